"""What sparse attention costs a causal language model: perplexity of held-out text at equal computed density.

    sparsefinder-train run --teacher smollm2 --out runs/smollm2
    python -m benchmarks.perplexity --data runs/smollm2 [runs/...] [--tokens 1024 2048 4096] [--quick] [--json FILE]

The first run is compared with patterns of others, further ones (the same model with entmax, say) with their own oracle.
Every row reads the same texts; densities are those of the plans that ran (computed pairs / legal pairs, mean over
layers, heads and texts), beside the density that was aimed at. The predictor was fitted and its budgets were allotted
on other text, at the length of its own run; how much is allotted, the oracle's threshold (it pools the attention that
it is asked to predict) and every pattern's size are chosen by density on the first text. A tile's own rows, the window
and the first tokens are always read. Every table (a model at a length) leaves a JSON file in --runs when it ends; what
is there is not measured again.
"""

import argparse
import functools
import itertools
import math
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.perplexity_rows import (
    CENTROIDS,
    PooledMass,
    Row,
    causal_pairs,
    content_rows,
    positional_rows,
    predicted,
)
from sparsefinder.artifact import Artifact, json_digest, load
from sparsefinder.attaching import attach_artifact
from sparsefinder.hf import Attached, LayerCall, LayerInput
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.plan import computed_pairs
from sparsefinder.predictors import Routing
from sparsefinder.teacher import Teacher, load_teacher
from training.calibrate import held_points
from training.corpus import chunk_tokens, default_texts, read_texts
from training.extract import read_layer, read_manifest
from training.fit import OnProgress, calibration_items, positional_of
from training.fit_content import fit_routing
from training.pipeline import spread
from training.points import Points, cuttable
from training.progress_bar import progress
from training.tasks.runs import Study, read_run, run_studies, write_json
from training.versions import versions

AIMS, BASELINE_AIMS = (0.05, 0.1, 0.2, 0.3), (0.1, 0.3)
LENGTHS, READ, LEAST = (1024, 2048, 4096), 4096, 2
FAMILIES = 5  # of baselines, two settings each


@dataclass(frozen=True, eq=False)
class Subject:
    """A run whose artifact is measured: the model with its attention, and what its budgets are chosen from."""

    folder: Path
    artifact: Artifact
    teacher: Teacher
    attached: Attached
    positional: Pattern
    points: list[Points]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _options(arguments)
    artifacts = {folder: load(folder / "artifact") for folder in options.data}
    teacher = load_teacher(artifacts[options.data[0]].card.teacher)
    texts = {tokens: _texts(teacher, options, tokens) for tokens in options.tokens}
    result: dict[str, Any] = {"about": _about(options, artifacts.values()), "rows": []}
    with progress() as on_progress:
        opened = functools.cache(functools.partial(_subject, on_progress=on_progress))
        routing = functools.cache(functools.partial(_routing, on_progress=on_progress))
        tables = list(itertools.product(options.tokens, artifacts.items()))
        for tokens, (folder, artifact) in tables[:: -1 if options.last_first else 1]:
            study = _study(options, opened, routing, folder, artifact, texts[tokens])
            print(f"\n{study.name}, {len(texts[tokens])} texts")
            print(f"{'':26} {'aim':>6} {'density':>8} {'perplexity':>11} {'to dense':>9}")
            stored = read_run(options.runs / f"{study.name}.json", study.settings)
            for row in stored["figures"]["rows"] if stored else ():
                _show(row)
            result["rows"] += run_studies([study], options.runs, on_progress)[study.name]["figures"]["rows"]
            if options.json:
                write_json(options.json, result)
    if options.json:
        print(f"\nAll figures lie in {options.json}")
    return result


def _study(
    options: argparse.Namespace,
    opened: Callable[[Path], Subject],
    routing: Callable[[Subject], list[Routing]],
    folder: Path,
    artifact: Artifact,
    texts: list[list[int]],
) -> Study:
    """All rows of one run at one length."""
    first, kind, tokens = folder == options.data[0], _name(artifact), len(texts[0])
    settings = {"artifact": artifact.card.version, "aims": options.aims, "baselines": first}
    settings |= {"texts": json_digest({"ids": texts})}

    def make(on_step: Callable[[int, int], None]) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        total = 1 + 2 * len(options.aims) + first * FAMILIES * len(BASELINE_AIMS)
        subject = opened(folder)
        for found in _rows(subject, texts, options.aims, routing(subject) if first else None):
            rows.append(found | {"tokens": tokens, "attention": kind})
            _show(rows[-1])
            on_step(len(rows), total)
        return {"rows": rows}

    return Study(f"{kind}-{tokens}", settings, make)


