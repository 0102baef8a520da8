"""What sparse attention costs a masked language model: perplexity at masks against the density that is computed.

    python -m benchmarks.fill_mask [--quick] [--text FILE] [--json FILE] [--picture FILE] [--page FILE]

The shipped fill-mask head on the entmax MiniLM, whose attention is replaced in all layers (the second experiment of
Treviso et al., 2022). Every row is asked at the same masks; density is that of the plans that ran (computed pairs /
legal pairs). Patterns are computed pair by pair, the plans of tiles as they are. Settings and centroids come from text
that nothing is measured on.
"""

import argparse
import math
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.fill_mask_page import draw_curves, make_page
from benchmarks.fill_mask_rows import GRID, Row, allotted_rows, family_rows, oracle_rows
from benchmarks.pages import deliver
from sparsefinder.hf import LayerCall, Mode
from sparsefinder.mlm_head import MlmHead, load_mlm_head
from sparsefinder.plan import computed_pairs
from sparsefinder.shipped import default_artifact
from training.calibrate import held_points
from training.config import ExtractConfig
from training.corpus import chunk_tokens, default_texts, read_texts
from training.fit import calibration_items, positional_of
from training.mlm_head import answers, held_draws
from training.pipeline import Opened, spread
from training.points import cuttable
from training.progress_bar import progress
from training.sweep import Measured, open_sweep
from training.sweep_files import write_json
from training.sweep_workers import read_works
from training.versions import versions

BATCH = 4
CHUNKS, QUICK_CHUNKS = 24, 6


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options, began = _options(arguments), time.perf_counter()
    source = ExtractConfig(
        artifact=str(default_artifact()), instances=GRID.train_instances, heldout_instances=GRID.instances
    )
    with progress() as on_progress:
        ready = open_sweep(GRID, source, options.out, on_progress)
        rows = list(_rows(ready, options.quick))
    head = load_mlm_head(default_artifact("minilm-mlm-head"), ready.opened.teacher, ready.opened.artifact)
    texts = _texts(ready, options)
    result: dict[str, Any] = {"about": _about(options, ready, texts), "rows": []}
    for name, chunks in texts.items():
        print(f"\n{name}: {len(chunks)} texts of {GRID.tokens} tokens")
        print(f"{'':30} {'density':>8} {'perplexity':>11} {'to dense':>9} {'accuracy':>9}")
        dense = math.nan
        for row in [Row("dense", "dense", {}, None), *rows]:
            found = measure(ready.opened, head, row, chunks)
            dense = found["perplexity"] if row.plan_for is None else dense
            found |= {"text": name, "to_dense": found["perplexity"] / dense}
            result["rows"].append(found)
            numbers = f"{found['perplexity']:11.3f} {found['to_dense']:9.3f} {found['accuracy']:9.3f}"
            print(f"{row.line:30} {found['density']:8.3f} {numbers}", flush=True)
    result["about"]["minutes"] = round((time.perf_counter() - began) / 60, 1)
    if options.json:
        write_json(options.json, result)
    if options.picture:
        draw_curves(result, options.picture)
    deliver(make_page(result), options.page)
    return result


def _rows(ready: Measured, quick: bool) -> Iterator[Row]:
    """The served predictor with budgets allotted to its heads, every family of the sweep, and the oracle."""
    works, artifact, heldout = read_works(ready.shards), ready.setup.artifact, ready.shards / "heldout"
    items, positional = calibration_items(len(works[0].lengths)), positional_of(artifact.card)
    served = [cuttable(layer) for layer in artifact.layers]
    points = held_points(heldout, served, positional, artifact.card.tile_size, items)
    step = 2 if quick else 1
    yield from list(allotted_rows(artifact, points))[::step]
    yield from list(family_rows(ready.setup, works))[::step]
    yield from oracle_rows()


@torch.no_grad()
def measure(opened: Opened, head: MlmHead, row: Row, chunks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Perplexity and accuracy at the masks of all texts, and the mean density over layers, heads and texts."""
    computed, legal = 0.0, 0.0

    def observe(call: LayerCall) -> None:
        nonlocal computed, legal
        pairs = call.q.shape[1] * sum(call.legal.count(b) for b in range(call.q.shape[0]))
        legal += pairs
        computed += pairs if call.plan is None else float(computed_pairs(call.plan).sum())

    mode: Mode = "dense" if row.plan_for is None else "sparse"
    with opened.attached.using(mode, plan_for=row.plan_for, observe=observe):
        drawn = held_draws(opened.teacher, chunks, BATCH)
    losses, right = answers(head, drawn)
    return {
        "line": row.line,
        "role": row.role,
        "setting": row.setting,
        "density": computed / legal,
        "perplexity": math.exp(float(losses.mean())),
        "accuracy": float(right.mean()),
    }


def _texts(ready: Measured, options: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Default held-out text that no setting was chosen on, and the user's files."""
    known = {tuple(chunk) for chunk in ready.chunks}
    found = {"default held-out": default_texts("heldout")} | {path.name: read_texts([path]) for path in options.text}
    count = QUICK_CHUNKS if options.quick else CHUNKS
    texts = {}
    for name, pieces in found.items():
        chunks = chunk_tokens(ready.opened.teacher, pieces, GRID.tokens)
        unseen = [chunk for chunk in chunks if tuple(chunk) not in known and len(chunk) == GRID.tokens]
        texts[name] = spread(unseen, count, GRID.seed)
    return texts


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CHUNKS} texts, half of the settings")
    parser.add_argument("--text", type=Path, action="append", default=[], help="UTF-8 file beside the default text")
    parser.add_argument("--out", type=Path, default=Path("runs/fill-mask"), help="folder of the extracted graphs")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--picture", type=Path, help="draw the curves into this file")
    parser.add_argument("--page", type=Path, help="write the tables to this file")
    return parser.parse_args(arguments)


def _about(options: argparse.Namespace, ready: Measured, texts: dict[str, list[list[int]]]) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "-m", "benchmarks.fill_mask", *sys.argv[1:]]),
        "artifact": ready.setup.artifact.card.version,
        "text": {name: len(chunks) for name, chunks in texts.items()},
        "tokens": GRID.tokens,
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": versions("torch", "transformers", "numba"),
    }


if __name__ == "__main__":
    main()
