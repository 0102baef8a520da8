"""Copying and reversing with an encoder–decoder, trained here: cross-attention whose gold positions are known.

The source is `START s EOS` and the target `s EOS` or `reverse(s) EOS`. To predict symbol i of n, some cross-attention
head must read source position i + 1 (copy) or n − i (reverse): nothing else in the source or in the target so far tells
it. START is there so that copying does not read position i from row i, where every window would keep it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

from sparsefinder.errors import ConfigError
from training.tasks.together import OnStep, Schedule

PAD, EOS, START = 0, 1, 2
FIRST_SYMBOL = 3
Order = Literal["copy", "reverse"]


@dataclass(frozen=True)
class Reversal:
    """Strings of `shortest` to `longest` symbols from an alphabet of `symbols`."""

    order: Order = "copy"
    shortest: int = 6
    longest: int = 16
    symbols: int = 20

    def __post_init__(self) -> None:
        if self.order not in ("copy", "reverse") or not 1 <= self.shortest <= self.longest:
            raise ConfigError(f"reversal: expected copy or reverse and 1 ≤ shortest ≤ longest, got {self}")


@dataclass(frozen=True, eq=False)
class Pairs:
    """A batch, padded on the right. `gold[b, i]`: the source position that target row i must read, −1 = none."""

    source: Int[Tensor, "B M"]
    source_real: Bool[Tensor, "B M"]
    seen: Int[Tensor, "B N"]
    target: Int[Tensor, "B N"]
    target_real: Bool[Tensor, "B N"]
    gold: Int[Tensor, "B N"]


def reversal_batch(task: Reversal, batch: int, generator: torch.Generator) -> Pairs:
    """Random strings; the decoder sees `START t_0 … t_{n−1}` and predicts `t_0 … t_{n−1} EOS`."""
    lengths = torch.randint(task.shortest, task.longest + 1, (batch, 1), generator=generator)
    at = torch.arange(task.longest + 1)[None, :]
    symbols = torch.randint(FIRST_SYMBOL, FIRST_SYMBOL + task.symbols, (batch, task.longest + 1), generator=generator)
    ended = torch.where(at < lengths, symbols, torch.where(at == lengths, EOS, PAD))
    start = torch.full((batch, 1), START)
    source = torch.cat([start, ended], 1)
    gold = torch.where(at < lengths, at + 1 if task.order == "copy" else lengths - at, -1)
    target = torch.where(gold >= 0, source.gather(1, gold.clamp(min=0)), ended)
    real = at <= lengths
    seen = torch.cat([start, target[:, :-1]], 1).masked_fill(~real, PAD)
    return Pairs(source, torch.arange(task.longest + 2)[None, :] <= lengths + 1, seen, target, real, gold)


def marian(task: Reversal, width: int = 48, heads: int = 2, layers: int = 1, seed: int = 0) -> MarianMTModel:
    """A Marian of random weights, without dropout."""
    torch.manual_seed(seed)
    config = MarianConfig(
        vocab_size=FIRST_SYMBOL + task.symbols, decoder_vocab_size=FIRST_SYMBOL + task.symbols, d_model=width,
        encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=2 * width, decoder_ffn_dim=2 * width, max_position_embeddings=4 * task.longest,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, init_std=0.1, scale_embedding=True,
        pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=START, forced_eos_token_id=EOS,
        bos_token_id=None,
    )  # fmt: skip
    return MarianMTModel(config)


def logits_of(model: Any, pairs: Pairs) -> Float[Tensor, "B N V"]:
    """Teacher-forced logits of one batch."""
    output = model(
        input_ids=pairs.source,
        attention_mask=pairs.source_real.long(),
        decoder_input_ids=pairs.seen,
        decoder_attention_mask=pairs.target_real.long(),
        use_cache=False,
    )
    logits: Tensor = output.logits
    return logits


def accuracy_of(logits: Float[Tensor, "B N V"], pairs: Pairs) -> float:
    """Share of the symbols (not EOS) that are named right."""
    kept = pairs.gold >= 0
    return float((logits[kept].argmax(-1) == pairs.target[kept]).float().mean())


def train_reversal(
    task: Reversal,
    model: Any,
    schedule: Schedule,
    batch: int = 32,
    on_step: OnStep = lambda done, total: None,
    run: Callable[[Any, Pairs], Tensor] = logits_of,
) -> list[float]:
    """Train on fresh batches with Adam; returns the losses. `run` may put the model under another attention."""
    generator = torch.Generator().manual_seed(schedule.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=schedule.rate, betas=(0.9, 0.98))
    losses = []
    for step in range(schedule.steps):
        optimizer.param_groups[0]["lr"] = schedule.rate_at(step)
        pairs = reversal_batch(task, batch, generator)
        logits = run(model, pairs)
        loss = torch.nn.functional.cross_entropy(logits[pairs.target_real], pairs.target[pairs.target_real])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        on_step(step + 1, schedule.steps)
    return losses
