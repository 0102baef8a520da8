"""Drift: it begins and ends once, on the whole interval, and says which layer fell most."""

import logging
from typing import Any

import numpy as np
import pytest
from app_fakes import HEADS, LAYERS, audited

from app.audit import Auditor, Point
from app.calibration import calibration_of
from app.drift import DriftWatch
from app.live import FIELDS, Record
from app.live_metrics import LiveFigures
from app.telemetry import Telemetry

LOOP = {"overall": {"recall": 0.9}, "layers": [{"recall": 0.95}, {"recall": 0.85}]}
CALIBRATION = {"loop": LOOP}


def record(*recalls: float) -> Record:
    """One audited request: 100 gold pairs in each head, of which so many are kept in each layer."""
    counts = np.zeros((LAYERS, HEADS, len(FIELDS)))
    counts[..., FIELDS.index("rows")] = 4
    counts[..., FIELDS.index("gold")] = 100
    counts[..., FIELDS.index("kept_gold")] = [[100 * recall] * HEADS for recall in recalls]
    return counts


class Watched:
    """A watch with a clock that is moved by hand, and what it has logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture, requests: int = 10, margin: float = 0.03):
        caplog.set_level(logging.INFO, logger="sparsefinder.app")
        self.log = caplog
        self.now = 0.0
        self.watch = DriftWatch(requests, margin, lambda: self.now)
        self.watch.serve(CALIBRATION)

    def check(self, *records: Record) -> Any:
        self.now += 1.0
        self.watch.check(lambda: records)
        return self.watch.state

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(line.levelname, line.getMessage()) for line in self.log.records if "drift" in line.getMessage()]


@pytest.fixture
def watched(caplog: pytest.LogCaptureFixture) -> Watched:
    return Watched(caplog)


def test_drift_begins_once_and_ends_once(watched: Watched) -> None:
    good, bad = [record(0.94, 0.86)] * 10, [record(0.95, 0.65)] * 10
    for _ in range(3):
        assert not watched.check(*good).drifting
    for _ in range(3):
        assert watched.check(*bad).drifting
    assert watched.events == [("WARNING", "recall_drift")]
    for _ in range(3):
        assert not watched.check(*good).drifting
    assert watched.events == [("WARNING", "recall_drift"), ("INFO", "recall_drift_ended")]
    assert watched.check(*bad).drifting
    assert len(watched.events) == 3


def test_it_says_both_recalls_and_the_layer_that_fell_most(watched: Watched) -> None:
    drift = watched.check(*[record(0.9, 0.6)] * 10)
    assert drift.fall == pytest.approx(0.9 - 0.75)
    assert (drift.calibrated_recall, drift.live_recall) == (0.9, pytest.approx(0.75))
    assert (drift.layer, drift.layer_calibrated_recall, drift.layer_live_recall) == (1, 0.85, pytest.approx(0.6))
    (line,) = [one for one in watched.log.records if one.getMessage() == "recall_drift"]
    fields = line.fields  # type: ignore[attr-defined]
    assert (fields["calibrated_recall"], fields["live_recall"]) == (0.9, pytest.approx(0.75))
    assert (fields["layer"], fields["requests"]) == (1, 10)
    shown = watched.watch.shown()
    assert shown["drift"]["drifting"] is True
    assert shown["drift_reason"] is None


def test_the_whole_interval_must_lie_below(watched: Watched) -> None:
    """Half of the requests at 0.95 and half at 0.75: the mean of 0.85 is below 0.87, its interval is not."""
    mixed = [record(0.95, 0.95), record(0.75, 0.75)]
    drift = watched.check(*mixed * 5)
    assert drift.live_interval[0] < drift.live_recall < 0.87 < drift.live_interval[1]
    assert not drift.drifting
    drift = watched.check(*mixed * 200)  # the same recall, now known better
    assert drift.live_interval[1] < 0.87
    assert drift.drifting


def test_a_few_requests_are_not_enough(watched: Watched) -> None:
    assert watched.check(*[record(0.1, 0.1)] * 9) is None
    assert "9 of 10" in watched.watch.shown()["drift_reason"]
    assert watched.check(*[record(0.1, 0.1)] * 10).drifting


@pytest.mark.parametrize("calibration", [None, {}, {"loop": None}, {"loop": {"overall": None}}, {"loop": {}}])
def test_without_a_calibration_in_the_loop_it_is_not_known(watched: Watched, calibration: Any) -> None:
    watched.watch.serve(calibration)
    assert watched.check(*[record(0.1, 0.1)] * 50) is None
    shown = watched.watch.shown()
    assert shown["drift"] is None
    assert "calibration in the loop" in shown["drift_reason"]
    assert not watched.events


def test_the_card_s_calibration_in_the_loop_is_the_one_that_is_compared() -> None:
    plan = {"set": "plan", "instances": 4, "overall": {"recall": 0.95}, "layers": {}, "heads": {}}
    calibration = calibration_of({"plan": plan, "loop": LOOP, "tokens": 256})
    assert calibration is not None
    assert calibration["loop"] == LOOP
    assert calibration["about"] == {"tokens": 256}
    assert "loop" not in (calibration_of({"plan": plan}) or {})


def test_a_layer_that_keeps_its_window_has_no_fall(watched: Watched) -> None:
    watched.watch.serve({"loop": {"overall": {"recall": 0.9}, "layers": [{"recall": None}, {"recall": 0.85}]}})
    assert watched.check(*[record(0.1, 0.8)] * 10).layer == 1
    watched.watch.serve({"loop": {"overall": {"recall": 0.9}, "layers": []}})
    assert watched.check(*[record(0.1, 0.8)] * 10).layer is None


def test_a_reload_forgets(watched: Watched) -> None:
    assert watched.check(*[record(0.5, 0.5)] * 10).drifting
    watched.watch.serve(CALIBRATION)
    assert watched.watch.state is None
    assert watched.check(*[record(0.9, 0.9)] * 10).drifting is False
    assert watched.events == [("WARNING", "recall_drift")]  # the artifact that drifted serves no more


def test_a_reload_during_a_comparison_forgets_it_too(watched: Watched) -> None:
    def records() -> list[Record]:
        watched.watch.serve(CALIBRATION)
        return [record(0.5, 0.5)] * 10

    watched.watch.check(records)
    assert watched.watch.state is None
    assert not watched.events


def test_it_compares_at_most_once_a_second(watched: Watched) -> None:
    asked = []

    def records() -> list[Record]:
        asked.append(watched.now)
        return [record(0.9, 0.9)] * 10

    for step in range(30):
        watched.now = 100 + step / 10
        watched.watch.check(records)
    assert asked == [100.0, 101.0, 102.0]
    watched.watch.check(records, at_once=True)  # somebody reads it now
    assert asked[3:] == [pytest.approx(102.9)]


def served(**loop: Any) -> Auditor:
    watch = DriftWatch(3, 0.03)
    auditor = Auditor(1.0, 4, 100, Telemetry(), watch)
    auditor.serve("v", {"loop": loop} if loop else None)
    return auditor


def finish(auditor: Auditor, times: int, density: float | None = None) -> None:
    for _ in range(times):
        auditor.offer(Point("v", density), [audited(4, 1)] * LAYERS)
        auditor.work()


def test_another_working_point_does_not_drift(caplog: pytest.LogCaptureFixture) -> None:
    """A client that asks for little gets little; only the served point is compared."""
    auditor = served(**LOOP)
    finish(auditor, 5, 0.1)
    auditor.watch()
    assert auditor.drift.state is None
    finish(auditor, 3)
    auditor.watch(at_once=True)
    assert auditor.drift.state is not None
    assert auditor.drift.state.drifting


def test_a_comparison_that_raises_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    auditor = served(overall={"recall": "much"})
    finish(auditor, 3)
    auditor.watch()
    assert [line.getMessage() for line in caplog.records if line.levelname == "ERROR"] == ["drift_check_failed"]


def test_gauges_by_layer_and_head_are_read_once_a_second() -> None:
    auditor, now = served(**LOOP), [0.0]
    registry = auditor.figures.registry
    registry.register(LiveFigures(auditor, lambda: now[0]))
    value = registry.get_sample_value
    assert value("sparsefinder_live_requests") == 0
    assert value("sparsefinder_live_recall", {"layer": "all", "head": "all"}) is None
    assert value("sparsefinder_live_recall_low") is None
    assert value("sparsefinder_drifting") == 0
    assert value("sparsefinder_recall_drift") is None
    finish(auditor, 3)
    assert value("sparsefinder_live_requests") == 0  # still the same second
    auditor.drift.serve(CALIBRATION)
    now[0] = 1.0
    assert value("sparsefinder_live_requests") == 3
    for labels in ({"layer": "all", "head": "all"}, {"layer": "1", "head": "all"}, {"layer": "0", "head": "2"}):
        assert value("sparsefinder_live_recall", labels) == 0.5
        assert value("sparsefinder_live_sparsity", labels) == 0.75
        assert value("sparsefinder_live_mass", labels) == pytest.approx(0.5, abs=1e-5)
        assert value("sparsefinder_live_exact_rows", labels) == 0
    assert value("sparsefinder_live_recall", {"layer": str(LAYERS), "head": "all"}) is None
    assert value("sparsefinder_live_recall_low") == value("sparsefinder_live_recall_high") == 0.5
    assert value("sparsefinder_drifting") == 1
    assert value("sparsefinder_recall_drift") == pytest.approx(0.4)
