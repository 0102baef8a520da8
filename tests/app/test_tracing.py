"""Tracing: a span per request where an endpoint is set; nothing of OpenTelemetry elsewhere."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from app_fakes import COMPUTED, FakeLoader, embed, make_settings, serving
from starlette.testclient import TestClient

from app import tracing
from sparsefinder.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
ENDPOINT = "http://127.0.0.1:9/v1/traces"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Spans = Callable[[], dict[str, Any]]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exporter that the tracer gets in the place of one that sends."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    monkeypatch.setattr(tracing, "_exporter", lambda endpoint: exporter)
    return exporter


@pytest.fixture
def traced(tmp_path: Path, loader: FakeLoader, spans: Any) -> Iterator[TestClient]:
    with serving(make_settings(tmp_path, otlp_endpoint=ENDPOINT), loader) as client:
        client.app.state.tracer._provider.force_flush()  # type: ignore[attr-defined]
        spans.clear()
        yield client


def finished(client: TestClient, exporter: Any) -> dict[str, Any]:
    """The spans since the start, by name."""
    client.app.state.tracer._provider.force_flush()  # type: ignore[attr-defined]
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_span_with_two_inside(traced: TestClient, spans: Any) -> None:
    answer = embed(traced, "a SECRET text", attention="sparse")
    found = finished(traced, spans)
    assert set(found) == {"POST /v1/embeddings", "queue", "inference"}
    whole = found["POST /v1/embeddings"]
    facts = dict(whole.attributes)
    assert facts["http.response.status_code"] == 200
    assert facts["http.route"] == "/v1/embeddings"
    assert facts["sparsefinder.tokens"] == 5
    assert facts["sparsefinder.attention"] == "sparse"
    assert facts["sparsefinder.computed_density"] == pytest.approx(COMPUTED, abs=0.05)
    assert facts["sparsefinder.request_id"] == answer.headers["x-request-id"]
    assert {"sparsefinder.queue_ms", "sparsefinder.inference_ms"} <= set(facts)
    assert "SECRET" not in "".join(span.to_json() for span in found.values())
    for name in ("queue", "inference"):
        child = found[name]
        assert child.parent.span_id == whole.context.span_id
        assert child.end_time - child.start_time == pytest.approx(facts[f"sparsefinder.{name}_ms"] * 1e6, abs=1e3)
    assert found["queue"].end_time == found["inference"].start_time
    assert found["inference"].end_time <= whole.end_time


def test_the_clients_trace_is_continued(traced: TestClient, spans: Any) -> None:
    assert traced.post("/v1/embeddings", json={"input": "a"}, headers={"traceparent": PARENT}).status_code == 200
    whole = finished(traced, spans)["POST /v1/embeddings"]
    assert f"{whole.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{whole.parent.span_id:016x}" == PARENT.split("-")[2]


def test_a_trace_that_is_not_sampled_is_not_recorded(traced: TestClient, spans: Any) -> None:
    answer = traced.post("/v1/embeddings", json={"input": "a"}, headers={"traceparent": PARENT[:-1] + "0"})
    assert answer.status_code == 200
    assert finished(traced, spans) == {}


def test_a_traceparent_that_is_none_starts_a_new_trace(traced: TestClient, spans: Any) -> None:
    answer = traced.post("/v1/embeddings", json={"input": "a"}, headers={"traceparent": "00-" + "z" * 32 + "-1-01"})
    assert answer.status_code == 200
    assert finished(traced, spans)["POST /v1/embeddings"].parent is None


def test_errors_and_strangers_paths(traced: TestClient, spans: Any) -> None:
    embed(traced, "explode")
    failed = finished(traced, spans)["POST /v1/embeddings"]
    assert not failed.status.is_ok
    assert failed.attributes["error.type"] == "internal_error"
    spans.clear()
    traced.get("/SECRET-path")
    traced.request("VERB", "/livez")
    embed(traced, "")
    found = finished(traced, spans)
    assert set(found) == {"GET unmatched", "HTTP /livez", "POST /v1/embeddings"}
    assert not any(span.status.status_code.name == "ERROR" for span in found.values())
    assert "SECRET" not in "".join(span.to_json() for span in found.values())


def test_without_the_extra_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"sparsefinder\[tracing\]") as error:
        tracing.make_tracer(ENDPOINT)
    assert "\n" not in str(error.value)


def test_without_the_extra_the_command_ends_with_2(tmp_path: Path) -> None:
    artifact = make_settings(tmp_path).artifact_path()
    code = (
        "import sys; from app import tracing; tracing.find_spec = lambda name: None; from app.cli import main;"
        f"sys.argv = ['sparsefinder-serve', '--artifact', {str(artifact)!r}, '--otlp-endpoint', {ENDPOINT!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "sparsefinder[tracing]" in done.stderr


def test_without_the_setting_nothing_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = ['tests']; from pathlib import Path; from app_fakes import *;"
        f"context = serving(make_settings(Path({str(tmp_path)!r}))); client = context.__enter__(); embed(client);"
        "context.__exit__(None, None, None);"
        "assert client.app.state.tracer is None;"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))][:5])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == 0, done.stderr
    # FastAPI imports OpenTelemetry's API by itself, which does nothing without the SDK.
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_collector_that_is_not_there_delays_nothing(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with serving(make_settings(tmp_path, otlp_endpoint=ENDPOINT)) as client:
        assert embed(client).status_code == 200
