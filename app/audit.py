"""Live recall: for a few rows of some requests the true graph is computed and compared with what the plan had kept.

The estimator is Σ kept gold / Σ gold over the audited rows, with a bootstrap interval over requests (see `live`). Gold
is the served model's own entmax on its own q and k (design: in the loop).

What one audit may cost: one item of one request, `rows` rows per layer and head, so `rows · heads · layers` times the
item's tokens scores, `rows / tokens` of what dense attention would compute. It runs on the worker between two batches,
layer by layer, and stops for the next batch when `audit_ms` are used up; a layer that was begun is finished. What a
batch's own samples need to be copied comes out of the same time: as many are taken as fit, by what copying took so
far, and one where the pause was empty. So one batch is held up by `audit_ms` and one layer or one copy. At most
`MOST_WAITING` audits wait, in `MOST_BYTES` together; what finds no room or time is dropped and counted. No text is
kept, only q, k and which keys were kept, and of a finished audit nothing but counts.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from app import telemetry
from app.drift import DriftWatch
from app.live import FIELDS, Record, live_figures, pooled_recall
from app.schemas import Mode
from app.telemetry import Telemetry
from sparsefinder.edges import gold_pairs
from sparsefinder.entmax import entmax
from sparsefinder.threads import single_thread

AUDITED: tuple[Mode, ...] = ("sparse", "auto")  # the modes in which a plan can miss something
MOST_WAITING = 8
LEARNING = 0.2  # weight of the last batch in the time that copying is believed to take
MOST_BYTES = 256 * 1024 * 1024
BOUND = "of one batch: bound_ms, and one layer or the copying of one sample"
MOST_POINTS = 20  # other working points that are shown, those with the most requests


@dataclass(frozen=True)
class Sample:
    """Which rows of which item are audited: of a request, and once a batch is formed, of the batch."""

    item: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Point:
    """Whose figures belong together: an artifact's version at one working point; None is the one it serves."""

    version: str
    density: float | None = None


