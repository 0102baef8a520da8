"""Every error has one shape, says what was expected, and repeats or logs no text."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from app_fakes import FakeLoader, embed, error_of, make_settings, on_a_socket, serving
from starlette.testclient import TestClient

from app.telemetry import JsonLines

JSON = {"content-type": "application/json"}


def post(client: TestClient, body: bytes | str, **headers: str) -> Any:
    content = body.encode() if isinstance(body, str) else body
    return client.post("/v1/embeddings", content=content, headers=JSON | headers)


def test_unknown_path_and_method(client: TestClient) -> None:
    error_of(client.get("/nowhere"), 404, "not_found")
    error_of(client.post("/v1/embeddings/", json={"input": "a"}), 404, "not_found")
    response = client.get("/v1/embeddings")
    error_of(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        '"text"',
        "[1]",
        "null",
        '{"input": NaN}',
        '{"input": "a", "dimensions": Infinity}',
        '{"input": "a", "dimensions": -Infinity}',
        '{"input": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"input": ' + "1" * 5000 + "}",
        b'{"input": "\xff\xfe"}',
        b"\xff\xfe{\x00}\x00",
    ],
)
def test_what_is_not_a_json_object(client: TestClient, body: Any) -> None:
    assert len(json.dumps(error_of(post(client, body), 400, "invalid_json"))) < 400


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ("{}", "invalid_request", "input"),
        ('{"input": null}', "invalid_input", "input"),
        ('{"input": 3}', "invalid_input", "input"),
        ('{"input": {"a": 1}}', "invalid_input", "input"),
        ('{"input": []}', "empty_input", "input"),
        ('{"input": [[]]}', "empty_input", "input.0"),
        ('{"input": ""}', "empty_input", "input"),
        ('{"input": "   "}', "empty_input", "input"),
        ('{"input": ["fine", "  "]}', "empty_input", "input.1"),
        ('{"input": ["fine", 3]}', "invalid_input", "input.1"),
        ('{"input": [true]}', "invalid_input", "input.0"),
        ('{"input": [1.5]}', "invalid_input", "input.0"),
        ('{"input": [1e999]}', "invalid_input", "input.0"),
        ('{"input": [[1, "x"]]}', "invalid_input", "input.0"),
        ('{"input": [-1]}', "invalid_token", "input"),
        ('{"input": [[5], [1000]]}', "invalid_token", "input.1"),
        ('{"input": [' + "9" * 400 + "]}", "invalid_token", "input"),
        (r'{"input": "\ud800"}', "invalid_unicode", "input"),
        (r'{"input": ["a", "b\udfff"]}', "invalid_unicode", "input.1"),
        (r'{"input": "a", "user": "\ud800"}', "invalid_request", "user"),
        (r'{"input": "a", "model": "\ud800"}', "invalid_request", "model"),
        (r'{"input": "a", "\ud800": 1}', "invalid_request", "body"),
        ('{"input": "a", "attenton": "dense"}', "invalid_request", "attenton"),
        ('{"input": "a", "truncate": "yes"}', "invalid_request", "truncate"),
        ('{"input": "a", "truncate": 1}', "invalid_request", "truncate"),
        ('{"input": "a", "dimensions": 1e999}', "invalid_request", "dimensions"),
        ('{"input": "a", "dimensions": "4"}', "invalid_request", "dimensions"),
        ('{"input": "a", "encoding_format": "hex"}', "invalid_request", "encoding_format"),
        ('{"input": "a", "model": 3}', "invalid_request", "model"),
    ],
)
def test_what_is_not_a_request(client: TestClient, body: str, code: str, param: str) -> None:
    error = error_of(post(client, body), 422, code)
    assert error["param"] == param
    assert len(error["message"]) < 300


def test_a_big_wrong_value_is_not_echoed(client: TestClient) -> None:
    for value in ({"x" * 2_000_000: 1}, {"model": ["y" * 2_000_000]}, {"attention": "z" * 2_000_000}):
        response = client.post("/v1/embeddings", json={"input": "a"} | value)
        error_of(response, 422, "invalid_request")
        assert len(response.content) < 1000


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", ""]
)
def test_other_media_types(client: TestClient, kind: str) -> None:
    response = client.post("/v1/embeddings", content=b'{"input": "a"}', headers={"content-type": kind})
    error_of(response, 415, "unsupported_media_type")


def test_json_with_a_charset_is_json(client: TestClient) -> None:
    assert post(client, '{"input": "a"}', **{"content-type": 'Application/JSON; charset="UTF-8"'}).status_code == 200


def test_unicode_that_is_text(client: TestClient) -> None:
    for text in ("🙂", "a\u200db", "日本語 العربية हिन्दी ελληνικά עברית ไทย 한국어 русский తెలుగు አማርኛ"):
        assert embed(client, text).status_code == 200


def test_a_large_body(tmp_path: Path, loader: FakeLoader) -> None:
    with serving(make_settings(tmp_path, max_body_bytes=2000), loader) as client:
        error_of(embed(client, "a" * 3000), 413, "body_too_large")

        def chunks() -> Iterator[bytes]:
            for _ in range(50):
                yield b" " * 1000

        error_of(client.post("/v1/embeddings", content=chunks(), headers=JSON), 413, "body_too_large")
        error_of(client.post("/nowhere", content=b"x" * 3000), 413, "body_too_large")
        fits = json.dumps({"input": "a"}).ljust(2000).encode()
        assert post(client, fits).status_code == 200


def test_fifty_chunked_megabytes_over_a_socket(tmp_path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with on_a_socket(make_settings(tmp_path)) as address, httpx.Client(timeout=30) as client:
        chunk, before = b" " * 100_000, resident()
        for headers in ({}, {"content-length": str(500 * len(chunk))}):
            body = (chunk for _ in range(500))
            response = client.post(f"{address}/v1/embeddings", content=body, headers=JSON | headers)
            error_of(response, 413, "body_too_large")
        assert resident() - before < 25_000_000
        assert client.post(f"{address}/v1/embeddings", json={"input": "a"}).status_code == 200


def test_a_forward_pass_that_raises_harms_nobody_else(client: TestClient) -> None:
    error = error_of(embed(client, "please explode"), 500, "internal_error")
    assert "SECRET" not in error["message"]
    assert embed(client).status_code == 200


def test_nan_is_never_answered(client: TestClient) -> None:
    for kind in ("float", "base64"):
        error_of(embed(client, ["fine", "nan"], encoding_format=kind), 500, "non_finite_output")
    assert embed(client, "fine").status_code == 200


def test_no_text_is_logged(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "sparsefinder.app")
    word = "SECRET"
    embed(client, f"{word} text")
    embed(client, f"{word} explode")
    embed(client, [word, "nan"])
    client.post("/v1/embeddings", json={"input": "a", word: 1, "user": word})
    client.get(f"/{word}?{word}={word}")
    post(client, f'{{"input": "{word}')
    lines = [JsonLines().format(record) for record in caplog.records if record.name == "sparsefinder.app"]
    assert sum(json.loads(line)["event"] == "request" for line in lines) == 6
    assert any(json.loads(line)["event"] == "exception" for line in lines)
    assert word not in "\n".join(lines)
