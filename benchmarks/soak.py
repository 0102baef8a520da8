"""Ten minutes of everything at once: random lengths, reloads, clients that leave, bad bodies, and SIGTERM at the end.

    make soak
    python -m benchmarks.soak [--seconds 600] [--clients 12] [--json docs/figures/soak.json]

The service runs with the shipped artifact and its own settings. Every 20 seconds (5 in runs under two minutes) comes a
reload: to a copy of the artifact under another version, to the artifact, to a broken one. It must hold that

- every good request gets one whole answer: finite vectors from an artifact that served then, or 429;
- every bad one gets the status that says what is wrong, and nothing waits longer than its deadline;
- memory levels off after the warm-up (ten-minute runs), and threads stay bounded;
- after SIGTERM what runs is answered, what comes is refused, and the exit code is 0.
"""

import argparse
import json
import math
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.local_server import Server, resident_mib, running, thread_count, wait_ready
from benchmarks.paired import hardware
from benchmarks.soak_checks import CYCLE, Interval, Sample, Soaked, checks, summary
from benchmarks.soak_clients import Drawn, Reply, big_body, connected, exchange, keep_acting
from sparsefinder.artifact import PREDICTOR_FILE, load, save
from sparsefinder.shipped import default_artifact
from training.tasks.runs import write_json
from training.versions import versions

SECONDS, SHORT = 600.0, 120.0
RELOAD_SECONDS, RELOAD_SECONDS_SHORT = CYCLE, 5.0
LOOK_SECONDS = 0.01
ORDER = ("second", "first", "broken")
# One token each for the shipped teacher, so that lengths in words are lengths in tokens.
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "was",
    "he",
    "it",
    "with",
    "as",
    "for",
    "on",
    "that",
    "by",
    "this",
    "had",
    "not",
)
LAST, LAST_ITEMS = 4, 2  # requests that run when SIGTERM comes, and their texts
HEAD_START, GO_ON = 0.5, 1.0  # seconds from those to SIGTERM, and from there until the clients come no more


@dataclass
class _Running:
    """What grows while the service runs."""

    replies: list[Reply] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    reloads: list[Reply] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="sparsefinder-soak-") as folder:
        root = Path(folder) / "artifacts"
        make_artifacts(root)
        command = [sys.executable, "-m", "app.cli", "--artifact", str(root / "first"), "--log-level", "warning"]
        with running([*command, "--crossover", "default"], Path(folder) / "service.log") as server:
            wait_ready(server)
            soaked = soak(server, root, options)
    found = checks(soaked)
    about = {
        "command": shlex.join(["python", "-m", "benchmarks.soak", *sys.argv[1:]]),
        "seconds": options.seconds,
        "clients": options.clients,
        "hardware": hardware(),
        "versions": versions("torch", "transformers", "numba", "fastapi", "uvicorn"),
    }
    result = {"about": about, **summary(soaked)}
    result["checks"] = [{"what": check.what, "holds": check.holds, "found": check.found} for check in found]
    for name, value in result.items():
        if name not in ("checks", "memory_each_second", "memory_least_of_each_second"):
            print(f"{name}: {value}")
    for check in found:
        print(f"{'ok  ' if check.holds else 'FAIL'} {check.what}: {check.found}")
    if options.json:
        write_json(options.json, result)
    return 0 if all(check.holds for check in found) else 1


def make_artifacts(root: Path) -> None:
    """The shipped artifact, the same one under another version, and one with a flipped byte."""
    root.mkdir()
    shutil.copytree(default_artifact(), root / "first")
    shipped = load(root / "first")
    save(root / "second", replace(shipped, card=replace(shipped.card, objective=f"{shipped.card.objective}, a copy")))
    shutil.copytree(root / "first", root / "broken")
    tensors = bytearray((root / "broken" / PREDICTOR_FILE).read_bytes())
    tensors[-1] ^= 1
    (root / "broken" / PREDICTOR_FILE).write_bytes(bytes(tensors))


