"""Sparse attention against dense attention and others, one layer at a time: prediction and plan are paid for.

    python -m benchmarks.attention --data runs/smollm2 runs/smollm2-8192 [--rounds 5] [--quick]
                                   [--json docs/figures/attention.json] [--picture docs/figures/attention_scaling.png]

One process, nothing in parallel: every rival in turn, `--rounds` times, after a round that compiles. Ratios are medians
of the rounds' ratios. Four parts, `--parts`:

    random         random key lists and numbers, 12 heads of 64 dims, plans given, against torch's fused softmax (SDPA)
    real           the runs' own queries, keys and values on held-out text, plans of their predictors cut for an
                   attention mass: SDPA, dense entmax, the `entmax` package (up to --package tokens), FlexAttention over
                   the same plan (first layer; plan and block mask given), BigBird at the same density (blocks of 64,
                   bidirectional, so twice the pairs), mode `auto`; and where the time goes
    bidirectional  a padded batch of four through a layer of ModernBERT-base's shape: random weights, speed only
    scaling        one causal layer of random numbers, 1k to 32k tokens: time, and peaks of memory

Of several runs with the same attention each length is served by the one that was fitted at it, or at the next greater
one. Cuts are chosen for the mean mass of the measured layers on held-out text of the run's own length. Mass at each
length is that of evenly spread rows of one text.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_page import line_of
from benchmarks.attention_random import bidirectional, random_rows
from benchmarks.attention_real import Rivals, calibrated, calls_of, points_of, real_rows
from benchmarks.attention_scaling import scaling_rows
from benchmarks.paired import hardware
from benchmarks.perplexity import attention_name, fitted_at, held_out_texts, open_subject, serving
from sparsefinder.artifact import load
from sparsefinder.threads import limit_threads
from training.progress_bar import progress
from training.tasks.runs import OnProgress, write_json
from training.versions import versions

PARTS = ("random", "real", "bidirectional", "scaling")
LENGTHS, LONG = (1024, 2048, 4096, 8192), (1024, 2048, 4096, 8192, 16384, 32768)
QUICK = {"tokens": [1024, 2048], "long": [1024, 2048, 4096], "layers": [8, 20], "masses": [0.95], "rounds": 2}
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _options(arguments)
    limit_threads(options.threads)
    result: dict[str, Any] = {"about": _about(options)} | {part: [] for part in options.parts}
    for name, value in result["about"].items():
        print(f"{name}: {value}")
    makers: dict[str, Callable[[argparse.Namespace, OnProgress], Iterator[Row]]] = {
        "random": _random, "real": _real, "bidirectional": _bidirectional, "scaling": _scaling,
    }  # fmt: skip
    with progress() as on_progress, torch.inference_mode():
        for part in options.parts:
            print(f"\n{part}", flush=True)
            for row in makers[part](options, on_progress):
                result[part].append(row)
                print(line_of(row), flush=True)
                if options.json:
                    write_json(options.json, result)
    if options.picture:
        from benchmarks.attention_picture import draw  # matplotlib is needed here only

        draw(result.get("scaling", []), options.picture)
    if options.json:
        print(f"\nAll figures lie in {options.json}")
    return result


def _random(options: argparse.Namespace, on_progress: OnProgress) -> Iterator[Row]:
    total = len(options.tokens) * len(options.densities) * len(options.tiles)
    for done, row in enumerate(
        random_rows(options.tokens, options.densities, options.tiles, options.rounds, options.seed), 1
    ):
        on_progress("random lists", done, total)
        yield row


def _bidirectional(options: argparse.Namespace, on_progress: OnProgress) -> Iterator[Row]:
    lengths = options.tokens[1:] or options.tokens
    for done, tokens in enumerate(lengths, 1):
        yield bidirectional(tokens, options.tiles[0], options.rounds, options.seed)
        on_progress("padded batches", done, len(lengths))


def _scaling(options: argparse.Namespace, on_progress: OnProgress) -> Iterator[Row]:
    for done, row in enumerate(scaling_rows(options.long, options.rounds, options.seed), 1):
        on_progress("scaling", done, len(options.long))
        yield row


def _real(options: argparse.Namespace, on_progress: OnProgress) -> Iterator[Row]:
    rivals = Rivals(options.package, options.layers[0], min(options.tokens))
    lengths = {folder: [n for n in options.tokens if folder in serving(options.data, n)] for folder in options.data}
    for folder in filter(lengths.get, options.data):
        subject = open_subject(folder, load(folder / "artifact"))
        name = attention_name(subject.artifact)
        if options.crossover == "measured":
            subject.attached.load_crossover()
        points = points_of(subject, options.layers, lambda done, n, name=name: on_progress(f"points, {name}", done, n))  # type: ignore[misc]
        served = {mass: calibrated(subject, options.layers, points, mass) for mass in options.masses}
        for tokens in lengths[folder]:
            (text,) = held_out_texts(subject.teacher, options.text, tokens, 1, options.seed)
            for done, call in enumerate(calls_of(subject, options.layers, text), 1):
                rows = real_rows(subject, call, served, rivals, options.rounds)
                yield from (row | {"fitted_at": fitted_at(folder)} for row in rows)
                on_progress(f"{name}, {tokens} tokens", done, len(options.layers))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="folders of runs of causal teachers")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS), help="lengths, rising")
    parser.add_argument("--long", type=int, nargs="+", default=list(LONG), help="lengths of the part scaling")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 14, 20, 26])
    parser.add_argument("--masses", type=float, nargs="+", default=[0.95, 0.99], help="attention mass to keep")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.05, 0.1], help="of the random lists")
    parser.add_argument("--tiles", type=int, nargs="+", default=[32, 64], help="rows of a tile of the random lists")
    parser.add_argument("--package", type=int, default=4096, help="most tokens that the entmax package is timed at")
    parser.add_argument(
        "--crossover", choices=("measured", "shipped"), default="measured", help="times that `auto` decides by"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0 = as many as torch chooses")
    parser.add_argument("--text", type=Path, action="append", default=[], help="UTF-8 file instead of the default text")
    parser.add_argument("--quick", action="store_true", help="few lengths, layers and rounds")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--picture", type=Path, help="draw the part scaling into this file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if "real" in options.parts and not options.data:
        parser.error("--parts real: expected --data, got none")
    if options.picture and "scaling" not in options.parts:
        parser.error("--picture: expected --parts scaling, which it draws")
    if options.quick:
        vars(options).update(QUICK)
    return options


def _about(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "-m", "benchmarks.attention", *sys.argv[1:]]),
        "artifacts": ", ".join(f"{folder.name} {load(folder / 'artifact').card.version}" for folder in options.data),
        "text": ", ".join(path.name for path in options.text) or "held-out default",
        "rounds": options.rounds,
        "hardware": hardware(),
        "versions": versions("torch", "transformers", "numba", "entmax"),
    }


if __name__ == "__main__":
    main()
