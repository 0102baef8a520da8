"""Rows of the sweep that put tokens into buckets, by other methods than Sparsefinder's clusters."""

import functools
from collections.abc import Callable
from dataclasses import replace

from sparsefinder.predictors import (
    Clustered,
    InvertedClusters,
    InvertedLists,
    Lsh,
    Projections,
    Quantization,
    Smyrf,
    clustered_hashes,
    lsh_rotations,
    smyrf_directions,
)
from training.fit_content import fit_inverted, fit_inverted_clusters, fit_routing
from training.sweep_setup import BOTH_LOSSES, Setup
from training.sweep_sheets import Choosing, Family, LayerWork, Parameters, Sheet, nested_settings, one_setting

ROUNDS = (1, 4)
KEYS = (8, 16, 32, 64)
BITS = 32
LISTS = (16, 64)  # centroids of inverted lists
PROBES = (-2.0, -3.0, -4.0, -5.0, -6.0, -8.0)  # log-shares at which a query probes a cluster


def quantization(setup: Setup) -> list[Family]:
    """Bins of equal count in every projected dimension (Treviso et al., 2022)."""

    def family(objective: str, rank: int, maps: tuple[Projections, ...]) -> Family:
        def sheet(bins: int) -> Sheet:
            return one_setting({"buckets": bins}, lambda work: Quantization(maps[work.layer], bins))

        return Family("quantization", "learned", [sheet(b) for b in setup.config.buckets], objective, rank, every=4)

    return [family(*found) for found in setup.maps(BOTH_LOSSES)]


def hashing(setup: Setup) -> list[Family]:
    """Reformer's LSH, with the keys' buckets from their queries and with their own, and SMYRF's balanced LSH."""
    card, seed = setup.artifact.card, setup.config.seed

    def sheet(buckets: int, make: Callable[[int, int, int], Choosing]) -> Sheet:
        grid: list[Parameters] = [{"buckets": buckets, "rounds": r} for r in ROUNDS]
        return nested_settings(grid, lambda work: [make(buckets, r, seed + work.layer) for r in ROUNDS])

    def reformer(shared: bool) -> Callable[[int, int, int], Choosing]:
        return lambda b, r, seed: Lsh(lsh_rotations(card.heads, card.head_dim, b, r, seed), shared)

    def smyrf(buckets: int, rounds: int, seed: int) -> Choosing:
        return Smyrf(smyrf_directions(card.heads, card.head_dim, rounds, seed), buckets)

    kinds = {"reformer": reformer(True), "lsh, separate": reformer(False), "smyrf": smyrf}
    return [
        Family(name, "baseline", [sheet(b, make) for b in setup.config.buckets if b % 2 == 0], every=4)
        for name, make in kinds.items()
    ]


def clustered_attention(setup: Setup) -> list[Family]:
    """Clustered attention (Vyas et al., 2020)."""
    card, seed = setup.artifact.card, setup.config.seed
    keys = [k for k in KEYS if k < setup.config.tokens]

    def sheet(clusters: int) -> Sheet:
        def make(work: LayerWork) -> list[Choosing]:
            hashes = clustered_hashes(card.heads, card.head_dim, BITS, seed + work.layer)
            return [Clustered(hashes, clusters, k) for k in keys]

        return nested_settings([{"buckets": clusters, "keys": k} for k in keys], make)

    # k-means runs for every instance here, so few numbers of clusters must do.
    few = sorted({setup.config.buckets[len(setup.config.buckets) // 2 - 1], setup.config.buckets[-1]})
    return [Family("clustered", "baseline", [sheet(clusters) for clusters in few], every=8)]


def routing(setup: Setup) -> list[Family]:
    """Routing Transformer: balanced top-w tokens of every centroid (Roy et al., 2021)."""

    def sheet(buckets: int) -> Sheet:
        return one_setting(
            {"buckets": buckets},
            lambda work: fit_routing(setup.train(work.layer), buckets, seed=setup.config.seed),
        )

    return [Family("routing", "baseline", [sheet(buckets) for buckets in setup.config.buckets], every=4)]


def inverted(setup: Setup) -> list[Family]:
    """Keys in one of B clusters, queries in several: on the keys themselves, and in the learned spaces."""
    grid: list[Parameters] = [{"probe": p} for p in PROBES]

    def lists(buckets: int, fitted: Callable[[int], InvertedLists]) -> Sheet:
        def make(work: LayerWork) -> list[Choosing]:
            first = fitted(work.layer)
            return [replace(first, threshold=p) for p in PROBES]

        return nested_settings([{"buckets": buckets, **point} for point in grid], make)

    def clusters(buckets: int, fitted: Callable[[int], InvertedClusters]) -> Sheet:
        def make(work: LayerWork) -> list[Choosing]:
            return [replace(fitted(work.layer), threshold=p) for p in PROBES]

        return nested_settings([{"buckets": buckets, **point} for point in grid], make)

    def of_keys(buckets: int) -> Callable[[int], InvertedLists]:
        return functools.cache(lambda layer: fit_inverted(setup.train(layer), buckets, PROBES[0], setup.config.seed))

    found = [Family("inverted", "baseline", [lists(b, of_keys(b)) for b in LISTS], every=4)]
    for objective, rank, maps in setup.maps(("logistic",)):

        def of_maps(buckets: int, maps: tuple[Projections, ...] = maps) -> Callable[[int], InvertedClusters]:
            return functools.cache(
                lambda layer: fit_inverted_clusters(
                    maps[layer], setup.train(layer), buckets, PROBES[0], setup.config.seed
                )
            )

        sheets = [clusters(b, of_maps(b)) for b in LISTS]
        found.append(Family("inverted", "learned", sheets, objective, rank, every=4))
    return found
