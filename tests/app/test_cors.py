"""Pages of other origins: none by default; with the setting exactly those that are named, whatever the status."""

from pathlib import Path
from typing import Any

import pytest
from app_fakes import embed, error_of, make_settings, serving
from starlette.testclient import TestClient

from app.settings import load_settings
from sparsefinder.errors import ConfigError

PAGE, OTHER = "https://app.example.org", "https://app.example.org.evil.test"


def ask(client: TestClient, origin: str, method: str = "POST", path: str = "/v1/embeddings") -> Any:
    headers = {"origin": origin, "access-control-request-method": method, "access-control-request-headers": "a, b"}
    return client.options(path, headers=headers)


def granted(response: Any) -> str | None:
    origin: str | None = response.headers.get("access-control-allow-origin")
    return origin


def test_off_by_default(client: TestClient) -> None:
    error_of(ask(client, PAGE), 405, "method_not_allowed")
    response = client.post("/v1/embeddings", json={"input": "a"}, headers={"origin": PAGE})
    assert not [name for name in response.headers if name.startswith("access-control") or name == "vary"]


def test_only_the_named_origins(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path, cors_origins=f"{PAGE}, http://[::1]:3000", api_keys="k")) as client:
        allowed = ask(client, PAGE)
        assert (allowed.status_code, allowed.content, granted(allowed)) == (204, b"", PAGE)
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        assert "POST" in allowed.headers["access-control-allow-methods"]
        assert allowed.headers["x-request-id"]
        assert granted(ask(client, "http://[::1]:3000")) == "http://[::1]:3000"
        for origin in (OTHER, "null", PAGE.upper(), f"{PAGE}/", "https://example.org"):
            refused = ask(client, origin)
            error_of(refused, 405, "method_not_allowed")
            assert granted(refused) is None
            assert refused.headers["vary"] == "origin"
        assert 'route="unmatched",status="204"' in client.get("/metrics").text


def test_errors_of_every_layer_can_be_read(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path, cors_origins=PAGE, max_body_bytes=1024)) as client:
        headers = {"origin": PAGE}
        post = client.post
        answers = [
            post("/v1/embeddings", json={"input": "a"}, headers=headers),
            post("/v1/embeddings", json={"input": ""}, headers=headers),
            post("/v1/embeddings", json={"input": "explode"}, headers=headers),
            post("/v1/embeddings", content=b" " * 2000, headers=headers),
            client.get("/nowhere", headers=headers),
            client.put("/livez", headers=headers),
        ]
        assert [one.status_code for one in answers] == [200, 422, 500, 413, 404, 405]
        assert {granted(one) for one in answers} == {PAGE}
        named = answers[0].headers["access-control-expose-headers"].split(", ")
        assert {name for name in answers[0].headers if name.startswith("x-")} <= set(named)
        assert "access-control-allow-credentials" not in answers[0].headers
        assert granted(embed(client)) is None  # no page sent it


def test_any_origin_is_not_for_a_service_with_keys(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path, cors_origins="*")) as client:
        assert granted(ask(client, OTHER)) == OTHER
    for keys in ({"api_keys": "k"}, {"admin_keys": "k"}):
        with pytest.raises(ConfigError, match="cors_origins: expected exact origins where keys are configured"):
            load_settings(cors_origins=f"{PAGE},*", **keys)


@pytest.mark.parametrize("origin", ["example.org", f"{PAGE}/", f"{PAGE}/path", "https://*.example.org", "ftp://a.b"])
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        load_settings(cors_origins=origin)
