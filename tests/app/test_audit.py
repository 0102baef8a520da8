"""Live recall: the estimator by hand, its interval, and what audits cost."""

import threading
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from app_fakes import HEADS, LAYERS, audited

from app.audit import MOST_WAITING, AuditedLayer, Auditor, Point, Sample, measure
from app.drift import DriftWatch
from app.live import FIELDS, intervals
from app.telemetry import Telemetry
from sparsefinder.metrics import counts
from sparsefinder.patterns.legal import Legal
from sparsefinder.patterns.positional import window
from sparsefinder.plan import build_plan, plan_matrix


def auditor(**values: Any) -> Auditor:
    parts = {"rate": 1.0, "rows": 4, "window": 100, "figures": Telemetry(), "drift": DriftWatch(50, 0.03)}
    made = Auditor(**(parts | values))
    made.serve("v", None)
    return made


def finish(audit: Auditor, version: str, layers: list[AuditedLayer], density: float | None = None) -> None:
    """One audit from beginning to end."""
    audit.offer(Point(version, density), layers)
    while audit.waiting:
        audit.work()


def without_plan(keys: int) -> AuditedLayer:
    return audited(keys, 0)


class Ticking:
    """A clock that stands still, but for every layer that is measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layer_ms: float):
        self.now, self.layers = 100.0, 0

        def measured(layer: AuditedLayer) -> Any:
            self.now, self.layers = self.now + layer_ms / 1000, self.layers + 1
            return measure(layer)

        monkeypatch.setattr("app.audit.measure", measured)

    def __call__(self) -> float:
        return self.now


def test_measure_against_a_double_loop() -> None:
    torch.manual_seed(0)
    heads, rows, keys, alpha = 2, 3, 9, 1.5
    q, k = torch.randn(heads, rows, 4) * 2, torch.randn(heads, keys, 4) * 2
    legal = torch.ones(rows, keys, dtype=torch.bool).tril(4)
    layer = AuditedLayer(q, k, torch.tensor([0.5, 1.0]), alpha, legal, torch.rand(heads, rows, keys) < 0.6)
    expected = np.zeros((heads, len(FIELDS)))
    for h in range(heads):
        for r in range(rows):
            z = [float(layer.scale[h] * q[h, r] @ k[h, j]) / 2 if legal[r, j] else -np.inf for j in range(keys)]
            low, high = max(z) - 1, max(z)
            for _ in range(60):  # bisection on the definition: sum of [z/2 - tau]_+^2 is 1
                tau = (low + high) / 2
                low, high = (tau, high) if sum(max(x - tau, 0) ** 2 for x in z) > 1 else (low, tau)
            p = [max(x - low, 0) ** 2 for x in z]
            kept = [bool(layer.kept[h, r, j] and legal[r, j]) for j in range(keys)]
            gold = [weight > 1e-12 for weight in p]
            hit = [g and s for g, s in zip(gold, kept, strict=True)]
            mass = sum(w for w, s in zip(p, kept, strict=True) if s)
            expected[h] += [1, int(legal[r].sum()), sum(kept), sum(gold), sum(hit), mass, hit == gold]
    np.testing.assert_allclose(measure(layer), expected, atol=1e-5)


def test_a_layer_without_a_plan_has_no_rows_and_counts_nothing() -> None:
    assert not measure(without_plan(5)).any()
    audit = auditor()
    audit.offer(Point("v"), [without_plan(5)] * LAYERS)
    assert not audit.waiting  # nothing of it could be measured
    finish(audit, "v", [audited(4, 2), without_plan(4)])
    figures = audit.live("v")
    assert figures["overall"]["rows"] == 2 * HEADS
    assert figures["layers"][1]["recall"] is None


def test_heads_that_share_a_key_are_measured_as_the_model_computes_them() -> None:
    torch.manual_seed(0)
    legal, kept = torch.ones(2, 7, dtype=torch.bool), torch.rand(4, 2, 7) < 0.5
    shared = AuditedLayer(torch.randn(4, 2, 3), torch.randn(2, 7, 3), torch.ones(4), 1.5, legal, kept)
    apart = replace(shared, k=torch.stack([shared.k[head // 2] for head in range(4)]))
    np.testing.assert_array_equal(measure(shared), measure(apart))


def test_gold_of_a_softmax_model_is_the_mass_that_calibration_counts() -> None:
    """Else every key would be gold, and the recall nothing but the density of the plan."""
    torch.manual_seed(0)
    q, k, scale = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), torch.ones(2)
    legal = Legal(torch.ones(1, 6, dtype=torch.bool), torch.ones(1, 6, dtype=torch.bool))
    plan = build_plan(window(1), legal, tile_size=1, heads=2)
    expected = counts(q, k, plan, legal, 1.0, scale, gold_mass=0.8)
    kept = torch.stack([plan_matrix(plan, legal, 0, head) for head in range(2)])
    layer = AuditedLayer(q[0], k[0], scale, 1.0, torch.ones(6, 6, dtype=torch.bool), kept, 0.8)
    found = dict(zip(FIELDS, measure(layer).T, strict=True))
    for name in ("rows", "legal", "kept", "gold", "kept_gold", "exact_rows"):
        assert found[name].tolist() == getattr(expected, name)[0].tolist(), name
    np.testing.assert_allclose(found["mass"], expected.mass_sum[0], atol=1e-5)
    assert found["gold"].sum() < found["legal"].sum()


def test_live_figures_are_sums_over_requests() -> None:
    audit = auditor()
    for keys, rows in ((4, 2), (10, 4)):
        finish(audit, "v", [audited(keys, rows)] * LAYERS)
    finish(audit, "v0", [audited(50, 1)] * LAYERS)  # another artifact's record is not mixed in
    figures = audit.live("v")
    assert figures["requests"] == 2
    overall = figures["overall"]
    assert overall["rows"] == 6 * LAYERS * HEADS
    assert overall["recall"] == 0.5
    assert overall["exact_rows"] == 0.0
    assert overall["mass"] == pytest.approx(0.5, abs=1e-5)
    assert overall["sparsity"] == pytest.approx(1 - 6 / (2 * 4 + 4 * 10))
    assert len(figures["layers"]) == LAYERS
    assert len(figures["layers"][0]["heads"]) == HEADS
    assert audit.live("v9")["overall"] is None


def test_the_interval_is_over_requests() -> None:
    audit = auditor()
    good, bad = audited(4, 4), audited(4, 4)
    good.kept[:] = True
    finish(audit, "v", [good])
    assert audit.live("v")["overall"]["recall_interval"] is None  # one request says nothing of the spread
    for layer in [good] * 10 + [bad] * 9:
        finish(audit, "v", [layer])
    low, high = audit.live("v")["overall"]["recall_interval"]
    recall = audit.live("v")["overall"]["recall"]
    # Ten requests of recall 1 and ten of 1/2: the mean of n has the deviation 0.25 / sqrt(20), whatever rows they had.
    spread = 1.96 * 0.25 / 20**0.5
    assert recall == pytest.approx((11 + 9 / 2) / 20)
    assert low == pytest.approx(recall - spread, abs=0.04)
    assert high == pytest.approx(recall + spread, abs=0.04)


def test_every_figure_has_the_interval_it_would_have_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    below = np.random.default_rng(0).integers(1, 9, (30, 5)).astype(float)
    below[:, 3] = 0  # a layer without gold
    below[:29, 4] = 0  # nearly without: draws that hold none of it say nothing
    above = below * np.random.default_rng(1).random((30, 5))
    together = intervals(above, below)
    assert together[3] is None
    assert together[4] == pytest.approx([above[29, 4] / below[29, 4]] * 2)
    for column in (0, 1, 2, 4):
        assert together[column] == pytest.approx(intervals(above[:, [column]], below[:, [column]])[0])
    monkeypatch.setattr("app.live.BLOCK", 30 * 7)  # draws in blocks of seven are the same draws
    assert intervals(above, below)[:3] == [pytest.approx(span) for span in together[:3]]


def test_the_window_forgets() -> None:
    audit = auditor(window=3)
    for _ in range(5):
        finish(audit, "v", [audited(4, 1)])
    assert audit.live("v")["requests"] == 3


def test_another_working_point_is_kept_apart() -> None:
    """Its requests neither mix with the served point's figures nor push them out of the window."""
    audit = auditor(window=4)
    exact = audited(4, 1)
    exact.kept[:] = True
    for _ in range(3):
        finish(audit, "v", [audited(4, 1)])
    for density in (0.5, 0.5, 0.2):
        finish(audit, "v", [exact], density)
    for _ in range(9):
        finish(audit, "v0", [exact], 0.5)
    assert (audit.live("v")["requests"], audit.live("v")["overall"]["recall"]) == (3, 0.5)
    assert audit.points("v") == []  # of another version
    for density in (0.5, 0.5, 0.2):
        finish(audit, "v", [exact], density)
    shown = [(point["density"], point["requests"], point["recall"]) for point in audit.points("v")]
    assert shown == [(0.2, 1, 1.0), (0.5, 2, 1.0)]
    assert audit.figures.registry.get_sample_value("sparsefinder_audited_requests_total") == 3


