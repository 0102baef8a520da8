"""From extracted graphs to predictors: maps, centroids, thresholds, and the artifact that holds them."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.artifact import Card
from sparsefinder.errors import ConfigError, DataError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.positional import GlobalTokens, window
from sparsefinder.predictors import Clusters, Distance, Predictor, Projections, RowBudget, Score, Tiles, mixed_share
from sparsefinder.predictors.projections import expand_heads, project_keys, project_queries
from training.config import CLUSTER_COUNTS, FitConfig, Objective
from training.cut import CURVE_POINTS, Curve, curve, recalls_at, shared_threshold, threshold_at
from training.extract import LayerData, read_layer, read_manifest
from training.fit_files import KeptMaps
from training.kmeans import POINTS_PER_CLUSTER, kmeans
from training.layers import in_place, predicted_layers
from training.maps import head_samples
from training.points import layer_points, point_curves
from training.scores import cluster_parts, legal_of, pair_parts, tile_parts
from training.threads import over_layers, single_thread
from training.train_maps import Trained, train_layer

CALIBRATION_INSTANCES = 8  # every other held-out instance, at most so many; the rest is for measuring

OnProgress = Callable[[str, int, int], None]  # (what is being trained, steps that are done, steps in all)


@dataclass(frozen=True, eq=False)
class Fitted:
    """The served predictors, all the named maps, and what was seen on the way.

    layers: one per layer, None for those that keep their sliding window. The rest has an entry per predicted layer.
    """

    layers: tuple[Predictor | None, ...]
    projections: Mapping[str, tuple[Projections, ...]]
    centroids: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    thresholds: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Cut:
    """One layer of one objective, cut: the predictor (None for tiles, which all layers cut alike) and its curve."""

    predictor: Predictor | None
    curves: list[Curve]
    centroids: dict[int, Tensor] = field(default_factory=dict)  # by the number of clusters
    mixed: dict[int, list[float]] = field(default_factory=dict)


def name_of(objective: Objective, rank: int) -> str:
    """The name of a set of maps in an artifact, such as `hinge-r4`."""
    return f"{objective}-r{rank}"


def positional_of(config: FitConfig | Card) -> Pattern:
    """What is added to every prediction."""
    return window(config.window_size) | GlobalTokens(config.global_tokens)


def calibration_items(instances: int) -> list[int]:
    """Held-out instances that cuts are chosen on: the even ones, at most eight."""
    return list(range(0, instances, 2))[:CALIBRATION_INSTANCES]


def measuring_items(instances: int, count: int | None = None) -> list[int]:
    """Held-out instances that figures come from: the odd ones, or the only one."""
    return (list(range(1, instances, 2)) or [0])[:count]


def fit(
    train: Path,
    heldout: Path,
    config: FitConfig,
    on_progress: OnProgress = lambda what, done, total: None,
    keep: Path | None = None,
) -> Fitted:
    """Train every (objective, rank) that the configuration names, layer after layer, and cut them on held-out text.

    keep: folder where the maps of every finished layer are kept, so that an interrupted fit goes on from there.

    Raises:
        DataError: the splits are missing, of different teachers, or too small for the clusters; `keep` is no folder.
    """
    with single_thread():
        return _fit(train, heldout, config, on_progress, keep)


def _fit(train: Path, heldout: Path, config: FitConfig, on_progress: OnProgress, keep: Path | None) -> Fitted:
    manifest = _same_teacher(read_manifest(train), read_manifest(heldout))
    wanted = list(dict.fromkeys([(config.objective, config.rank), *config.also]))
    trained: dict[str, list[Trained]] = {name_of(*pair): [] for pair in wanted}
    cuts: dict[str, list[_Cut]] = {name: [] for name in trained}
    layers = predicted_layers(manifest)
    total = len(layers) * len(wanted) * config.steps
    done = itertools.count(1)
    files = None if keep is None else KeptMaps(keep, train, heldout)

    def work(layer: int) -> list[tuple[str, Trained, _Cut]]:
        data, held, found = read_layer(train, layer), read_layer(heldout, layer), []
        for objective, rank in wanted:
            name, own = name_of(objective, rank), _own_config(config, objective, rank)

            def on_step(what: str = f"{name}, layer {layer}") -> None:
                on_progress(what, next(done), total)

            maps = files.read(layer, own) if files else None
            if maps is None:
                maps = train_layer(data, own, objective, rank, layer, on_step)
                if files:
                    files.write(layer, own, maps)
            found.append((name, maps, _cut(maps, data, held, own)))
            _require_reachable(found[-1][2], own)
        return found

    for found in over_layers(work, layers, manifest["tokens"]):
        for name, maps, cut in found:
            trained[name].append(maps)
            cuts[name].append(cut)
    fitted = _assemble(config, wanted, trained, cuts)
    return replace(fitted, layers=in_place(fitted.layers, manifest))


def fit_clusters(
    projections: Projections, data: LayerData, clusters: int, seed: int, top: int = 1
) -> tuple[Clusters, Float[Tensor, " H"]]:
    """k-means on projected queries and keys, pooled per head, padding dropped; and the share of mixed clusters.

    Raises:
        DataError: fewer queries and keys than clusters.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = POINTS_PER_CLUSTER * clusters // 2
    q = project_queries(projections, head_samples(data.q, data.mask, tokens, generator)[None])[0]
    keys = expand_heads(head_samples(data.k, data.mask, tokens, generator)[None], projections.heads)
    k = project_keys(projections, keys)[0]
    centroids = torch.stack([kmeans(torch.cat([q[h], k[h]]), clusters, seed) for h in range(projections.heads)])
    fitted = Clusters(projections, centroids, torch.full((projections.heads,), top))
    few = slice(0, 4)
    legal = replace(legal_of(data, 0), query_real=data.mask[few], key_real=data.mask[few])
    return fitted, mixed_share(fitted, data.q[few], data.k[few], legal)


