"""Inverted lists: every key is in one cluster, and a query probes the few clusters that promise most."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from sparsefinder.errors import ShapeError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors.assemble import require_heads
from sparsefinder.predictors.projections import Projections, Settings, project_item, require_metric
from sparsefinder.predictors.routing import require_centroids
from sparsefinder.predictors.tokens import Members, check_call, item_tokens, meet, one_hot, warn_if_identical


@dataclass(frozen=True, eq=False)
class InvertedLists:
    """Key j is in the cluster of its nearest centroid; query i probes cluster c, and so reads its keys, where
    `scale[h] q_i · c + log size(c) − logsumexp over the clusters ≥ threshold`.

    That is the log-share of softmax attention that c would get if each of its keys were its centroid. size(c): legal
    keys in c, for a causal layer those up to the query, so that no row depends on later tokens; a cluster without any
    is never probed. Nearest by `‖root[h] (k − c)‖₂`, the first of equally near ones. Nothing of size N × M.
    root: `E[q qᵀ]^{1/2}` makes that distance the expected error of the score when c stands for k, which is what counts;
        None = plain Euclidean distance. Root and centroids: `training.fit_content.fit_inverted`.
    Grid: the number of centroids, `threshold` (natural log of a share, so from about −12 to 0).

    Raises:
        PatternError: no centroid (they are not fitted yet).
        ShapeError: centroids that are not `[heads, clusters, head_dim]`, a root that does not fit them, or not one
            scale per head.
    """

    kind: ClassVar[str] = "inverted"
    whole_sequence: ClassVar[bool] = False
    centroids: Float[Tensor, "H B D"]
    scale: Float[Tensor, " H"]
    threshold: float
    root: Float[Tensor, "H D D"] | None = None

    def __post_init__(self) -> None:
        require_centroids(self.centroids)
        heads, _, dim = self.centroids.shape
        if self.root is not None and tuple(self.root.shape) != (heads, dim, dim):
            raise ShapeError(f"root: expected {(heads, dim, dim)}, got {tuple(self.root.shape)}")
        if tuple(self.scale.shape) != (heads,):
            raise ShapeError(f"scale: expected one for each of {heads} heads, got {self.scale.shape}")

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The pairs of a query and the keys of the clusters that it probes."""
        heads, _, dim = self.centroids.shape
        check_call(self.kind, q, k, legal, heads, dim)

        def assign(b: int, rows: Tensor, columns: Tensor) -> Members:
            tokens = item_tokens(q, k, legal, b, self.centroids.dtype)
            warn_if_identical(self.kind, tokens.q, tokens.k)
            scores = self.scale[:, None, None] * tokens.q @ self.centroids.transpose(1, 2)
            members = one_hot(self._nearest(tokens.k), self.centroids.shape[1])
            return probed(scores, members, _seen(legal, rows, columns), self.threshold), members

        return meet(q, k, legal, assign)

    def _nearest(self, k: Float[Tensor, "H m D"]) -> Int64[Tensor, "H m"]:
        if self.root is None:
            return nearest_centroid(k, self.centroids)
        return nearest_centroid(*(x @ self.root.transpose(1, 2) for x in (k, self.centroids)))

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        root = {} if self.root is None else {"root": self.root}
        return {"centroids": self.centroids, "scale": self.scale, **root}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return {"threshold": self.threshold}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "InvertedLists":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        threshold = float(settings["threshold"])  # type: ignore[arg-type]
        return cls(tensors["centroids"], tensors["scale"], threshold, tensors.get("root"))


@dataclass(frozen=True, eq=False)
class InvertedClusters:
    """`InvertedLists` in a learned metric space: the score of cluster c is `−‖q'_i − c‖²`, keys are clustered by k'.

    Cheaper (rank instead of head_dim), and as good as the maps. Grid: the number of centroids, `threshold`.

    Raises:
        PatternError: bilinear projections (clusters in that space mean nothing), or no centroid.
        ShapeError: centroids that do not fit the projections.
    """

    kind: ClassVar[str] = "inverted_metric"
    whole_sequence: ClassVar[bool] = False
    projections: Projections
    centroids: Float[Tensor, "H B r"]
    threshold: float

    def __post_init__(self) -> None:
        require_metric(self.projections, self.kind)
        require_centroids(self.centroids)
        require_heads("centroids", self.centroids[:, 0, 0], self.projections)
        if self.centroids.shape[2] != self.projections.rank:
            raise ShapeError(f"centroids: expected rank {self.projections.rank}, got {tuple(self.centroids.shape)}")

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The pairs of a query and the keys of the clusters that it probes."""
        check_call(self.kind, q, k, legal, self.projections.heads, self.projections.q_map.shape[2])

        def assign(b: int, rows: Tensor, columns: Tensor) -> Members:
            item = project_item(self.projections, q, k, legal, b)
            warn_if_identical(self.kind, item.q, item.k)
            scores = -squared_to_centroids(item.q, self.centroids)
            members = one_hot(nearest_centroid(item.k, self.centroids), self.centroids.shape[1])
            return probed(scores, members, _seen(legal, rows, columns), self.threshold), members

        return meet(q, k, legal, assign)

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return {"centroids": self.centroids, **self.projections.to_tensors()}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return {"threshold": self.threshold, **self.projections.settings()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "InvertedClusters":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        threshold = float(settings["threshold"])  # type: ignore[arg-type]
        return cls(Projections.from_tensors(tensors, settings), tensors["centroids"], threshold)


def squared_to_centroids(x: Float[Tensor, "H n r"], centroids: Float[Tensor, "H B r"]) -> Float[Tensor, "H n B"]:
    """`‖x − c‖²`, summed dimension after dimension, so that a batch changes no bit."""
    total = torch.zeros(*x.shape[:2], centroids.shape[1], dtype=x.dtype, device=x.device)
    for axis in range(x.shape[2]):
        total += (x[..., axis, None] - centroids[:, None, :, axis]).square_()
    return total


def nearest_centroid(x: Float[Tensor, "H n r"], centroids: Float[Tensor, "H B r"]) -> Int64[Tensor, "H n"]:
    """The nearest centroid of every vector; the first of equally near ones."""
    return squared_to_centroids(x, centroids).argmin(-1)


def probed(
    scores: Float[Tensor, "H n B"], members: Bool[Tensor, "H m B"], seen: Tensor | None, threshold: float
) -> Bool[Tensor, "H n B"]:
    """Clusters that every query probes: `log-share ≥ threshold` (see `InvertedLists`).

    seen: for each query, how many of the keys, the first ones, it may see; None = all.
    """
    if seen is None:
        size = members.sum(1)[:, None, :]
    else:
        counts = torch.nn.functional.pad(members.cumsum(1), (0, 0, 1, 0))  # [H, m + 1, B], of the first 0, 1, … keys
        size = counts[:, seen]
    weighted = scores + size.to(scores).log()  # log 0 = −inf: a cluster without keys gets no share
    return (weighted - weighted.logsumexp(-1, keepdim=True) >= threshold) & (size > 0)


def _seen(legal: Legal, rows: Tensor, columns: Tensor) -> Tensor | None:
    return torch.searchsorted(columns, rows + legal.query_offset, right=True) if legal.causal else None
