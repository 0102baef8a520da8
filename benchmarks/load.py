"""64 clients against this service and against the same model behind a plain FastAPI + sentence-transformers server.

    make load                                 # the quick form, about two minutes
    python -m benchmarks.load [--quick] [--rounds 5] [--seconds 15] [--json docs/figures/load.json]

All servers stand ready on the loopback address of one machine and are asked one after the other, in rounds, every
second round in the reverse order, so that noise is visible and drift meets all alike. Each gets the same sequence of
single texts: pieces of the held-out default text, their lengths log-uniform up to 512 tokens with the special ones. A
client sends its next request when the last one is answered; 429 is tried again after Retry-After, everything else but
200 is a failure. Counted is what is answered in the window after a warm-up. Our service runs with its own defaults.
The embeddings of mode `original` must equal the rival's to 1e-4: on texts of all lengths before the load, and on one
request in twenty under it.
"""

import argparse
import contextlib
import http.client
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.load_clients import KEPT, Outcome, Text, ask, furthest, run_load, texts_of
from benchmarks.load_page import CLOSE, failed, measured, summary_table, summed_up, verdicts
from benchmarks.local_server import HOST, Server, cpu_seconds, running, wait_ready
from benchmarks.paired import hardware
from sparsefinder.teacher import load_teacher
from training.corpus import default_texts
from training.tasks.runs import write_json
from training.versions import versions

CLIENTS, SEQUENCE, CHARACTERS = 64, 2000, 400_000
COMPARED = 24  # texts of all lengths, before the load
OURS = (sys.executable, "-m", "app.cli")
RIVAL = (sys.executable, "-m", "benchmarks.baseline_server")
Kept = dict[str, list[Outcome]]


@dataclass(frozen=True)
class Way:
    """What is asked, and of which server."""

    name: str
    server: str
    fields: Mapping[str, Any]


def ways() -> list[Way]:
    """Ours in four modes; the rival as it is first written, with a lock, and with one core for each request."""
    ours = [Way(mode, "ours", {"attention": mode}) for mode in ("original", "dense", "sparse", "auto")]
    return [ours[0], *(Way(name, name, {}) for name in servers() if name != "ours"), *ours[1:]]


def servers() -> dict[str, Sequence[str]]:
    """Commands of the servers, by name."""
    cores = os.cpu_count() or 1
    rivals: dict[str, Sequence[str]] = {"baseline": RIVAL, "baseline, lock": (*RIVAL, "--at-once", "1")}
    if cores > 1:
        rivals["baseline, a core each"] = (*RIVAL, "--at-once", str(cores))
    return {"ours": OURS, **rivals}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if find_spec("sentence_transformers") is None:
        raise SystemExit(
            "load: sentence-transformers is missing: pip install -c constraints.txt '.[cpu,teacher,bench]'"
        )
    started = time.perf_counter()
    with _all_servers() as up:
        texts = texts_of(
            load_teacher("minilm").tokenizer, "\n".join(default_texts("heldout", CHARACTERS)), SEQUENCE, options.seed
        )
        for server in up.values():
            wait_ready(server)
        about = _about(options, texts, up["ours"])
        for name, value in about.items():
            print(f"{name}: {value}")
        equal = [_compare(up, texts)]
        rounds, kept = _rounds(options, up, texts)
    baselines = [way.name for way in ways() if way.server != "ours"]
    equal += [furthest(kept["original"], kept[name]) for name in baselines]
    result: dict[str, Any] = {"about": about | {"minutes": round((time.perf_counter() - started) / 60, 1)}}
    result |= {"ways": summed_up(rounds), "compared": sum(count for count, _ in equal)}
    result["furthest"] = max((difference for count, difference in equal if count), default=math.nan)
    print("\n" + summary_table(result) + "\n")
    print("\n".join(verdicts(result)))
    if options.json:
        write_json(options.json, result)
    return _exit_code(result)


def _exit_code(result: Mapping[str, Any]) -> int:
    failures = {name: way["failures"] for name, way in result["ways"].items() if way["failures"]}
    if failures:
        print(f"load: expected no failure, got {failures}", file=sys.stderr)
    close = result["furthest"] <= CLOSE
    if not close:
        print(f"load: expected embeddings equal to {CLOSE}, got {result['furthest']:.2e}", file=sys.stderr)
    return 0 if close and not failures else 1


