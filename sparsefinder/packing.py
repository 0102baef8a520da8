"""Batches without padding: all of an encoder but its attention sees the texts as one long row of real tokens.

Linear layers cost the same for a padding token as for a real one. Inside `packed`, a model reads the real tokens of a
batch one text after the other, each with its own positions; attention alone takes the row apart again, so that no text
sees another. Ours (`hf`) then works on the padded batch as ever, the original model's runs text by text.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sparsefinder-original"
TOLERANCE = 1e-4
PROBE_LENGTHS = (16, 5, 9)


@dataclass(frozen=True, eq=False)
class Row:
    """How the real tokens of a batch `[B, N]` lie in one row of T tokens."""

    mask: Bool[Tensor, "B N"]
    places: Int[Tensor, " T"]  # of each token in the padded batch, flattened

    @staticmethod
    def of(mask: Bool[Tensor, "B N"]) -> "Row":
        """The row of a batch whose real tokens are where `mask` is True."""
        return Row(mask, mask.flatten().nonzero().flatten())

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return [int(count) for count in self.mask.sum(1).tolist()]

    def take(self, padded: Tensor) -> Tensor:
        """From a padded batch `[B, N, ...]` to the row `[1, T, ...]`."""
        return padded.flatten(0, 1)[self.places].unsqueeze(0)

    def spread(self, row: Tensor) -> Tensor:
        """From a row `[1, T, ...]` to the padded batch `[B, N, ...]`, with zeros where there is no token."""
        flat = row.new_zeros(self.mask.numel(), *row.shape[2:])
        return flat.index_copy_(0, self.places, row[0]).view(*self.mask.shape, *row.shape[2:])


class _Thread(threading.local):
    row: Row | None = None


_THREAD = _Thread()


def current_row() -> Row | None:
    """The row that this thread's forward pass reads, None outside of `packed`."""
    return _THREAD.row


@contextlib.contextmanager
def packed(row: Row) -> Iterator[None]:
    """Let the forward passes inside read this row instead of a padded batch."""
    _THREAD.row = row
    try:
        yield
    finally:
        _THREAD.row = None


def packed_hidden(model: Any, tokens: Int[Tensor, "B N"], mask: Bool[Tensor, "B N"]) -> Float[Tensor, "B N d"]:
    """Last hidden states of a right-padded batch, computed without its padding (zeros there)."""
    row = Row.of(mask)
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask) + _first_position(model)
    with packed(row):
        hidden = model(input_ids=row.take(tokens), position_ids=row.take(positions)).last_hidden_state
    return row.spread(hidden)


def _first_position(model: Any) -> int:
    """0, or where RoBERTa begins to count."""
    embeddings = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    padding = getattr(embeddings, "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


def can_pack(model: Any) -> bool:
    """Whether an encoder gives the same hidden states packed as padded: tried on three texts of random tokens.

    The model must call either this project's attention (`hf.attach`) or that of `NAME`. One with sliding windows may
    pass this trial and still be wrong on longer texts: do not ask for it.
    """
    device, vocabulary = next(model.parameters()).device, int(model.config.vocab_size)
    width = max(PROBE_LENGTHS)
    tokens = torch.randint(vocabulary, (len(PROBE_LENGTHS), width), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(width)[None, :] < torch.tensor(PROBE_LENGTHS)[:, None]
    tokens, mask = tokens.to(device), mask.to(device)
    with torch.inference_mode():
        expected = model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        try:
            came = packed_hidden(model, tokens, mask)
        except (TypeError, ValueError, RuntimeError, IndexError):  # it takes no positions, or none that begin anew
            return False
    return float((came - expected)[mask].abs().max()) <= TOLERANCE


def _text_by_text(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **rest: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' own scaled dot product attention; inside `packed`, of each text by itself."""
    row = current_row()
    if row is None:
        return sdpa_attention_forward(module, q, k, v, mask, **rest)
    queries, keys, values = (torch.split(x, row.lengths, dim=2) for x in (q, k, v))
    texts = zip(queries, keys, values, strict=True)
    outputs = [sdpa_attention_forward(module, *text, attention_mask=None, **rest)[0] for text in texts]
    return torch.cat(outputs, 1), None


def _no_mask_inside(*args: Any, **said: Any) -> Tensor | None:
    return sdpa_mask(*args, **said) if current_row() is None else None


AttentionInterface.register(NAME, _text_by_text)
AttentionMaskInterface.register(NAME, _no_mask_inside)
