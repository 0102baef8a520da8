"""Every status of /openapi.json is produced by a real request, and no operation gives one that is not there.

Every operation meets every situation, also those that do not concern it. A new route is a row of ROWS.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from app_fakes import FakeLoader, embed, error_of, make_settings, serving, write_artifact
from starlette.testclient import TestClient

from app.main import create_app, make_engine
from app.settings import Settings
from app.telemetry import Telemetry

COMMITTED = json.loads((Path(__file__).parents[2] / "docs" / "openapi.json").read_text())
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Row:
    """One operation. body: what it is sent about a text; None for GET. also: further bodies that it must meet."""

    method: str
    path: str
    body: Callable[[str], dict[str, Any]] | None = None
    also: tuple[dict[str, Any], ...] = field(default=())


def about(text: str) -> dict[str, Any]:
    return {"input": text}


def masked(text: str) -> dict[str, Any]:
    return {"input": f"[MASK] {text}"}


def nothing(_: str) -> dict[str, Any]:
    return {}


ROWS = (
    Row("GET", "/livez"),
    Row("GET", "/readyz"),
    Row("GET", "/metrics"),
    Row("GET", "/info"),
    Row("GET", "/v1/models"),
    Row("GET", "/v1/sparsity"),
    Row("POST", "/v1/embeddings", about, ({"input": "a", "encoding_format": "base64", "attention": "exact"},)),
    Row("POST", "/v1/fill-mask", masked, ({"input": "[MASK]", "targets": ["one", "two"], "density": 0.5},)),
    Row("POST", "/v1/attention", about, ({"input": "a b", "gold": True, "pattern": True, "clusters": True},)),
    Row("POST", "/tokenize", about),
    Row("POST", "/admin/reload", nothing, ({"artifact": "missing"}, {"artifact": "bad"})),
    Row("POST", "/admin/rollback", nothing),
)
# Operations that need a causal model.
CAUSAL = (Row("POST", "/v1/score", about, ({"input": "a b", "top_k": 2},)),)
ALL = (*ROWS, *CAUSAL)
Seen = list[tuple[Row, Any]]


@dataclass(frozen=True)
class Place:
    """Where a situation happens, and which operations meet it there."""

    root: Path
    rows: tuple[Row, ...]

    def settings(self, **values: Any) -> Settings:
        """With an artifact that these operations can use."""
        settings = make_settings(self.root, **values)
        write_artifact(self.root / "first", version="v1", causal=self.rows is CAUSAL)
        return settings


def send(client: TestClient, row: Row, text: str = "a few words", **fields: Any) -> Any:
    body = None if row.body is None else row.body(text) | fields
    return client.request(row.method, row.path, json=body)


def raw(client: TestClient, row: Row, content: bytes, **headers: str) -> Any:
    return client.request(row.method, row.path, content=content, headers=JSON | headers)


def plainly(place: Place) -> Iterator[tuple[Row, Any]]:
    """A service in order: good requests, bodies that are wrong, a model that fails."""
    with serving(place.settings(audit_rate=1.0)) as client:
        write_artifact(place.root / "bad", version="v2", fault="read")
        write_artifact(place.root / "second", version="v2")
        embed(client, "an audited text")
        for row in place.rows:
            yield row, send(client, row)
            yield row, send(client, row, unknown=1)
            yield row, send(client, row, model="other")
            yield row, send(client, row, "explode")
            for fields in row.also:
                yield row, client.request(row.method, row.path, json=fields)
            yield row, raw(client, row, b"{")
            yield row, raw(client, row, b"{}", **{"content-type": "text/plain"})
        client.post("/admin/reload", json={"artifact": "second"})
        yield from ((row, send(client, row)) for row in place.rows if row.path.startswith("/admin"))


def without_a_key(place: Place) -> Iterator[tuple[Row, Any]]:
    with serving(place.settings(api_keys="k", admin_keys="a")) as client:
        yield from ((row, send(client, row)) for row in place.rows)


def open_to_others(place: Place) -> Iterator[tuple[Row, Any]]:
    with serving(place.settings(host="0.0.0.0")) as client:
        yield from ((row, send(client, row)) for row in place.rows)


def with_too_long_a_body(place: Place) -> Iterator[tuple[Row, Any]]:
    with serving(place.settings(max_body_bytes=1024)) as client:
        yield from ((row, raw(client, row, b" " * 2000)) for row in place.rows)


def before_it_is_loaded(place: Place) -> Iterator[tuple[Row, Any]]:
    loader, settings = FakeLoader(), place.settings()
    loader.read_gate.clear()
    with TestClient(create_app(settings, make_engine(settings, Telemetry(), loader))) as client:
        try:
            yield from ((row, send(client, row)) for row in place.rows)
        finally:
            loader.read_gate.set()


def while_the_queue_is_full(place: Place) -> Iterator[tuple[Row, Any]]:
    loader = FakeLoader()
    running = next(row for row in place.rows if row.path in ("/v1/embeddings", "/v1/score"))
    with serving(place.settings(max_queue_items=1), loader) as client, ThreadPoolExecutor(2) as pool:
        loader.gate.clear()
        probes = len(loader.calls)
        try:
            for waiting in (0.0, 1.0):  # the first is computed, the second fills the queue
                pool.submit(send, client, running, "slow")
                until = time.monotonic() + 20
                while len(loader.calls) == probes or f"sparsefinder_queue_items {waiting}" not in metrics(client):
                    assert time.monotonic() < until
            yield from ((row, send(client, row)) for row in place.rows if not row.path.startswith("/admin"))
        finally:
            loader.gate.set()


def metrics(client: TestClient) -> str:
    return client.get("/metrics").text


def when_time_is_up(place: Place) -> Iterator[tuple[Row, Any]]:
    loader = FakeLoader()
    with serving(place.settings(request_seconds=0.1), loader) as client:
        loader.gate.clear()
        try:
            yield from ((row, send(client, row, "slow")) for row in place.rows if not row.path.startswith("/admin"))
        finally:
            loader.gate.set()


SITUATIONS = (
    plainly,
    without_a_key,
    open_to_others,
    with_too_long_a_body,
    before_it_is_loaded,
    while_the_queue_is_full,
    when_time_is_up,
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    found: Seen = []
    for situation in SITUATIONS:
        for rows in (ROWS, CAUSAL):
            place = Place(tmp_path_factory.mktemp(situation.__name__), rows)
            with contextlib.closing(situation(place)) as answers:
                found += answers
    return found


def declared(row: Row) -> dict[str, Any]:
    operation: dict[str, Any] = COMMITTED["paths"][row.path][row.method.lower()]
    return operation


def answer_of(row: Row, status: int) -> dict[str, Any]:
    """What the document says of an answer, its reference followed."""
    answer: dict[str, Any] = declared(row)["responses"][str(status)]
    return COMMITTED["components"]["responses"][answer["$ref"].split("/")[-1]] if "$ref" in answer else answer


def test_the_rows_are_the_operations() -> None:
    there = {(path, method.upper()) for path, item in COMMITTED["paths"].items() for method in item}
    assert {(row.path, row.method) for row in ALL} == there


def test_every_declared_status_is_produced_and_no_other(seen: Seen) -> None:
    produced = {(row.path, row.method, response.status_code) for row, response in seen}
    expected = {(row.path, row.method, int(status)) for row in ALL for status in declared(row)["responses"]}
    assert produced - expected == set()
    assert expected - produced == set()


def test_every_error_has_the_one_shape(seen: Seen) -> None:
    for _, response in seen:
        if response.status_code >= 400:
            error_of(response, response.status_code, response.json()["error"]["code"])


def test_every_answer_has_the_headers_and_the_body_that_are_declared(seen: Seen) -> None:
    for row, response in seen:
        answer = answer_of(row, response.status_code)
        where = f"{row.method} {row.path} {response.status_code}"
        for name, header in answer["headers"].items():
            assert name in response.headers or not header["required"], f"{where}: {name}"
        ours = {name for name in response.headers if name.startswith("x-")} | {"retry-after", "allow"}
        assert {name for name in ours if name in response.headers} <= set(answer["headers"]), where
        media, content = next(iter(answer["content"].items()))
        assert response.headers["content-type"].partition(";")[0] == media, where
        if media == "application/json":
            problems = [error.message for error in strict(content["schema"]).iter_errors(response.json())]
            assert problems == [], where


def strict(schema: dict[str, Any]) -> Any:
    """A validator of the document that takes no field which is not declared."""

    def closed(value: Any) -> Any:
        if isinstance(value, dict):
            more = {"additionalProperties": False} if "properties" in value and "type" in value else {}
            return more | {name: closed(one) for name, one in value.items()}
        return [closed(one) for one in value] if isinstance(value, list) else value

    return jsonschema_rs.Draft202012Validator(closed(schema | {"components": COMMITTED["components"]}))


def refused(response: Any, method: str, status: int, code: str) -> None:
    if method == "HEAD":  # it has the headers of the answer and no body
        assert (response.status_code, response.content) == (status, b"")
        assert response.headers["x-request-id"]
    else:
        error_of(response, status, code)


def test_methods_that_a_path_does_not_have(client: TestClient) -> None:
    for path, item in COMMITTED["paths"].items():
        has = {method.upper() for method in item}
        has |= {"HEAD"} if "GET" in has else set()
        for method in set(METHODS) - has:
            response = client.request(method, path)
            refused(response, method, 405, "method_not_allowed")
            assert response.headers["allow"] == ", ".join(sorted(has)), (method, path)
        for method in has & {"HEAD"}:
            response = client.request(method, path)
            assert (response.status_code, response.content) == (200, b"")


def test_paths_that_do_not_exist(client: TestClient) -> None:
    for path in ("/v1", "/v1/embeddings/", "/docs", "/redoc", "/admin", "/LIVEZ", "/v1/%00"):
        for method in METHODS:
            refused(client.request(method, path), method, 404, "not_found")