def _rounds(
    options: argparse.Namespace, up: Mapping[str, Server], texts: Sequence[Text]
) -> tuple[dict[str, list[dict[str, Any]]], Kept]:
    found: dict[str, list[dict[str, Any]]] = {way.name: [] for way in ways()}
    kept: Kept = {way.name: [] for way in ways()}
    for turn in range(options.rounds):
        for way in ways()[:: -1 if turn % 2 else 1]:
            row, outcomes = _measure(way, up[way.server], texts, options)
            found[way.name].append(row)
            kept[way.name] += [outcome for outcome in outcomes if outcome.vector is not None]
            print(
                f"round {turn + 1} {way.name:22} {row['tokens_per_second']:7.0f} tokens/s p99 {row['p99_ms']:6.0f} ms",
                flush=True,
            )
    return found, kept


def _measure(
    way: Way, server: Server, texts: Sequence[Text], options: argparse.Namespace
) -> tuple[dict[str, Any], list[Outcome]]:
    """One way in one round, and all its outcomes."""
    bodies = _bodies(way, texts)
    begin, spent, own = time.perf_counter(), cpu_seconds(server.process.pid), time.process_time()
    whole = options.warm + options.seconds
    outcomes = run_load(server.port, bodies, [text.tokens for text in texts], clients=options.clients, seconds=whole)
    took = time.perf_counter() - begin
    counted = [one for one in outcomes if begin + options.warm < one.ended <= begin + whole]
    row = measured(counted, options.seconds) | failed(outcomes)
    row["server_cores"] = round((cpu_seconds(server.process.pid) - spent) / took, 2)
    row["clients_cores"] = round((time.process_time() - own) / took, 2)
    return row, outcomes


def _compare(up: Mapping[str, Server], texts: Sequence[Text]) -> tuple[int, float]:
    """Texts of all lengths, one by one, from ours in mode `original` and from the plain rival."""
    ordered = sorted(texts, key=lambda text: text.tokens)
    chosen = [ordered[place * (len(ordered) - 1) // (COMPARED - 1)] for place in range(COMPARED)]
    asked = {way.name: way for way in ways()}
    answers = [_one_by_one(asked[name], up[asked[name].server], chosen) for name in ("original", "baseline")]
    return furthest(*answers)


def _one_by_one(way: Way, server: Server, texts: Sequence[Text]) -> list[Outcome]:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    bodies = _bodies(way, texts)
    # Indices of which every vector is kept.
    return [
        ask(connection, body, place * KEPT, text.tokens)
        for place, (body, text) in enumerate(zip(bodies, texts, strict=True))
    ]


def _bodies(way: Way, texts: Sequence[Text]) -> list[bytes]:
    return [json.dumps({"input": text.text} | dict(way.fields)).encode() for text in texts]


@contextlib.contextmanager
def _all_servers() -> Iterator[dict[str, Server]]:
    with tempfile.TemporaryDirectory(prefix="sparsefinder-load-") as folder, contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(running(command, Path(folder) / f"{place}.log"))
            for place, (name, command) in enumerate(servers().items())
        }


def _about(options: argparse.Namespace, texts: Sequence[Text], ours: Server) -> dict[str, Any]:
    connection = http.client.HTTPConnection(HOST, ours.port, timeout=60)
    connection.request("GET", "/info")
    info = json.loads(connection.getresponse().read())
    lengths = sorted(text.tokens for text in texts)
    return {
        "command": shlex.join(["python", "-m", "benchmarks.load", *sys.argv[1:]]),
        "artifact": f"{info['artifact']['artifact']} {info['artifact']['version']}",
        "clients": options.clients,
        "texts": f"{len(texts)}, log-uniform, {lengths[0]} to {lengths[-1]} tokens,"
        f" median {lengths[len(lengths) // 2]}, mean {sum(lengths) / len(lengths):.0f}",
        "rounds": f"{options.rounds} of {options.seconds:g} s after {options.warm:g} s",
        "max_batch_tokens": info["settings"]["max_batch_tokens"],
        "audit_rate": info["settings"]["audit_rate"],
        "hardware": hardware(),
        "versions": versions("torch", "transformers", "sentence-transformers", "fastapi", "uvicorn", "numba"),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of the window that counts")
    parser.add_argument("--warm", type=float, default=3.0, help="seconds of load before it")
    parser.add_argument("--quick", action="store_true", help="two rounds of six seconds: two minutes in all")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.seconds, options.warm = 2, 6.0, 1.5
    return options


if __name__ == "__main__":
    sys.exit(main())
