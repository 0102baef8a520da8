"""Scores of every legal pair of held-out instances, in the form that `cut.curve` reads: one `Part` per instance.

The arithmetic is the predictors' own, so a threshold found here means the same there.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsefinder.edges import edges_matrix
from sparsefinder.patterns.algebra import Pattern, context_of, union_leaves
from sparsefinder.patterns.legal import Legal, legal_from_mask
from sparsefinder.patterns.positional import GlobalTokens, Nothing
from sparsefinder.predictors import Clusters, Projections, Tiles
from sparsefinder.predictors.projections import Item, item_scores, project_item
from sparsefinder.predictors.tiles import normalized_scores
from training.cut import Part
from training.extract import LayerData


def legal_of(data: LayerData, item: int) -> Legal:
    """The legal pairs of one instance."""
    return legal_from_mask(data.mask[item : item + 1], data.causal)


def pair_parts(
    projections: Projections, data: LayerData, items: Sequence[int], positional: Pattern, budget: bool = False
) -> list[list[Part]]:
    """`parts[head][instance]`: the scores that `Distance`, `Score` or (with `budget`) `RowBudget` cut.

    Metric scores are minus the *squared* distance. A budget's score is minus the share of the row's keys that rank
    before: `density = −threshold`.
    """
    parts: list[list[Part]] = [[] for _ in range(projections.heads)]
    for b in items:
        item, legal, visible = _projected(projections, data, b)
        always = _always(positional, legal, item)
        for head in range(projections.heads):
            scores = item_scores(projections.form, item, head)
            if budget:
                scores = row_ranks(scores, visible)
            parts[head].append(_part(scores, always, visible, _gold(data, b, head, item)))
    return parts


def cluster_parts(clusters: Clusters, data: LayerData, items: Sequence[int], positional: Pattern) -> list[list[Part]]:
    """`parts[head][instance]`: minus the least `top_k` at which the pair shares a cluster, so `top_k = −threshold`."""
    heads = clusters.projections.heads
    parts: list[list[Part]] = [[] for _ in range(heads)]
    for b in items:
        item, legal, visible = _projected(clusters.projections, data, b)
        always = _always(positional, legal, item)
        for head in range(heads):
            scores = -meeting_top(item.q[head], item.k[head], clusters.centroids[head]).to(torch.float32)
            parts[head].append(_part(scores, always, visible, _gold(data, b, head, item)))
    return parts


def tile_parts(tiles: Tiles, data: LayerData, items: Sequence[int], positional: Pattern, size: int) -> list[list[Part]]:
    """`parts[head][instance]`: the tile predictor's scores of (tile, key), standing for the rows of the tile.

    Keys that the plan reads in any case (positional, and the tile's own rows) are +inf. The one row of a global token
    is counted with its tile: a slight over-estimate of sparsity that the measured plan does not have.
    """
    columns = _without_global_rows(positional)
    parts: list[list[Part]] = [[] for _ in range(tiles.projections.heads)]
    for b in items:
        legal = legal_of(data, b)
        n = int(data.mask[b].sum())  # extraction pads on the right
        scores = normalized_scores(tiles, data.q[b : b + 1], data.k[b : b + 1], legal, size)[0, :, :, :n]
        allowed = legal.matrix(0)[:n, :n]
        rows = torch.arange(n)
        own = columns.allows(context_of(legal), 0, 0, rows[:, None], rows[None, :]) | torch.eye(n, dtype=torch.bool)
        always = _any_per_tile(own & allowed, size)
        counts = _sum_per_tile(allowed, size)
        for head in range(scores.shape[0]):
            gold = _sum_per_tile(edges_matrix(data.edges, b, head)[:n, :n], size)
            value = torch.where(always, torch.inf, scores[head, : counts.shape[0]])
            seen = counts > 0
            parts[head].append(Part(value[seen], counts[seen], gold[seen]))
    return parts


def meeting_top(
    q: Float[Tensor, "n r"], k: Float[Tensor, "m r"], centroids: Float[Tensor, "B r"]
) -> Int[Tensor, "n m"]:
    """The least `top_k` at which a query and a key share one of their `top_k` nearest centroids."""
    rank_q, rank_k = (_centroid_ranks(x, centroids) for x in (q, k))
    best = torch.full((q.shape[0], k.shape[0]), centroids.shape[0], dtype=torch.int16)
    for c in range(centroids.shape[0]):
        best = torch.minimum(best, torch.maximum(rank_q[:, None, c], rank_k[None, :, c]) + 1)
    return best


def _centroid_ranks(x: Float[Tensor, "n r"], centroids: Float[Tensor, "B r"]) -> Int[Tensor, "n B"]:
    """0 for the nearest centroid; of equally near ones the first (the sums run like those of `Clusters`)."""
    total = torch.zeros(x.shape[0], centroids.shape[0])
    for axis in range(x.shape[1]):
        total += (x[:, axis, None] - centroids[None, :, axis]).square()
    return total.argsort(dim=-1, stable=True).argsort(-1).to(torch.int16)


def _projected(projections: Projections, data: LayerData, b: int) -> tuple[Item, Legal, Bool[Tensor, "n m"]]:
    legal = legal_of(data, b)
    item = project_item(projections, data.q[b : b + 1], data.k[b : b + 1], legal, 0)
    return item, legal, legal.matrix(0)[item.rows][:, item.columns]


def _always(positional: Pattern, legal: Legal, item: Item) -> Bool[Tensor, "n m"]:
    return positional.allows(context_of(legal), 0, 0, item.rows[:, None], item.columns[None, :])


def _gold(data: LayerData, b: int, head: int, item: Item) -> Bool[Tensor, "n m"]:
    return edges_matrix(data.edges, b, head)[item.rows][:, item.columns]


def _part(scores: Tensor, always: Tensor, visible: Tensor, gold: Tensor) -> Part:
    value = torch.where(always, torch.inf, scores)[visible]
    return Part(value, torch.ones_like(value, dtype=torch.bool), gold[visible])


def row_ranks(scores: Float[Tensor, "n m"], visible: Bool[Tensor, "n m"]) -> Float[Tensor, "n m"]:
    """Minus the share of the row's visible keys that rank before each key; of equal scores the earlier key first."""
    order = scores.masked_fill(~visible, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(scores.shape[1]).expand_as(order))
    return -rank.to(scores.dtype) / visible.sum(-1, keepdim=True)


def _without_global_rows(positional: Pattern) -> Pattern:
    """Global tokens as keys only: as queries they are tiles of one row, and do not make their whole tile dense."""
    result: Pattern = Nothing()
    for leaf in union_leaves(positional):
        result = result | (_GlobalKeys(leaf) if isinstance(leaf, GlobalTokens) else leaf)
    return result


class _GlobalKeys(Pattern):
    def __init__(self, tokens: GlobalTokens):
        self.tokens = tokens

    def allows(self, ctx, b, h, i, j):  # type: ignore[no-untyped-def]
        """The key is global."""
        return (ctx.key_position(b, j) < self.tokens.of_item(b, i)) & torch.ones_like(i, dtype=torch.bool)


def _any_per_tile(matrix: Bool[Tensor, "n m"], size: int) -> Bool[Tensor, "T m"]:
    return torch.stack([part.any(0) for part in torch.split(matrix, size)])


def _sum_per_tile(matrix: Bool[Tensor, "n m"], size: int) -> Int[Tensor, "T m"]:
    return torch.stack([part.sum(0) for part in torch.split(matrix, size)])


def project_parts(
    projections: Projections, data: LayerData, b: int
) -> tuple[Float[Tensor, "H n r"], Float[Tensor, "H m r"]]:
    """`q'` and `k'` of the real tokens of one instance, as the predictors compute them."""
    item = _projected(projections, data, b)[0]
    return item.q, item.k
