"""What sparse attention costs a causal language model: perplexity of held-out text at equal computed density.

    sparsefinder-train run --teacher smollm2 --out runs/smollm2
    python -m benchmarks.perplexity --data runs/smollm2 [runs/...] [--tokens 1024 2048 4096] [--quick] [--json FILE]

The first run is compared with patterns of others, further ones (the same model with entmax, say) with their own oracle;
runs of the same attention, fitted at other lengths, say, share a table.
Every row reads the same texts; densities are those of the plans that ran (computed pairs / legal pairs, mean over
layers, heads and texts), beside the density that was aimed at. The predictor was fitted and its budgets were allotted
on other text, at the length of its own run; how much is allotted, the oracle's threshold (it pools the attention that
it is asked to predict) and every pattern's size are chosen by density on the first text. A tile's own rows, the window
and the first tokens are always read. Every part of a table (what a predictor changes, and the rest) leaves a JSON file
in --runs when it ends; what is there is not measured again.
"""

import argparse
import functools
import itertools
import math
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from sparsefinder.artifact import Artifact, delta_hash, json_digest, load
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
PLANS = ("window_size", "global_tokens", "tile_size")  # what every plan of a card has


@dataclass(frozen=True, eq=False)
class Subject:
    """A run whose artifact is measured: the model with its attention."""

    folder: Path
    artifact: Artifact
    teacher: Teacher
    attached: Attached
    positional: Pattern


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _options(arguments)
    artifacts = {folder: load(folder / "artifact") for folder in options.data}
    teacher = load_teacher(artifacts[options.data[0]].card.teacher)
    texts = {
        tokens: held_out_texts(teacher, options.text, tokens, max(options.least, options.read // tokens), options.seed)
        for tokens in options.tokens
    }
    result: dict[str, Any] = {"about": _about(options, artifacts), "rows": []}
    with progress() as on_progress:
        opened = functools.cache(open_subject)
        tables = list(itertools.product(options.tokens, _same_attention(artifacts)))
        for tokens, members in tables[:: -1 if options.last_first else 1]:
            folder, artifact = members[0]
            print(f"\n{attention_name(artifact)}, {tokens} tokens, {len(texts[tokens])} texts")
            print(f"{'':32} {'aim':>6} {'density':>8} {'perplexity':>11} {'to dense':>9}")
            rivals = _rivals(options, opened, folder, artifact, texts[tokens], on_progress)
            dense, *others = _rows_of(rivals, options.runs, on_progress)
            rows = [dense]
            for member in members:
                own = _predicted(options, opened, *member, texts[tokens], dense["perplexity"], on_progress)
                rows += _rows_of(own, options.runs, on_progress)
            rows += others
            result["rows"] += [row | {"tokens": tokens, "attention": attention_name(artifact)} for row in rows]
            if options.json:
                write_json(options.json, result)
    if options.json:
        print(f"\nAll figures lie in {options.json}")
    return result


def _same_attention(artifacts: Mapping[Path, Artifact]) -> list[list[tuple[Path, Artifact]]]:
    """Runs with one row of dense attention and one oracle, together."""
    found: dict[str, list[tuple[Path, Artifact]]] = {}
    for folder, artifact in artifacts.items():
        found.setdefault(json_digest(_attention(artifact)), []).append((folder, artifact))
    return list(found.values())


def _attention(artifact: Artifact) -> dict[str, Any]:
    """All of an artifact that its dense row and its oracle depend on."""
    settings = {name: getattr(artifact.card, name) for name in ("teacher_fingerprint", "alpha", *PLANS)}
    return settings | {"delta": delta_hash(artifact), "scale": json_digest({"scale": artifact.card.head_scale})}


def _rows_of(study: Study, runs: Path, on_progress: OnProgress) -> list[dict[str, Any]]:
    """The rows of a study, all of which have been printed: as they came, or now."""
    stored = read_run(runs / f"{study.name}.json", study.settings)
    for row in stored["figures"]["rows"] if stored else ():
        _show(row)
    rows: list[dict[str, Any]] = run_studies([study], runs, on_progress)[study.name]["figures"]["rows"]
    return rows


def _rivals(
    options: argparse.Namespace,
    opened: Callable[[Path, Artifact], Subject],
    folder: Path,
    artifact: Artifact,
    texts: list[list[int]],
    on_progress: OnProgress,
) -> Study:
    """The dense row, the oracle's, and those of others' patterns for the first run: all that no predictor changes."""
    baselines = options.baseline_aims if folder == options.data[0] else []
    ids = json_digest({"ids": texts})
    settings = _attention(artifact) | {"aims": options.aims, "baselines": baselines, "texts": ids}
    count = 1 + len(options.aims) + FAMILIES * len(baselines)

    def make(on_step: Callable[[int, int], None]) -> dict[str, Any]:
        subject = opened(folder, artifact)
        routing = _routing(subject, on_progress) if baselines else None
        return {"rows": _shown(_rival_rows(subject, texts, options, routing), count, on_step)}

    return Study(f"rivals-{attention_name(artifact)}-{len(texts[0])}", settings, make)


def _predicted(
    options: argparse.Namespace,
    opened: Callable[[Path, Artifact], Subject],
    folder: Path,
    artifact: Artifact,
    texts: list[list[int]],
    dense: float,
    on_progress: OnProgress,
) -> Study:
    """The rows of the artifact's predictor; dense: the perplexity that they are compared with."""
    settings = {"artifact": artifact.card.version, "aims": options.aims, "texts": json_digest({"ids": texts})}

    def make(on_step: Callable[[int, int], None]) -> dict[str, Any]:
        subject, seen = opened(folder, artifact), list[LayerInput]()
        points = _points(subject, 1 if options.quick else None, on_progress)
        _measure(subject.teacher, subject.attached, Row("dense", None, None), texts[:1], seen.append)
        made = predicted(artifact.layers, points, seen, subject.positional, artifact.card.tile_size, options.aims)
        name = f"predicted, fitted at {fitted_at(folder)}"
        rows = (_compared(subject, replace(row, name=name), texts, dense) for row in made)
        return {"rows": _shown(rows, len(options.aims), on_step)}

    return Study(f"predicted-{folder.name}-{len(texts[0])}", settings, make)


def _shown(rows: Iterable[dict[str, Any]], count: int, on_step: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """All rows, each printed when it comes."""
    found = []
    for row in rows:
        _show(row)
        found.append(row)
        on_step(len(found), count)
    return found


def _show(row: dict[str, Any]) -> None:
    aim = "" if row["aim"] is None else f"{row['aim']:.2f}"
    numbers = f"{row['density']:8.3f} {row['perplexity']:11.3f} {row['to_dense']:9.3f}"
    print(f"{row['row']:32} {aim:>6} {numbers}", flush=True)


def attention_name(artifact: Artifact) -> str:
    """softmax, or entmax with its α."""
    return "softmax" if artifact.card.alpha == 1 else f"{artifact.card.alpha}-entmax"


def fitted_at(folder: Path) -> int:
    """Tokens of the texts that a run's predictors were fitted and cut on."""
    return int(read_manifest(folder / "shards" / "heldout")["tokens"])


def serving(folders: Sequence[Path], tokens: int) -> list[Path]:
    """For texts of a length, of every kind of attention the run that was fitted at that length or at the next greater
    one; at the greatest where there is none."""
    found: dict[str, Path] = {}
    for folder in sorted(folders, key=fitted_at, reverse=True):
        name = attention_name(load(folder / "artifact"))
        if name not in found or fitted_at(folder) >= tokens:
            found[name] = folder
    return [folder for folder in folders if folder in found.values()]


def open_subject(folder: Path, artifact: Artifact) -> Subject:
    """The artifact's teacher, loaded anew, with the artifact's attention."""
    teacher = load_teacher(artifact.card.teacher)
    return Subject(folder, artifact, teacher, attach_artifact(teacher, artifact), positional_of(artifact.card))


@functools.cache
def _points(subject: Subject, most: int | None, on_progress: OnProgress) -> list[Points]:
    """What the budgets of the heads are chosen from, at every length the same; most: texts (None = all for that)."""
    heldout = subject.folder / "shards" / "heldout"
    return held_points(
        heldout,
        [cuttable(layer) for layer in subject.artifact.layers],
        subject.positional,
        subject.artifact.card.tile_size,
        calibration_items(read_manifest(heldout)["instances"])[:most],
        on_layer=lambda done, n: on_progress("points", done, n),
    )


def _routing(subject: Subject, on_progress: OnProgress) -> list[Routing]:
    """Centroids of every layer, by the online k-means of the paper over the run's training text."""
    layers, train, found = len(subject.artifact.layers), subject.folder / "shards" / "train", []
    manifest = read_manifest(train)
    for layer in range(layers):
        found.append(fit_routing(read_layer(train, layer, manifest), CENTROIDS))
        on_progress("centroids", layer + 1, layers)
    return found


def _rival_rows(
    subject: Subject, texts: list[list[int]], options: argparse.Namespace, routing: list[Routing] | None
) -> Iterator[dict[str, Any]]:
    """The dense row first, which the others are compared with; routing: None = no baselines."""
    card, seen = subject.artifact.card, list[LayerInput]()
    oracle = PooledMass(subject.positional, card.tile_size)

    def watch(call: LayerInput) -> None:
        oracle.see(call)
        seen.append(call)

    dense = _measure(subject.teacher, subject.attached, Row("dense", None, None), texts, watch)
    yield dense | {"to_dense": 1.0}
    rows, size = [oracle.rows(options.aims)], card.tile_size
    if routing is not None:
        rows.append(positional_rows(len(texts[0]), card.heads, size, options.baseline_aims))
        rows.append(content_rows(seen, routing, subject.positional, size, options.baseline_aims))
    for row in itertools.chain(*rows):
        yield _compared(subject, row, texts, dense["perplexity"])


def _compared(subject: Subject, row: Row, texts: list[list[int]], dense: float) -> dict[str, Any]:
    found = _measure(subject.teacher, subject.attached, row, texts)
    return found | {"to_dense": found["perplexity"] / dense}


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


def held_out_texts(teacher: Teacher, files: Sequence[Path], tokens: int, count: int, seed: int) -> list[list[int]]:
    """So many whole chunks of these files (none = the embedded default), spread over all of it."""
    texts = read_texts([str(path) for path in files]) if files else default_texts("heldout")
    whole = [chunk for chunk in chunk_tokens(teacher, texts, tokens) if len(chunk) == tokens]
    return spread(whole, count, seed + 1)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders of runs: artifact and shards")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS), help="lengths of the texts")
    parser.add_argument("--aims", type=float, nargs="+", default=list(AIMS), help="computed densities of our own rows")
    parser.add_argument(
        "--baseline-aims", type=float, nargs="+", default=list(BASELINE_AIMS), help="and those of others' patterns"
    )
    parser.add_argument("--read", type=int, default=READ, help="tokens that are read at each length, in all")
    parser.add_argument("--least", type=int, default=LEAST, help="texts of each length, whatever --read says")
    parser.add_argument("--text", type=Path, action="append", default=[], help="UTF-8 file instead of the default text")
    parser.add_argument("--runs", type=Path, default=Path("runs/perplexity"), help="folder of finished tables")
    parser.add_argument("--last-first", action="store_true", help="from the end (for a second process)")
    parser.add_argument("--quick", action="store_true", help="one text of 1024 tokens at one density")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.read, options.least, options.aims = [1024], 1024, 1, [0.3]
        options.baseline_aims = [0.3]
        options.runs = options.runs / "quick"
    return options


def _about(options: argparse.Namespace, artifacts: Mapping[Path, Artifact]) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "-m", "benchmarks.perplexity", *sys.argv[1:]]),
        "artifacts": {folder.name: artifact.card.version for folder, artifact in artifacts.items()},
        "text": ", ".join(path.name for path in options.text) or "held-out default",
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": versions("torch", "transformers", "numba"),
    }


if __name__ == "__main__":
    main()
