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

from sparsefinder.artifact import delta_hash, json_digest
from sparsefinder.mlm_head import MlmCard, MlmHead, load_mlm_head, new_mlm_head, save_mlm_head
from sparsefinder.teacher import Teacher
from training.config import ExtractConfig, MlmHeadConfig
from training.corpus import chunk_tokens, text_hash
from training.finetune import batches
from training.finetune_run import prepare_texts
from training.masking import MASKED_SHARE, Draws, Ids, draw, joined, kept_draws
from training.pipeline import OnProgress, Opened, open_teacher

WARMUP = 0.03  # of the steps
WEIGHT_DECAY = 0.01  # of the dense matrix alone
UNSEEN = 1.0  # what is added to every word's count, so that no word is impossible
MEASURE_SEED = 1
MEASURE_EVERY = 200  # steps between two looks at held-out text
POSITIONS = 1024  # that get their logits together where nothing is learned

OnStep = Callable[[int, int], None]


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
    began = time.perf_counter(), time.process_time()
    opened = open_teacher(ExtractConfig(teacher=config.teacher, artifact=config.artifact))
    teacher, artifact = opened.teacher, opened.artifact
    on_progress("read text", 0, 1)
    train, held_out = prepare_texts(text, eval_text)
    pieces = [piece for part in train for piece in part]
    sources = [chunk_tokens(teacher, part, config.tokens) for part in train]
    chunks = {name: chunk_tokens(teacher, texts, config.tokens)[:eval_chunks] for name, texts in held_out.items()}
    with opened.attached.using("dense"):
        held = {name: held_draws(teacher, items, config.batch_size) for name, items in chunks.items()}
        drawn = _draws(config, opened, sources, text_hash(pieces), out, on_progress)

    head, said = new_mlm_head(teacher, config.seed), ["head"]

    def on_step(step: int, steps: int) -> None:
        if step % MEASURE_EVERY == 0:
            found = (f"{name} {figures(head, draws)['perplexity']:.1f}" for name, draws in held.items())
            said[0] = f"head, step {step}: perplexity of {', '.join(found)}"
        on_progress(said[0], step, steps)

    fit_head(config, head, drawn, on_step)
    record: dict[str, Any] = {
        "command": shlex.join(["sparsefinder-train", *sys.argv[1:]]),
        "config": {name: value for name, value in dataclasses.asdict(config).items() if name != "artifact"},
        "text_sha256": text_hash(pieces),
        "chunks": [len(source) for source in sources],
        "positions": len(drawn.words),
        "minutes": round((time.perf_counter() - began[0]) / 60, 1),
        "cpu_minutes": round((time.process_time() - began[1]) / 60, 1),  # of all threads: others may use the machine
    }
    card = MlmCard(config.teacher, teacher.fingerprint, delta_hash(artifact), record)
    save_mlm_head(out / "head", head, card)
    read = load_mlm_head(out / "head", teacher, artifact)  # measured as it will be read back
    words = unigram(drawn, len(head.bias))
    record["held_out"] = {name: figures(read, draws) | _of_frequencies(words, draws) for name, draws in held.items()}
    return save_mlm_head(out / "head", read, dataclasses.replace(card, training=record))


def held_draws(teacher: Teacher, items: Ids, size: int) -> Draws:
    """Masked positions of text to measure on, the same in every call, read in the mode that is on."""
    generator = torch.Generator().manual_seed(MEASURE_SEED)
    return joined([draw(teacher, items[at : at + size], MASKED_SHARE, generator) for at in range(0, len(items), size)])


def _draws(
    config: MlmHeadConfig,
    opened: Opened,
    sources: Sequence[Ids],
    text_sha256: str,
    out: Path,
    on_progress: OnProgress,
) -> Draws:
    """What the dense teacher says at masked positions, in a folder that is named by all that decides it."""
    asked = {name: getattr(config, name) for name in ("tokens", "batch_size", "seed")}
    asked |= {"teacher": opened.teacher.fingerprint, "delta": delta_hash(opened.artifact), "text": text_sha256}
    asked |= {"alpha": opened.attached.alpha, "scale": opened.attached.head_scale.tolist(), "share": MASKED_SHARE}
    folder = out / f"draws-{json_digest(asked)[:16]}"
    stream = batches(sources, config.batch_size, config.seed)

    def on_batch(done: int, total: int) -> None:
        on_progress("masked texts", done, total)

    return kept_draws(opened.teacher, stream, config.batches, folder, MASKED_SHARE, config.seed, on_batch)


def fit_head(config: MlmHeadConfig, head: MlmHead, drawn: Draws, on_step: OnStep = lambda step, steps: None) -> MlmHead:
    """Train `head`, in place, on positions that were drawn; its bias begins as the words' log frequencies.

    AdamW, a short warm-up, then half a cosine down to a hundredth. The word embeddings stay as they are.
    """
    with torch.no_grad():
        head.bias.copy_(unigram(drawn, len(head.bias)))
    others = [weight for weight in head.parameters() if weight is not head.dense.weight]
    groups = [{"params": [head.dense.weight], "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(config.seed)
    steps, step = config.epochs * math.ceil(len(drawn.words) / config.positions), 0
    for _ in range(config.epochs):
        for part in torch.split(torch.randperm(len(drawn.words), generator=generator), config.positions):
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * _rate(step, steps)
            logits = head(drawn.hidden[part].to(head.bias))
            loss = torch.nn.functional.cross_entropy(logits, drawn.words[part].to(logits.device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            step += 1
            on_step(step, steps)
    return head


def _rate(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / max(1, round(WARMUP * steps)))
    return warm * max(0.5 * (1 + math.cos(math.pi * step / steps)), 0.01)


def unigram(drawn: Draws, words: int) -> Float[Tensor, " V"]:
    """Log frequency of every word among the positions, with one added to each count."""
    counts = torch.bincount(drawn.words, minlength=words).float() + UNSEEN
    return (counts / counts.sum()).log()


@torch.no_grad()
def answers(head: MlmHead, drawn: Draws) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """(cross-entropy in nats, 1 where the likeliest word is right) at every position."""
    losses, right = [], []
    for hidden, words in zip(*(torch.split(x, POSITIONS) for x in (drawn.hidden, drawn.words)), strict=True):
        logits = head(hidden.to(head.bias)).cpu()
        losses.append(torch.nn.functional.cross_entropy(logits, words, reduction="none"))
        right.append((logits.argmax(-1) == words).float())
    return torch.cat(losses), torch.cat(right)


def figures(head: MlmHead, drawn: Draws) -> dict[str, float]:
    """Perplexity and accuracy at masked positions, and how many they were."""
    losses, right = answers(head, drawn)
    return _figures(float(losses.mean()), float(right.mean())) | {"positions": len(drawn.words)}


def _of_frequencies(log_shares: Float[Tensor, " V"], drawn: Draws) -> dict[str, float]:
    """The same of an answer that knows how frequent words are, and nothing else."""
    right = (drawn.words == log_shares.argmax()).float().mean()
    found = _figures(-float(log_shares[drawn.words].mean()), float(right))
    return {f"unigram_{name}": value for name, value in found.items()}


def _figures(loss: float, accuracy: float) -> dict[str, float]:
    return {"perplexity": round(math.exp(loss), 3), "accuracy": round(accuracy, 4)}
