"""kill −9, at every step of writing an artifact, in the middle of a retrain and of a reload: what lies there afterwards
is the old artifact or the new one, whole, and the next run is not disturbed by what was left behind."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
from cases_artifact import artifact, listing
from tiny_bert import make_artifact, make_teacher

from sparsefinder.artifact import CARD, load, save
from sparsefinder.atomic_folder import write_folder
from sparsefinder.errors import ArtifactError

REPOSITORY = Path(__file__).resolve().parents[1]
# Both programs import once and fork a process for every command, since imports are most of what small ones take. The
# first writes a folder and kills itself before its so-many-th line of writing; nothing is flushed to disk, as only the
# process dies here and not the machine.
WRITER = """
import json, os, shutil, signal, sys
from pathlib import Path
from sparsefinder import atomic_folder
os.fsync = lambda handle: None
for command in sys.stdin:
    left, path, source, exchange = json.loads(command)
    files = {file.name: file.read_bytes() for file in Path(source).iterdir()}
    child = os.fork()
    if child == 0:
        def step(frame, event, argument):
            global left
            if frame.f_code.co_filename not in (atomic_folder.__file__, shutil.__file__):
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return step
        if not exchange:
            atomic_folder._exchange = lambda a, b: False
        sys.settrace(step)
        atomic_folder.write_folder(Path(path), files, "card.json")
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
TRAINER = """
import json, os, sys
import training.calibrate, training.extract, training.fit, training.pipeline
from training.cli import app
for command in sys.stdin:
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)
        try:
            app([str(one) for one in json.loads(command)], standalone_mode=False)
        except SystemExit as asked:
            os._exit(asked.code or 0)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """One of the two programs: takes a command, forks, says the number of the process and its exit code."""

    def __init__(self, code: str, log: Path) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=REPOSITORY, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"),
        )  # fmt: skip

    def run(self, *command: Any, kill_after: float | None = None) -> int:
        """The exit code of one command; it is killed after so many seconds, if it still runs."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command, default=str) + "\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):  # it had ended
                os.kill(child, signal.SIGKILL)
        return int(self.process.stdout.readline())

    def timed(self, *command: Any) -> float:
        """Seconds of one command that must come through."""
        started = time.perf_counter()
        assert self.run(*command) == 0, self.log.read_text()[-2000:]
        return time.perf_counter() - started

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(20) == 0


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Forks]:
    with contextlib.closing(Forks(WRITER, tmp_path / "writer.log")) as forks:
        yield forks


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Forks]:
    with contextlib.closing(Forks(TRAINER, tmp_path / "trainer.log")) as forks:
        yield forks


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("exchange", [True, False])
def test_before_every_line_of_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Forks, exchange: bool
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    path, other = tmp_path / "a", tmp_path / "other"
    old, new = save(path, artifact()).version, save(other, artifact(alpha=1.4)).version
    before, seen = contents(path), []
    while writer.run(len(seen), path, other, exchange) == -signal.SIGKILL:
        seen.append(load(path).card.version)
        write_folder(path, before, CARD)  # the next run, beside all that was left behind
        assert contents(path) == before
    assert len(seen) > 50
    assert seen == sorted(seen, key=[old, new].index)  # the change comes once, at one line
    assert set(seen) == {old, new}
    assert load(path).card.version == new
    assert not path.with_name(".a.previous").exists()


def test_before_every_line_of_the_first_writing(tmp_path: Path, writer: Forks) -> None:
    save(tmp_path / "other", artifact())
    files, path, lines = contents(tmp_path / "other"), tmp_path / "new" / "a", 0
    while writer.run(lines, path, tmp_path / "other", True) == -signal.SIGKILL:
        lines += 1
        if path.exists():
            assert contents(path) == files
            shutil.rmtree(path)
        else:
            with pytest.raises(ArtifactError, match="expected an artifact folder"):
                load(path)
    assert lines > 30
    assert contents(path) == files


class Moments:
    """When to kill: at random within what a command takes, which the machine's other work may change at any time."""

    def __init__(self, seconds: float, seed: int) -> None:
        self.scale, self.drawn = seconds, 0
        self._random = random.Random(seed)
        self._started = time.monotonic()

    def go_on(self, seconds: float, killed: int) -> bool:
        """For so many seconds, and until at least three were killed."""
        return killed < 3 or time.monotonic() < self._started + seconds

    def draw(self) -> float:
        self.drawn += 1
        return self._random.uniform(0, self.scale)

    def was_killed(self, code: int) -> bool:
        assert code in (0, -signal.SIGKILL)
        self.scale *= 1.1 if code else 0.7
        return code != 0


SMALL = ["--tokens", "24", "--instances", "6", "--heldout", "4"]
QUICK = ["--steps", "4", "--tile-size", "8", "--tiles", "2", "--window", "3"]


