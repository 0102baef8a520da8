"""/openapi.json: committed, complete, and the same on every machine."""

import json
from pathlib import Path
from typing import Any

import pytest
from app_fakes import make_settings, serving
from fastapi import FastAPI
from starlette.testclient import TestClient

from app import openapi, routes
from app.openapi import documented, text_of
from app.schemas import Strict

COMMITTED = Path(__file__).parents[2] / "docs" / "openapi.json"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(COMMITTED.read_text())
    return content


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, one) for path, item in document["paths"].items() for method, one in item.items()]


def test_what_is_committed_is_what_is_served(client: TestClient) -> None:
    served = client.get("/openapi.json")
    assert served.headers["content-type"] == "application/json"
    assert served.text == COMMITTED.read_text(), "renew it: python -m app.openapi docs/openapi.json"


def test_settings_do_not_change_it(tmp_path: Path) -> None:
    values = {"served_name": "other", "api_keys": "k", "admin_keys": "a", "max_items": 3, "cors_origins": "http://a.b"}
    with serving(make_settings(tmp_path, **values)) as client:
        assert client.get("/openapi.json").text == COMMITTED.read_text()


def test_every_route_is_in_it_or_left_out_on_purpose(document: dict[str, Any]) -> None:
    app = FastAPI(openapi_url=None)
    routes.install(app)
    there = {(route.path, method) for route in app.state.routes for method in route.methods if method != "HEAD"}
    described = {(path, method.upper()) for path, method, _ in operations(document)}
    # This document, and the page for people.
    left_out = {"/openapi.json", "/", "/ui", "/ui/", "/ui/{name}"}
    assert {path for path, _ in there - described} <= left_out
    assert described <= there


def test_every_operation_says_what_it_takes_and_gives(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        where = f"{method} {path}"
        assert operation["summary"], where
        assert operation["description"], where
        good = operation["responses"]["200"]
        schema = next(iter(good["content"].values()))["schema"]
        assert schema, where
        assert good["headers"]["x-request-id"]["required"], where
        if method == "post":
            body = operation["requestBody"]["content"]["application/json"]["schema"]
            assert body["additionalProperties"] is False, where
            assert {"400", "415", "422"} <= set(operation["responses"]), where
        private = path.startswith(("/v1", "/admin", "/info", "/tokenize"))
        assert ("security" in operation) == private == ("401" in operation["responses"]), where
        assert path.startswith("/admin") == ("403" in operation["responses"]), where
        for status, answer in operation["responses"].items():
            assert status == "200" or set(answer) == {"$ref"}, where


def test_errors_have_the_one_shape_and_their_headers(document: dict[str, Any]) -> None:
    answers = document["components"]["responses"]
    for answer in answers.values():
        assert answer["content"] == {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
        assert answer["headers"]["x-request-id"]["required"]
    waits = {name for name, answer in answers.items() if "retry-after" in answer["headers"]}
    assert waits == {"Conflict", "GatewayTimeout", "ServiceUnavailable", "TooManyRequests"}
    assert "allow" in answers["MethodNotAllowed"]["headers"]
    assert "www-authenticate" in answers["Unauthorized"]["headers"]


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def look(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                target: Any = document
                for part in value["$ref"].removeprefix("#/").split("/"):
                    target = target[part]
            for one in value.values():
                look(one)
        elif isinstance(value, list):
            for one in value:
                look(one)

    look(document)


def test_nothing_of_a_machine_is_in_it(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    for word in (str(Path.home()), str(Path.cwd()), "localhost", "127.0.0.1:"):
        assert word not in text
    assert "servers" not in document


def test_nested_bodies_become_components() -> None:
    class Inner(Strict):
        number: int

    class Outer(Strict):
        """A body."""

        inner: Inner

    app = FastAPI(openapi_url=None)
    app.post("/x", **documented(None, (404,), Outer))(lambda: None)
    content = json.loads(text_of(app))
    body = content["paths"]["/x"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["inner"] == {"$ref": "#/components/schemas/Inner"}
    assert "Inner" in content["components"]["schemas"]
    assert set(content["paths"]["/x"]["post"]["responses"]) == {"200", "404", "413"}


def test_the_command_writes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["app.openapi", str(tmp_path / "openapi.json")])
    openapi.main()
    assert (tmp_path / "openapi.json").read_text() == COMMITTED.read_text()