def _require_reachable(cut: _Cut, config: FitConfig) -> None:
    """Raise ConfigError for a sparsity that what is kept in any case (window, global, a tile's own rows) forbids."""
    most = min((float(c.sparsity[0]) for c in cut.curves if c.forced), default=1.0)
    if config.sparsity is not None and most < config.sparsity:
        raise ConfigError(
            f"sparsity: expected at most {most:.2f}, which window {config.window_size}, {config.global_tokens} global "
            f"tokens and tiles of {config.tile_size} leave on this text, got {config.sparsity}"
        )


def _own_config(config: FitConfig, objective: Objective, rank: int) -> FitConfig:
    """The configuration for one of the named maps; only the served one keeps its special kind."""
    served = (objective, rank) == (config.objective, config.rank)
    return replace(config, objective=objective, rank=rank, kind=config.kind if served else None, also=())


def _same_teacher(train: dict[str, Any], heldout: dict[str, Any]) -> dict[str, Any]:
    for name in ("teacher_fingerprint", "delta", "alpha", "head_scale", "layers", "windows", "heads", "head_dim"):
        if train.get(name) != heldout.get(name):
            raise DataError(f"fit: expected training and held-out shards of one teacher, their {name} differ")
    return train


def _cut(trained: Trained, data: LayerData, held: LayerData, config: FitConfig) -> _Cut:
    items, positional = calibration_items(held.q.shape[0]), positional_of(config)
    target = {"recall": config.recall, "sparsity": config.sparsity}
    maps, kind = trained.projections, config.served_kind
    if kind == "tiles":
        tiles = Tiles(maps, threshold=0.0, distance_weight=trained.distance_weight)
        if data.alpha == 1:  # a softmax graph is made again at every look, so the pass that looks once is used
            return _Cut(None, point_curves(layer_points(tiles, held, items, positional, config.tile_size)))
        parts = tile_parts(tiles, held, items, positional, config.tile_size)
        return _Cut(None, [curve(head) for head in parts])
    sets = _cluster_sets(maps, data, config)
    found = {count: part.centroids for count, (part, _) in sets.items()}
    mixed = {count: share.tolist() for count, (_, share) in sets.items()}
    if kind == "clusters":
        clusters = sets[config.clusters][0]
        curves = [curve(head) for head in cluster_parts(clusters, held, items, positional)]
        tops = [_top(c, config.clusters, target) if config.top is None else config.top for c in curves]
        return _Cut(replace(clusters, top_k=torch.tensor(tops)), curves, found, mixed)
    curves = [curve(head) for head in pair_parts(maps, held, items, positional, budget=kind == "budget")]
    cuts = torch.tensor([threshold_at(c, **target) for c in curves])
    if kind == "budget":
        return _Cut(RowBudget(maps, min(max(-float(cuts.mean()), 1e-6), 1.0)), curves, found, mixed)
    if kind == "score":
        return _Cut(Score(maps, cuts), curves)
    return _Cut(Distance(maps, (-cuts).clamp(min=0).sqrt()), curves, found, mixed)


