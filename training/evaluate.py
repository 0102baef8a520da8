"""Held-out figures of predictors, through `sparsefinder.metrics`: of the plan that is computed, and of the pattern."""

from collections.abc import Callable, Sequence
from pathlib import Path

from sparsefinder.metrics import HeadCounts, Report, SetName, counts, join, no_counts, summarize
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import legal_from_mask
from sparsefinder.predictors import Predictor, Tiles, layer_pattern, layer_plan
from training.extract import LayerData, read_layer, read_manifest
from training.fit import measuring_items
from training.layers import asked_predictors, in_place
from training.threads import over_layers, single_thread

BATCH = 4

OnLayer = Callable[[int, int], None]


def evaluate(
    heldout: Path,
    predictors: Sequence[Predictor | None],
    positional: Pattern,
    tile_size: int,
    set_name: SetName = "plan",
    instances: int | None = None,
    on_layer: OnLayer = lambda done, total: None,
) -> Report:
    """Figures of the named set (predicted ∪ positional) on the held-out instances that no cut was chosen on.

    Layers that keep their sliding window have no figures (NaN) and count in no mean.

    Raises:
        DataError: the split is missing, or has other layers than the predictors.
        PatternError: the set `pattern` of a tile predictor, which has none.
    """
    manifest = read_manifest(heldout)
    items = measuring_items(manifest["instances"], instances)
    asked = in_place(asked_predictors(predictors, manifest), manifest)

    def work(layer: int) -> HeadCounts:
        predictor = asked[layer]
        if predictor is None:
            return no_counts(manifest["heads"], set_name)
        data = read_layer(heldout, layer, manifest)
        return layer_counts(data, predictor, positional, tile_size, set_name, items, layer)

    layers = []
    with single_thread():
        for counted in over_layers(work, range(len(predictors)), manifest["tokens"]):
            layers.append(counted)
            on_layer(len(layers), len(predictors))
    return summarize(layers)


def layer_counts(
    data: LayerData,
    predictor: Predictor,
    positional: Pattern,
    tile_size: int,
    set_name: SetName,
    items: Sequence[int],
    layer: int = 0,
) -> HeadCounts:
    """Counts of one layer over the given instances, a few at a time."""
    parts = []
    for start in range(0, len(items), BATCH):
        chosen = list(items[start : start + BATCH])
        q, k = data.q[chosen], data.k[chosen]
        legal = legal_from_mask(data.mask[chosen], data.causal)
        if set_name == "plan":
            kept = layer_plan(predictor, q, k, legal, positional, tile_size, layer)
            parts.append(counts(q, k, kept, legal, data.alpha, data.scale, layer=layer, gold_mass=data.gold_mass))
        else:
            pattern = layer_pattern(predictor, q, k, legal, positional)
            parts.append(counts(q, k, pattern, legal, data.alpha, data.scale, layer=layer, gold_mass=data.gold_mass))
    return join(parts)


def has_pattern(predictors: Sequence[Predictor | None]) -> bool:
    """Whether there is a set `pattern` beside the plan: tile predictors have none."""
    return not any(isinstance(predictor, Tiles) for predictor in predictors)