def soak(server: Server, root: Path, options: argparse.Namespace) -> Soaked:
    """Run it all; the service has ended when this returns."""
    state, begin = _Running(), time.perf_counter()
    state.intervals.append(Interval(_name(root, "first"), begin, None))
    threads = [
        threading.Thread(target=keep_acting, args=(server.port, seed, WORDS, state.ended.is_set, state.replies))
        for seed in range(options.clients)
    ]
    threads.append(threading.Thread(target=_watch, args=(server.process.pid, state)))
    for thread in threads:
        thread.start()
    try:
        _reload_until(begin + options.seconds, server, root, state, options)
        stopped, last, code, took = _stop(server, state)
    finally:
        state.ended.set()
        for thread in threads:
            thread.join()
    return Soaked(
        begin=begin,
        warm=begin + min(120.0, options.seconds / 3),
        stopped=stopped,
        replies=tuple(state.replies),
        last=tuple(last),
        reloads=tuple(state.reloads),
        intervals=tuple(state.intervals),
        samples=tuple(state.samples),
        exit_code=code,
        stop_seconds=took,
        exceptions=sum('"event": "exception"' in line for line in server.log.read_text(errors="replace").splitlines()),
        long=options.seconds >= SECONDS,
    )


def _name(root: Path, folder: str) -> str:
    """Folder and version, as answers name them."""
    return f"{folder} {load(root / folder).card.version}"


def _watch(pid: int, state: _Running) -> None:
    """A sample each second; between them memory is looked at often, as it is least for a moment between two batches."""
    due, least = time.perf_counter() + 1.0, math.inf
    while not state.ended.wait(LOOK_SECONDS):
        try:
            mib = resident_mib(pid)
            if not mib:
                return  # nothing is left of one that has ended and is not waited for yet
            least, now = min(least, mib), time.perf_counter()
            if now >= due:
                state.samples.append(Sample(now, mib, thread_count(pid), least))
                due, least = now + 1.0, math.inf
        except OSError:
            return  # it has ended


def _reload_until(end: float, server: Server, root: Path, state: _Running, options: argparse.Namespace) -> None:
    """A reload at every turn, and 50 MB beside each third one, so that the reload is what memory has to bear then."""
    every = RELOAD_SECONDS if options.seconds >= SHORT else RELOAD_SECONDS_SHORT
    names = {folder: _name(root, folder) for folder in ("first", "second")}
    turn = 0
    while (left := end - time.perf_counter()) > 0:
        time.sleep(min(every, left))
        if left < every:
            return
        folder = ORDER[turn % len(ORDER)]
        started = time.perf_counter()
        state.reloads.append(reload(server.port, folder))
        if folder != "broken":
            state.intervals[-1] = replace(state.intervals[-1], end=time.perf_counter())
            state.intervals.append(Interval(names[folder], started, None))
        else:
            state.replies.append(big_body(server.port))
        turn += 1


def reload(port: int, folder: str) -> Reply:
    """Ask for a reload; a broken artifact must give 409, every other one 200."""
    wanted, started = 409 if folder == "broken" else 200, time.perf_counter()
    with connected(port) as connection:
        connection.request(
            "POST", "/admin/reload", json.dumps({"artifact": folder}), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        content = response.read()
    fault = "" if response.status == wanted else f"expected {wanted}, got {response.status}: {content[:200]!r}"
    return Reply(f"reload {folder}", started, started, time.perf_counter(), response.status, "", fault)


def _stop(server: Server, state: _Running) -> tuple[float, list[Reply], int, float]:
    """SIGTERM while long requests run and clients go on; when it was sent, what became of the long ones, exit code."""
    last: list[Reply] = []

    def ask() -> None:
        body = json.dumps({"input": [" ".join(WORDS * 30)] * LAST_ITEMS, "attention": "dense"}).encode()
        with connected(server.port) as connection:
            last.append(exchange(connection, Drawn("last", body, LAST_ITEMS)))

    threads = [threading.Thread(target=ask) for _ in range(LAST)]
    for thread in threads:
        thread.start()
    time.sleep(HEAD_START)
    server.process.send_signal(signal.SIGTERM)
    stopped = time.perf_counter()
    time.sleep(GO_ON)
    state.ended.set()
    code = server.process.wait(60)
    took = time.perf_counter() - stopped
    for thread in threads:
        thread.join()
    return stopped, last, code, took


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
