"""What each head keeps and loses at every threshold, from held-out graphs: the curves that budgets are allotted on.

Everything is said of the *plan*: pairs that the attention computes, with window, global tokens and every query itself.
A pair has one number, the greatest threshold at which the plan reads it, so one pass over the pairs serves all cuts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, UInt8
from torch import Tensor

from sparsefinder.edges import gold_pairs
from sparsefinder.entmax import entmax
from sparsefinder.errors import ConfigError
from sparsefinder.patterns.algebra import Pattern, union_leaves
from sparsefinder.patterns.legal import Legal
from sparsefinder.patterns.positional import GlobalTokens
from sparsefinder.plan import build_plan, plan_matrix
from sparsefinder.predictors import Distance, Predictor, RowBudget, Score, Tiles
from sparsefinder.predictors.projections import item_scores, project_item
from sparsefinder.predictors.tiles import normalized_scores
from training.cut import Curve
from training.extract import LayerData
from training.point_kernels import level_sums
from training.scores import legal_of, row_ranks
from training.values import LayerValues

# Shares of a head's scored pairs at which it may be cut: closer where few are kept.
GRID = (
    0.0, 0.002, 0.004, 0.007, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.125, 0.15, 0.18, 0.22, 0.26,
    0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0,
)  # fmt: skip
ROWS = 512  # of each instance that are looked at, at most
ENTMAX_ROWS = 64  # of those, for errors that take one entmax for every threshold
Cuttable = Tiles | Distance | Score | RowBudget


@dataclass(frozen=True, eq=False)
class Points:
    """Means over instances at the thresholds of every head of one layer, thresholds falling (scores: more is sooner).

    density: pairs that are computed / legal pairs. recall, mass: of the teacher's graph and attention. error: the
    squared length of what the head's output, through the output matrix, is off, as a share of that of the whole layer's
    output; NaN where no values are known.
    """

    threshold: Float64[np.ndarray, "H P"]
    density: Float64[np.ndarray, "H P"]
    recall: Float64[np.ndarray, "H P"]
    mass: Float64[np.ndarray, "H P"]
    error: Float64[np.ndarray, "H P"]


def layer_points(
    predictor: Predictor,
    data: LayerData,
    items: Sequence[int],
    positional: Pattern,
    tile_size: int,
    *,
    values: LayerValues | None = None,
    thresholds: Float64[np.ndarray, "H P"] | None = None,
    rows: int = ROWS,
) -> Points:
    """Points of one layer over some of its instances; thresholds on a grid where none are given.

    rows: so many query rows of an instance, evenly spread, stand for all of them.

    Raises:
        ConfigError: a kind of predictor that no threshold cuts.
    """
    served = cuttable(predictor)
    if thresholds is None:
        thresholds = grid_thresholds(served, data, items, positional, tile_size)
    heads, count = thresholds.shape
    found = np.full((4, len(items), heads, count), np.nan)
    for at, b in enumerate(items):
        item = _item(data, b, positional, tile_size, values, rows)
        scores = plan_scores(served, data, b, positional, tile_size)
        for head in range(heads):
            found[:, at, head] = _head(item, head, scores[head][item.score_rows(scores[head])], thresholds[head])
    return Points(thresholds, *_means(found))


def point_curves(points: Points) -> list[Curve]:
    """The curve of every head, of the pairs that its plan computes."""
    found = []
    for row in zip(points.threshold, 1 - points.density, points.recall, strict=True):
        threshold, sparsity, recall = (torch.from_numpy(part.copy()) for part in row)
        found.append(Curve(threshold, sparsity, recall, forced=True))
    return found


def cuttable(predictor: Predictor | None) -> Cuttable:
    """The predictor, if thresholds or budgets per head cut it. ConfigError where they do not."""
    if not isinstance(predictor, Tiles | Distance | Score | RowBudget):
        kind = "none" if predictor is None else predictor.kind
        raise ConfigError(f"calibrate: expected tiles, distance, score or budget predictors, got {kind}")
    return predictor


def grid_thresholds(
    predictor: Cuttable, data: LayerData, items: Sequence[int], positional: Pattern, tile_size: int
) -> Float64[np.ndarray, "H P"]:
    """Thresholds of every head that keep the shares `GRID` of what is scored: the first none, the last everything."""
    heads = predictor.projections.heads
    seen: list[list[np.ndarray]] = [[] for _ in range(heads)]
    for b in items:
        scores = plan_scores(predictor, data, b, positional, tile_size)
        for head in range(heads):
            part = scores[head].numpy()
            seen[head].append(part[np.isfinite(part)])
    found = np.empty((heads, len(GRID)))
    for head, parts in enumerate(seen):
        found[head] = _between(np.sort(np.concatenate(parts)).astype(np.float64))
    return found


def _between(ascending: Float64[np.ndarray, " S"]) -> Float64[np.ndarray, " P"]:
    """Thresholds at the shares of `GRID`, midway between two different scores, so that rounding moves no pair."""
    if not ascending.size:
        return np.zeros(len(GRID))
    least = ascending[ascending.size - np.maximum(np.round(np.array(GRID) * ascending.size).astype(np.int64), 1)]
    below = np.searchsorted(ascending, least, side="left")
    lower = np.where(below > 0, ascending[np.maximum(below - 1, 0)], least - 1)
    return np.concatenate([ascending[-1:] + 1, ((least + lower) / 2)[1:]])


def plan_scores(
    predictor: Cuttable, data: LayerData, b: int, positional: Pattern, tile_size: int
) -> list[Float[Tensor, "R m"]]:
    """For every head the score at which the plan begins to read a key, one row per tile (`Tiles`) or per query.

    A token's pair widens to its tile: to all rows, or (causal) to those from its own on. −inf = never.
    """
    q, k, legal = data.q[b : b + 1], data.k[b : b + 1], legal_of(data, b)
    if isinstance(predictor, Tiles):
        return list(normalized_scores(predictor, q, k, legal, tile_size)[0])
    item, n = project_item(predictor.projections, q, k, legal, 0), q.shape[2]
    visible = legal.matrix(0)[item.rows][:, item.columns]
    own = visible & (item.rows >= _global_rows(positional, legal))[:, None]  # a global row is a tile of its own
    found = []
    for head in range(predictor.projections.heads):
        scores = item_scores(predictor.projections.form, item, head)
        scores = row_ranks(scores, visible) if isinstance(predictor, RowBudget) else scores
        scores = scores.masked_fill(~own, -torch.inf)
        parts = torch.split(scores, tile_size)  # extraction pads on the right: tiles start at the first row
        wide = [part.cummax(0).values if legal.causal else part.amax(0, keepdim=True).expand_as(part) for part in parts]
        whole = torch.full((n, k.shape[2]), -torch.inf)
        whole[item.rows[:, None], item.columns] = torch.cat(wide).float()
        found.append(whole)
    return found


def _global_rows(positional: Pattern, legal: Legal) -> int:
    counts = [
        int(leaf.of_item(0, legal.key_real)) for leaf in union_leaves(positional) if isinstance(leaf, GlobalTokens)
    ]
    return max(counts, default=0)


@dataclass(frozen=True, eq=False)
class _Item:
    """What all heads of one instance share: the rows looked at, what they may see, and what is kept in any case."""

    data: LayerData
    b: int
    tile_size: int
    values: LayerValues | None
    real: int
    rows: Int[Tensor, " R"]
    visible: Bool[Tensor, "R m"]
    always: Bool[Tensor, "R m"]

    def score_rows(self, scores: Float[Tensor, "S n"]) -> tuple[Tensor, slice]:
        """Where the rows stand in a predictor's scores, which come by tile or by query."""
        by_tile = scores.shape[0] < self.data.q.shape[2]
        return self.rows // self.tile_size if by_tile else self.rows, slice(0, self.real)


