"""Live recall: the estimator by hand, its interval, and what audits cost."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from app_fakes import HEADS, LAYERS, audited, embed, make_settings, serving
from starlette.testclient import TestClient

from app.audit import FIELDS, AuditedLayer, Auditor, Sample, measure
from app.telemetry import Telemetry


def auditor(**values: Any) -> Auditor:
    return Auditor(**({"rate": 1.0, "rows": 4, "window": 100, "figures": Telemetry()} | values))


def live(client: TestClient, requests: int) -> dict[str, Any]:
    """Live figures once so many requests are audited (audits run after the answers)."""
    until = time.monotonic() + 10
    while True:
        content = client.get("/v1/sparsity").json()
        if content["live"]["requests"] >= requests or time.monotonic() > until:
            figures: dict[str, Any] = content["live"]
            return figures
        time.sleep(0.02)


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


def test_live_figures_are_sums_over_requests() -> None:
    audit = auditor()
    for keys, rows in ((4, 2), (10, 4)):
        audit.record("v1", [audited(keys, rows)] * LAYERS)
    audit.record("v0", [audited(50, 1)] * LAYERS)  # another artifact's record is not mixed in
    figures = audit.live("v1")
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
    audit.record("v", [good])
    assert audit.live("v")["overall"]["recall_interval"] is None  # one request says nothing of the spread
    for layer in [good] * 10 + [bad] * 9:
        audit.record("v", [layer])
    low, high = audit.live("v")["overall"]["recall_interval"]
    recall = audit.live("v")["overall"]["recall"]
    # Ten requests of recall 1 and ten of 1/2: the mean of n has the deviation 0.25 / sqrt(20), whatever rows they had.
    spread = 1.96 * 0.25 / 20**0.5
    assert recall == pytest.approx((11 + 9 / 2) / 20)
    assert low == pytest.approx(recall - spread, abs=0.04)
    assert high == pytest.approx(recall + spread, abs=0.04)


def test_the_window_forgets() -> None:
    audit = auditor(window=3)
    for _ in range(5):
        audit.record("v", [audited(4, 1)])
    assert audit.live("v")["requests"] == 3


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


def test_a_sample_finds_its_batch() -> None:
    assert Sample(7, (1,)).within([3, 7, 1]) == Sample(1, (1,))
    assert Sample(7, (1,)).within([3, 1]) is None


def test_live_figures_over_http(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path, audit_rate=1.0, audit_rows=2, max_batch_tokens=8)) as client:
        before = client.get("/v1/sparsity").json()
        assert before["live"]["requests"] == 0
        assert before["calibration"]["overall"]["recall"] == 0.9
        assert (before["set"], before["artifact_version"]) == ("plan", "v1")
        embed(client, "one two three")
        embed(client, ["one two three", "four five", "six"])  # three batches, one audited item
        embed(client, attention="dense")  # has no plan that could miss anything
        figures = live(client, 2)
        assert figures["requests"] == 2
        assert figures["overall"]["recall"] == 0.5
        assert figures["overall"]["rows"] == 2 * 2 * LAYERS * HEADS
        assert figures["layers"][1]["heads"][2]["recall"] == 0.5
        text = client.get("/metrics").text
        assert "sparsefinder_audited_requests_total 2.0" in text
        assert f"sparsefinder_audited_gold_pairs_total {2 * 2 * 2 * LAYERS * HEADS}.0" in text


def test_an_audit_that_fails_reaches_no_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: AuditedLayer) -> None:
        raise RuntimeError

    monkeypatch.setattr("app.audit.measure", broken)
    with serving(make_settings(tmp_path, audit_rate=1.0)) as client:
        assert embed(client).status_code == 200
        until = time.monotonic() + 10
        while "sparsefinder_audit_failures_total 1.0" not in client.get("/metrics").text:
            assert time.monotonic() < until
        assert embed(client).status_code == 200
