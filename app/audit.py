"""Live recall: for a few rows of some requests the true graph is computed and compared with what the plan had kept.

The estimator is Σ kept gold / Σ gold over the audited rows, with a bootstrap interval over requests, because the rows
of one request are correlated. Gold is the served model's own entmax on its own q and k (design: in the loop).

What one audit may cost: one item of one request, `rows` rows per layer and head, so `rows · heads · layers` times the
item's tokens scores, `rows / tokens` of what dense attention would compute. It runs on the worker after the answer.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from app.telemetry import Telemetry
from sparsefinder.entmax import entmax

FIELDS = ("rows", "legal", "kept", "gold", "kept_gold", "mass", "exact_rows")
Record = npt.NDArray[np.float64]
RESAMPLES = 400
PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True)
class Sample:
    """Which rows of which item of a request are audited; after `within`, of which item of a batch."""

    item: int
    rows: tuple[int, ...]

    def within(self, group: Sequence[int]) -> "Sample | None":
        """The same sample seen from a batch that holds the items `group`, if it does."""
        return Sample(group.index(self.item), self.rows) if self.item in group else None


@dataclass(frozen=True)
class AuditedLayer:
    """One layer of one item: the audited rows' queries, all keys, and which keys the plan let each row read."""

    q: Float[Tensor, "H R D"]
    k: Float[Tensor, "H M D"]
    scale: Float[Tensor, " H"]
    alpha: float
    legal: Bool[Tensor, "R M"]
    kept: Bool[Tensor, "H R M"]


def measure(layer: AuditedLayer) -> Record:
    """Counts `[H, len(FIELDS)]` of one audited layer.

    `mass` sums the probability that falls on kept keys; a row is exact where all its gold keys are kept.
    """
    scores = layer.scale[:, None, None] * (layer.q @ layer.k.transpose(-1, -2))
    legal = layer.legal.expand_as(scores)
    weights = entmax(scores, layer.alpha, legal)
    gold, kept = weights > 0, layer.kept & legal
    hit = gold & kept
    rows = torch.full((scores.shape[0],), scores.shape[1], device=scores.device)
    exact = (hit == gold).all(-1).sum(-1)
    sums = [legal.sum((1, 2)), kept.sum((1, 2)), gold.sum((1, 2)), hit.sum((1, 2)), (weights * kept).sum((1, 2))]
    return torch.stack([part.double() for part in [rows, *sums, exact]], -1).cpu().numpy()


class Auditor:
    """Chooses what is audited and keeps the records of the last `window` audited requests of the serving artifact."""

    def __init__(self, rate: float, rows: int, window: int, figures: Telemetry):
        self.rate = rate
        self.rows = rows
        self.window = window
        self.figures = figures
        self._random = np.random.default_rng(0)
        self._records: deque[tuple[str, Record]] = deque(maxlen=window)
        self._lock = threading.Lock()

    def choose(self, lengths: Sequence[int]) -> Sample | None:
        """A sample of a request with items of these lengths, for `rate` of the requests; every token is as likely."""
        if self._random.random() >= self.rate:
            return None
        shares = np.asarray(lengths) / sum(lengths)
        item = int(self._random.choice(len(lengths), p=shares))
        count = min(self.rows, lengths[item])
        rows = self._random.choice(lengths[item], count, replace=False)
        return Sample(item, tuple(sorted(int(row) for row in rows)))

    def record(self, version: str, layers: Sequence[AuditedLayer]) -> None:
        """On the worker: measure one audited request and keep its counts."""
        started = time.perf_counter()
        counts = np.stack([measure(layer) for layer in layers])
        self.figures.audit_seconds.inc(time.perf_counter() - started)
        with self._lock:
            self._records.append((version, counts))
        rows, _, _, gold, kept, _, _ = counts.sum((0, 1))
        self.figures.audited_requests.inc()
        self.figures.audited_rows.inc(rows)
        self.figures.audited_gold.inc(gold)
        self.figures.audited_kept.inc(kept)

    def failed(self) -> None:
        """Count an audit that raised."""
        self.figures.audit_failures.inc()

    def live(self, version: str) -> dict[str, Any]:
        """Figures of the audited requests that this version answered: overall, per layer, per head."""
        with self._lock:
            records = [counts for name, counts in self._records if name == version]
        figures: dict[str, Any] = {"requests": len(records), "overall": None, "layers": []}
        if not records:
            return figures
        stacked = np.stack(records)
        figures["overall"] = _summary(stacked.sum((1, 2)))
        for layer in range(stacked.shape[1]):
            heads = [{"head": head} | _summary(stacked[:, layer, head]) for head in range(stacked.shape[2])]
            figures["layers"].append({"layer": layer} | _summary(stacked[:, layer].sum(1)) | {"heads": heads})
        return figures


def _summary(records: Record) -> dict[str, Any]:
    """Ratios of sums over requests `[requests, len(FIELDS)]`; None where there is nothing to divide by."""
    rows, legal, kept, gold, kept_gold, mass, exact = records.sum(0)
    return {
        "rows": int(rows),
        "gold_pairs": int(gold),
        "sparsity": 1 - kept / legal if legal else None,
        "recall": kept_gold / gold if gold else None,
        "recall_interval": _interval(records[:, 4], records[:, 3]),
        "mass": mass / rows if rows else None,
        "exact_rows": exact / rows if rows else None,
    }


def _interval(above: Record, below: Record) -> list[float] | None:
    """95 % bootstrap interval of Σ above / Σ below over requests (percentiles); None for fewer than two requests."""
    if len(below) < 2 or not below.sum():
        return None
    random = np.random.default_rng(0)
    weights = random.multinomial(len(below), np.full(len(below), 1 / len(below)), RESAMPLES)
    totals = weights @ below
    ratios = (weights @ above)[totals > 0] / totals[totals > 0]
    return [float(edge) for edge in np.percentile(ratios, PERCENTILES)]
