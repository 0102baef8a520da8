"""A teacher turned into its entmax twin: texts, training, held-out figures, and an artifact with the delta."""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from sparsefinder.artifact import Artifact, Card, load, save
from sparsefinder.predictors import WindowOnly
from sparsefinder.teacher import Teacher, load_teacher
from training.config import FinetuneConfig
from training.corpus import blocks, chunk_tokens, default_texts, drop_shared, read_texts, text_hash
from training.distances import Student
from training.finetune import CausalQuality, Quality, finetune, measure, measure_causal
from training.finetune_state import State
from training.masking import Ids
from training.pipeline import check_folder
from training.progress_bar import progress

EVAL_CHUNKS, CAUSAL_EVAL_CHUNKS = 100, 8


def finetune_artifact(
    config: FinetuneConfig,
    out: Path,
    *,
    text: Sequence[Path] = (),
    eval_text: Sequence[Path] = (),
    artifact: Path | None = None,
    eval_chunks: int | None = None,
    until: int | None = None,
) -> Card:
    """Train a student on the embedded default and `text`, measure it on held-out text, write it to `out`.

    artifact: go on from its delta and head scale. Until the end what is learned is kept beside `out`, in `out.state`:
    the same call goes on where it stopped. until: stop after so many of the steps, as good as it is then.

    Raises:
        DataError, ConfigError, ArtifactError, IncompatibleModelError: what cannot be read, or does not fit.
    """
    check_folder(out)
    start = load(artifact) if artifact else None
    console, original = Console(), load_teacher(config.teacher)
    with progress() as on_progress:
        on_progress("read text", 0, 1)
        train, held_out = prepare_texts(text, eval_text)
    sources = [chunk_tokens(original, part, config.tokens) for part in train]
    about = [dataclasses.asdict(config), [text_hash(part) for part in train], start.card.hash if start else None]
    state = State(out.with_name(f"{out.name}.state"), about)
    student, delta = _train(config, sources, start, console, state, until)
    minutes = state.seconds() / 60
    eval_chunks = eval_chunks or (EVAL_CHUNKS if original.lm is None else CAUSAL_EVAL_CHUNKS)
    qualities = _measure(original, student, held_out, config.tokens, eval_chunks)
    figures = {name: dataclasses.asdict(quality) for name, quality in qualities.items()}
    record = {
        "command": shlex.join(["sparsefinder-train", *sys.argv[1:]]),
        "config": dataclasses.asdict(config),
        "steps": until or config.steps,
        "text_sha256": text_hash([piece for part in train for piece in part]),
        "chunks": [len(source) for source in sources],
        "minutes": round(minutes, 1),
        "held_out": figures,
        "before": start.card.training["finetune"] if start else None,
    }
    card = save(out, Artifact(_card(student, original, record), _window_only(student), delta=delta))
    state.remove()
    size = sum(t.numel() * t.element_size() for t in delta.values()) / 1e6
    for name, quality in qualities.items():
        console.print(f"{name}: {_line(quality)}")
    console.print(f"Delta of {size:.2f} MB after {minutes:.1f} minutes; artifact {card.version} lies in {out}")
    return card


def prepare_texts(text: Sequence[Path], eval_text: Sequence[Path]) -> tuple[list[list[str]], dict[str, list[str]]]:
    """Training pieces (the embedded default, then the user's files) and held-out texts by name.

    No piece of the first shares a span of 50 characters with any of the second.
    """
    own = [piece for whole in read_texts(text) for piece in blocks(whole)]  # first: a mistake is said at once
    asked = {path.name: read_texts([path]) for path in eval_text}
    held_out = {"default held-out": default_texts("heldout")} | asked
    avoid = [piece for texts in held_out.values() for piece in texts]
    parts = [drop_shared(pieces, avoid) for pieces in (default_texts("train"), own)]
    return [part for part in parts if part], held_out


def _line(quality: Quality | CausalQuality) -> str:
    if isinstance(quality, CausalQuality):
        words = f"perplexity {quality.perplexity:.2f} of {quality.original_perplexity:.2f}"
        return f"{words}, {quality.divergence:.4f} nats apart, density {quality.density:.2%} ({quality.texts} chunks)"
    figures = f"cosine {quality.cosine:.4f}, correlation {quality.correlation:.4f}, density {quality.density:.2%}"
    return f"{figures} ({quality.texts} chunks)"


def _train(
    config: FinetuneConfig,
    sources: Sequence[Ids],
    start: Artifact | None,
    console: Console,
    state: State,
    until: int | None,
) -> tuple[Student, dict[str, Tensor]]:
    with Progress(console=console, transient=not console.is_terminal) as bars:
        bar = bars.add_task("finetune", total=config.steps)

        def on_step(step: int, loss: float, density: float) -> None:
            bars.update(bar, completed=step + 1, description=f"loss {loss:.4f} density {density:.2%}")
            if not console.is_terminal and (step + 1) % 25 == 0:
                console.print(f"step {step + 1} of {config.steps}: loss {loss:.4f}, density {density:.2%}")

        return finetune(config, sources, start=start, on_step=on_step, state=state, until=until)


def _measure(
    original: Teacher, student: Student, held_out: dict[str, list[str]], tokens: int, count: int
) -> dict[str, Quality | CausalQuality]:
    """Figures of the delta as it will be read back, not of the weights in memory."""
    found: dict[str, Quality | CausalQuality] = {}
    compare = measure if original.lm is None else measure_causal
    for name, texts in held_out.items():
        chunks = chunk_tokens(original, texts, tokens)[:count]
        found[name] = compare(original, student.teacher, student.attached, chunks)
    return found


def _window_only(student: Student) -> tuple[WindowOnly, ...]:
    return tuple(WindowOnly() for _ in range(student.teacher.model.config.num_hidden_layers))


def _card(student: Student, original: Teacher, record: dict[str, Any]) -> Card:
    config = student.teacher.model.config
    heads = int(config.num_attention_heads)
    return Card(
        teacher=original.name,
        teacher_fingerprint=original.fingerprint,
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", heads)),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        alpha=student.attached.alpha,
        head_scale=tuple(tuple(round(float(x), 6) for x in row) for row in student.attached.head_scale),
        objective="none",
        served="window",
        window_size=9,
        global_tokens=1,
        tile_size=32,
        training={"finetune": record},
        libraries={name: version(name) for name in ("torch", "transformers", "entmax", "numba")},
    )
