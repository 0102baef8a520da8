"""Drift: whether the recall on live traffic has fallen below what the artifact's calibration measured in the loop.

It begins when at least `requests` audited requests are known and the whole 95 % interval of the live recall lies more
than `margin` below the calibrated recall, and ends when the interval reaches above that line again.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app import telemetry
from app.live import Record, layer_recalls, pooled_recall

SECONDS_BETWEEN = 1.0  # a bootstrap over a thousand requests takes tens of milliseconds


@dataclass(frozen=True)
class Drift:
    """Where the live recall of the served point stands. layer: the one whose recall fell most, with both recalls."""

    drifting: bool
    requests: int
    margin: float
    calibrated_recall: float
    live_recall: float
    live_interval: list[float]
    fall: float  # calibrated - live
    layer: int | None = None
    layer_calibrated_recall: float | None = None
    layer_live_recall: float | None = None


class DriftWatch:
    """Compares now and then, remembers whether it drifts, and says so once when that begins and once when it ends."""

    def __init__(self, requests: int, margin: float, clock: Callable[[], float] = time.monotonic):
        self.requests = requests
        self.margin = margin
        self._clock = clock
        self._lock = threading.Lock()
        self._loop: Mapping[str, Any] | None = None
        self._checked: float | None = None
        self._state: Drift | None = None
        self._reason: str | None = "nothing serves yet"

    def serve(self, calibration: Mapping[str, Any] | None) -> None:
        """Forget what was, and compare with this calibration from now on (its part `loop`)."""
        loop = (calibration or {}).get("loop")
        known = loop is not None and (loop.get("overall") or {}).get("recall") is not None
        with self._lock:
            self._loop = dict(loop) if loop and known else None
            self._reset("no audited request yet" if known else "the artifact has no calibration in the loop")

    def check(self, records: Callable[[], Sequence[Record]], at_once: bool = False) -> None:
        """Compare with these records; not `at_once`, only where `SECONDS_BETWEEN` are over. Any thread may ask."""
        with self._lock:
            loop, now = self._loop, self._clock()
            early = self._checked is not None and now - self._checked < SECONDS_BETWEEN
            if loop is None or (early and not at_once):
                return
            self._checked = now
        found = list(records())
        recall, span = pooled_recall(found) if len(found) >= self.requests else (None, None)
        with self._lock:
            if self._loop is not loop:  # another artifact serves by now, and has begun anew
                return
            if len(found) < self.requests:
                self._reason = f"{len(found)} of {self.requests} audited requests that it takes to tell"
            elif recall is None or span is None:
                self._reason = "no audited row had a gold pair"
            else:
                self._state, self._reason = self._compare(loop, found, recall, span), None

    @property
    def state(self) -> Drift | None:
        """The last comparison; None while there is none."""
        with self._lock:
            return self._state

    def shown(self) -> dict[str, Any]:
        """The last comparison for /v1/sparsity, or why there is none."""
        with self._lock:
            return {"drift": asdict(self._state) if self._state else None, "drift_reason": self._reason}

    def _reset(self, reason: str) -> None:
        self._checked, self._state, self._reason = None, None, reason

    def _compare(self, loop: Mapping[str, Any], records: Sequence[Record], recall: float, span: list[float]) -> Drift:
        calibrated = float(loop["overall"]["recall"])
        drift = Drift(
            span[1] < calibrated - self.margin, len(records), self.margin, calibrated, recall, span,
            calibrated - recall, *_largest_fall(loop, layer_recalls(records)),
        )  # fmt: skip
        before = self._state is not None and self._state.drifting
        if drift.drifting != before:
            facts = {name: value for name, value in asdict(drift).items() if name != "drifting"}
            event, level = ("recall_drift", logging.WARNING) if drift.drifting else ("recall_drift_ended", logging.INFO)
            telemetry.log(event, level, **facts)
        return drift


def _largest_fall(
    loop: Mapping[str, Any], live: Sequence[float | None]
) -> tuple[int | None, float | None, float | None]:
    """The layer whose recall fell most, with its calibrated and its live recall."""
    known = [layer.get("recall") for layer in loop.get("layers", ())]
    both = [(then, now, layer) for layer, (then, now) in enumerate(zip(known, live, strict=False))]
    falls = [(then - now, layer, then, now) for then, now, layer in both if then is not None and now is not None]
    return max(falls)[1:] if falls else (None, None, None)
