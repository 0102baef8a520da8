"""What sparse attention costs a causal language model: perplexity of held-out text at equal computed density.

    sparsefinder-train run --teacher smollm2 --out runs/smollm2
    python -m benchmarks.perplexity --data runs/smollm2 [--tokens 1024 2048 4096] [--quick] [--json FILE]

Every row reads the same texts; densities are those of the plans that ran (computed pairs / legal pairs, mean over
layers, heads and texts), beside the density that was aimed at. The predictor was fitted and its budgets were allotted
on other text, at the length of its own run; the oracle, which pools the attention that it is asked to predict, has its
threshold from the first text. A tile's own rows, the window and the first tokens are always read.
"""

import argparse
import json
import math
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.perplexity_rows import PooledMass, Row, positional_rows, predicted
from sparsefinder.artifact import load
from sparsefinder.attaching import attach_artifact
from sparsefinder.hf import Attached, LayerCall
from sparsefinder.plan import computed_pairs
from sparsefinder.teacher import Teacher, load_teacher
from training.calibrate import held_points
from training.corpus import chunk_tokens, default_texts, read_texts
from training.extract import read_manifest
from training.fit import calibration_items, positional_of
from training.pipeline import spread
from training.points import cuttable
from training.progress_bar import progress
from training.versions import versions

AIMS, LENGTHS, TEXTS = (0.05, 0.1, 0.2, 0.3), (1024, 2048, 4096), 4


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _options(arguments)
    artifact = load(options.data / "artifact")
    teacher = load_teacher(artifact.card.teacher)
    attached = attach_artifact(teacher, artifact)
    card, heldout = artifact.card, options.data / "shards" / "heldout"
    positional = positional_of(card)
    items = calibration_items(read_manifest(heldout)["instances"])
    served = [cuttable(layer) for layer in artifact.layers]
    with progress() as on_progress:
        points = held_points(
            heldout, served, positional, card.tile_size, items, None, lambda done, n: on_progress("points", done, n)
        )
    result: dict[str, Any] = {"about": _about(options, card.version), "rows": []}
    for tokens in options.tokens:
        texts = _texts(teacher, options, tokens)
        print(f"\n{tokens} tokens, {len(texts)} texts")
        print(f"{'':26} {'aim':>6} {'density':>8} {'perplexity':>11} {'to dense':>9}")
        oracle = PooledMass(positional, card.tile_size)
        dense = None
        for row in [
            Row("dense", None, None),
            *predicted(artifact.layers, points, positional, card.tile_size, options.aims),
            *(_later(oracle, aim) for aim in options.aims),
            *positional_rows(tokens, card.heads, card.head_dim, card.tile_size, options.aims),
        ]:
            found = _measure(teacher, attached, row, texts, oracle if dense is None else None)
            dense = dense or found["perplexity"]
            found |= {"tokens": tokens, "to_dense": found["perplexity"] / dense}
            result["rows"].append(found)
            aim = "" if row.aim is None else f"{row.aim:.2f}"
            numbers = f"{found['density']:8.3f} {found['perplexity']:11.3f} {found['to_dense']:9.3f}"
            print(f"{row.name:26} {aim:>6} {numbers}", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
        print(f"\nAll figures lie in {options.json}")
    return result


def _later(oracle: PooledMass, aim: float) -> Row:
    """The oracle's row, whose threshold is known once the dense row has been measured."""
    return Row("oracle: pooled attention", aim, lambda call: oracle.plan(call, aim))


@torch.no_grad()
def _measure(
    teacher: Teacher, attached: Attached, row: Row, texts: list[list[int]], oracle: PooledMass | None
) -> dict[str, Any]:
    """Perplexity over all texts; the oracle watches the first one in the dense row."""
    computed, legal = 0.0, 0.0
    losses: list[float] = []

    def observe(call: LayerCall) -> None:
        nonlocal computed, legal
        _, heads, n, _ = call.q.shape
        pairs = heads * n * (n + 1) / 2
        legal += pairs
        computed += pairs if call.plan is None else float(computed_pairs(call.plan).sum())
        if oracle is not None and not losses:
            oracle.see(call)

    for text in texts:
        ids = torch.tensor([text])
        with attached.using("dense" if row.plan_for is None else "sparse", plan_for=row.plan_for, observe=observe):
            logits = teacher.lm(input_ids=ids).logits[0, :-1]
        losses.append(float(torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:])))
    return {
        "row": row.name,
        "aim": row.aim,
        "density": computed / legal,
        "perplexity": math.exp(sum(losses) / len(losses)),
        "of_texts": [math.exp(loss) for loss in losses],
    }


def _texts(teacher: Teacher, options: argparse.Namespace, tokens: int) -> list[list[int]]:
    texts = read_texts([str(path) for path in options.text]) if options.text else default_texts("heldout")
    whole = [chunk for chunk in chunk_tokens(teacher, texts, tokens) if len(chunk) == tokens]
    return spread(whole, options.texts, options.seed + 1)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of a run: its artifact and its shards")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS), help="lengths of the texts")
    parser.add_argument("--aims", type=float, nargs="+", default=list(AIMS), help="computed densities")
    parser.add_argument("--texts", type=int, default=TEXTS, help="texts of each length")
    parser.add_argument("--text", type=Path, action="append", default=[], help="UTF-8 file instead of the default text")
    parser.add_argument("--quick", action="store_true", help="one text of 1024 tokens at two densities")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.texts, options.aims = [1024], 1, [0.1, 0.3]
    return options


def _about(options: argparse.Namespace, artifact: str) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "-m", "benchmarks.perplexity", *sys.argv[1:]]),
        "artifact": artifact,
        "text": ", ".join(path.name for path in options.text) or "held-out default",
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": versions("torch", "transformers", "numba"),
    }


if __name__ == "__main__":
    main()
