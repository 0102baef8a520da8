"""Which query/key pairs exist at all: neither token is padding, and the key is not in the query's future."""

from dataclasses import dataclass, replace

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
    radius: in a sliding-window layer a key must not be farther than this from the query's own place; None = no limit.
    cross: the keys are those of another text, so no query has a key of its own that a plan would read in any case.
    """

    query_real: Bool[Tensor, "B N"]
    key_real: Bool[Tensor, "B M"]
    causal: bool = False
    query_offset: int = 0
    radius: int | None = None
    cross: bool = False

    def __post_init__(self) -> None:
        if self.query_real.shape[0] != self.key_real.shape[0] or self.query_real.device != self.key_real.device:
            shapes = f"{tuple(self.query_real.shape)} and {tuple(self.key_real.shape)}"
            raise ShapeError(f"legal: expected query and key masks of one batch on one device, got {shapes}")
        if self.query_offset < 0 or (self.radius or 0) < 0:
            came = f"{self.query_offset} and {self.radius}"
            raise ShapeError(f"legal: expected a query_offset and a radius of at least 0, got {came}")

    def allows(self, b: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Is (i, j) a legal pair of item `b`? On broadcastable index tensors."""
        real = self.query_real[b, i] & self.key_real[b, j]
        visible = self.visible(i, j)
        return real if visible is None else real & visible

    def visible(self, i: Tensor, j: Tensor) -> Tensor | None:
        """May query `i` see key `j` as far as positions go? On broadcastable index tensors; None = yes, all."""
        place, visible = i + self.query_offset, None
        if self.radius is not None:
            visible = (j - place).abs() <= self.radius
        if self.causal:
            visible = j <= place if visible is None else visible & (j <= place)
        return visible

    def matrix(self, b: int) -> Bool[Tensor, "N M"]:
        """All legal pairs of one item."""
        device = self.key_real.device
        i = torch.arange(self.query_real.shape[1], device=device)
        return self.allows(b, i[:, None], torch.arange(self.key_real.shape[1], device=device)[None, :])

    def count(self, b: int) -> int:
        """Number of legal pairs of one item, without the matrix."""
        if not self.causal and self.radius is None:
            return int(self.query_real[b].sum()) * int(self.key_real[b].sum())
        last = self.key_real.shape[1] - 1
        place = self.query_real[b].nonzero().squeeze(-1) + self.query_offset
        reach = last if self.radius is None else self.radius
        end, start = place if self.causal else place + reach, place - reach
        seen = torch.nn.functional.pad(self.key_real[b].cumsum(0), (1, 0))  # real keys before each index
        return int((seen[end.clamp(max=last) + 1] - seen[start.clamp(0, last + 1)]).sum())


def legal_from_mask(mask: Bool[Tensor, "B N"], causal: bool = False) -> Legal:
    """Self-attention over padded texts: `mask` is True at real tokens."""
    return Legal(mask, mask, causal)


def legal_full(batch: int, queries: int, keys: int, causal: bool = False, query_offset: int = 0) -> Legal:
    """Every token is real (on the CPU)."""
    query_real = torch.ones(batch, queries, dtype=torch.bool)
    return Legal(query_real, torch.ones(batch, keys, dtype=torch.bool), causal, query_offset)


def legal_to(legal: Legal, device: torch.device | str) -> Legal:
    """The same legal pairs on another device."""
    return replace(legal, query_real=legal.query_real.to(device), key_real=legal.key_real.to(device))


def first_real(legal: Legal) -> Int[Tensor, " B"]:
    """Index of each item's first real key, from which positions and tiles are counted; 0 where all is padding."""
    return legal.key_real.int().argmax(-1)


def last_real(legal: Legal) -> Int[Tensor, " B"]:
    """Index of each item's last real key; the last index where all is padding."""
    return legal.key_real.shape[1] - 1 - legal.key_real.flip(-1).int().argmax(-1)
