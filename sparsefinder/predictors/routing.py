"""Routing Transformer (Roy et al., 2021, section 4): every centroid picks its nearest tokens; online k-means."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
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
    refuse_causal,
    warn_if_identical,
)


@dataclass(frozen=True, eq=False)
class Routing:
    """Centroid c picks the `window` queries and the `window` keys with the greatest `c · x`; an edge if one centroid
    picked both.

    x: the token's query or key on the unit ball (`on_unit_ball`), not projected. window: tokens per centroid; None =
    `ceil(tokens / centroids)`, the paper's balanced choice, for queries and keys apart. A token may be picked several
    times or never: `unpicked_queries(pattern, legal)` counts those that then predict nothing. Padding never competes.
    Ranks over the whole sequence. The centroids come from `ema_update`. Grid: the number of centroids, `window`.

    Raises:
        PatternError: no centroid (they are not fitted yet), or a window below 1.
        ShapeError: centroids that are not `[heads, clusters, head_dim]`.
    """

    kind: ClassVar[str] = "routing"
    whole_sequence: ClassVar[bool] = True
    centroids: Float[Tensor, "H B D"]
    window: int | None = None

    def __post_init__(self) -> None:
        require_centroids(self.centroids)
        if self.window is not None and self.window < 1:
            raise PatternError(f"window: expected at least 1 token per centroid, got {self.window}")

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The pairs that one centroid picked. PatternError where `legal` is causal."""
        refuse_causal(self.kind, legal)
        heads, _, dim = self.centroids.shape
        check_call(self.kind, q, k, legal, heads, dim)

        def assign(b: int, rows: Tensor, columns: Tensor) -> Members:
            tokens = item_tokens(q, k, legal, b, self.centroids.dtype)
            warn_if_identical(self.kind, tokens.q, tokens.k)
            query, key = (self.centroids @ on_unit_ball(x).transpose(1, 2) for x in (tokens.q, tokens.k))
            return picks(query, self.window), picks(key, self.window)

        return meet(q, k, legal, assign)

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return {"centroids": self.centroids}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return {"window": self.window}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "Routing":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        return cls(tensors["centroids"], settings["window"])  # type: ignore[arg-type]


def picks(nearness: Float[Tensor, "H B n"], window: int | None) -> Tensor:
    """True `[H, n, B]` where the centroid picks the token: the `window` (None: `ceil(n / B)`) greatest of its row."""
    count = -(-nearness.shape[2] // nearness.shape[1]) if window is None else window
    return best_of(nearness, count).transpose(1, 2)


def on_unit_ball(x: Float[Tensor, "*any D"]) -> Float[Tensor, "*any D"]:
    """Layer norm without scale and bias, then length one: `(x − mean) / ‖x − mean‖`; zero where x is constant."""
    centred = x - x.mean(-1, keepdim=True)
    length: Tensor = centred.norm(dim=-1, keepdim=True)
    return centred / length.clamp(min=1e-12)


def require_centroids(centroids: Float[Tensor, "H B r"]) -> None:
    """Raise ShapeError or PatternError unless there are centroids for every head."""
    if centroids.ndim != 3:
        raise ShapeError(f"centroids: expected [heads, clusters, dim], got {tuple(centroids.shape)}")
    if centroids.shape[1] == 0:
        raise PatternError("centroids: expected at least one per head, got none (fit them first)")


def ema_update(
    centroids: Float[Tensor, "H C D"],
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    legal: Legal,
    decay: float = 0.999,
) -> Float[Tensor, "H C D"]:
    """One step of online k-means on a batch: `c ← decay c + (1 − decay) mean`, back to length one.

    mean: of the queries and keys, on the unit ball, whose nearest centroid is c (the paper writes the sum over tokens,
    which would grow with the batch). Real tokens only; a centroid that nobody is nearest to stays as it is.

    Raises:
        PatternError: a decay outside 0 to 1.
        ShapeError, NonFiniteError: as in `Routing.pattern`.
    """
    if not 0.0 <= decay <= 1.0:
        raise PatternError(f"decay: expected a fraction from 0 to 1, got {decay}")
    require_centroids(centroids)
    heads, clusters, dim = centroids.shape
    check_call("routing", q, k, legal, heads, dim)
    total, count = torch.zeros_like(centroids), centroids.new_zeros(heads, clusters)
    for b in range(q.shape[0]):
        tokens = item_tokens(q, k, legal, b, centroids.dtype)
        points = on_unit_ball(torch.cat([tokens.q, tokens.k], 1))
        nearest = (points @ centroids.transpose(1, 2)).argmax(-1)
        total.scatter_add_(1, nearest[..., None].expand_as(points), points)
        count.scatter_add_(1, nearest, torch.ones_like(points[..., 0]))
    moved = decay * centroids + (1 - decay) * total / count.clamp(min=1)[..., None]
    moved = moved / moved.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return torch.where(count[..., None] > 0, moved, centroids)
