"""Rows of the quality table: for every head, the recall of a predictor's options at each sparsity, on held-out items.

A row has one or more options (numbers of clusters, window sizes, tile sizes). The best option for each head and
sparsity is chosen on one half of the items and read off on the other, so no row profits from what it is measured on.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsefinder.artifact import Artifact
from sparsefinder.edges import edges_matrix
from sparsefinder.entmax import threshold
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.positional import Nothing
from sparsefinder.predictors import Clusters, Projections, Tiles, random_projections, true_score_projections
from sparsefinder.predictors.projections import expand_heads
from training.cut import Curve, Part, curve, recalls_at, recalls_by_selection
from training.extract import LayerData
from training.fit import positional_of
from training.scores import meeting_top, pair_parts, project_parts, tile_parts

SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
TILE_SIZES = (8, 16, 32)
METRIC_OBJECTIVES = ("hinge", "hinge-sum", "logistic")

Tables = tuple[Tensor, Tensor]
Options = dict[str, list[list[float]]]  # option -> for each head the recall at each of SPARSITIES, NaN = not reached


@dataclass(frozen=True)
class Row:
    """A line of the table; `options(layer, data, items)` measures them."""

    name: str
    rank: int | None
    options: Callable[[int, LayerData, Sequence[int]], Options]
    control: bool = False


def all_rows(artifact: Artifact, ranks: Sequence[int], seed: int = 0) -> list[Row]:
    """Controls, every named set of maps in the artifact at these ranks, and the oracle."""
    card = artifact.card
    positional = positional_of(card)
    rows = [
        Row("window only", None, lambda _, data, items: {"": window_recalls(data, items, 0)}, control=True),
        Row(
            "window ∪ global", None, lambda _, data, items: {"": window_recalls(data, items, card.global_tokens)}, True
        ),
    ]
    for rank in ranks:
        rows += _controls(card.heads, card.head_dim, rank, seed)
        for objective in METRIC_OBJECTIVES:
            rows += _metric_rows(artifact, objective, rank, positional)
        rows += _bilinear_rows(artifact, rank, positional)
        rows += _tile_rows(artifact, rank)
    true = true_score_projections(card.heads, card.head_dim)
    rows.append(Row("oracle: true score − τ of its row", None, _above_tau))
    rows.append(Row("oracle: true score, threshold", None, _pairs(true, Nothing(), budget=False)))
    rows.append(Row("oracle: true score, budget", None, _pairs(true, Nothing(), budget=True)))
    return rows


def _controls(heads: int, dim: int, rank: int, seed: int) -> list[Row]:
    metric, dot = (random_projections(heads, rank, dim, seed, form) for form in ("metric", "bilinear"))
    return [
        Row("random projection, distance", rank, _pairs(metric, Nothing(), budget=False), control=True),
        Row("random projection, product", rank, _pairs(dot, Nothing(), budget=False), control=True),
    ]


def _metric_rows(artifact: Artifact, objective: str, rank: int, positional: Pattern) -> list[Row]:
    name = f"{objective}-r{rank}"
    if name not in artifact.projections:
        return []
    maps = artifact.projections[name]
    rows = []
    for kind, budget in (("distance", False), ("budget", True)):
        rows.append(Row(f"{objective} + {kind}", rank, _layered(maps, Nothing(), budget)))
        rows.append(Row(f"{objective} + {kind} ∪ window ∪ global", rank, _layered(maps, positional, budget)))
    sets = {key: value for key, value in artifact.centroids.items() if key.startswith(f"{name}-b")}
    if sets:
        rows += _cluster_rows(objective, rank, maps, sets, artifact.card.global_tokens)
    return rows


def _bilinear_rows(artifact: Artifact, rank: int, positional: Pattern) -> list[Row]:
    name = f"bilinear-r{rank}"
    if name not in artifact.projections:
        return []
    maps = artifact.projections[name]
    return [
        Row(f"logistic (bilinear) + {kind}{label}", rank, _layered(maps, extra, budget))
        for kind, budget in (("threshold", False), ("budget", True))
        for label, extra in (("", Nothing()), (" ∪ window ∪ global", positional))
    ]


def _tile_rows(artifact: Artifact, rank: int) -> list[Row]:
    name = f"listwise-r{rank}"
    if name not in artifact.projections:
        return []
    maps = artifact.projections[name]
    weights: Sequence[Tensor | None] = artifact.thresholds.get(f"{name}-distance", (None,) * len(maps))

    def options(layer: int, data: LayerData, items: Sequence[int]) -> Options:
        tiles = Tiles(maps[layer], threshold=0.0, distance_weight=weights[layer])
        found = {size: tile_parts(tiles, data, items, Nothing(), size) for size in TILE_SIZES}
        return {
            f"tile {size}": [recalls_at(curve(head), SPARSITIES) for head in parts] for size, parts in found.items()
        }

    return [Row("listwise tiles (plan)", rank, options)]


def _pairs(maps: Projections, positional: Pattern, budget: bool) -> Callable[[int, LayerData, Sequence[int]], Options]:
    return lambda _, data, items: {"": _recalls(pair_parts(maps, data, items, positional, budget))}


def _recalls(parts: Sequence[Sequence[Part]]) -> list[list[float]]:
    return [recalls_by_selection(head, SPARSITIES) for head in parts]


def _above_tau(_: int, data: LayerData, items: Sequence[int]) -> Options:
    """The ceiling: gold pairs are those above zero, so all of them come first."""
    heads = data.q.shape[1]
    keys = expand_heads(data.k, heads)
    parts: list[list[Part]] = [[] for _ in range(heads)]
    for b in items:
        n = int(data.mask[b].sum())
        legal = _legal(data, n)
        for head in range(heads):
            scores = data.scale[head] * data.q[b, head, :n] @ keys[b, head, :n].T
            above = (data.alpha - 1) * scores - threshold(scores, data.alpha, legal)[:, None]
            gold = edges_matrix(data.edges, b, head)[:n, :n][legal]
            parts[head].append(Part(above[legal], torch.ones_like(gold), gold))
    return {"": _recalls(parts)}


def _layered(
    maps: Sequence[Projections], positional: Pattern, budget: bool
) -> Callable[[int, LayerData, Sequence[int]], Options]:
    return lambda layer, data, items: _pairs(maps[layer], positional, budget)(layer, data, items)


def window_recalls(data: LayerData, items: Sequence[int], global_tokens: int) -> list[list[float]]:
    """Windows of every radius, against each head's own graph."""
    heads = data.q.shape[1]
    parts: list[list[Part]] = [[] for _ in range(heads)]
    for b in items:
        n = int(data.mask[b].sum())
        scores, legal = _nearness(n, global_tokens), _legal(data, n)
        for head in range(heads):
            gold = edges_matrix(data.edges, b, head)[:n, :n][legal]
            parts[head].append(Part(scores[legal], torch.ones_like(gold), gold))
    return _recalls(parts)