def _cluster_sets(
    maps: Projections, data: LayerData, config: FitConfig
) -> dict[int, tuple[Clusters, Float[Tensor, " H"]]]:
    """Centroids in several numbers for metric maps, as far as there are points; the served number must be there."""
    if maps.form != "metric":
        return {}
    points = 2 * int(data.mask.sum())
    counts = {count for count in CLUSTER_COUNTS if count <= points}
    counts |= {config.clusters} if config.served_kind == "clusters" else set()
    return {count: fit_clusters(maps, data, count, config.seed) for count in sorted(counts)}


def _top(c: Curve, clusters: int, target: Mapping[str, float | None]) -> int:
    """Thresholds lie between whole numbers of clusters, and an infinite one keeps what is positional alone."""
    return min(max(int(-threshold_at(c, **target)), 1), clusters)


def _assemble(
    config: FitConfig,
    wanted: list[tuple[Objective, int]],
    trained: dict[str, list[Trained]],
    cuts: dict[str, list[_Cut]],
) -> Fitted:
    served_name = name_of(config.objective, config.rank)
    thresholds: dict[str, tuple[Tensor, ...]] = {}
    centroids: dict[str, tuple[Tensor, ...]] = {}
    layers: tuple[Predictor, ...] = ()
    figures: dict[str, Any] = {"loss": {}, "mixed_clusters": {}, "recall_at_sparsity": {}}
    for objective, rank in wanted:
        name = name_of(objective, rank)
        predictors = _predictors(config, trained[name], cuts[name])
        for predictor in predictors:
            if isinstance(predictor, Distance | Score):
                thresholds[name] = (*thresholds.get(name, ()), predictor.threshold)
            elif isinstance(predictor, Tiles):
                thresholds |= _tile_thresholds(name, thresholds, predictor)
        layers = predictors if name == served_name else layers
        figures["loss"][name] = [float(part.losses[-10:].mean()) for part in trained[name]]
        figures["recall_at_sparsity"][name] = _curve_figures(cuts[name])
        for count in cuts[name][0].centroids:
            centroids[f"{name}-b{count}"] = tuple(cut.centroids[count] for cut in cuts[name])
            figures["mixed_clusters"][f"{name}-b{count}"] = [cut.mixed[count] for cut in cuts[name]]
    projections = {name: tuple(part.projections for part in parts) for name, parts in trained.items()}
    return Fitted(layers, projections, centroids, thresholds, figures)


def _predictors(config: FitConfig, trained: list[Trained], cuts: list[_Cut]) -> tuple[Predictor, ...]:
    if all(cut.predictor is not None for cut in cuts):
        return tuple(cut.predictor for cut in cuts if cut.predictor is not None)
    shared = shared_threshold(
        [c for cut in cuts for c in cut.curves], {"recall": config.recall, "sparsity": config.sparsity}
    )
    return tuple(Tiles(part.projections, shared, distance_weight=part.distance_weight) for part in trained)


def _tile_thresholds(name: str, known: Mapping[str, tuple[Tensor, ...]], tiles: Tiles) -> dict[str, tuple[Tensor, ...]]:
    heads = tiles.projections.heads
    weight = torch.zeros(heads) if tiles.distance_weight is None else tiles.distance_weight
    added = {
        name: torch.as_tensor(tiles.threshold, dtype=torch.float32).expand(heads).clone(),
        f"{name}-distance": weight,
    }
    return {key: (*known.get(key, ()), tensor) for key, tensor in added.items()}


def _curve_figures(cuts: list[_Cut]) -> dict[str, Any]:
    """Recall at each sparsity, mean over heads, per layer: the calibration curve of the card."""
    table = [[recalls_at(c) for c in cut.curves] for cut in cuts]
    means = torch.tensor(table, dtype=torch.float64).nanmean(1)
    plain = [[round(x, 4) if math.isfinite(x) else None for x in row] for row in means.tolist()]
    return {"sparsity": list(CURVE_POINTS), "recall": plain}
