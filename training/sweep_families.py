"""Every row of the sweep: name -> what makes its families. A new one is a line in `FAMILIES`."""

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from sparsefinder.predictors import Clusters, Projections, true_score_projections
from training.fit import fit_clusters, name_of
from training.sweep_blocks import chunks, gate, routed_clusters, truncated_svd
from training.sweep_content import clustered_attention, hashing, inverted, quantization, routing
from training.sweep_positional import fixed_patterns, random_patterns, window_only
from training.sweep_scores import budget_sheet, cluster_sheet, projected, tau_sheet, threshold_sheet, tile_sheets
from training.sweep_setup import METRIC, Setup
from training.sweep_sheets import Family, Role

LOG_ODDS = (-6.0, -4.0, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)


def _distance(setup: Setup) -> list[Family]:
    c = setup.config
    return [
        Family("distance", "learned", [threshold_sheet(maps, c.thresholds, c.densities)], objective, rank)
        for objective, rank, maps in setup.maps(METRIC)
    ]


def _score(setup: Setup) -> list[Family]:
    return [
        Family(
            "score", "learned", [threshold_sheet(maps, LOG_ODDS, setup.config.densities, "bilinear")], objective, rank
        )
        for objective, rank, maps in setup.maps(("bilinear",))
    ]


def _budget(setup: Setup) -> list[Family]:
    return [
        Family("budget", "learned", [budget_sheet(maps, setup.config.densities)], objective, rank)
        for objective, rank, maps in setup.maps((*METRIC, "bilinear"))
    ]


def _clusters(setup: Setup) -> list[Family]:
    return [_cluster_family(setup, "learned", objective, rank, maps) for objective, rank, maps in setup.maps(METRIC)]


def _cluster_family(setup: Setup, role: Role, objective: str, rank: int, maps: Sequence[Projections]) -> Family:
    def fitted(buckets: int) -> Callable[[int], Clusters]:
        @functools.cache
        def of_layer(layer: int) -> Clusters:
            return fit_clusters(maps[layer], setup.train(layer), buckets, setup.config.seed)[0]

        return of_layer

    tokens = projected(maps)
    sheets = [cluster_sheet(buckets, fitted(buckets), tokens) for buckets in setup.config.buckets]
    return Family("clusters", role, sheets, objective, rank)


def _tiles(setup: Setup) -> list[Family]:
    found = []
    for objective, rank, maps in setup.maps(("listwise",)):
        name = name_of("listwise", rank)
        weights: Sequence[Tensor | None] = setup.artifact.thresholds.get(f"{name}-distance", (None,) * len(maps))
        sheets = tile_sheets(maps, weights, setup.config.densities, setup.config.tile_sizes)
        found.append(Family("tiles", "learned", sheets, objective, rank, "plan"))
    return found


def _random_projection(setup: Setup) -> list[Family]:
    return [
        Family("distance", "control", [threshold_sheet(maps, (), setup.config.densities)], "untrained", rank)
        for rank, maps in setup.controls()
    ]


def _random_clusters(setup: Setup) -> list[Family]:
    return [_cluster_family(setup, "control", "untrained", rank, maps) for rank, maps in setup.controls()]


def _oracles(setup: Setup) -> list[Family]:
    card, densities = setup.artifact.card, setup.config.densities
    maps = [true_score_projections(card.heads, card.head_dim)] * card.layers
    return [
        Family("true score, threshold", "oracle", [threshold_sheet(maps, (), densities, "bilinear")]),
        Family("true score, budget", "oracle", [budget_sheet(maps, densities)]),
        Family("true score − τ", "oracle", [tau_sheet(densities)]),
    ]


FAMILIES: dict[str, Callable[[Setup], list[Family]]] = {
    "window": lambda setup: window_only(setup.config),
    "random": lambda setup: random_patterns(setup.config),
    "fixed": lambda setup: fixed_patterns(setup.config),
    "distance": _distance,
    "score": _score,
    "budget": _budget,
    "clusters": _clusters,
    "quantization": quantization,
    "hashing": hashing,
    "clustered attention": clustered_attention,
    "routing": routing,
    "routed clusters": routed_clusters,
    "inverted": inverted,
    "chunks": chunks,
    "gate": gate,
    "svd": truncated_svd,
    "tiles": _tiles,
    "random projection": _random_projection,
    "random clusters": _random_clusters,
    "oracle": _oracles,
}


def all_families(setup: Setup, rows: Sequence[str] = tuple(FAMILIES)) -> list[Family]:
    """The families of these rows, in the order of the table."""
    return [family for name, make in FAMILIES.items() if name in rows for family in make(setup)]