def _nearness(n: int, global_tokens: int) -> Tensor:
    i = torch.arange(n)
    scores = -(i[:, None] - i[None, :]).abs().float()
    everywhere = (i[:, None] < global_tokens) | (i[None, :] < global_tokens)
    return torch.where(everywhere, torch.inf, scores)


def _legal(data: LayerData, n: int) -> Tensor:
    legal = torch.ones(n, n, dtype=torch.bool)
    return legal.tril() if data.causal else legal


def _cluster_rows(
    objective: str, rank: int, maps: Sequence[Projections], sets: Mapping[str, Sequence[Tensor]], global_tokens: int
) -> list[Row]:
    """Clusters alone, and with window and global tokens. Options: the number of clusters, and with a window also
    `top`, while the window fills up to the sparsity. Both rows are read off the same tables, which are kept."""
    kept: dict[tuple[int, tuple[int, ...]], dict[str, list[tuple[Tables, Tables]]]] = {}

    def tables(layer: int, data: LayerData, items: Sequence[int]) -> dict[str, list[tuple[Tables, Tables]]]:
        at = (layer, tuple(items))
        if at not in kept:
            kept[at] = {}
            for key, centroids in sets.items():
                clusters = Clusters(maps[layer], centroids[layer], torch.ones(data.q.shape[1], dtype=torch.long))
                kept[at][key.rsplit("-", 1)[-1]] = _tables(clusters, data, items, global_tokens)
        return kept[at]

    def alone(layer: int, data: LayerData, items: Sequence[int]) -> Options:
        found = tables(layer, data, items)
        return {label: [recalls_at(_along_top(own), SPARSITIES) for own, _ in heads] for label, heads in found.items()}

    def with_window(layer: int, data: LayerData, items: Sequence[int]) -> Options:
        return {
            f"{label} top {top}": [recalls_at(_along_window(both, top), SPARSITIES) for _, both in heads]
            for label, heads in tables(layer, data, items).items()
            for top in range(1, int(label[1:]) // 2 + 1)
        }

    return [
        Row(f"{objective} + clusters", rank, alone),
        Row(f"{objective} + clusters ∪ window ∪ global", rank, with_window),
    ]


def _tables(
    clusters: Clusters, data: LayerData, items: Sequence[int], global_tokens: int
) -> list[tuple[Tables, Tables]]:
    """For each head the shares of the legal and of the gold pairs by (least `top` at which they meet, distance), mean
    over instances; then the same with global pairs at top 0: kept whatever the clusters say."""
    heads, width = data.q.shape[1], data.q.shape[2]
    shape = (heads, 2, 2, clusters.centroids.shape[1] + 1, width)  # head, without or with global, legal or gold
    total, with_gold = torch.zeros(shape, dtype=torch.float64), [0] * heads
    for b in items:
        n = int(data.mask[b].sum())
        legal, distance = _legal(data, n), -_nearness(n, 0).long()
        q, k = project_parts(clusters.projections, data, b)
        for head in range(heads):
            meet = meeting_top(q[head], k[head], clusters.centroids[head]).long()
            gold = edges_matrix(data.edges, b, head)[:n, :n][legal]
            with_gold[head] += bool(gold.any())
            for extra in range(2):
                if extra:
                    meet[:global_tokens], meet[:, :global_tokens] = 0, 0
                cell = (meet * width + distance)[legal]
                for kind, cells in enumerate((cell, cell[gold])):
                    number = torch.bincount(cells, minlength=shape[3] * width).view(shape[3:])
                    total[head, extra, kind] += number / max(cells.numel(), 1)
    for head in range(heads):
        total[head, :, 0] /= len(items)
        total[head, :, 1] /= max(with_gold[head], 1)
    return [((own[0], own[1]), (both[0], both[1])) for own, both in total]


def _along_top(tables: Tables) -> Curve:
    density, recall = (table.sum(1).cumsum(0)[1:] for table in tables)
    return Curve(-torch.arange(1.0, density.shape[0] + 1).double(), 1 - density, recall)


def _along_window(tables: Tables, top: int) -> Curve:
    """Clusters up to `top`, then nearer pairs first; what the clusters hold cannot be taken away."""
    inside = [table[: top + 1].sum() for table in tables]
    density, recall = (
        torch.cat([part[None], part + table[top + 1 :].sum(0).cumsum(0)])
        for part, table in zip(inside, tables, strict=True)
    )
    return Curve(-torch.arange(density.shape[0]).double(), 1 - density, recall, forced=True)


def choose(options: Options, chosen_on: Options) -> list[list[tuple[float, str]]]:
    """`[head][sparsity]`: recall and the option that was best on the other half; NaN where none is that sparse."""
    names = list(options)
    found = []
    for head in range(len(options[names[0]])):
        before = {name: chosen_on[name][head] for name in names}
        after = {name: options[name][head] for name in names}
        line = []
        for s in range(len(SPARSITIES)):
            able = [n for n in names if not (math.isnan(before[n][s]) or math.isnan(after[n][s]))]
            best = max(able, key=lambda n: before[n][s], default="")
            line.append((after[best][s] if able else math.nan, best))
        found.append(line)
    return found
