"""POST /admin/rollback: what served before comes back, or what serves stays."""

from pathlib import Path
from typing import Any

import pytest
from app_fakes import embed, error_of, make_settings, serving, write_artifact
from starlette.testclient import TestClient


def reload(client: TestClient, artifact: str | None = None) -> Any:
    return client.post("/admin/reload", json={} if artifact is None else {"artifact": artifact})


def rollback(client: TestClient) -> Any:
    return client.post("/admin/rollback", json={})


def version(client: TestClient) -> str:
    return str(embed(client).headers["x-sparsefinder-artifact"])


def test_what_served_before_comes_back_and_a_second_one_undoes_the_first(client: TestClient, tmp_path: Path) -> None:
    write_artifact(tmp_path / "second", version="v2")
    assert reload(client, "second").status_code == 200
    answer = rollback(client)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["old"]["version"], answer.json()["new"]["version"]) == ("v2", "v1")
    assert version(client) == "v1"
    text = client.get("/metrics").text
    assert 'sparsefinder_artifact_info{name="first",version="v1"} 1.0' in text
    assert 'sparsefinder_reloads_total{result="ok"} 2.0' in text
    assert rollback(client).json()["new"]["version"] == "v2"
    assert version(client) == "v2"


def test_there_is_nothing_to_roll_back(client: TestClient, tmp_path: Path) -> None:
    message = error_of(rollback(client), 409, "nothing_to_roll_back")["message"]
    assert "first v1" in message
    write_artifact(tmp_path / "bad", version="v2", fault="read")
    assert reload(client, "bad").status_code == 409
    assert reload(client).status_code == 200  # the same once more
    error_of(rollback(client), 409, "nothing_to_roll_back")


def test_reloading_the_same_again_does_not_forget_what_was_before(client: TestClient, tmp_path: Path) -> None:
    write_artifact(tmp_path / "second", version="v2")
    assert reload(client, "second").status_code == 200
    assert reload(client, "second").status_code == 200
    assert rollback(client).json()["new"]["version"] == "v1"


def test_a_folder_that_holds_another_version_by_now(client: TestClient, tmp_path: Path) -> None:
    write_artifact(tmp_path / "second", version="v2")
    assert reload(client, "second").status_code == 200
    write_artifact(tmp_path / "first", version="v1-retrained")
    message = error_of(rollback(client), 409, "artifact_changed")["message"]
    assert "expected version v1, got v1-retrained" in message
    assert "v2 serves on" in message
    assert version(client) == "v2"
    assert 'sparsefinder_reloads_total{result="artifact_changed"} 1.0' in client.get("/metrics").text
    write_artifact(tmp_path / "first", version="v1")  # put back, it can be had again
    assert rollback(client).json()["new"]["version"] == "v1"


@pytest.mark.parametrize("fault", ["read", "teacher", "bug", "nan"])
def test_a_folder_that_is_broken_by_now(client: TestClient, tmp_path: Path, fault: str) -> None:
    write_artifact(tmp_path / "second", version="v2")
    assert reload(client, "second").status_code == 200
    write_artifact(tmp_path / "first", version="v1", fault=fault)
    error_of(rollback(client), 409, "artifact_unusable")
    assert version(client) == "v2"
    assert client.get("/readyz").status_code == 200


def test_no_page_can_send_it_unasked(client: TestClient, tmp_path: Path) -> None:
    write_artifact(tmp_path / "second", version="v2")
    assert reload(client, "second").status_code == 200
    error_of(client.post("/admin/rollback"), 415, "unsupported_media_type")
    error_of(client.post("/admin/rollback", data={"a": "b"}), 415, "unsupported_media_type")
    error_of(client.post("/admin/rollback", json={"version": "v1"}), 422, "invalid_request")
    assert version(client) == "v2"


def test_it_needs_an_admin_key(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path, api_keys="k", admin_keys="a")) as client:
        bearer = {"authorization": "Bearer k"}
        error_of(rollback(client), 401, "missing_api_key")
        error_of(client.post("/admin/rollback", json={}, headers=bearer), 401, "invalid_api_key")
