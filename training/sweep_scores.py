"""Sheets of the families that cut a score: thresholds and budgets of rows, and of tiles of rows."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.entmax import threshold as entmax_threshold
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.content import Listed
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors import Clusters, Distance, Projections, RowBudget, Score, Tiles
from sparsefinder.predictors.projections import Form, Item, expand_heads, project_item
from sparsefinder.predictors.tiles import normalized_scores
from training.sweep_kernels import level_meetings, level_rows, level_scores, rank_groups, squared_distances
from training.sweep_sheets import SAMPLE_STEP, Bytes, Choosing, LayerWork, Prepared, Sheet

Scores = npt.NDArray[np.float32]
ScoresOf = Callable[[LayerWork, int], Scores]  # of one instance, [H, n, m], higher = sooner kept

PROJECTED = 256  # instances of a layer whose projections are kept
LOG_SHARES = tuple(float(x) for x in np.arange(-12.0, -1.4, 0.5))  # thresholds of tiles: log of a key's share


def pair_scores_of(maps: Projections) -> Callable[[LayerWork, int], Scores]:
    """Scores of all pairs as `Distance` and `Score` cut them: minus the squared distance, or the bilinear score."""

    def scores(work: LayerWork, b: int) -> Scores:
        q, k, legal = work.item(b)
        item = project_item(maps, q, k, legal, 0)
        if maps.form == "bilinear":
            return (item.q @ item.k.transpose(-1, -2)).contiguous().numpy()
        found = np.empty((item.q.shape[0], item.q.shape[1], item.k.shape[1]), np.float32)
        squared_distances(_array(item.q), _array(item.k.transpose(1, 2)), found)
        return found

    return scores


def threshold_sheet(
    maps: Sequence[Projections], grid: Sequence[float], densities: Sequence[float], form: Form = "metric"
) -> Sheet:
    """One threshold for all heads from the grid (distances, or log-odds), and one for each head that keeps a share
    `density` of the pairs on the instances that settings are chosen on."""

    def predictor(work: LayerWork, cuts: Tensor) -> Choosing:
        if form == "metric":
            return Distance(maps[work.layer], (-cuts).clamp(min=0).sqrt())
        return Score(maps[work.layer], cuts)

    fixed = [-t * t if form == "metric" else t for t in grid]
    named = [{"threshold": t} for t in grid]
    settle = settle_distances if form == "metric" else lambda cuts: cuts
    return score_sheet(lambda work: pair_scores_of(maps[work.layer]), named, fixed, densities, predictor, settle)


def settle_distances(cuts: Scores) -> Scores:
    """Squared distances that are squares in float32: `Distance` holds the root and squares it again."""
    root = np.sqrt(np.maximum(-cuts, 0)).astype(np.float32)
    return -(root * root)


def score_sheet(
    scores_of: Callable[[LayerWork], ScoresOf],
    named: Sequence[dict[str, float]],
    fixed: Sequence[float],
    densities: Sequence[float],
    predictor: Callable[[LayerWork, Tensor], Choosing],
    settle: Callable[[Scores], Scores] = lambda cuts: cuts,
) -> Sheet:
    """Any score, cut at the fixed values (of the parameters `named`) and at the quantiles of each head.

    settle: rounds cuts to what the predictor can hold.
    """

    def prepare(work: LayerWork) -> Prepared:
        scores = scores_of(work)
        cuts = np.concatenate(
            [np.tile(np.asarray(fixed, np.float32), (work.heads, 1)), _quantiles(work, scores, densities)], 1
        )
        cuts = settle(cuts)
        order = np.argsort(-cuts, 1, kind="stable")
        edges = np.ascontiguousarray(np.take_along_axis(cuts, order, 1))
        index = np.argsort(order, 1, kind="stable")

        def levels(b: int) -> Bytes:
            found = scores(work, b)
            out = np.empty(found.shape, np.uint8)
            level_scores(found, edges, out)
            return out

        return Prepared(edges.shape[1], index, levels, lambda p: predictor(work, torch.from_numpy(cuts[:, p].copy())))

    return Sheet((*named, *({"density": d} for d in densities)), prepare)


def budget_sheet(maps: Sequence[Projections], densities: Sequence[float]) -> Sheet:
    """`RowBudget`: a fixed share of the keys for every row."""

    def prepare(work: LayerWork) -> Prepared:
        scores = pair_scores_of(maps[work.layer])

        def levels(b: int) -> Bytes:
            found = scores(work, b)
            keys = found.shape[2]
            return best_of_rows(found, [min(max(math.ceil(d * keys - 1e-9), 1), keys) for d in densities])

        return _same_for_all(work, len(densities), levels, lambda p: RowBudget(maps[work.layer], densities[p]))

    return Sheet(tuple({"density": d} for d in densities), prepare)


def best_of_rows(scores: Scores, budgets: Sequence[int]) -> Bytes:
    """Levels of the `budgets` (ascending) best scores of every row; scores equal to the last one are kept too."""
    ordered = np.sort(scores, 2)
    edges = np.ascontiguousarray(ordered[:, :, [scores.shape[2] - count for count in budgets]])
    out = np.empty(scores.shape, np.uint8)
    level_rows(scores, edges, out)
    return out


def tile_sheets(
    maps: Sequence[Projections], weights: Sequence[Tensor | None], densities: Sequence[float], sizes: Sequence[int]
) -> list[Sheet]:
    """The plans of `Tiles`: one threshold on the log-share for all heads and layers, or as many keys for every tile."""
    sheets = []
    for size in sizes:
        layers = [Tiles(m, 0.0, distance_weight=w) for m, w in zip(maps, weights, strict=True)]
        sheets += [_tile_thresholds(layers, size), _tile_budgets(layers, densities, size)]
    return sheets


def _tile_thresholds(layers: Sequence[Tiles], size: int) -> Sheet:
    descending = LOG_SHARES[::-1]

    def prepare(work: LayerWork) -> Prepared:
        edges = np.tile(np.asarray(descending, np.float32), (work.heads, 1))

        def levels(b: int) -> Bytes:
            found = _tile_scores(layers[work.layer], work, b, size)
            out = np.empty(found.shape, np.uint8)
            level_scores(found, edges, out)
            return spread_tiles(out, size)

        return _same_for_all(
            work, len(descending), levels, lambda p: replace(layers[work.layer], threshold=descending[p])
        )

    return Sheet(tuple({"threshold": t, "tile": size} for t in descending), prepare, size)


def _tile_budgets(layers: Sequence[Tiles], densities: Sequence[float], size: int) -> Sheet:
    def prepare(work: LayerWork) -> Prepared:
        longest = max(work.lengths)
        keys = [max(1, round(d * longest)) for d in densities]

        def levels(b: int) -> Bytes:
            found = _tile_scores(layers[work.layer], work, b, size)
            return spread_tiles(best_of_rows(found, [min(count, found.shape[2]) for count in keys]), size)

        return _same_for_all(
            work, len(keys), levels, lambda p: replace(layers[work.layer], threshold=None, keys_per_tile=keys[p])
        )

    return Sheet(tuple({"density": d, "tile": size} for d in densities), prepare, size)


def _tile_scores(tiles: Tiles, work: LayerWork, b: int, size: int) -> Scores:
    q, k, legal = work.item(b)
    return normalized_scores(tiles, q, k, legal, size)[0].numpy()


def spread_tiles(levels: Bytes, size: int) -> Bytes:
    """Levels of (tile, key) as levels of (row, key); a tile always reads its own rows, since every row reads itself."""
    n = levels.shape[2]
    out = np.repeat(levels, size, 1)[:, :n]
    own = np.arange(n) // size
    out[:, own[:, None] == own[None, :]] = 0
    return np.ascontiguousarray(out)


def projected(maps: Sequence[Projections]) -> Callable[[LayerWork, int], Item]:
    """Projected tokens of an instance, kept for the other sheets of a family while they work on one layer."""

    @functools.lru_cache(PROJECTED)
    def of_item(work: LayerWork, b: int) -> Item:
        q, k, legal = work.item(b)
        return project_item(maps[work.layer], q, k, legal, 0)

    return of_item


def cluster_sheet(buckets: int, fitted: Callable[[int], Clusters], tokens: Callable[[LayerWork, int], Item]) -> Sheet:
    """`Clusters` with every `top` up to the number of clusters; `fitted(layer)` has the centroids, `tokens` is
    `projected` of the same maps."""

    def prepare(work: LayerWork) -> Prepared:
        clusters = fitted(work.layer)

        def levels(b: int) -> Bytes:
            item = tokens(work, b)
            out = np.empty((work.heads, item.q.shape[1], item.k.shape[1]), np.uint8)
            level_meetings(_ranks(clusters, item.q), _ranks(clusters, item.k), out)
            return out

        return _same_for_all(work, buckets, levels, lambda p: replace(clusters, top_k=torch.full((work.heads,), p + 1)))

    return Sheet(tuple({"buckets": buckets, "top": top} for top in range(1, buckets + 1)), prepare)


def _ranks(clusters: Clusters, x: Float[Tensor, "H n r"]) -> Bytes:
    """Rank of every centroid for each token, 0 = nearest, as `Clusters.members` ranks them; `[H, B, n]`."""
    nearness = np.empty((*x.shape[:2], clusters.centroids.shape[1]), np.float32)
    squared_distances(_array(x), _array(clusters.centroids.transpose(1, 2)), nearness)
    ranks = np.empty((x.shape[0], nearness.shape[2], x.shape[1]), np.uint8)
    rank_groups(-nearness, ranks)
    return ranks


def _array(x: Tensor) -> npt.NDArray[np.float32]:
    """Contiguous, so that numba compiles once."""
    return np.ascontiguousarray(x.numpy())


@dataclass(frozen=True, eq=False)
class AboveTau:
    """The oracle of oracles: the true score minus the threshold τ of its row; at 0 it is the gold graph itself."""

    scale: Float[Tensor, " H"]
    alpha: float
    cuts: Float[Tensor, " H"]

    def scores(self, q: Float[Tensor, "H n D"], k: Float[Tensor, "H m D"], legal: Legal) -> Float[Tensor, "H n m"]:
        """`(α − 1) z − τ` of one item; an illegal pair can be anything."""
        z = self.scale[:, None, None] * q @ k.transpose(-1, -2)
        visible = legal.matrix(0).expand(z.shape)
        return (self.alpha - 1) * z - entmax_threshold(z, self.alpha, visible)[..., None]

    def pattern(self, q: Tensor, k: Tensor, legal: Legal) -> Pattern:
        """The pairs above the cut, item by item (a matrix: for measuring only)."""
        keys = expand_heads(k, q.shape[1])
        found = []
        for b in range(q.shape[0]):
            own = Legal(legal.query_real[b : b + 1], legal.key_real[b : b + 1], legal.causal)
            found.append(self.scores(q[b], keys[b], own) >= self.cuts[:, None, None])
        return Listed(torch.stack(found))


def tau_sheet(densities: Sequence[float]) -> Sheet:
    """The cuts of `AboveTau`."""

    def scores_of(work: LayerWork) -> ScoresOf:
        oracle = AboveTau(work.data.scale, work.data.alpha, torch.zeros(work.heads))

        def scores(work: LayerWork, b: int) -> Scores:
            q, k, legal = work.item(b)
            return oracle.scores(q[0], expand_heads(k, work.heads)[0], legal).numpy()

        return scores

    def predictor(work: LayerWork, cuts: Tensor) -> Choosing:
        return AboveTau(work.data.scale, work.data.alpha, cuts)

    return score_sheet(scores_of, [{"threshold": 0.0}], [0.0], densities, predictor)


def _quantiles(work: LayerWork, scores: ScoresOf, densities: Sequence[float]) -> Scores:
    """`[H, D]`: the score above which each head has a share `density` of its legal pairs."""
    parts = []
    for b in work.chosen():
        found = scores(work, b)
        n = found.shape[1]
        visible = np.tri(n, dtype=bool) if work.data.causal else np.ones((n, n), bool)
        parts.append(found[:, ::SAMPLE_STEP][:, visible[::SAMPLE_STEP]])
    return np.quantile(np.concatenate(parts, 1), [1 - d for d in densities], axis=1).T.astype(np.float32)


def _same_for_all(
    work: LayerWork, count: int, levels: Callable[[int], Bytes], predictor: Callable[[int], Choosing | Tiles]
) -> Prepared:
    """Settings that mean the same level for every head."""
    return Prepared(count, np.tile(np.arange(count), (work.heads, 1)), levels, predictor)