def _show(row: dict[str, Any]) -> None:
    aim = "" if row["aim"] is None else f"{row['aim']:.2f}"
    numbers = f"{row['density']:8.3f} {row['perplexity']:11.3f} {row['to_dense']:9.3f}"
    print(f"{row['row']:26} {aim:>6} {numbers}", flush=True)


def _name(artifact: Artifact) -> str:
    """softmax, or entmax with its α."""
    return "softmax" if artifact.card.alpha == 1 else f"{artifact.card.alpha}-entmax"


def _subject(folder: Path, on_progress: OnProgress) -> Subject:
    artifact = load(folder / "artifact")
    teacher = load_teacher(artifact.card.teacher)
    card, heldout, positional = artifact.card, folder / "shards" / "heldout", positional_of(artifact.card)
    points = held_points(
        heldout,
        [cuttable(layer) for layer in artifact.layers],
        positional,
        card.tile_size,
        calibration_items(read_manifest(heldout)["instances"]),
        on_layer=lambda done, n: on_progress("points", done, n),
    )
    return Subject(folder, artifact, teacher, attach_artifact(teacher, artifact), positional, points)


def _routing(subject: Subject, on_progress: OnProgress) -> list[Routing]:
    """Centroids of every layer, by the online k-means of the paper over the run's training text."""
    layers, train, found = len(subject.artifact.layers), subject.folder / "shards" / "train", []
    manifest = read_manifest(train)
    for layer in range(layers):
        found.append(fit_routing(read_layer(train, layer, manifest), CENTROIDS))
        on_progress("centroids", layer + 1, layers)
    return found


def _rows(
    subject: Subject, texts: list[list[int]], aims: Sequence[float], routing: list[Routing] | None
) -> Iterator[dict[str, Any]]:
    """All rows of one model, the dense one first, which the others are compared with; routing: None = no baselines."""
    card, positional, seen = subject.artifact.card, subject.positional, list[LayerInput]()
    oracle = PooledMass(positional, card.tile_size)

    def watch(call: LayerInput) -> None:
        oracle.see(call)
        seen.append(call)

    dense = _measure(subject.teacher, subject.attached, Row("dense", None, None), texts, watch)
    yield dense | {"to_dense": 1.0}
    rows = [
        predicted(subject.artifact.layers, subject.points, seen, positional, card.tile_size, aims),
        oracle.rows(aims),
    ]
    if routing is not None:
        rows.append(positional_rows(len(texts[0]), card.heads, card.tile_size, BASELINE_AIMS))
        rows.append(content_rows(seen, routing, positional, card.tile_size, BASELINE_AIMS))
    for row in itertools.chain(*rows):
        found = _measure(subject.teacher, subject.attached, row, texts)
        yield found | {"to_dense": found["perplexity"] / dense["perplexity"]}


@torch.no_grad()
def _measure(
    teacher: Teacher,
    attached: Attached,
    row: Row,
    texts: list[list[int]],
    watch: Callable[[LayerInput], None] | None = None,
) -> dict[str, Any]:
    """Perplexity over all texts; `watch` sees the layers of the first one."""
    computed, legal = 0.0, 0
    losses: list[float] = []

    def observe(call: LayerCall) -> None:
        nonlocal computed, legal
        pairs = causal_pairs(*call.q.shape[:3])
        legal += pairs
        computed += pairs if call.plan is None else float(computed_pairs(call.plan).sum())
        if watch is not None and not losses:
            watch(call)

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
    return spread(whole, max(options.least, options.read // tokens), options.seed + 1)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders of runs: artifact and shards")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS), help="lengths of the texts")
    parser.add_argument("--aims", type=float, nargs="+", default=list(AIMS), help="computed densities of our own rows")
    parser.add_argument("--read", type=int, default=READ, help="tokens that are read at each length, in all")
    parser.add_argument("--least", type=int, default=LEAST, help="texts of each length, whatever --read says")
    parser.add_argument("--text", type=Path, action="append", default=[], help="UTF-8 file instead of the default text")
    parser.add_argument("--runs", type=Path, default=Path("runs/perplexity"), help="folder of finished tables")
    parser.add_argument("--last-first", action="store_true", help="from the end (for a second process)")
    parser.add_argument("--quick", action="store_true", help="one text of 1024 tokens at two densities")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.read, options.least, options.aims = [1024], 1024, 1, [0.1, 0.3]
        options.runs = options.runs / "quick"
    return options


def _about(options: argparse.Namespace, artifacts: Iterable[Artifact]) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "-m", "benchmarks.perplexity", *sys.argv[1:]]),
        "artifacts": {_name(artifact): artifact.card.version for artifact in artifacts},
        "text": ", ".join(path.name for path in options.text) or "held-out default",
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": versions("torch", "transformers", "numba"),
    }


if __name__ == "__main__":
    main()
