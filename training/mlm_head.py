"""A fill-mask head for a frozen teacher: draw masked positions once, train on them, measure on held-out text."""

import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.artifact import json_digest
from sparsefinder.mlm_head import MlmCard, MlmHead, load_mlm_head, new_mlm_head, save_mlm_head
from training.config import ExtractConfig, MlmHeadConfig
from training.corpus import chunk_tokens, text_hash
from training.finetune import batches
from training.finetune_run import prepare_texts
from training.masking import Draws, draw, joined, kept_draws
from training.pipeline import OnProgress, Opened, delta_hash, open_teacher

WARMUP = 0.03  # of the steps
UNSEEN = 1.0  # what is added to every word's count, so that no word is impossible
MEASURE_SEED = 1
LOSS_EVERY = 50  # steps between two losses that are said

OnStep = Callable[[int, int, float], None]


def train_mlm_head(
    config: MlmHeadConfig,
    out: Path,
    *,
    text: Sequence[Path] = (),
    eval_text: Sequence[Path] = (),
    eval_chunks: int = 100,
    on_progress: OnProgress = lambda what, done, total: None,
) -> MlmCard:
    """Train a head on the embedded default and `text`, measure it on held-out text, write it to `out / "head"`.

    What the teacher says at masked positions is kept in `out`; started again, the work goes on there.

    Raises:
        ArtifactError, ConfigError, DataError, IncompatibleModelError: what cannot be read, or does not fit.
    """
    started = time.perf_counter()
    opened = open_teacher(ExtractConfig(teacher=config.teacher, artifact=config.artifact))
    train, held_out = prepare_texts(text, eval_text)
    pieces = [piece for part in train for piece in part]
    sources = [chunk_tokens(opened.teacher, part, config.tokens) for part in train]
    drawn = _draws(config, opened, sources, text_hash(pieces), out, on_progress)
    seconds_drawn = time.perf_counter() - started

    said = ["head"]

    def on_step(step: int, steps: int, loss: float) -> None:
        if step % LOSS_EVERY == 1:
            said[0] = f"head, loss {loss:.3f}"
        on_progress(said[0], step, steps)

    head = fit_head(config, new_mlm_head(opened.teacher, config.seed), drawn, on_step)
    seconds = time.perf_counter() - started
    record: dict[str, Any] = {
        "command": shlex.join(["sparsefinder-train", *sys.argv[1:]]),
        "config": {name: value for name, value in dataclasses.asdict(config).items() if name != "artifact"},
        "text_sha256": text_hash(pieces),
        "chunks": [len(source) for source in sources],
        "positions": len(drawn.words),
        "minutes": {"drawing": round(seconds_drawn / 60, 1), "all": round(seconds / 60, 1)},
    }
    artifact = opened.artifact
    card = MlmCard(
        config.teacher, opened.teacher.fingerprint, artifact.card.hash if artifact else "", delta_hash(artifact), record
    )
    save_mlm_head(out / "head", head, card)
    chunks = {
        name: chunk_tokens(opened.teacher, texts, config.tokens)[:eval_chunks] for name, texts in held_out.items()
    }
    read = load_mlm_head(out / "head", opened.teacher)  # measured as it will be read back
    figures = {name: measure_head(config, opened, read, drawn, items) for name, items in chunks.items()}
    return save_mlm_head(out / "head", read, dataclasses.replace(card, training=record | {"held_out": figures}))


def _draws(
    config: MlmHeadConfig,
    opened: Opened,
    sources: Sequence[Sequence[Sequence[int]]],
    text_sha256: str,
    out: Path,
    on_progress: OnProgress,
) -> Draws:
    """What the teacher says at masked positions, in a folder that is named by all that decides it."""
    asked = {name: getattr(config, name) for name in ("tokens", "batch_size", "share", "seed")}
    asked |= {"teacher": opened.teacher.fingerprint, "delta": delta_hash(opened.artifact), "text": text_sha256}
    asked |= {"alpha": opened.attached.alpha, "scale": opened.attached.head_scale.tolist()}
    folder = out / f"draws-{json_digest(asked)[:16]}"
    stream = batches(sources, config.batch_size, config.seed)
    with opened.attached.using("dense"):
        return kept_draws(
            opened.teacher,
            stream,
            config.batches,
            folder,
            config.share,
            config.seed,
            lambda done, total: on_progress("masked texts", done, total),
        )


def fit_head(
    config: MlmHeadConfig,
    head: MlmHead,
    drawn: Draws,
    on_step: OnStep = lambda step, steps, loss: None,
) -> MlmHead:
    """Train `head`, in place, on positions that were drawn; its bias begins as the words' log frequencies.

    AdamW, a short warm-up, then half a cosine down to a hundredth. The word embeddings stay as they are.
    """
    with torch.no_grad():
        head.bias.copy_(unigram(drawn, len(head.bias)))
    decayed = [head.dense.weight]
    others = [weight for weight in head.parameters() if weight is not head.dense.weight]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(config.seed)
    steps = config.epochs * math.ceil(len(drawn.words) / config.positions)
    step = 0
    for _ in range(config.epochs):
        for part in torch.randperm(len(drawn.words), generator=generator).split(config.positions):
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * _rate(step, steps)
            loss = _loss(head, drawn, part)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            step += 1
            on_step(step, steps, float(loss.detach()))
    return head


def _loss(head: MlmHead, drawn: Draws, part: Tensor) -> Tensor:
    logits = head(drawn.hidden[part].to(head.bias))
    return torch.nn.functional.cross_entropy(logits, drawn.words[part].to(logits.device))


def _rate(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / max(1, round(WARMUP * steps)))
    return warm * max(0.5 * (1 + math.cos(math.pi * step / steps)), 0.01)


def unigram(drawn: Draws, words: int) -> Float[Tensor, " V"]:
    """Log frequency of every word among the positions, with one added to each count."""
    counts = torch.bincount(drawn.words, minlength=words).float() + UNSEEN
    return (counts / counts.sum()).log()


@torch.no_grad()
def measure_head(
    config: MlmHeadConfig, opened: Opened, head: MlmHead, drawn: Draws, items: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Perplexity and accuracy at masked positions of `items`, beside those of the words' frequencies in `drawn`."""
    generator = torch.Generator().manual_seed(MEASURE_SEED)
    size = config.batch_size
    with opened.attached.using("dense"):
        parts = [
            draw(opened.teacher, items[at : at + size], config.share, generator) for at in range(0, len(items), size)
        ]
    found = joined(parts)
    logits = torch.cat([head(hidden.to(head.bias)).cpu() for hidden in found.hidden.split(config.positions)])
    frequencies = unigram(drawn, len(head.bias)).expand(len(found.words), -1)
    ours, theirs = (_figures(values, found) for values in (logits, frequencies))
    return {**ours, **{f"unigram_{name}": value for name, value in theirs.items()}, "positions": len(found.words)}


def _figures(logits: Float[Tensor, "n V"], found: Draws) -> dict[str, float]:
    loss = torch.nn.functional.cross_entropy(logits, found.words)
    accuracy = (logits.argmax(-1) == found.words).float().mean()
    return {"perplexity": round(math.exp(float(loss)), 3), "accuracy": round(float(accuracy), 4)}
