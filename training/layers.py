"""Which layers of a split are predicted: those that attend to the whole text. The others keep their sliding window."""

from collections.abc import Sequence
from typing import Any, TypeVar

from sparsefinder.errors import DataError
from sparsefinder.predictors import Predictor

T = TypeVar("T")


def predicted_layers(manifest: dict[str, Any]) -> list[int]:
    """The numbers of the layers of a split that are predicted."""
    windows = manifest.get("windows", [None] * manifest["layers"])
    return [layer for layer, radius in enumerate(windows) if radius is None]


def in_place(found: Sequence[T], manifest: dict[str, Any]) -> tuple[T | None, ...]:
    """What was found for every predicted layer, in its place among all layers; None for the others."""
    places = dict(zip(predicted_layers(manifest), found, strict=True))
    return tuple(places.get(layer) for layer in range(manifest["layers"]))


def asked_predictors(predictors: Sequence[Predictor | None], manifest: dict[str, Any]) -> list[Predictor]:
    """The predictors of the predicted layers.

    Raises:
        DataError: shards of another number of layers, or a predicted layer without a predictor.
    """
    if manifest["layers"] != len(predictors):
        raise DataError(f"shards: expected some of {len(predictors)} layers, got {manifest['layers']}")
    found = []
    for layer in predicted_layers(manifest):
        predictor = predictors[layer]
        if predictor is None:
            raise DataError(f"layer {layer}: expected a predictor, since it attends to the whole text, got none")
        found.append(predictor)
    return found
