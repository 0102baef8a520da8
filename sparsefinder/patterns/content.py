"""Patterns that know what the tokens are. Everything learned is one of two: buckets meet, or a score is high enough."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from sparsefinder.edges import Edges
from sparsefinder.patterns.algebra import Context, Pattern

WORD_BITS = 64


@dataclass(frozen=True, eq=False)
class BucketsMeet(Pattern):
    """A query and a key share at least one bucket (clustering, quantization, LSH, routing: any number of buckets each).

    query_bits, key_bits: either bool, True = the token is in bucket `w`; or int64 words of 64 buckets, see `pack_bits`.
    """

    query_bits: Bool[Tensor, "B H N W"] | Int64[Tensor, "B H N W"]
    key_bits: Bool[Tensor, "B H M W"] | Int64[Tensor, "B H M W"]

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = pack_bits(self.query_bits[b, h, i]), pack_bits(self.key_bits[b, h, j])
        met = (query[..., 0] & key[..., 0]) != 0
        for word in range(1, query.shape[-1]):
            met = met | ((query[..., word] & key[..., word]) != 0)
        return met


def pack_bits(bits: Bool[Tensor, "*any W"] | Int64[Tensor, "*any W"]) -> Int64[Tensor, "*any words"]:
    """Sets as int64 words `[*any, ceil(W / 64)]`: bucket `w` is bit `w % 64` of word `w // 64`. Words stay."""
    if bits.dtype != torch.bool:
        return bits
    words = []
    for start in range(0, max(bits.shape[-1], 1), WORD_BITS):
        part = bits[..., start : start + WORD_BITS].long()
        # Distinct powers of two never carry, so the sum is the union (bit 63 is the sign, and wraps as it should).
        words.append((part << torch.arange(part.shape[-1], device=bits.device)).sum(-1))
    return torch.stack(words, -1)


@dataclass(frozen=True, eq=False)
class ScoreAbove(Pattern):
    """A score in the projected space reaches a threshold.

    kind "euclidean": `‖q'_i − k'_j‖₂ ≤ threshold` (a length, not its square);
    kind "dot": `q'_i · k'_j ≥ threshold`.
    threshold: one per head, or one per item, head and query (budgets per row, scores minus their logsumexp).

    Sums run over the rank one after the other, not in a matrix product, whose last bit may depend on the other tokens:
    the set of pairs is then the same whatever the padding.
    """

    q: Float[Tensor, "B H N r"]
    k: Float[Tensor, "B H M r"]
    threshold: Float[Tensor, " H"] | Float[Tensor, "B H N"]
    kind: Literal["euclidean", "dot"]

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        limit = self.threshold[h] if self.threshold.ndim == 1 else self.threshold[b, h, i]
        score = pair_scores(self.q[b, h, i], self.k[b, h, j], self.kind)
        return score >= limit if self.kind == "dot" else (score <= limit * limit) & (limit >= 0)


def pair_scores(q: Tensor, k: Tensor, kind: Literal["euclidean", "dot"]) -> Tensor:
    """`q·k`, or the squared distance, of vectors `[..., r]` that broadcast; in the same order of summation always."""
    total = torch.zeros_like(q[..., 0] + k[..., 0])
    for axis in range(q.shape[-1]):
        if kind == "dot":
            total += q[..., axis] * k[..., axis]
        else:
            total += (q[..., axis] - k[..., axis]).square_()
    return total


@dataclass(frozen=True, eq=False)
class InEdges(Pattern):
    """Explicitly listed pairs, for gold graphs and oracles."""

    edges: Edges

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        heads, n, m = self.edges.shape[1:]
        owner = torch.arange(self.edges.offsets.shape[0] - 1, device=i.device)
        known = owner.repeat_interleave(self.edges.offsets.diff()) * (n * m) + self.edges.flat
        asked = (b * heads + h) * (n * m) + i * m + j
        at = torch.searchsorted(known, asked.contiguous()).clamp(max=max(known.shape[0] - 1, 0))
        return known[at] == asked if known.shape[0] else torch.zeros_like(asked, dtype=torch.bool)


@dataclass(frozen=True, eq=False)
class Listed(Pattern):
    """A boolean matrix per item and head (small inputs and tests only: it holds `B H N M` entries)."""

    matrix: Bool[Tensor, "B H N M"]

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.matrix[b, h, i, j]
