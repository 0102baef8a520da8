"""Rows of the sweep that choose for chunks or blocks of tokens, and the truncated SVD of the scores."""

import functools
from collections.abc import Callable

from sparsefinder.predictors import ChunkClusters, Clusters, Gate, Projections, RoutedChunks
from training.config import FitConfig
from training.extract import LayerData
from training.fit import fit_clusters
from training.fit_content import chunk_data, fit_gate, fit_svd
from training.sweep_scores import budget_sheet, threshold_sheet
from training.sweep_setup import BOTH_LOSSES, LazyMaps, Setup
from training.sweep_sheets import Choosing, Family, LayerWork, Parameters, Sheet, nested_settings, one_setting
from training.train_maps import train_layer

CHUNK = 8  # tokens
BLOCK = 16  # tokens of the gate's blocks
RANK = 4


def routed_clusters(setup: Setup) -> list[Family]:
    """Sparsefinder's version 2 on tokens: its centroids, Routing's top-k (Treviso et al., 2022, section 6)."""
    seed = setup.config.seed

    def family(objective: str, rank: int, maps: tuple[Projections, ...]) -> Family:
        def sheet(buckets: int) -> Sheet:
            def make(work: LayerWork) -> Choosing:
                fitted, _ = fit_clusters(maps[work.layer], setup.train(work.layer), buckets, seed)
                return RoutedChunks(fitted.projections, fitted.centroids)

            return one_setting({"buckets": buckets}, make)

        return Family("routed clusters", "learned", [sheet(b) for b in setup.config.buckets], objective, rank, every=4)

    return [family(*found) for found in setup.maps(BOTH_LOSSES)]


def chunks(setup: Setup) -> list[Family]:
    """Versions 1 and 2 on chunks of tokens, with maps learned on chunk means."""
    seed, count = setup.config.seed, -(-setup.config.tokens // CHUNK)
    config = FitConfig(objective="hinge", rank=RANK, steps=setup.config.fit_steps, seed=seed)

    @functools.cache
    def data(layer: int) -> LayerData:
        return chunk_data(setup.train(layer), CHUNK)

    @functools.cache
    def maps(layer: int) -> Projections:
        return train_layer(data(layer), config, "hinge", RANK, layer).projections

    def fitted(layer: int, buckets: int) -> Clusters:
        return fit_clusters(maps(layer), data(layer), buckets, seed)[0]

    def first(buckets: int) -> Sheet:
        grid: list[Parameters] = [{"buckets": buckets, "top": top} for top in range(1, buckets + 1)]

        def make(work: LayerWork) -> list[Choosing]:
            centroids = fitted(work.layer, buckets).centroids
            return [ChunkClusters(maps(work.layer), centroids, top, CHUNK) for top in range(1, buckets + 1)]

        return nested_settings(grid, make)

    def second(buckets: int) -> Sheet:
        def make(work: LayerWork) -> Choosing:
            return RoutedChunks(maps(work.layer), fitted(work.layer, buckets).centroids, None, CHUNK)

        return one_setting({"buckets": buckets}, make)

    few = [b for b in setup.config.buckets if b <= min(8, count)]
    return [
        Family("chunks v1", "learned", [first(b) for b in few], "hinge", RANK, every=4),
        Family("chunks v2", "learned", [second(b) for b in setup.config.buckets if b <= count], "hinge", RANK, every=4),
    ]


def gate(setup: Setup) -> list[Family]:
    """A gate on pooled blocks (after Gao et al., 2024)."""
    rank = max(setup.ranks(), default=RANK)
    blocks = -(-setup.config.tokens // BLOCK)
    tops = list(range(1, blocks))

    def make(work: LayerWork) -> list[Choosing]:
        fitted = fit_gate(
            setup.train(work.layer), BLOCK, rank, setup.config.fit_steps, layer=work.layer, seed=setup.config.seed
        )
        return [Gate(fitted.maps, BLOCK, top) for top in tops]

    grid: list[Parameters] = [{"block": BLOCK, "top": top} for top in tops]
    return [Family("gate", "learned", [nested_settings(grid, make)] if tops else [], "listwise", rank, every=4)]


def truncated_svd(setup: Setup) -> list[Family]:
    """Truncated SVD of the score form: nothing is trained."""
    found = []
    for rank in setup.ranks():
        maps = LazyMaps(_svd_of(setup, rank), setup.artifact.card.layers)
        sheets = [
            threshold_sheet(maps, (), setup.config.densities, "bilinear"),
            budget_sheet(maps, setup.config.densities),
        ]
        found += [
            Family("svd, threshold", "baseline", sheets[:1], rank=rank),
            Family("svd, budget", "baseline", sheets[1:], rank=rank),
        ]
    return found


def _svd_of(setup: Setup, rank: int) -> Callable[[int], Projections]:
    return lambda layer: fit_svd(setup.train(layer), rank, setup.config.seed)
