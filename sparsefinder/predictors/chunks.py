"""Sparsefinder on chunks (Treviso et al., 2022, section 7): contiguous tokens share buckets, which makes blocks.

Two symmetric versions; the asymmetric one, query tiles against single keys, is `Tiles`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors.assemble import require_heads
from sparsefinder.predictors.inverted import squared_to_centroids
from sparsefinder.predictors.projections import (
    Projections,
    Settings,
    project_keys,
    project_queries,
    require_metric,
)
from sparsefinder.predictors.routing import picks, require_centroids
from sparsefinder.predictors.tokens import (
    Members,
    best_of,
    check_call,
    item_tokens,
    meet,
    refuse_causal,
    warn_if_identical,
)


@dataclass(frozen=True, eq=False)
class ChunkClusters:
    """Version 1: the mean query and the mean key of every chunk go to their `top_k` nearest centroids; all pairs of two
    chunks that share one are edges.

    Chunks of `chunk` tokens are counted from the first real token, the last may be shorter. The maps are learned on
    chunks: positive where any pair of their tokens is gold (`training.fit_content.fit_chunks`). A chunk's mean looks
    ahead, so causal layers are refused. Grid: `chunk`, the number of centroids, `top_k`.

    Raises:
        PatternError: bilinear projections, no centroid, a `top_k` outside 1 to the number of centroids, no token.
        ShapeError: centroids that do not fit the projections.
    """

    kind: ClassVar[str] = "chunks"
    whole_sequence: ClassVar[bool] = True
    projections: Projections
    centroids: Float[Tensor, "H B r"]
    top_k: int
    chunk: int

    def __post_init__(self) -> None:
        _check(self.kind, self.projections, self.centroids, self.chunk)
        if not 1 <= self.top_k <= self.centroids.shape[1]:
            raise PatternError(f"top_k: expected 1 to {self.centroids.shape[1]} clusters, got {self.top_k}")

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The pairs of chunks that share a cluster. PatternError where `legal` is causal."""

        def members(low: Float[Tensor, "H T r"]) -> Bool[Tensor, "H T B"]:
            return best_of(-squared_to_centroids(low, self.centroids), self.top_k)

        return _pattern(self, q, k, legal, members)

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return {"centroids": self.centroids, **self.projections.to_tensors()}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return {"top_k": self.top_k, "chunk": self.chunk, **self.projections.settings()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "ChunkClusters":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        numbers = int(settings["top_k"]), int(settings["chunk"])  # type: ignore[arg-type]
        return cls(Projections.from_tensors(tensors, settings), tensors["centroids"], *numbers)


@dataclass(frozen=True, eq=False)
class RoutedChunks:
    """Version 2: Sparsefinder's centroids with Routing's top-k; every centroid picks its `window` nearest chunks of
    queries and of keys, and an edge joins what one centroid picked.

    With `chunk = 1`, the paper's own setting, it picks tokens. window: chunks per centroid; None =
    `ceil(chunks / centroids)`. Nearest by Euclidean distance in the projected space. What nobody picked predicts
    nothing: `unpicked_queries`. Ranks over the whole sequence. Grid: the number of centroids, `window`, `chunk`.

    Raises:
        PatternError: bilinear projections, no centroid, a window or a chunk below 1.
        ShapeError: centroids that do not fit the projections.
    """

    kind: ClassVar[str] = "routed_chunks"
    whole_sequence: ClassVar[bool] = True
    projections: Projections
    centroids: Float[Tensor, "H B r"]
    window: int | None = None
    chunk: int = 1

    def __post_init__(self) -> None:
        _check(self.kind, self.projections, self.centroids, self.chunk)
        if self.window is not None and self.window < 1:
            raise PatternError(f"window: expected at least 1 chunk per centroid, got {self.window}")

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The pairs that one centroid picked. PatternError where `legal` is causal."""

        def members(low: Float[Tensor, "H T r"]) -> Bool[Tensor, "H T B"]:
            return picks(-squared_to_centroids(low, self.centroids).transpose(1, 2), self.window)

        return _pattern(self, q, k, legal, members)

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return {"centroids": self.centroids, **self.projections.to_tensors()}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return {"window": self.window, "chunk": self.chunk, **self.projections.settings()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "RoutedChunks":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        numbers = settings["window"], int(settings["chunk"])  # type: ignore[arg-type]
        return cls(Projections.from_tensors(tensors, settings), tensors["centroids"], *numbers)  # type: ignore[arg-type]


def chunk_means(x: Float[Tensor, "*rest n D"], size: int) -> Float[Tensor, "*rest T D"]:
    """Mean vector of every chunk of one item's real tokens; the last may be shorter."""
    return torch.stack([part.mean(-2) for part in torch.split(x, size, dim=-2)], -2)


def chunk_of(tokens: int, size: int, device: torch.device) -> Int64[Tensor, " n"]:
    """The chunk of each of an item's real tokens."""
    return torch.arange(tokens, device=device) // size


def _check(kind: str, projections: Projections, centroids: Tensor, chunk: int) -> None:
    require_metric(projections, kind)
    require_centroids(centroids)
    require_heads("centroids", centroids[:, 0, 0], projections)
    if centroids.shape[2] != projections.rank:
        raise ShapeError(f"centroids: expected rank {projections.rank}, got {tuple(centroids.shape)}")
    if chunk < 1:
        raise PatternError(f"chunk: expected at least 1 token, got {chunk}")


def _pattern(
    predictor: ChunkClusters | RoutedChunks, q: Tensor, k: Tensor, legal: Legal, members: Callable[[Tensor], Tensor]
) -> Pattern:
    """The meeting of chunk sets, spelled out for their tokens."""
    maps = predictor.projections
    refuse_causal(predictor.kind, legal)
    check_call(predictor.kind, q, k, legal, maps.heads, maps.q_map.shape[2])

    def assign(b: int, rows: Tensor, columns: Tensor) -> Members:
        tokens = item_tokens(q, k, legal, b, maps.q_map.dtype)
        low_q = project_queries(maps, chunk_means(tokens.q, predictor.chunk)[None])[0]
        low_k = project_keys(maps, chunk_means(tokens.k, predictor.chunk)[None])[0]
        warn_if_identical(predictor.kind, low_q, low_k)
        query, key = (chunk_of(x.shape[0], predictor.chunk, x.device) for x in (rows, columns))
        return members(low_q)[:, query], members(low_k)[:, key]

    return meet(q, k, legal, assign)