def _item(data: LayerData, b: int, positional: Pattern, tile_size: int, values: LayerValues | None, rows: int) -> _Item:
    legal, real = legal_of(data, b), int(data.mask[b].sum())
    some = torch.arange(0, real, max(1, real // rows))
    always = plan_matrix(build_plan(positional, legal, tile_size, heads=1), legal, 0, 0)
    return _Item(data, b, tile_size, values, real, some, legal.matrix(0)[some, :real], always[some, :real])


def _head(
    item: _Item, head: int, scores: Float[Tensor, "R m"], thresholds: Float64[np.ndarray, " P"]
) -> Float64[np.ndarray, "4 P"]:
    """Density, recall, mass and error of one instance and head at every threshold."""
    data, values, b = item.data, item.values, item.b
    kv, count = head // (data.q.shape[1] // data.k.shape[1]), thresholds.shape[0]
    z = (data.q[b, head, item.rows] * data.scale[head]) @ data.k[b, kv, : item.real].T
    p = entmax(z, data.alpha, item.visible)
    gold = gold_pairs(p, data.alpha, data.gold_mass)
    level = _levels(scores, item.always, torch.from_numpy(thresholds[::-1].astype(np.float32)))
    v = torch.zeros(item.real, 0) if values is None else values.v[b, kv, : item.real] @ values.root[head].T
    sums, ends = np.zeros((4, item.rows.shape[0], count)), item.visible.sum(-1)
    arrays = (np.ascontiguousarray(x.numpy()) for x in (p, gold, level, ends, v))
    softmax = values is not None and data.alpha == 1
    level_sums(*arrays, softmax, *sums)
    if values is not None and not softmax:
        few = slice(None, None, max(1, p.shape[0] // ENTMAX_ROWS))
        errors = _entmax_errors(z[few], p[few], level[few], item.visible[few], v, data.alpha, count)
        sums[3] = errors.mean(0)  # summed over all rows below
    power = 0.0 if values is None else float(values.power[b]) * item.rows.shape[0] / item.real
    whole = np.array([float(ends.sum()), float(gold.sum()), float((ends > 0).sum()), power])[:, None]
    return np.where(whole > 0, sums.sum(1) / np.where(whole > 0, whole, 1.0), np.nan)


def _levels(
    scores: Float[Tensor, "R m"], always: Bool[Tensor, "R m"], ascending: Float[Tensor, " P"]
) -> UInt8[Tensor, "R m"]:
    """How many thresholds are above each score: the first point that keeps the pair, 0 where it is kept in any case."""
    above = ascending.shape[0] - torch.searchsorted(ascending, scores.contiguous(), right=True)
    return above.masked_fill(always, 0).to(torch.uint8)


def _entmax_errors(
    z: Tensor, p: Tensor, level: Tensor, visible: Tensor, v: Float[Tensor, "m r"], alpha: float, count: int
) -> Float64[np.ndarray, "R P"]:
    """`‖o − o_g‖²` of every row where entmax, over the kept pairs, finds another threshold and so other weights."""
    whole = p @ v
    found = [(entmax(z, alpha, visible & (level <= g)) @ v - whole).square().sum(-1) for g in range(count)]
    return torch.stack(found, -1).double().numpy()


def _means(found: Float64[np.ndarray, "4 I H P"]) -> list[Float64[np.ndarray, "H P"]]:
    """Over instances, those left out that say nothing (no gold pair)."""
    known = ~np.isnan(found)
    total, count = np.where(known, found, 0.0).sum(1), known.sum(1)
    return list(np.where(count > 0, total / np.maximum(count, 1), np.nan))
