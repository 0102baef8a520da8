"""Live figures for Prometheus, computed when they are scraped and at most once a second."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from app.audit import Auditor

FIGURES = {
    "recall": "Kept gold pairs / gold pairs of the audited rows.",
    "sparsity": "1 - pairs of the plan / legal pairs of the audited rows.",
    "mass": "Attention that falls on kept pairs, mean over the audited rows.",
    "exact_rows": "Share of the audited rows whose gold pairs are all kept.",
}
KEPT_SECONDS = 1.0
NAME = "sparsefinder_"
ALL = "all"


class LiveFigures(Collector):
    """Gauges of the serving artifact at its own working point, by layer and head; what is not known has no sample."""

    def __init__(self, auditor: Auditor, clock: Callable[[], float] = time.monotonic):
        self._auditor = auditor
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: list[GaugeMetricFamily] = []
        self._until = float("-inf")

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing: what is registered must not be computed for that."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """All gauges, of one reading."""
        with self._lock:
            now = self._clock()
            if now >= self._until:
                self._auditor.watch()
                live = self._auditor.live(self._auditor.version or "")
                self._kept = [*_by_head(live), *_pooled(live), *_drift(self._auditor)]
                self._until = now + KEPT_SECONDS
            return iter(self._kept)


def _by_head(live: dict[str, Any]) -> Iterator[GaugeMetricFamily]:
    rows = [(ALL, ALL, live["overall"] or {})]
    for layer in live["layers"]:
        name = str(layer["layer"])
        rows += [(name, ALL, layer), *((name, str(head["head"]), head) for head in layer["heads"])]
    for figure, words in FIGURES.items():
        family = GaugeMetricFamily(f"{NAME}live_{figure}", words, labels=["layer", "head"])
        for layer_name, head_name, row in rows:
            if row.get(figure) is not None:
                family.add_metric([layer_name, head_name], row[figure])
        yield family


def _pooled(live: dict[str, Any]) -> Iterator[GaugeMetricFamily]:
    yield GaugeMetricFamily(f"{NAME}live_requests", "Audited requests that live figures are of.", live["requests"])
    span = (live["overall"] or {}).get("recall_interval") or (None, None)
    for edge, value in zip(("low", "high"), span, strict=True):
        words = f"{edge.capitalize()} end of the live recall's 95 % interval, over layers and heads."
        yield GaugeMetricFamily(f"{NAME}live_recall_{edge}", words, value)


def _drift(auditor: Auditor) -> Iterator[GaugeMetricFamily]:
    drift = auditor.drift.state
    words = "Calibrated recall in the loop - live recall."
    yield GaugeMetricFamily(f"{NAME}recall_drift", words, drift.fall if drift else None)
    words = "1 while the live recall is below the calibrated one by more than the margin."
    yield GaugeMetricFamily(f"{NAME}drifting", words, float(drift is not None and drift.drifting))
