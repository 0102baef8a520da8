"""The demo leaves no process behind, whatever happens, and shows what it promises."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_bert import make_artifact, make_teacher

from app import demo

ROOT = Path(__file__).resolve().parents[2]
EVENTS = """
import os, signal, sys, time
{before}
with open({pid!r}, "w") as file:
    file.write(str(os.getpid()))
print('{{"event": "listening", "port": 1}}', flush=True)
print('{{"event": "ready"}}', flush=True)
time.sleep(60)
"""


def stand_in(folder: Path, before: str = "") -> tuple[list[str], Path]:
    """A program that looks like the service from outside, and the file that will hold its process id."""
    pid = folder / "pid"
    return [sys.executable, "-c", EVENTS.format(before=before, pid=str(pid))], pid


def gone(pid: Path) -> bool:
    try:
        os.kill(int(pid.read_text()), 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError, SystemExit])
def test_the_service_ends_with_the_demo(tmp_path: Path, failure: type[BaseException]) -> None:
    command, pid = stand_in(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)

    def fail() -> None:
        with demo.service(command) as address:
            assert address == "http://127.0.0.1:1"
            assert not gone(pid)
            raise failure

    with pytest.raises(failure):
        fail()
    assert gone(pid)
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_service_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "STOP_SECONDS", 0.2)
    command, pid = stand_in(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    with demo.service(command):
        pass
    assert gone(pid)


def test_a_service_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(demo.DemoError, match=r"code 3.*\n.*no such thing"),
        demo.service([sys.executable, "-c", "import sys; print('no such thing'); sys.exit(3)"]),
    ):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_demo(tmp_path: Path, number: signal.Signals) -> None:
    command, pid = stand_in(tmp_path)
    # A shell's background job ignores SIGINT, and so would what it starts.
    heard = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"import signal, time\nfrom app import demo\n{heard}\nwith demo.service({command!r}): time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    while not pid.exists() or not pid.read_text():
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(number)
    assert process.wait(20) != 0
    assert gone(pid)


@pytest.mark.slow
def test_the_demo_on_a_small_model(tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path / "teacher")
    artifact = make_artifact(tmp_path / "few", teacher, keys=20)
    names = {"SPARSEFINDER_TEACHER": str(teacher), "SPARSEFINDER_ARTIFACT": str(artifact), "SPARSEFINDER_API_KEYS": "k"}
    names |= {"SPARSEFINDER_CROSSOVER": "default"}  # measuring takes longer than the demo itself
    command = [sys.executable, "-m", "app.demo"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | names, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in ("sparse", "dense", "original", "recall, live", "make serve", "make train", "/metrics", "few"):
        assert expected in done.stdout
