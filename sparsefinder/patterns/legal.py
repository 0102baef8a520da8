"""Which query/key pairs exist at all: neither token is padding, and the key is not in the query's future."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sparsefinder.errors import ShapeError


@dataclass(frozen=True, eq=False)
class Legal:
    """Legal pairs of a batch. Applied once, last, when a plan or a mask is built; no pattern knows of it.

    query_real, key_real: True = real token, False = padding (on either side).
    causal: the key's index must not exceed `i + query_offset`.
    query_offset: with a KV cache, row `i` of the queries sits at key index `i + query_offset`.
    """

    query_real: Bool[Tensor, "B N"]
    key_real: Bool[Tensor, "B M"]
    causal: bool = False
    query_offset: int = 0

    def __post_init__(self) -> None:
        if self.query_real.shape[0] != self.key_real.shape[0] or self.query_real.device != self.key_real.device:
            shapes = f"{tuple(self.query_real.shape)} and {tuple(self.key_real.shape)}"
            raise ShapeError(f"legal: expected query and key masks of one batch on one device, got {shapes}")
        if self.query_offset < 0:
            raise ShapeError(f"legal: expected a query_offset of at least 0, got {self.query_offset}")

    def allows(self, b: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Is (i, j) a legal pair of item `b`? On broadcastable index tensors."""
        real = self.query_real[b, i] & self.key_real[b, j]
        return real & (j <= i + self.query_offset) if self.causal else real

    def matrix(self, b: int) -> Bool[Tensor, "N M"]:
        """All legal pairs of one item."""
        device = self.key_real.device
        i = torch.arange(self.query_real.shape[1], device=device)
        return self.allows(b, i[:, None], torch.arange(self.key_real.shape[1], device=device)[None, :])

    def count(self, b: int) -> int:
        """Number of legal pairs of one item, without the matrix."""
        if not self.causal:
            return int(self.query_real[b].sum()) * int(self.key_real[b].sum())
        seen = self.key_real[b].cumsum(0)
        rows = self.query_real[b].nonzero().squeeze(-1) + self.query_offset
        return int(seen[rows.clamp(max=seen.shape[0] - 1)].sum())


def legal_from_mask(mask: Bool[Tensor, "B N"], causal: bool = False) -> Legal:
    """Self-attention over padded texts: `mask` is True at real tokens."""
    return Legal(mask, mask, causal)


def legal_full(batch: int, queries: int, keys: int, causal: bool = False, query_offset: int = 0) -> Legal:
    """Every token is real (on the CPU)."""
    query_real = torch.ones(batch, queries, dtype=torch.bool)
    return Legal(query_real, torch.ones(batch, keys, dtype=torch.bool), causal, query_offset)


def legal_to(legal: Legal, device: torch.device | str) -> Legal:
    """The same legal pairs on another device."""
    return Legal(legal.query_real.to(device), legal.key_real.to(device), legal.causal, legal.query_offset)


def first_real(legal: Legal) -> Int[Tensor, " B"]:
    """Index of each item's first real key, from which positions and tiles are counted; 0 where all is padding."""
    return legal.key_real.int().argmax(-1)


def last_real(legal: Legal) -> Int[Tensor, " B"]:
    """Index of each item's last real key; the last index where all is padding."""
    return legal.key_real.shape[1] - 1 - legal.key_real.flip(-1).int().argmax(-1)