@pytest.mark.parametrize(("layer_ms", "bound_ms", "slices"), [(30, 50, 3), (5, 50, 1), (80, 50, 6), (10, 20, 3)])
def test_a_pause_ends_after_the_bound_and_the_layer_that_was_begun(
    monkeypatch: pytest.MonkeyPatch, layer_ms: int, bound_ms: int, slices: int
) -> None:
    clock = Ticking(monkeypatch, layer_ms)
    audit = auditor(audit_ms=float(bound_ms), clock=clock)
    for _ in range(2):
        audit.offer(Point("v"), [audited(4, 1)] * 3)
    pauses = []
    while audit.waiting:
        before, measured = clock.now, clock.layers
        audit.work()
        pauses.append(clock.layers - measured)
        assert clock.now - before < (bound_ms + layer_ms) / 1000 + 1e-9
    assert (len(pauses), sum(pauses)) == (slices, 6)
    assert set(pauses[:-1]) <= {-(-bound_ms // layer_ms)}  # no pause ends early
    assert audit.live("v")["requests"] == 2
    assert audit.cost()["seconds"] == pytest.approx(6 * layer_ms / 1000)


def test_a_layer_is_measured_by_one_thread_and_the_batches_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cores are busy, waiting for a second thread takes longer than the layer."""
    torch.set_num_threads(2)
    threads = []
    monkeypatch.setattr("app.audit.measure", lambda layer: threads.append(torch.get_num_threads()) or measure(layer))
    finish(auditor(), "v", [audited(4, 1)] * LAYERS)
    assert threads == [1] * LAYERS
    assert torch.get_num_threads() == 2


def test_the_delay_of_a_batch_is_what_it_waited_for_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking(monkeypatch, 30)
    audit = auditor(audit_ms=50.0, clock=clock)
    audit.offer(Point("v"), [audited(4, 1)] * 6)
    clock.now = 10.0
    audit.work()  # two layers: until 10.06
    audit.batch_ran(arrived=9.0, seconds=2.0, copying=0.0, samples=0)  # waited all the time
    audit.work()  # until 10.12
    audit.batch_ran(arrived=10.1, seconds=2.0, copying=0.5, samples=1)  # came in the middle
    audit.work()
    audit.batch_ran(arrived=11.0, seconds=1.5, copying=0.0, samples=0)  # came later
    audit.batch_ran(arrived=9.0, seconds=0.0, copying=0.0, samples=0)  # no pause before it
    value = audit.figures.registry.get_sample_value
    assert value("sparsefinder_audit_delay_seconds_sum") == pytest.approx(0.06 + 0.02 + 0.5)
    assert value("sparsefinder_audit_delay_seconds_count") == 4
    cost = audit.cost()
    assert cost["longest_delay_ms"] == pytest.approx(520)
    assert cost["bound_ms"] == 50
    assert cost["seconds"] == pytest.approx(6 * 0.03 + 0.5)
    assert cost["share_of_inference"] == pytest.approx(cost["seconds"] / 5.0)
    assert (cost["accepted"], cost["finished"], cost["failed"], cost["dropped"]) == (1, 1, 0, 0)


def test_copying_takes_what_the_pause_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking(monkeypatch, 30)
    audit = auditor(audit_ms=55.0, clock=clock)
    samples = [Sample(item, (0,)) for item in range(6)]
    assert audit.admit(samples) == samples[:1]  # nothing is known yet
    audit.batch_ran(arrived=clock.now, seconds=1.0, copying=0.06, samples=6)  # 10 ms each
    assert audit.admit(samples) == samples[:5]
    audit.batch_ran(arrived=clock.now, seconds=1.0, copying=0.0, samples=0)  # teaches nothing
    audit.offer(Point("v"), [audited(4, 1)])
    audit.work()  # 30 ms
    assert audit.admit(samples) == samples[:2]
    audit.batch_ran(arrived=clock.now, seconds=1.0, copying=0.04, samples=2)  # 20 ms each: 12 ms are believed now
    assert audit.admit(samples) == samples[:4]
    audit.offer(Point("v"), [audited(4, 1)] * 2)
    audit.work()  # 60 ms
    assert audit.admit(samples) == []
    audit.batch_ran(arrived=clock.now, seconds=1.0, copying=0.0, samples=0)
    for _ in range(30):
        audit.batch_ran(arrived=clock.now, seconds=1.0, copying=9.0, samples=1)
    assert audit.admit(samples) == samples[:1]  # long texts are audited too, one by one


def test_what_finds_no_room_is_dropped_and_counted() -> None:
    audit = auditor()
    for _ in range(MOST_WAITING - 2):
        audit.offer(Point("v"), [audited(4, 1)])
    samples = [Sample(item, (0,)) for item in range(5)]
    audit.batch_ran(arrived=0.0, seconds=0.0, copying=0.0, samples=1)  # copying takes no time
    assert audit.admit(samples) == samples[:2]
    assert audit.admit(samples) == samples[:2]  # a batch that failed is formed again, and nothing is counted twice
    audit.batch_ran(arrived=0.0, seconds=0.0, copying=0.0, samples=2, left_out=3)
    for _ in range(4):
        audit.offer(Point("v"), [audited(4, 1)])
    assert audit.admit(samples) == []
    audit.batch_ran(arrived=0.0, seconds=0.0, copying=0.0, samples=0, left_out=5)
    value = audit.figures.registry.get_sample_value
    assert value("sparsefinder_audits_waiting") == MOST_WAITING
    assert value("sparsefinder_audits_dropped_total") == audit.cost()["dropped"] == 3 + 2 + 5
    audit.work()
    assert not audit.waiting
    assert audit.live("v")["requests"] == MOST_WAITING


def test_what_waits_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    audit, layer = auditor(audit_ms=1e-9), audited(100, 8)
    tensors = (layer.q, layer.k, layer.scale, layer.legal, layer.kept)
    assert layer.bytes == sum(tensor.element_size() * tensor.numel() for tensor in tensors)
    monkeypatch.setattr("app.audit.MOST_BYTES", 5 * layer.bytes)
    for _ in range(3):
        audit.offer(Point("v"), [layer] * 2)
    held = audit.figures.registry.get_sample_value
    assert (held("sparsefinder_audits_waiting"), audit.cost()["dropped"]) == (2, 1)
    left = []
    while audit.waiting:
        left.append(held("sparsefinder_audits_waiting_bytes"))
        audit.work()  # one layer
    assert left == [count * layer.bytes for count in (4, 3, 2, 1)]
    assert held("sparsefinder_audits_waiting_bytes") == 0
    audit.offer(Point("v"), [layer] * 9)  # alone it may be larger than the bound: long texts are audited too
    assert audit.waiting


def test_no_text_is_kept() -> None:
    """Whatever an auditor holds is numbers: tensors, counts and names of versions."""
    audit = auditor(audit_ms=1e-9)
    for density in (None, 0.5):
        finish(audit, "v", [audited(4, 1)], density)
    audit.offer(Point("v"), [audited(4, 1)] * 2)
    audit.work()
    seen = [(place, value) for place, value in held(vars(audit)) if not isinstance(value, NUMBERS)]
    assert {value for _, value in seen if isinstance(value, str)} <= {"v"}
    assert all(isinstance(value, str) for _, value in seen), seen


NUMBERS = (int, float, np.ndarray, torch.Tensor, type(None))
PARTS = (Telemetry, DriftWatch, np.random.Generator, type(threading.Lock()), types.BuiltinFunctionType)


def held(value: Any, place: str = "auditor") -> Iterator[tuple[str, Any]]:
    """Every leaf of what an object holds, with where it is; parts that see no request are left out."""
    if isinstance(value, PARTS):
        return
    if hasattr(value, "__dataclass_fields__"):
        value = vars(value)
    if isinstance(value, dict):
        value = value.items()
        yield from (found for name, part in value for found in held(part, f"{place}.{name}"))
    elif isinstance(value, list | tuple | deque):
        yield from (found for part in value for found in held(part, f"{place}[]"))
    else:
        yield place, value


def test_what_is_chosen_is_bounded_and_fair() -> None:
    audit = auditor(rows=4)
    chosen = [audit.choose([2, 30]) for _ in range(400)]
    assert all(sample is not None for sample in chosen)
    samples = [sample for sample in chosen if sample is not None]
    assert all(len(sample.rows) == (2 if sample.item == 0 else 4) == len(set(sample.rows)) for sample in samples)
    assert all(max(sample.rows) < [2, 30][sample.item] for sample in samples)
    assert np.mean([sample.item for sample in samples]) == pytest.approx(30 / 32, abs=0.05)
    assert auditor(rate=0.0).choose([5]) is None
    some = auditor(rate=0.25)
    assert np.mean([some.choose([5]) is not None for _ in range(1000)]) == pytest.approx(0.25, abs=0.05)
