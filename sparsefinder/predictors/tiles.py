"""Tile predictor: one summary of a tile's queries against single keys (design: the paper's chunks, made asymmetric).

The score of tile t and key j is `s'_t · k'_j + k_linear · k_j + distance_weight · log(1 + distance)`; what meets the
threshold is the score minus its logsumexp over the keys that the tile may see (objective `listwise`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.algebra import Context, Pattern
from sparsefinder.patterns.legal import Legal
from sparsefinder.plan import KeysPerTile, Plan, ScoreAtLeast, plan_from_tile_scores, tile_count
from sparsefinder.predictors.assemble import require_heads
from sparsefinder.predictors.projections import (
    Projections,
    Settings,
    check_fit,
    expand_heads,
    project_keys,
    project_queries,
)
from sparsefinder.query_tiles import only_positional
from sparsefinder.shapes import head_tiles

QUERIES_BEFORE = 7
NO_KEY = float(np.finfo(np.float32).max)  # thresholds are finite, since artifacts hold finite numbers only
EVERY_KEY = -NO_KEY


@dataclass(frozen=True, eq=False)
class Tiles:
    """A tile reads the keys whose log-share `score − logsumexp` reaches `threshold`, or its `keys_per_tile` best keys.

    threshold: one number, or one per head: `EVERY_KEY` for a head that stays dense, `NO_KEY` for one that needs nothing
        beside the positional pattern.

    Bidirectional: the summary of a tile is the mean of its own queries, and it may see every real key.
    Causal: the list is fixed when the tile opens. The summary is the mean of its first query and the `queries_before`
    before it, and both the choice and the normaliser see the keys up to that first query only; the tile's later keys
    are then always read, by the rows that may (`first_row`). No list depends on a token that comes after its row.

    distance_weight: learned weight per head of `log(1 + distance)`, see `log_distance`; none where it is not given.

    Raises:
        PatternError: not exactly one of `threshold` and `keys_per_tile`, or a count below 1.
        ShapeError: not one distance weight or threshold per head.
    """

    kind: ClassVar[str] = "tiles"
    projections: Projections
    threshold: float | Float[Tensor, " H"] | None = None
    keys_per_tile: int | None = None
    distance_weight: Float[Tensor, " H"] | None = None
    queries_before: int = QUERIES_BEFORE

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.keys_per_tile is None):
            raise PatternError("tiles: expected exactly one of threshold and keys_per_tile")
        if self.keys_per_tile is not None and self.keys_per_tile < 1:
            raise PatternError(f"keys_per_tile: expected at least 1, got {self.keys_per_tile}")
        if self.queries_before < 0:
            raise PatternError(f"queries_before: expected at least 0, got {self.queries_before}")
        if isinstance(self.threshold, Tensor):
            require_heads("threshold", self.threshold, self.projections)
        if self.distance_weight is not None:
            require_heads("distance_weight", self.distance_weight, self.projections)

    def plan(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        legal: Legal,
        positional: Pattern,
        tile_size: int | Int[Tensor, " H"] = 32,
        ctx: Context | None = None,
    ) -> Plan:
        """The plan of chosen keys ∪ positional pattern ∪ every query itself; nothing of size N×M is made.

        Raises:
            PatternError: a causal layer with a query offset (the list of an open tile cannot be made again).
            ShapeError: q, k and the maps do not fit.
            NonFiniteError: NaN in a real token.
        """
        if q.device.type == "cpu" and self.threshold is not None and only_positional(positional):
            from sparsefinder.predictors.tiles_cpu import threshold_plan  # numba is needed on the CPU only

            return threshold_plan(self, q, k, legal, positional, tile_size)
        scores = normalized_scores(self, q, k, legal, tile_size)
        rule = (
            KeysPerTile(self.keys_per_tile or 0) if self.threshold is None else ScoreAtLeast(thresholds(self.threshold))
        )
        return plan_from_tile_scores(scores, rule, positional, legal, tile_size, ctx)

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        own = {"distance_weight": self.distance_weight, "threshold": self.threshold}
        tensors = {name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor)}
        return {**tensors, **self.projections.to_tensors()}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        shared = None if isinstance(self.threshold, Tensor) else self.threshold
        cut = {"threshold": shared, "keys_per_tile": self.keys_per_tile, "queries_before": self.queries_before}
        return {**cut, **self.projections.settings()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "Tiles":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        projections = Projections.from_tensors(tensors, settings)
        cut = (tensors.get("threshold", settings["threshold"]), settings["keys_per_tile"])
        return cls(projections, *cut, tensors.get("distance_weight"), int(settings["queries_before"]))  # type: ignore[arg-type]


def thresholds(threshold: float | Tensor) -> float | tuple[float, ...]:
    """As `ScoreAtLeast` wants it."""
    return tuple(threshold.tolist()) if isinstance(threshold, Tensor) else threshold


def tile_means(
    q: Float[Tensor, "*rest n D"], tile_size: int, causal: bool = False, queries_before: int = QUERIES_BEFORE
) -> Float[Tensor, "*rest T D"]:
    """Mean query of each tile of one item's real tokens: its own rows, or (causal) its first and those before it."""
    n = q.shape[-2]
    starts = range(0, n, tile_size)
    spans = [(max(0, s - queries_before), s + 1) if causal else (s, min(n, s + tile_size)) for s in starts]
    return torch.stack([q[..., low:high, :].mean(-2) for low, high in spans], -2)


