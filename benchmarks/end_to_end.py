"""Whole models with sparse attention: tokens a second of every mode beside the quality of what it says.

    python -m benchmarks.end_to_end --data runs/smollm2 runs/smollm2-8192 [--mass 0.95] [--rounds 3] [--quick]
                                    [--json docs/figures/end_to_end.json]

Scoring (the loss of every next token) of one held-out text of 2048, 4096 and 8192 tokens by the causal runs (of
several with the same attention, by the one that was fitted at the length or at the next greater one), and embeddings
of 128, 256 and 512 tokens, 1 and 16 texts at once, by the shipped encoder. Modes: `original` (the untouched softmax
model, torch's fused attention), and of every artifact `dense`, `sparse`, `exact` (entmax only) and `auto`. All of a
length take turns in one process, `--rounds` times after a first round, which compiles and says the quality:
perplexity, or the cosine to `original`. Prediction and plan are part of every pass.
"""

import argparse
import functools
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from benchmarks.attention_real import calibrated, points_of
from benchmarks.paired import hardware, paired, shares
from benchmarks.perplexity import Subject, attention_name, held_out_texts, open_subject, serving
from sparsefinder.artifact import load
from sparsefinder.hf import Attached, LayerCall, Mode
from sparsefinder.plan import computed_pairs
from sparsefinder.shipped import default_artifact
from sparsefinder.teacher import Teacher, batch, embed, load_teacher
from sparsefinder.threads import limit_threads
from training.progress_bar import progress
from training.tasks.runs import OnProgress, write_json
from training.versions import versions

SCORED, EMBEDDED, BATCHES = (2048, 4096, 8192), (128, 256, 512), (1, 16)
QUICK = 512  # tokens that the quick form scores
PIECE = 512  # positions whose logits exist at a time
Row = dict[str, Any]
Pass = Callable[[Teacher], Any]


@dataclass(frozen=True, eq=False)
class Way:
    """A model in a mode; attached: None = the original model."""

    attention: str
    mode: str
    teacher: Teacher
    attached: Attached | None


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _options(arguments)
    limit_threads(options.threads)
    result: dict[str, Any] = {"about": _about(options), "scoring": [], "embedding": []}
    for name, value in result["about"].items():
        print(f"{name}: {value}")
    with progress() as on_progress, torch.inference_mode():
        for part, make in (("scoring", _scoring), ("embedding", _embedding)):
            print(f"\n{part}", flush=True)
            for row in make(options, on_progress):
                result[part].append(row)
                print(_line(row), flush=True)
                if options.json:
                    write_json(options.json, result)
    if options.json:
        print(f"\nAll figures lie in {options.json}")
    return result


def _line(row: Row) -> str:
    where = f"{row['tokens']:5} × {row['texts']:2} {row['attention']:10} {row['mode']:8}"
    ms = statistics.median(row["ms"])
    return f"{where} {ms:9.1f} ms {row['quality']:8.4f} density {row['density']:.3f} ran {row['ran']}"


def _scoring(options: argparse.Namespace, on_progress: OnProgress) -> Iterator[Row]:
    if not options.data or not options.tokens:
        return
    subjects = [_subject(folder, options, on_progress) for folder in options.data]
    original = load_teacher(subjects[0].artifact.card.teacher)
    for done, tokens in enumerate(options.tokens):
        on_progress("scoring", done, len(options.tokens))
        served = serving(options.data, tokens)
        ways = _ways(original, [subject for subject in subjects if subject.folder in served])
        (text,) = held_out_texts(original, options.text, tokens, 1, options.seed)
        yield from _rows(ways, functools.partial(perplexity, text=text), tokens, 1, options.rounds, float)


def _embedding(options: argparse.Namespace, on_progress: OnProgress) -> Iterator[Row]:
    if not options.short:
        return
    subject = _subject(options.artifact, options, on_progress)
    original = load_teacher(subject.artifact.card.teacher)
    ways, cases = _ways(original, [subject]), [(n, size) for n in options.short for size in options.batches]
    for done, (tokens, size) in enumerate(cases):
        on_progress("embedding", done, len(cases))
        ids, mask = batch(original, held_out_texts(original, options.text, tokens, size, options.seed))
        wanted = embed(original, ids, mask)

        def likeness(vectors: Tensor, wanted: Tensor = wanted) -> float:
            return float(cosine_similarity(vectors, wanted).mean())

        work = functools.partial(embed, tokens=ids, mask=mask)
        yield from _rows(ways, work, tokens, ids.shape[0], options.rounds, likeness)


def _rows(
    ways: Sequence[Way], work: Pass, tokens: int, texts: int, rounds: int, quality: Callable[[Any], float]
) -> Iterator[Row]:
    """A row for every way, all of them timed in turn."""
    runs = {f"{way.attention} {way.mode}": functools.partial(_run, way, work) for way in ways}
    times, given = paired(runs, rounds)
    for way, (name, run) in zip(ways, runs.items(), strict=True):
        row = {"attention": way.attention, "mode": way.mode, "tokens": tokens, "texts": texts}
        row |= {"quality": quality(given[name]), "ms": times[name]} | _what_ran(way, work)
        yield row | ({"shares": shares(run, 1)} if way.mode == "sparse" else {})


