"""`sparsefinder-train audit` against a service on a real socket: what it shows, and what each mistake is told."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from app_fakes import HEADS, LAYERS, make_settings, on_a_socket, write_artifact
from typer.testing import CliRunner

from app.settings import Settings
from sparsefinder.errors import ConfigError
from training import audit_client, audit_run, corpus
from training.audit_client import Service
from training.cli import app

LOOP = {
    "overall": {"recall": 0.91, "sparsity": 0.66, "mass": 0.97, "exact_rows": 0.44},
    "layers": [{"recall": 0.93}, {"recall": 0.89}],
}
Stub = Callable[[BaseHTTPRequestHandler], tuple[int, dict[str, str], bytes]]


def invoke(url: str, *arguments: Any, **environment: str) -> Any:
    whole = ["audit", "--url", url, *map(str, arguments)]
    return CliRunner(env={"SPARSEFINDER_API_KEY": None, "COLUMNS": "200"} | environment).invoke(app, whole)


def mistake(result: Any) -> str:
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    line: str = result.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    return line


def settings(root: Path, **values: Any) -> Settings:
    made = make_settings(root, **({"audit_rate": 1.0, "audit_rows": 2, "drift_requests": 3} | values))
    write_artifact(root / "first", version="v1", loop=LOOP)
    return made


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"SECRET{line} the bridge over the river" for line in range(2000)))
    return path


@contextlib.contextmanager
def stub(answer: Stub) -> Iterator[str]:
    """The address of a server that is no service of ours."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answer(self)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_live_figures_beside_calibrated_ones(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "new" / "audit.json"
    with on_a_socket(settings(tmp_path)) as url:
        first = invoke(url, "--text", text, "--requests", 4)
        result = invoke(url + "/", "--text", text, "--requests", 6, "--out", out, "--attention", "sparse")
    assert (first.exit_code, result.exit_code) == (0, 0), result.output
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.strip()}
    assert rows["all"][:7] == ["90.0", "91.0", "50.0", "50.0–50.0", "–", "66.0", rows["0"][6]]
    assert (rows["0"][:3], rows["1"][:3]) == (["–", "93.0", "50.0"], ["–", "89.0", "50.0"])
    assert "6 requests of 16 tokens in mode sparse" in result.stdout
    assert "10 audited requests in the service's window, 4 of them before" in result.stdout
    assert "drift: DRIFTING; calibrated in the loop 91.0%, live 50.0%" in result.stdout
    assert "(bound: 50 ms and one layer), 0 dropped" in result.stdout
    kept = json.loads(out.read_text())
    assert (kept["requests"], kept["before"], kept["tokens"]) == (6, 4, 96)
    assert len(kept["sparsity"]["live"]["layers"]) == LAYERS
    assert len(kept["sparsity"]["live"]["layers"][0]["heads"]) == HEADS
    assert "SECRET" not in out.read_text() + result.output


def test_exit_code_1_only_where_the_whole_interval_is_below(tmp_path: Path, text: Path) -> None:
    with on_a_socket(settings(tmp_path)) as url:
        below = invoke(url, "--text", text, "--requests", 3, "--min-recall", 0.6)
        assert below.exit_code == 1
        assert "below 60.0%" in below.stdout
        assert invoke(url, "--text", text, "--requests", 3, "--min-recall", 0.5).exit_code == 0
    with on_a_socket(settings(tmp_path)) as url:
        alone = invoke(url, "--text", text, "--requests", 1, "--min-recall", 0.6)
        assert "at least two audited requests" in mistake(alone)


def test_the_key_comes_from_the_environment_and_is_never_shown(tmp_path: Path, text: Path) -> None:
    with on_a_socket(settings(tmp_path, api_keys="right-key")) as url:
        asked = ["--text", text, "--requests", 2]
        assert "environment variable SPARSEFINDER_API_KEY" in mistake(invoke(url, *asked))
        wrong = mistake(invoke(url, *asked, SPARSEFINDER_API_KEY="wrong-key"))
        assert "does not know the one in SPARSEFINDER_API_KEY" in wrong
        broken = mistake(invoke(url, *asked, SPARSEFINDER_API_KEY="wrong\nkey"))
        assert "wrong" not in wrong + broken
        other = invoke(url, *asked, "--key-env", "MY_KEY", MY_KEY="right-key")
        assert other.exit_code == 0, other.output
        assert "right-key" not in other.output
        assert "MY_KEY" in mistake(invoke(url, *asked, "--key-env", "MY_KEY", SPARSEFINDER_API_KEY="right-key"))
    assert "right-key" not in repr(Service("http://127.0.0.1:1", "right-key"))