def log_distance(tiles: int | Int[Tensor, " T"], keys: int, tile_size: int) -> Float[Tensor, "T m"]:
    """`log(1 + d)`, d in tokens from a key to the nearest row of the tile (0 inside it), both counted from the first
    real token. tiles: how many, or which."""
    start = _which(tiles)[:, None] * tile_size
    key = torch.arange(keys)[None, :]
    return torch.log1p(torch.maximum(start - key, key - (start + tile_size - 1)).clamp(min=0).float())


def visible_keys(tiles: int | Int[Tensor, " T"], keys: int, tile_size: int, causal: bool) -> Bool[Tensor, "T m"]:
    """Keys that tile t's choice and normaliser may see: all, or (causal) those up to its first row."""
    start = _which(tiles)[:, None] * tile_size
    return torch.arange(keys)[None, :] <= start if causal else torch.ones(start.shape[0], keys, dtype=torch.bool)


def _which(tiles: int | Tensor) -> Tensor:
    return tiles if isinstance(tiles, Tensor) else torch.arange(tiles)


def tile_scores(
    projections: Projections,
    distance_weight: Float[Tensor, " H"] | None,
    means: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv m D"],
    tile_size: int,
    causal: bool = False,
    which: Int[Tensor, " T"] | None = None,
) -> Float[Tensor, "B H T m"]:
    """Score minus its logsumexp over the visible keys (`exp` sums to one), −inf for the others. Differentiable.

    The definition, and what training uses. Items must have equal length and no padding. For metric projections the
    score is `−‖s'_t − k'_j‖²`. which: the tiles that the means are of; the first ones where it is not given.
    """
    keys = expand_heads(k, projections.heads)
    if means.shape[1] != projections.heads or means.shape[-1] != projections.q_map.shape[2]:
        expected = f"[B, {projections.heads}, T, {projections.q_map.shape[2]}]"
        raise ShapeError(f"means: expected {expected}, got {tuple(means.shape)}")
    summary, low_k = project_queries(projections, means), project_keys(projections, keys)
    if projections.form == "metric":
        summary, column = 2 * summary, -low_k.square().sum(-1)
    elif projections.k_linear is None:
        column = torch.zeros_like(low_k[..., 0])
    else:
        column = (keys @ projections.k_linear[:, :, None]).squeeze(-1)
    scores = summary @ low_k.transpose(-1, -2) + column[..., None, :]
    tiles, count = scores.shape[-2] if which is None else which, scores.shape[-1]
    if distance_weight is not None:
        scores = scores + distance_weight[:, None, None] * log_distance(tiles, count, tile_size).to(scores)
    hidden = ~visible_keys(tiles, count, tile_size, causal).to(scores.device)
    return torch.log_softmax(scores.masked_fill(hidden, -torch.inf), -1)


def normalized_scores(
    tiles: Tiles, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal, tile_size: int | Tensor = 32
) -> Float[Tensor, "B H T M"]:
    """`tile_scores` of a padded batch, as `plan_from_tile_scores` wants it: −inf at padding and at what is not visible.

    Each item is worked on alone, over its real span, so that its bits do not depend on the batch: by a kernel with a
    fixed order of summation on the CPU, by products of the item's own size elsewhere.

    Raises:
        PatternError: a causal layer with a query offset.
        ShapeError: q, k and the maps do not fit.
    """
    check_call(tiles, q, k, legal)
    sizes = head_tiles(tile_size, tiles.projections.heads)
    shape = (q.shape[0], q.shape[1], tile_count(legal, min(sizes)), k.shape[2])
    out = torch.full(shape, -torch.inf, device=q.device)
    if q.device.type != "cpu":
        _fill_by_item(tiles, q.detach().float(), k.detach().float(), legal, sizes, out)
    else:
        from sparsefinder.predictors.tiles_cpu import fill_cpu

        fill_cpu(tiles, q, k, legal, sizes, torch.zeros(shape[:2], dtype=torch.int64), out)
    return out


def check_call(tiles: Tiles, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> None:
    """Errors as in `normalized_scores`."""
    check_fit(tiles.projections, q, k)
    if legal.causal and legal.query_offset:
        raise PatternError(f"tiles: expected a query_offset of 0 in a causal layer, got {legal.query_offset}")


def _fill_by_item(tiles: Tiles, q: Tensor, k: Tensor, legal: Legal, sizes: tuple[int, ...], out: Tensor) -> None:
    """The definition, item by item and, where heads differ in tile size, size by size."""
    for b in range(q.shape[0]):
        rows, columns = legal.query_real[b].nonzero().flatten(), legal.key_real[b].nonzero().flatten()
        if 0 in (rows.shape[0], columns.shape[0]):
            continue
        begin, row_end, key_end = int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1
        if columns.shape[0] != key_end - begin or int(rows[0]) != begin or rows.shape[0] != row_end - begin:
            raise PatternError("tiles: expected padding at the ends of a text only, got holes or different starts")
        keys = k[b : b + 1, :, begin:key_end].contiguous()
        for size in sorted(set(sizes)):
            means = tile_means(q[b : b + 1, :, begin:row_end].contiguous(), size, legal.causal, tiles.queries_before)
            scores = tile_scores(tiles.projections, tiles.distance_weight, means, keys, size, legal.causal)
            same = torch.tensor([s == size for s in sizes], device=q.device)
            out[b, same, : scores.shape[2], begin:key_end] = scores[0, same]
