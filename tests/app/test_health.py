"""Health, keys, settings, the command line, and how the process ends."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from app_fakes import FakeLoader, embed, error_of, make_settings, serving, wait_ready
from starlette.testclient import TestClient
from typer.testing import CliRunner

from app.cli import serve
from app.main import create_app, make_engine
from app.settings import Settings, load_settings
from app.telemetry import Telemetry, begin, facts_of
from sparsefinder.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_alive_before_ready(tmp_path: Path, loader: FakeLoader) -> None:
    loader.read_gate.clear()
    settings = make_settings(tmp_path)
    app = create_app(settings, make_engine(settings, Telemetry(), loader))
    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.get("/livez").status_code == 200
        assert "loading" in error_of(client.get("/readyz"), 503, "not_ready")["message"]
        response = embed(client)
        error_of(response, 503, "not_ready")
        assert response.headers["retry-after"]
        assert "sparsefinder_ready 0.0" in client.get("/metrics").text
        loader.read_gate.set()
        wait_ready(client)
        assert client.head("/readyz").status_code == client.head("/livez").status_code == 200
        assert "sparsefinder_ready 1.0" in client.get("/metrics").text


def test_a_first_artifact_that_cannot_be_loaded(tmp_path: Path, loader: FakeLoader) -> None:
    failed = []
    settings = make_settings(tmp_path).model_copy(update={"artifact": tmp_path})
    app = create_app(settings, make_engine(settings, Telemetry(), loader), on_failure=lambda: failed.append(True))
    with TestClient(app, raise_server_exceptions=False) as client:
        while not failed:
            time.sleep(0.01)
        assert "failed" in error_of(client.get("/readyz"), 503, "not_ready")["message"]
        assert "fake.json" in str(app.state.engine.failure)


def test_a_stop_while_the_first_artifact_loads_is_no_failure(tmp_path: Path, loader: FakeLoader) -> None:
    loader.read_gate.clear()
    failed = []
    settings = make_settings(tmp_path)
    app = create_app(settings, make_engine(settings, Telemetry(), loader), on_failure=lambda: failed.append(True))
    with TestClient(app):
        threading.Timer(0.3, loader.read_gate.set).start()
    assert app.state.engine.failure is None
    assert not loader.calls  # no step of loading began after the stop
    assert not failed


def test_readiness_tells_the_truth_after_a_failure(client: TestClient, loader: FakeLoader) -> None:
    loader.broken.set()
    error_of(embed(client), 500, "internal_error")
    error_of(client.get("/readyz"), 503, "not_ready")
    assert client.get("/livez").status_code == 200
    loader.broken.clear()
    assert client.get("/readyz").status_code == 200  # found out by a probe, without waiting for traffic
    assert embed(client).status_code == 200


def test_keys(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, api_keys="first-key, clé-2", admin_keys="admin-key")
    with serving(settings) as client:
        for path in ("/livez", "/readyz", "/metrics"):
            assert client.get(path).status_code == 200
        for path in ("/v1/models", "/v1/sparsity", "/info"):
            error_of(client.get(path), 401, "missing_api_key")
            error_of(client.get(path, headers=bearer("wrong")), 401, "invalid_api_key")
            assert client.get(path, headers=bearer("first-key")).status_code == 200
        response = embed(client)
        error_of(response, 401, "missing_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        second = {"authorization": "Bearer clé-2".encode()}
        assert client.post("/v1/embeddings", json={"input": "a"}, headers=second).status_code == 200  # type: ignore[arg-type]
        error_of(client.post("/admin/reload", json={}), 401, "missing_api_key")
        error_of(client.post("/admin/reload", json={}, headers=bearer("first-key")), 401, "invalid_api_key")
        assert client.post("/admin/reload", json={}, headers=bearer("admin-key")).status_code == 200


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({}, 200),
        ({"host": "::1"}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "0.0.0.0"}, 403),
        ({"api_keys": "k"}, 403),
        ({"host": "0.0.0.0", "admin_keys": "k"}, 401),
    ],
)
def test_admin_without_a_key_only_on_a_private_service(tmp_path: Path, values: dict[str, Any], status: int) -> None:
    with serving(make_settings(tmp_path, **values)) as client:
        assert client.post("/admin/reload", json={}).status_code == status


def test_info_and_models_say_everything_but_secrets(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path, api_keys="hush-hush", admin_keys="psst-psst")) as client:
        info = client.get("/info", headers=bearer("hush-hush"))
        assert info.json()["artifact"]["version"] == "v1"
        assert info.json()["versions"]["torch"]
        assert info.json()["threads"] == 1
        assert set(info.json()["settings"]) == set(Settings.model_fields)
        assert info.json()["settings"]["api_keys"] == 1
        assert "hush" not in info.text
        assert "psst" not in info.text
        models = client.get("/v1/models", headers=bearer("hush-hush")).json()
        assert [model["id"] for model in models["data"]] == ["first"]


def test_the_schema_describes_the_bodies(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    assert "/v1/sparsity" in schema["paths"]
    body = schema["paths"]["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]["attention"]["enum"]) == {"original", "dense", "sparse", "exact", "auto"}


def test_settings_from_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEFINDER_PORT", "9001")
    monkeypatch.setenv("SPARSEFINDER_API_KEYS", "a,b , c")
    settings = load_settings()
    assert settings.port == 9001
    assert [key.get_secret_value() for key in settings.api_keys] == ["a", "b", "c"]
    assert load_settings(port=9002).port == 9002
    assert "a" not in repr(settings.api_keys)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", 2),
        ("port", 70000),
        ("audit_rate", float("nan")),
        ("device", "tpu"),
        ("max_items", 0),
        ("artifacts_root", "nowhere"),
    ],
)
def test_settings_outside_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        load_settings(**{name: value})


def test_every_setting_is_a_flag_and_two_workers_are_refused() -> None:
    command = typer.Typer()
    command.command()(serve)
    shown = CliRunner().invoke(command, ["--help"], terminal_width=200, env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for name in Settings.model_fields:
        assert "--" + name.replace("_", "-") in shown.output
    refused = CliRunner().invoke(command, ["--workers", "2"])
    assert refused.exit_code == 2
    assert "one process" in refused.output.replace("\n", " ")


FAKE_SERVER = """
import sys, types
sys.path.insert(0, {tests!r})
import app_fakes
sys.modules["app.model"] = types.SimpleNamespace(ModelLoader=app_fakes.SlowLoader)
from app.cli import main
main()
"""


def fake_server(artifact: Path, *flags: str, **options: Any) -> "subprocess.Popen[str]":
    """The real command line with the fake model, in a process of its own. options: of Popen."""
    code = FAKE_SERVER.format(tests=str(REPOSITORY / "tests"))
    command = [sys.executable, "-c", code, "--artifact", str(artifact), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, **options)


def start(artifact: Path, *flags: str) -> tuple["subprocess.Popen[str]", str]:
    """The same, listening; its address comes from the log."""
    process = fake_server(artifact, "--port", "0", *flags, env=os.environ | {"WEB_CONCURRENCY": "4"})
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "listening":
            return process, f"http://127.0.0.1:{event['port']}"
    raise AssertionError(f"the server did not start: exit code {process.wait(10)}")


def test_sigterm_finishes_what_runs_and_exits_with_0(tmp_path: Path) -> None:
    process, address = start(make_settings(tmp_path).artifact_path())
    try:
        with httpx.Client(base_url=address, timeout=30) as client, ThreadPoolExecutor(1) as pool:
            wait_ready(client)
            running = pool.submit(lambda: httpx.post(f"{address}/v1/embeddings", json={"input": "slow"}, timeout=30))
            while "sparsefinder_requests_running 2.0" not in client.get("/metrics").text:
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{address}/livez")
            assert running.result(20).status_code == 200
        assert process.wait(20) == 0
    finally:
        process.kill()


def test_a_stop_before_anything_serves_is_quiet(tmp_path: Path) -> None:
    process = fake_server(make_settings(tmp_path).artifact_path(), "--port", "0", stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["event"] == "starting"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = fake_server(make_settings(tmp_path).artifact_path(), "--port", str(port), stderr=subprocess.PIPE)
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith(f"error: host, port: cannot listen on 127.0.0.1:{port}")
    assert "address already in use" in said


def test_a_balancer_that_asks_too_early_is_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sparsefinder.app")
    scope: dict[str, Any] = {"type": "http", "method": "GET", "headers": []}
    begin(scope)
    for code in ("not_ready", "internal_error"):
        facts_of(scope).code = code
        Telemetry().finish(scope, 503, 0.0)
    assert [line.levelname for line in caplog.records] == ["INFO", "ERROR"]


def test_a_broken_first_artifact_ends_the_process_with_2(tmp_path: Path) -> None:
    make_settings(tmp_path)
    (tmp_path / "empty").mkdir()
    process = fake_server(tmp_path / "empty", "--port", "0", stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "expected fake.json" in errors