def test_a_service_that_audits_nothing(tmp_path: Path, text: Path) -> None:
    with on_a_socket(settings(tmp_path, audit_rate=0.0)) as url:
        assert "SPARSEFINDER_AUDIT_RATE=1" in mistake(invoke(url, "--text", text))
    with on_a_socket(settings(tmp_path, audit_rate=1e-12)) as url:
        line = mistake(invoke(url, "--text", text, "--requests", 2))
        assert "none of 2 was audited" in line
        assert "--requests" in line


def test_where_nothing_or_something_else_answers(text: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = mistake(invoke(f"http://127.0.0.1:{port}", "--text", text))
    assert "no service answers" in line
    assert "sparsefinder-serve" in line
    for status, body in ((200, b"<html>"), (200, b"[]"), (200, b"{}"), (200, b'{"live": 3}'), (404, b"no"), (500, b"")):
        with stub(lambda _, status=status, body=body: (status, {}, body)) as url:  # type: ignore[misc]
            mistake(invoke(url, "--text", text))


def test_a_redirect_takes_no_key_along(text: Path) -> None:
    seen = []

    def elsewhere(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        seen.append(request.headers["authorization"])
        return 200, {}, b"{}"

    with stub(elsewhere) as other, stub(lambda _: (302, {"location": other}, b"")) as url:
        assert "answered 302" in mistake(invoke(url, "--text", text, SPARSEFINDER_API_KEY="key"))
    assert seen == []


def test_a_busy_service_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(audit_client.time, "sleep", waited.append)
    answers = [(429, {"retry-after": "3"}, b"{}"), (503, {"retry-after": "900"}, b"{}"), (200, {}, b'{"a": 1}')]
    with stub(lambda _: answers.pop(0)) as url:
        assert Service(url).call("/v1/sparsity") == {"a": 1}
    assert waited == [3.0, audit_client.LONGEST_WAIT]


def test_what_a_service_refuses_is_said_in_its_own_words() -> None:
    body = json.dumps({"error": {"message": "expected something else"}}).encode()
    words = "answered 422: expected something else"
    with stub(lambda _: (422, {}, body)) as url, pytest.raises(ConfigError, match=words):
        Service(url).call("/v1/sparsity")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--attention", "dense"], "only a plan is audited"),
        (["--url", "ftp://127.0.0.1"], "expected http://host:port"),
        (["--url", "file:///etc/passwd"], "expected http://host:port"),
        (["--url", "127.0.0.1:8000"], "expected http://host:port"),
    ],
)
def test_options_that_cannot_be_meant(arguments: list[str], words: str) -> None:
    assert words in mistake(invoke("http://127.0.0.1:1", *arguments))


def test_a_text_that_cannot_be_read(tmp_path: Path) -> None:
    with on_a_socket(settings(tmp_path)) as url:
        assert "missing.txt" in mistake(invoke(url, "--text", tmp_path / "missing.txt"))
    assert invoke("http://127.0.0.1:1", "--min-recall", 1.5).exit_code == 2
    assert invoke("http://127.0.0.1:1", "--requests", 0).exit_code == 2


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Service, "call", interrupted)
    result = invoke("http://127.0.0.1:1", "--text", text)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.output


def test_pieces_are_whole_words_spread_over_the_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"word{n:04}" for n in range(1000)))
    pieces = audit_run.pieces_of([path], 5, 90)
    assert len(pieces) == 5
    assert all(90 <= len(piece) < 100 for piece in pieces)
    assert all(word in path.read_text().split() for piece in pieces for word in piece.split())
    starts = [int(piece[4:8]) for piece in pieces]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert starts[-1] >= 700  # not only the beginning
    assert len(audit_run.pieces_of([path], 10**6, 90)) == 90
    assert audit_run.pieces_of([path], 3, 10**6) == [path.read_text()]


def test_without_a_file_the_held_out_text_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text that the predictors were trained on, and enough of it."""

    def texts(split: str, characters: int) -> list[str]:
        assert split == "heldout"
        return ["words of a docstring"] * (characters // 20)

    monkeypatch.setattr(corpus, "default_texts", texts)
    assert len(audit_run.pieces_of([], 20, 400)) == 20