@dataclass(frozen=True)
class AuditedLayer:
    """One layer of one item: the audited rows' queries, all keys, and which keys the plan let each row read.

    A layer without a plan has no rows. H / Hkv heads share a key, as in the model. gold_mass: of a softmax model, what
    its gold keys hold together (`sparsefinder.edges.gold_pairs`).
    """

    q: Float[Tensor, "H R D"]
    k: Float[Tensor, "Hkv M D"]
    scale: Float[Tensor, " H"]
    alpha: float
    legal: Bool[Tensor, "R M"]
    kept: Bool[Tensor, "H R M"]
    gold_mass: float | None = None

    @property
    def bytes(self) -> int:
        """What it holds in memory."""
        tensors = (self.q, self.k, self.scale, self.legal, self.kept)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def measure(layer: AuditedLayer) -> Record:
    """Counts `[H, len(FIELDS)]` of one audited layer.

    `mass` sums the probability that falls on kept keys; a row is exact where all its gold keys are kept.
    """
    heads, count = layer.q.shape[:2]
    if not count:
        return np.zeros((heads, len(FIELDS)))
    keys = layer.k.repeat_interleave(heads // layer.k.shape[0], dim=0)
    scores = layer.scale[:, None, None] * (layer.q @ keys.transpose(-1, -2))
    legal = layer.legal.expand_as(scores)
    weights = entmax(scores, layer.alpha, legal)
    gold = gold_pairs(weights.flatten(0, 1), layer.alpha, layer.gold_mass).view_as(weights)
    kept = layer.kept & legal
    hit = gold & kept
    rows = torch.full((heads,), count, device=scores.device)
    exact = (hit == gold).all(-1).sum(-1)
    sums = [legal.sum((1, 2)), kept.sum((1, 2)), gold.sum((1, 2)), hit.sum((1, 2)), (weights * kept).sum((1, 2))]
    return torch.stack([part.double() for part in [rows, *sums, exact]], -1).cpu().numpy()


@dataclass(eq=False)
class _Waiting:
    """An audit that is not finished: the layers to measure, and the counts of those that are."""

    point: Point
    layers: deque[AuditedLayer]
    counts: list[Record] = field(default_factory=list)


@dataclass
class _Cost:
    """What audits have cost since the start."""

    seconds: float = 0.0
    inference_seconds: float = 0.0
    longest_delay: float = 0.0
    accepted: int = 0
    finished: int = 0
    failed: int = 0
    dropped: int = 0


class Auditor:
    """Chooses what is audited, does it between batches, and keeps the counts of the last `window` audited requests.

    Requests at another working point than the served one have a window of their own, so that they can neither mix with
    its figures nor push them out.
    """

    def __init__(
        self,
        rate: float,
        rows: int,
        window: int,
        figures: Telemetry,
        drift: DriftWatch,
        *,
        audit_ms: float = 50.0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.rate = rate
        self.rows = rows
        self.window = window
        self.audit_ms = audit_ms
        self.figures = figures
        self.drift = drift
        self.version: str | None = None
        self._clock = clock
        self._random = np.random.default_rng(0)
        self._records: deque[tuple[Point, Record]] = deque(maxlen=window)
        self._others: deque[tuple[Point, Record]] = deque(maxlen=window)
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._pause = (0.0, 0.0)  # when the last one for audits began and ended
        self._copying: float | None = None  # seconds that a sample takes to copy, as it was of late
        self._cost = _Cost()
        self._lock = threading.Lock()
        figures.audits_waiting.set_function(lambda: len(self._waiting))
        figures.audits_waiting_bytes.set_function(lambda: self._bytes)

    def serve(self, version: str, calibration: Mapping[str, Any] | None) -> None:
        """Name what serves from now on: its figures are shown and compared with its calibration."""
        self.version = version
        self.drift.serve(calibration)

    def choose(self, lengths: Sequence[int]) -> Sample | None:
        """A sample of a request with items of these lengths, for `rate` of the requests; every token is as likely."""
        if self._random.random() >= self.rate:
            return None
        shares = np.asarray(lengths) / sum(lengths)
        item = int(self._random.choice(len(lengths), p=shares))
        count = min(self.rows, lengths[item])
        rows = self._random.choice(lengths[item], count, replace=False)
        return Sample(item, tuple(sorted(int(row) for row in rows)))

    def admit(self, samples: Sequence[Sample]) -> list[Sample]:
        """As many of a batch's samples as may wait and there is time to copy; of the others nothing is copied.

        `batch_ran` counts the others, since a batch that fails is formed again.
        """
        used = self._pause[1] - self._pause[0]
        each = self.audit_ms / 1000 if self._copying is None else self._copying
        fit = int((self.audit_ms / 1000 - used) / each) if each else MOST_WAITING
        with self._lock:
            room = max(0, min(MOST_WAITING - len(self._waiting), fit if used else max(1, fit)))
        return list(samples[:room])

    def offer(self, point: Point, layers: Sequence[AuditedLayer]) -> None:
        """Let an audit wait, where there is room for it and a layer of it has a plan."""
        size = sum(layer.bytes for layer in layers)
        if not any(layer.q.shape[1] for layer in layers):
            return
        with self._lock:
            count = len(self._waiting)
            full = count >= MOST_WAITING or (count > 0 and self._bytes + size > MOST_BYTES)
            if not full:
                self._waiting.append(_Waiting(point, deque(layers)))
                self._bytes += size
                self._cost.accepted += 1
        if full:
            self._dropped(1)

    @property
    def waiting(self) -> bool:
        """Whether there is something to do."""
        return bool(self._waiting)

    def work(self) -> None:
        """On the worker, between two batches: layers of what waits until `audit_ms` are used up, at least one."""
        started = now = self._clock()
        while self._waiting:
            audit = self._waiting[0]
            try:
                with single_thread():  # a layer is less work than waiting for a second thread may be
                    self._step(audit)
            except Exception as error:  # noqa: BLE001  (an audit must never stop the service)
                telemetry.log("audit_failed", logging.ERROR, error)
                self.figures.audit_failures.inc()
                self._leave(audit, failed=1)
            now = self._clock()
            if now - started >= self.audit_ms / 1000:
                break
        self._pause = (started, now)
        self._spent(now - started)

    def warm_up(self, audits: Sequence[Sequence[AuditedLayer]]) -> None:
        """On the worker, before serving: what the first measured layer compiles and loads, no batch has to wait for."""
        try:
            for layer in (layer for layers in audits for layer in layers):
                measure(layer)
        except Exception as error:  # noqa: BLE001  (an audit must never stop the service)
            telemetry.log("audit_failed", logging.ERROR, error)

    def batch_ran(self, arrived: float, seconds: float, copying: float, samples: int, left_out: int = 0) -> None:
        """Note a batch whose oldest request arrived at `arrived` (of the clock), and what audits made it wait for.

        seconds: of its forward pass. copying: the part of them in which the rows of so many samples were copied.
        left_out: its other samples, which `admit` had no room for.
        """
        self._dropped(left_out)
        began, ended = self._pause
        delay = max(0.0, ended - max(began, arrived)) + copying
        self._pause = (0.0, 0.0)
        if samples:
            each = copying / samples
            self._copying = each if self._copying is None else self._copying + LEARNING * (each - self._copying)
        self.figures.audit_delay.observe(delay)
        self._spent(copying)
        with self._lock:
            self._cost.inference_seconds += seconds - copying
            self._cost.longest_delay = max(self._cost.longest_delay, delay)

    def watch(self, at_once: bool = False) -> None:
        """Compare the live recall with the calibration (see `DriftWatch`); takes a while, so never on the worker."""
        try:
            self.drift.check(lambda: self._records_of(self.version), at_once)
        except Exception as error:  # noqa: BLE001  (nobody waits for it who could be told)
            telemetry.log("drift_check_failed", logging.ERROR, error)

    def live(self, version: str) -> dict[str, Any]:
        """Figures of the audited requests that this version answered: overall, per layer, per head."""
        return live_figures(self._records_of(version))

    def points(self, version: str) -> list[dict[str, Any]]:
        """Requests and recall at each other working point of a version, the most audited ones."""
        with self._lock:
            others = [(point.density, counts) for point, counts in self._others if point.version == version]
        most = Counter(density for density, _ in others).most_common(MOST_POINTS)
        found = []
        for density, requests in sorted(most):
            recall, span = pooled_recall([counts for at, counts in others if at == density])
            found.append({"density": density, "requests": requests, "recall": recall, "recall_interval": span})
        return found

    def report(self, version: str) -> dict[str, Any]:
        """The part `live` of /v1/sparsity; it takes a while, so beside the event loop and the worker."""
        self.watch(at_once=True)
        about = {"audit_rate": self.rate, "rows_per_request": self.rows, "window_requests": self.window}
        cost = self.cost()  # first: what it calls finished is in the figures
        figures = self.live(version) | {"points": self.points(version), "cost": cost}
        return figures | self.drift.shown() | about

    def cost(self) -> dict[str, Any]:
        """What audits have cost since the start, in time and in delay of one batch; what waits now."""
        with self._lock:
            cost, waiting, held = replace(self._cost), len(self._waiting), self._bytes
        share = cost.seconds / cost.inference_seconds if cost.inference_seconds else None
        return {
            "seconds": cost.seconds,
            "share_of_inference": share,
            "longest_delay_ms": cost.longest_delay * 1000,
            "bound_ms": self.audit_ms,
            "bound": BOUND,
            **{name: getattr(cost, name) for name in ("accepted", "finished", "failed", "dropped")},
            "waiting": waiting,
            "waiting_bytes": held,
        }

    def _records_of(self, version: str | None) -> list[Record]:
        with self._lock:
            return [counts for point, counts in self._records if point.version == version]

    def _step(self, audit: _Waiting) -> None:
        """Measure one layer; its tensors are let go, and after the last one the counts are kept."""
        audit.counts.append(measure(audit.layers[0]))
        with self._lock:
            self._bytes -= audit.layers.popleft().bytes
        if audit.layers:
            return
        counts = np.stack(audit.counts)
        with self._lock:
            (self._records if audit.point.density is None else self._others).append((audit.point, counts))
        if audit.point.density is None:
            rows, _, _, gold, kept, _, _ = counts.sum((0, 1))
            self.figures.audited_requests.inc()
            self.figures.audited_rows.inc(rows)
            self.figures.audited_gold.inc(gold)
            self.figures.audited_kept.inc(kept)
        self._leave(audit, finished=1)

    def _leave(self, audit: _Waiting, finished: int = 0, failed: int = 0) -> None:
        with self._lock:
            self._waiting.remove(audit)
            self._bytes -= sum(layer.bytes for layer in audit.layers)
            self._cost.finished += finished
            self._cost.failed += failed

    def _spent(self, seconds: float) -> None:
        self.figures.audit_seconds.inc(seconds)
        with self._lock:
            self._cost.seconds += seconds

    def _dropped(self, count: int) -> None:
        if count > 0:
            self.figures.audits_dropped.inc(count)
            with self._lock:
                self._cost.dropped += count
