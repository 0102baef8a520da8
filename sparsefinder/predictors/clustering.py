"""Clustering predictor (Treviso et al., 2022, section 4.3): an edge where the two sets of nearest centroids meet."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.content import BucketsMeet
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors.assemble import require_heads
from sparsefinder.predictors.projections import Item, Projections, Settings, project_item, require_metric


@dataclass(frozen=True, eq=False)
class Clusters:
    """Every query and every key goes to its `top_k[h]` nearest of `B` centroids; an edge if they share one.

    Nearest by Euclidean distance; of equally near centroids the first counts.

    Raises:
        PatternError: bilinear projections, or a `top_k` outside 1..B.
        ShapeError: centroids or `top_k` that do not fit the projections.
    """

    kind: ClassVar[str] = "clusters"
    projections: Projections
    centroids: Float[Tensor, "H B r"]
    top_k: Int[Tensor, " H"]

    def __post_init__(self) -> None:
        require_metric(self.projections, self.kind)
        require_heads("top_k", self.top_k, self.projections)
        heads, rank = self.projections.heads, self.projections.rank
        if self.centroids.ndim != 3 or (self.centroids.shape[0], self.centroids.shape[2]) != (heads, rank):
            raise ShapeError(f"centroids: expected [{heads}, clusters, {rank}], got {tuple(self.centroids.shape)}")
        if self.centroids.shape[1] == 0:
            raise PatternError("centroids: expected at least one per head, got none (fit them first)")
        if self.top_k.min() < 1 or self.top_k.max() > self.centroids.shape[1]:
            raise PatternError(f"top_k: expected 1 to {self.centroids.shape[1]} clusters, got {self.top_k.tolist()}")

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The pairs that share a cluster. Warns where all projected vectors of a head are one and the same."""
        clusters = self.centroids.shape[1]
        query_bits = torch.zeros(*q.shape[:3], clusters, dtype=torch.bool, device=q.device)
        key_bits = torch.zeros(k.shape[0], q.shape[1], k.shape[2], clusters, dtype=torch.bool, device=k.device)
        for b in range(q.shape[0]):
            item = project_item(self.projections, q, k, legal, b)
            _warn_if_identical(item)
            query_bits[b, :, item.rows] = self.members(item.q)
            key_bits[b, :, item.columns] = self.members(item.k)
        return BucketsMeet(query_bits, key_bits)

    def members(self, x: Float[Tensor, "H n r"]) -> Bool[Tensor, "H n B"]:
        """True where centroid `c` is among the `top_k` nearest of a projected vector."""
        total = torch.zeros(*x.shape[:2], self.centroids.shape[1], dtype=x.dtype, device=x.device)
        for dim in range(x.shape[2]):
            total += (x[..., dim, None] - self.centroids[:, None, :, dim]).square()
        rank: Tensor = total.argsort(dim=-1, stable=True).argsort(dim=-1)
        return rank < self.top_k[:, None, None]

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return {"centroids": self.centroids, "top_k": self.top_k, **self.projections.to_tensors()}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return self.projections.settings()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "Clusters":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        return cls(Projections.from_tensors(tensors, settings), tensors["centroids"], tensors["top_k"])


def _warn_if_identical(item: Item) -> None:
    both = torch.cat([item.q, item.k], 1)
    if both.shape[1] < 3:  # one token: its query and key say nothing yet
        return
    heads = (both == both[:, :1]).flatten(1).all(1).nonzero().flatten().tolist()
    if heads:
        message = f"clusters: all projected vectors of heads {heads} are identical, so one cluster holds them all"
        warnings.warn(message, stacklevel=3)


def mixed_share(
    clusters: Clusters, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal
) -> Float[Tensor, " H"]:
    """Share of the clusters in use that hold both queries and keys, per head, over the whole batch, a fraction.

    A cluster of queries alone predicts nothing, so this share bounds the recall (design: 4 % with pair-hinge maps).
    """
    with_q = torch.zeros(clusters.centroids.shape[:2], dtype=torch.bool, device=q.device)
    with_k = with_q.clone()
    for b in range(q.shape[0]):
        item = project_item(clusters.projections, q, k, legal, b)
        with_q |= clusters.members(item.q).any(1)
        with_k |= clusters.members(item.k).any(1)
    return (with_q & with_k).sum(-1) / (with_q | with_k).sum(-1).clamp(min=1)
