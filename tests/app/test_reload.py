"""POST /admin/reload: the new artifact serves, or the old one does; never neither."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from app_fakes import FakeLoader, embed, error_of, make_settings, serving, write_artifact
from starlette.testclient import TestClient


def reload(client: TestClient, artifact: str | None = None, **fields: Any) -> Any:
    return client.post("/admin/reload", json=({} if artifact is None else {"artifact": artifact}) | fields)


def version(client: TestClient) -> str:
    return str(embed(client).headers["x-sparsefinder-artifact"])


def test_a_good_artifact_takes_over(client: TestClient, tmp_path: Path) -> None:
    write_artifact(tmp_path / "second", version="v2", bias=5.0)
    response = reload(client, "second")
    assert response.status_code == 200, response.text
    assert (response.json()["old"]["version"], response.json()["new"]["version"]) == ("v1", "v2")
    answer = embed(client).json()
    assert answer["sparsefinder"]["artifact_version"] == "v2"
    assert answer["sparsefinder"]["artifact"] == "second"
    assert answer["data"][0]["embedding"][3] == 5.0
    assert answer["model"] == "first"  # the served name outlives its artifacts
    text = client.get("/metrics").text
    assert 'sparsefinder_artifact_info{name="second",version="v2"} 1.0' in text
    assert 'name="first"' not in text
    assert 'sparsefinder_reloads_total{result="ok"} 1.0' in text


def test_the_same_folder_is_read_again(client: TestClient, tmp_path: Path) -> None:
    write_artifact(tmp_path / "first", version="v1b")
    assert reload(client).json()["new"]["version"] == "v1b"
    assert version(client) == "v1b"


@pytest.mark.parametrize("fault", ["read", "teacher", "bug", "nan"])
def test_a_bad_artifact_is_refused_and_the_old_one_serves_on(client: TestClient, tmp_path: Path, fault: str) -> None:
    write_artifact(tmp_path / "bad", version="v2", fault=fault)
    error = error_of(reload(client, "bad"), 409, "artifact_unusable")
    assert "v1 serves on" in error["message"]
    assert version(client) == "v1"
    assert client.get("/readyz").status_code == 200
    assert 'sparsefinder_reloads_total{result="artifact_unusable"} 1.0' in client.get("/metrics").text


def test_an_empty_folder_is_refused(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "fake.json" in error_of(reload(client, "empty"), 409, "artifact_unusable")["message"]
    error_of(reload(client, "missing"), 404, "artifact_not_found")


def test_paths_stay_below_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    outside = write_artifact(tmp_path / "outside", version="evil")
    with serving(make_settings(root)) as client:
        (root / "link").symlink_to(outside)
        for path in ("../outside", str(outside), "link", ".", "", "first/../../outside", "/etc", "../nothing"):
            error_of(reload(client, path), 422, "artifact_outside_root")
        error_of(reload(client, "a\0b"), 422, "invalid_path")
        error_of(reload(client, "x" * 300), 422, "invalid_path")  # longer than a file system takes
        error_of(reload(client, "x" * 5000), 422, "invalid_request")
        error_of(reload(client, "first", force=True), 422, "invalid_request")
        assert version(client) == "v1"


def test_two_reloads_at_once(client: TestClient, tmp_path: Path, loader: FakeLoader) -> None:
    write_artifact(tmp_path / "second", version="v2")
    loader.read_gate.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(reload, client, "second")
        while not client.app.state.engine._reloading.locked():  # type: ignore[attr-defined]
            pass
        error_of(reload(client, "second"), 409, "reload_in_progress")
        assert version(client) == "v1"  # it answers meanwhile
        loader.read_gate.set()
        assert first.result(20).status_code == 200
    assert version(client) == "v2"


def test_under_load_every_answer_is_from_one_artifact_and_says_which(tmp_path: Path, loader: FakeLoader) -> None:
    bias = {"v1": 0.0, "v2": 7.0}
    with serving(make_settings(tmp_path, max_batch_tokens=8), loader) as client:
        write_artifact(tmp_path / "second", version="v2", bias=7.0)
        write_artifact(tmp_path / "bad", version="v3", fault="read")
        stop = threading.Event()

        def ask() -> list[str]:
            seen = []
            while not stop.is_set():
                answer = embed(client, ["a b c", "d", "e f"])  # several batches each
                assert answer.status_code == 200, answer.text
                named = answer.json()["sparsefinder"]["artifact_version"]
                assert {item["embedding"][3] for item in answer.json()["data"]} == {bias[named]}
                seen.append(named)
            return seen

        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask) for _ in range(4)]
            for name in ("bad", "second", "bad", "first", "second") * 2:
                status = reload(client, name).status_code
                assert status == (409 if name == "bad" else 200)
            stop.set()
            seen = [named for future in asking for named in future.result(20)]
    assert set(seen) == {"v1", "v2"}
