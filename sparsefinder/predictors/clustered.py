"""Clustered attention (Vyas et al., 2020, section 3): clusters of queries read the best keys of their centroid."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors.projections import Settings
from sparsefinder.predictors.tokens import (
    Members,
    best_of,
    check_call,
    item_tokens,
    meet,
    one_hot,
    refuse_causal,
    warn_if_identical,
)

ITERATIONS = 10


@dataclass(frozen=True, eq=False)
class Clustered:
    """Query i reads the `keys` keys with the greatest `centroid · k`, where the centroid is the mean query of i's
    cluster.

    As in the paper, queries are hashed to the signs of `hashes @ q` and clustered by k-means in Hamming distance over
    the item's own real queries (`hamming_clusters`), so it ranks over the whole sequence, and nothing is learned.
    hashes: Gaussian, one per bit and head (`clustered_hashes`). Grid: `clusters`, `keys`.

    Raises:
        ShapeError: hashes that are not `[heads, bits, head_dim]`.
        PatternError: fewer than one cluster or key.
    """

    kind: ClassVar[str] = "clustered"
    whole_sequence: ClassVar[bool] = True
    hashes: Float[Tensor, "H bits D"]
    clusters: int
    keys: int

    def __post_init__(self) -> None:
        if self.hashes.ndim != 3 or 0 in self.hashes.shape:
            raise ShapeError(
                f"hashes: expected [heads, bits, head_dim], none of them 0, got {tuple(self.hashes.shape)}"
            )
        if self.clusters < 1 or self.keys < 1:
            raise PatternError(f"clustered: expected at least 1 cluster and key, got {self.clusters} and {self.keys}")

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The pairs of a query and its centroid's keys. PatternError where `legal` is causal."""
        refuse_causal(self.kind, legal)
        check_call(self.kind, q, k, legal, self.hashes.shape[0], self.hashes.shape[2])

        def assign(b: int, rows: Tensor, columns: Tensor) -> Members:
            tokens = item_tokens(q, k, legal, b, self.hashes.dtype)
            warn_if_identical(self.kind, tokens.q, tokens.k)
            codes = tokens.q @ self.hashes.transpose(1, 2) > 0
            members = one_hot(hamming_clusters(codes, self.clusters), self.clusters)
            return members, self._keys(tokens.q, tokens.k, members)

        return meet(q, k, legal, assign)

    def _keys(
        self, q: Float[Tensor, "H n D"], k: Float[Tensor, "H m D"], members: Bool[Tensor, "H n C"]
    ) -> Bool[Tensor, "H m C"]:
        weight = members.to(q).transpose(1, 2)
        centroids = weight @ q / weight.sum(-1, keepdim=True).clamp(min=1)  # an empty cluster has no query to serve
        return best_of(centroids @ k.transpose(1, 2), self.keys).transpose(1, 2)

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return {"hashes": self.hashes}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return {"clusters": self.clusters, "keys": self.keys}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "Clustered":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        return cls(tensors["hashes"], int(settings["clusters"]), int(settings["keys"]))  # type: ignore[arg-type]


def clustered_hashes(heads: int, head_dim: int, bits: int, seed: int) -> Float[Tensor, "H bits D"]:
    """Gaussian hash directions of `Clustered` (the paper: 63 bits)."""
    return torch.randn(heads, bits, head_dim, generator=torch.Generator().manual_seed(seed))


def hamming_clusters(codes: Bool[Tensor, "H n bits"], clusters: int) -> Int64[Tensor, "H n"]:
    """k-means of bit strings: nearest centroid in Hamming distance, then the majority of every bit; whole numbers only.

    It starts at tokens evenly spread over the sequence (no random number, so padding and batch change nothing) and
    takes at most `ITERATIONS` rounds. Of equally near centroids the first counts; a tie of votes sets the bit; a
    centroid that nobody is nearest to stays.
    """
    heads, tokens, _ = codes.shape
    start = torch.arange(clusters, device=codes.device) * tokens // clusters
    bits = codes.to(torch.float32)  # counts of at most some thousand are exact
    centroids, nearest = bits[:, start], torch.full((heads, tokens), -1, device=codes.device)
    for _ in range(ITERATIONS):
        differing = bits.sum(-1)[..., None] + centroids.sum(-1)[:, None] - 2 * bits @ centroids.transpose(1, 2)
        found = differing.argmin(-1)
        if torch.equal(found, nearest):
            break
        nearest = found
        weight = one_hot(nearest, clusters).to(bits).transpose(1, 2)
        size = weight.sum(-1, keepdim=True)
        centroids = torch.where(size > 0, (2 * (weight @ bits) >= size).to(bits), centroids)
    return nearest
