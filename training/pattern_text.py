"""Any pattern written as a line of text, measured on held-out graphs: what it keeps, and at which price."""

from collections.abc import Callable
from pathlib import Path

import torch

from sparsefinder.artifact import Artifact, load, predicted
from sparsefinder.errors import ConfigError
from sparsefinder.metrics import HeadCounts, Report, SetName, counts, join, no_counts, summarize
from sparsefinder.patterns.algebra import Pattern, context_of
from sparsefinder.patterns.heads import at_layer
from sparsefinder.patterns.legal import legal_from_mask
from sparsefinder.patterns.text import parse_pattern
from sparsefinder.plan import Plan, build_plan
from sparsefinder.predictors import Clusters, Distance, Predictor, Quantization, RowBudget, Score, TopKeys
from sparsefinder.predictors.from_text import text_pattern
from training.evaluate import BATCH
from training.extract import LayerData, read_layer
from training.fit import measuring_items
from training.pipeline import check_shards
from training.threads import single_thread

SETS: tuple[SetName, ...] = ("pattern", "plan")


def named_predictors(artifact: Artifact, layer: int, maps: str = "") -> dict[str, Predictor]:
    """What a text may name in one predicted layer: the served predictor by its kind, and what a set of maps gives.

    maps: a name such as `hinge-r8`; its predictors take the place of a served one of the same kind. Metric maps give
        `distance`, `budget`, `topk`, `quantization` and, for each number of centroids, such as `clusters16`; bilinear
        ones give `score`, `budget` and `topk`. Their settings are written in the text: `budget(density=0.1)`.

    Raises:
        ConfigError: maps that the artifact does not have.
    """
    served, at = artifact.layers[layer], predicted(artifact).index(layer)
    found: dict[str, Predictor] = {} if served is None else {served.kind: served}
    if not maps:
        return found
    if maps not in artifact.projections:
        raise ConfigError(f"maps: expected one of {', '.join(sorted(artifact.projections))}, got {maps!r}")
    projections = artifact.projections[maps][at]
    zero = torch.zeros(projections.heads)
    found |= {"budget": RowBudget(projections, 0.1), "topk": TopKeys(projections, 8)}
    if projections.form == "bilinear":
        return found | {"score": Score(projections, zero)}
    found |= {"distance": Distance(projections, zero + 1), "quantization": Quantization(projections, 8)}
    for name, centroids in artifact.centroids.items():
        if name.startswith(f"{maps}-b"):
            one = torch.ones(projections.heads, dtype=torch.long)
            found["clusters" + name.removeprefix(f"{maps}-b")] = Clusters(projections, centroids[at], one)
    return found


def evaluate_pattern(
    path: Path,
    shards: Path,
    text: str,
    maps: str = "",
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> dict[SetName, Report]:
    """Both sets of a pattern's text on the held-out shards of an artifact's teacher.

    Raises:
        PatternError: a text that cannot be read, or a setting that a predictor does not have.
        ConfigError, ArtifactError, DataError: what is missing, or of another teacher.
    """
    artifact = load(path)
    asked = predicted(artifact)
    pattern = parse_pattern(text, tuple(named_predictors(artifact, asked[0], maps)))
    manifest = check_shards(artifact, shards)
    items = measuring_items(manifest["instances"])
    parts: dict[SetName, list[HeadCounts]] = {name: [] for name in SETS}
    with single_thread():
        for layer in range(artifact.card.layers):
            if layer in asked:
                data = read_layer(shards / "heldout", layer, manifest)
                found = _layer(artifact, pattern, maps, data, items, layer)
            else:
                found = {name: no_counts(artifact.card.heads, name) for name in SETS}
            for name, counted in found.items():
                parts[name].append(counted)
            on_layer(layer + 1, artifact.card.layers)
    return {name: summarize(layers) for name, layers in parts.items()}


def _layer(
    artifact: Artifact, pattern: Pattern, maps: str, data: LayerData, items: list[int], layer: int
) -> dict[SetName, HeadCounts]:
    predictors, size = named_predictors(artifact, layer, maps), artifact.card.tile_size
    found: dict[SetName, list[HeadCounts]] = {name: [] for name in SETS}
    for start in range(0, len(items), BATCH):
        chosen = items[start : start + BATCH]
        q, k = data.q[chosen], data.k[chosen]
        legal = legal_from_mask(data.mask[chosen], data.causal)
        kept = text_pattern(at_layer(pattern, layer), predictors, q, k, legal, size)
        plan = build_plan(kept, legal, size, context_of(legal, layer), heads=q.shape[1])
        sets: dict[SetName, Pattern | Plan] = {"pattern": kept, "plan": plan}
        for name, pairs in sets.items():
            found[name].append(
                counts(q, k, pairs, legal, data.alpha, data.scale, layer=layer, gold_mass=data.gold_mass)
            )
    return {name: join(batches) for name, batches in found.items()}