@pytest.fixture
def base(tmp_path: Path) -> list[Any]:
    """`run` on a random two-layer BERT and a text of its letters."""
    rng = random.Random(0)
    words = ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(2, 6))) for _ in range(80)]
    text = tmp_path / "text.txt"
    text.write_text("\n".join(" ".join(rng.choice(words) for _ in range(8)) for _ in range(120)))
    return ["run", "--teacher", tiny.save_teacher(tmp_path / "teacher"), "--text", text, *SMALL, *QUICK]


@pytest.mark.slow
def test_in_the_middle_of_a_retrain(tmp_path: Path, trainer: Forks, base: list[Any]) -> None:
    """Over an artifact that is there: it stays whole, old or new, whenever the retraining process is killed."""
    assert trainer.run(*base, "--out", tmp_path / "run") == 0, trainer.log.read_text()
    path, shards = tmp_path / "run" / "artifact", tmp_path / "run" / "shards"
    fit = ["fit", "--data", shards, *QUICK, "--objective", "hinge", "--rank", 2]
    seconds, known = 0.0, set()
    for seed in (1, 2):
        seconds = trainer.timed(*fit, "--out", tmp_path / f"whole-{seed}", "--seed", seed)
        known.add(load(tmp_path / f"whole-{seed}").card.hash)
    assert trainer.run(*fit, "--out", path, "--seed", 1) == 0
    moments, killed = Moments(seconds, seed=0), 0
    while moments.go_on(20, killed):
        seed = 1 + moments.drawn % 2
        code = trainer.run(*fit, "--out", path, "--seed", seed, kill_after=moments.draw())
        killed += moments.was_killed(code)
        assert load(path).card.hash in known
    assert trainer.run(*fit, "--out", path, "--seed", 2) == 0
    assert contents(path).keys() == contents(tmp_path / "whole-2").keys()
    assert load(path).card.hash == load(tmp_path / "whole-2").card.hash


@pytest.mark.slow
def test_a_first_run_that_is_killed_again_and_again(tmp_path: Path, trainer: Forks, base: list[Any]) -> None:
    """The same command goes on from what is whole, and ends with what an undisturbed run writes."""
    seconds = trainer.timed(*base, "--out", tmp_path / "undisturbed")
    whole, path = load(tmp_path / "undisturbed" / "artifact").card.hash, tmp_path / "run" / "artifact"
    moments, killed = Moments(seconds, seed=1), 0
    while moments.go_on(12, killed):
        code = trainer.run(*base, "--out", tmp_path / "run", kill_after=moments.draw())
        killed += moments.was_killed(code)
        if path.exists():
            assert load(path).card.hash == whole
            shutil.rmtree(tmp_path / "run")
    assert trainer.run(*base, "--out", tmp_path / "run") == 0, trainer.log.read_text()
    assert load(path).card.hash == whole
    assert listing(tmp_path / "run") == listing(tmp_path / "undisturbed")


@pytest.mark.slow
def test_in_the_middle_of_a_reload(tmp_path: Path) -> None:
    """The service is killed while it reads a folder that is rewritten all the time; a new one starts from it."""
    teacher = make_teacher(tmp_path / "teacher")
    two = [load(make_artifact(tmp_path / name, teacher, keys)) for name, keys in (("few", 20), ("many", 200))]
    path = tmp_path / "served"
    known, stop = {save(path, one).version for one in two}, threading.Event()

    def rewrite() -> None:
        turn = 0
        while not stop.wait(0.01):
            turn += 1
            save(path, two[turn % 2])

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for moment in (0.05, 0.4):
            with service(teacher, path) as (process, client):
                asking = threading.Thread(target=reload_forever, args=(client,))
                asking.start()
                time.sleep(moment)
                process.kill()
                asking.join(20)
                assert not asking.is_alive()
            assert load(path).card.version in known
    finally:
        stop.set()
        writer.join()
    with service(teacher, path) as (process, client):
        version = load(path).card.version
        assert client.post("/v1/embeddings", json={"input": "w1"}).headers["x-sparsefinder-artifact"] == version
        process.terminate()
        assert process.wait(30) == 0
    assert "served" in listing(tmp_path)


def reload_forever(client: httpx.Client) -> None:
    with contextlib.suppress(httpx.TransportError):  # it was killed
        while True:
            assert client.post("/admin/reload", json={}).status_code in (200, 503)


@contextlib.contextmanager
def service(teacher: Path, artifact_folder: Path) -> Iterator[tuple["subprocess.Popen[str]", httpx.Client]]:
    """The real service with its real loader, ready."""
    command = [sys.executable, "-m", "app.cli", "--teacher", str(teacher), "--artifact", str(artifact_folder)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--crossover", "default"], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    try:
        assert process.stdout is not None
        events = (json.loads(line) for line in process.stdout)
        port = next(event["port"] for event in events if event["event"] == "listening")
        assert any(event["event"] == "ready" for event in events)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()