def _run(way: Way, work: Pass) -> Any:
    if way.attached is None:
        return work(way.teacher)
    mode: Mode = way.mode  # type: ignore[assignment]
    with way.attached.using(mode):
        return work(way.teacher)


def _what_ran(way: Way, work: Pass) -> dict[str, Any]:
    """How many layers ran each path, and the computed density of all of them; dense layers compute all legal pairs."""
    if way.attached is None:
        return {"density": 1.0, "ran": {"original": int(way.teacher.model.config.num_hidden_layers)}}
    ran: dict[str, int] = {}
    computed = legal = 0.0

    def observe(call: LayerCall) -> None:
        nonlocal computed, legal
        pairs = float(call.q.shape[1] * sum(map(call.legal.count, range(call.q.shape[0]))))
        ran[call.ran] = ran.get(call.ran, 0) + 1
        legal += pairs
        computed += pairs if call.plan is None else float(computed_pairs(call.plan).sum())

    mode: Mode = way.mode  # type: ignore[assignment]
    with way.attached.using(mode, observe=observe):
        work(way.teacher)
    return {"density": computed / legal, "ran": ran}


def perplexity(teacher: Teacher, text: Sequence[int]) -> float:
    """Of one text; logits are made in pieces, since those of long texts would fill the memory."""
    ids = torch.tensor([text])
    hidden, total = teacher.model(input_ids=ids).last_hidden_state[0, :-1], 0.0
    for low in range(0, hidden.shape[0], PIECE):
        logits = teacher.lm.get_output_embeddings()(hidden[low : low + PIECE])
        total += float(cross_entropy(logits.float(), ids[0, low + 1 : low + 1 + logits.shape[0]], reduction="sum"))
    return math.exp(total / hidden.shape[0])


def _ways(original: Teacher, subjects: Sequence[Subject]) -> list[Way]:
    ways = [Way("softmax", "original", original, None)]
    for subject in subjects:
        modes = (
            ("dense", "sparse", "auto") if subject.artifact.card.alpha == 1 else ("dense", "sparse", "exact", "auto")
        )
        ways += [Way(attention_name(subject.artifact), mode, subject.teacher, subject.attached) for mode in modes]
    return ways


def _subject(folder: Path, options: argparse.Namespace, on_progress: OnProgress) -> Subject:
    """The artifact of a run, or one by itself; cut for --mass where a run's held-out text is there to choose on."""
    artifact = load(folder / "artifact" if (folder / "artifact").is_dir() else folder)
    subject = open_subject(folder, artifact)
    if options.crossover == "measured":
        subject.attached.load_crossover()
    if options.mass and folder in options.data:
        layers = [layer for layer, predictor in enumerate(artifact.layers) if predictor is not None]
        points = points_of(subject, layers, lambda done, n: on_progress(f"points, {attention_name(artifact)}", done, n))
        cut = calibrated(subject, layers, points, options.mass)
        subject.attached.predictors = tuple(map(cut.predictors.get, range(len(artifact.layers))))
        subject.attached.expected = tuple(map(cut.expected.get, range(len(artifact.layers))))
    return subject


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="folders of runs of one causal teacher")
    parser.add_argument("--artifact", type=Path, default=default_artifact(), help="of the encoder")
    parser.add_argument("--mass", type=float, help="cut the runs' predictors for this attention mass; else as they are")
    parser.add_argument("--tokens", type=int, nargs="*", default=list(SCORED), help="of the texts that are scored")
    parser.add_argument("--short", type=int, nargs="*", default=list(EMBEDDED), help="of the texts that are embedded")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="texts that are embedded at once")
    parser.add_argument(
        "--crossover", choices=("measured", "shipped"), default="measured", help="times that `auto` decides by"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0 = as many as torch chooses")
    parser.add_argument("--text", type=Path, action="append", default=[], help="UTF-8 file instead of the default text")
    parser.add_argument("--quick", action="store_true", help="one short text of each kind, one round, no --mass")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.short, options.rounds, options.mass = [QUICK], options.short[:1], 1, None
    return options


def _about(options: argparse.Namespace) -> dict[str, Any]:
    artifacts: Mapping[str, Path] = {folder.name: folder / "artifact" for folder in options.data}
    named = dict(artifacts) | ({options.artifact.name: options.artifact} if options.short else {})
    return {
        "command": shlex.join(["python", "-m", "benchmarks.end_to_end", *sys.argv[1:]]),
        "artifacts": ", ".join(f"{name} {load(path).card.version}" for name, path in named.items()),
        "mass": options.mass,
        "text": ", ".join(path.name for path in options.text) or "held-out default",
        "rounds": options.rounds,
        "hardware": hardware(),
        "versions": versions("torch", "transformers", "numba"),
    }


if __name__ == "__main__":
    main()
