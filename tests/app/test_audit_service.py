"""Audits in the running service: which requests, when, and what is dropped; drift over HTTP."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from app_fakes import HEADS, LAYERS, FakeLoader, audited, embed, make_settings, serving, write_artifact
from starlette.testclient import TestClient

from app.audit import MOST_WAITING, AuditedLayer, measure
from app.servable import Asked, Lane


def live(client: TestClient, requests: int, finished: int = 0) -> dict[str, Any]:
    """Live figures once so many requests are audited, or audits finished (they run after the answers)."""
    until = time.monotonic() + 10
    while True:
        content = client.get("/v1/sparsity").json()
        done = content["live"]["requests"] >= requests and content["live"]["cost"]["finished"] >= finished
        if done or time.monotonic() > until:
            figures: dict[str, Any] = content["live"]
            return figures
        time.sleep(0.02)


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


def test_between_two_batches_there_is_one_pause_of_bounded_work(
    tmp_path: Path, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bound that one layer uses up, no batch waits for more than one layer, and idle time finishes the rest."""

    def measured(layer: AuditedLayer) -> Any:
        loader.calls.append(("layer", [], threading.current_thread().name))
        return measure(layer)

    monkeypatch.setattr("app.audit.measure", measured)
    settings = make_settings(tmp_path, audit_rate=1.0, audit_ms=1e-6, max_batch_tokens=4)
    with serving(settings, loader) as client:
        begun = len(loader.calls)
        loader.gate.clear()  # the first request holds the worker until the others wait
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(embed, client, "slow")]
            while ("sparse", [3]) not in [call[:2] for call in loader.calls[begun:]]:
                time.sleep(0.001)
            asked += [pool.submit(embed, client, word) for word in ("one two", "three four", "five six", "seven")]
            while client.app.state.engine.queue.tokens < 4 + 4 + 4 + 3:  # type: ignore[attr-defined]
                time.sleep(0.001)
            loader.gate.set()
            assert {future.result(20).status_code for future in asked} == {200}
        live(client, 5)
    ran = [mode for mode, _, _ in loader.calls[begun:]]
    last = len(ran) - ran[::-1].index("sparse")
    assert ran[:last] == ["sparse", "layer"] * (last // 2) + ["sparse"]
    assert ran[last:] == ["layer"] * (5 * LAYERS - last // 2)
    assert len({thread for _, _, thread in loader.calls[begun:]}) == 1


def test_more_samples_than_may_wait_are_dropped_before_they_are_copied(
    tmp_path: Path, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []
    with serving(make_settings(tmp_path, audit_rate=1.0), loader) as client:
        monkeypatch.setattr("app_fakes.audited", lambda *sizes: copied.append(sizes) or audited(*sizes))
        loader.gate.clear()
        count = MOST_WAITING + 5
        with ThreadPoolExecutor(count + 1) as pool:
            begun = len(loader.calls)
            first = pool.submit(embed, client, "slow")
            while len(loader.calls) == begun:
                time.sleep(0.001)
            asked = [pool.submit(embed, client, f"word{n}") for n in range(count)]
            while client.app.state.engine.queue.tokens < 3 * count:  # type: ignore[attr-defined]
                time.sleep(0.001)
            loader.gate.set()
            assert {future.result(20).status_code for future in [first, *asked]} == {200}
        figures = live(client, MOST_WAITING)
        # The first request's audit was measured in the pause before the batch of all others, or waits beside them.
        assert figures["cost"]["dropped"] in (5, 6)
        assert figures["cost"]["accepted"] + figures["cost"]["dropped"] == count + 1
        assert len(copied) == figures["cost"]["accepted"]
        assert f"sparsefinder_audits_dropped_total {figures['cost']['dropped']}.0" in client.get("/metrics").text


def test_which_requests_are_audited(tmp_path: Path) -> None:
    """Those that a plan answered; of another working point apart from the served one."""
    with serving(make_settings(tmp_path, audit_rate=1.0)) as client:
        for mode in ("original", "dense", "exact", "auto", "sparse"):
            embed(client, "one two three", attention=mode)
        engine = client.app.state.engine  # type: ignore[attr-defined]
        for density in (0.3, 0.3, 0.1):
            asked = Asked(engine.model, ["one two"], Lane("embed", "sparse", density), truncate=False)
            client.portal.call(engine.ask, asked)  # type: ignore[union-attr]
        figures = live(client, 2, finished=5)
        assert figures["requests"] == 2
        assert [(point["density"], point["requests"]) for point in figures["points"]] == [(0.1, 1), (0.3, 2)]
        assert figures["points"][0]["recall"] == 0.5
        assert 'sparsefinder_live_recall{head="all",layer="all"} 0.5' in client.get("/metrics").text


def test_drift_over_http_begins_once_and_a_reload_forgets_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sparsefinder.app")
    settings = make_settings(tmp_path, audit_rate=1.0, drift_requests=3)
    loop = {"overall": {"recall": 0.9}, "layers": [{"recall": 0.9}] * LAYERS}
    write_artifact(tmp_path / "first", version="v1", loop=loop)
    write_artifact(tmp_path / "second", version="v2", loop={"overall": {"recall": 0.5}})
    with serving(settings) as client:
        assert live(client, 0)["drift"] is None
        for word in ("one", "two", "three", "four"):
            embed(client, word)
        drift = live(client, 4)["drift"]
        assert (drift["drifting"], drift["calibrated_recall"], drift["live_recall"]) == (True, 0.9, 0.5)
        assert drift["layer"] in range(LAYERS)
        text = client.get("/metrics").text
        assert "sparsefinder_drifting 1.0" in text
        assert "sparsefinder_recall_drift 0.4" in text
        live(client, 4)
        assert client.post("/admin/reload", json={"artifact": "second"}).status_code == 200
        figures = live(client, 0)
        assert (figures["requests"], figures["drift"]) == (0, None)
        for word in ("one", "two", "three"):
            embed(client, word)
        assert live(client, 3)["drift"]["drifting"] is False
    said = [line.getMessage() for line in caplog.records if "drift" in line.getMessage()]
    assert said == ["recall_drift"]


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
