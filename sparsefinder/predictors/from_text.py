"""From text to pairs: predictors that a pattern names are taken from an artifact's layer, with other settings."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal
from sparsefinder.patterns.positional import Nothing
from sparsefinder.patterns.text import Predicted, Value, resolve
from sparsefinder.predictors import Predictor, Projections, layer_pattern

SHORT = {"top": "top_k"}  # what a text may say for a field


def with_settings(predictor: Predictor, settings: Mapping[str, Value]) -> Predictor:
    """The same predictor with other numbers; a number for a field that holds one per head is every head's.

    Raises:
        PatternError: a setting that the predictor does not have or that is learned, or a value that it refuses.
    """
    free = {field.name: field for field in fields(predictor) if _is_free(getattr(predictor, field.name))}
    changed: dict[str, Any] = {}
    for name, value in settings.items():
        field = free.get(name) or free.get(SHORT.get(name, ""))
        if field is None:
            known = ", ".join(sorted(free)) or "none"
            raise PatternError(f"{predictor.kind}: expected settings among {known}, got {name!r}")
        if value is None and field.default is None:
            changed[field.name] = None
        else:
            changed[field.name] = _like(f"{predictor.kind}: {name}", getattr(predictor, field.name), value)
    return replace(predictor, **changed)


def text_pattern(
    pattern: Pattern,
    predictors: Mapping[str, Predictor],
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    legal: Legal,
    tile_size: int = 32,
) -> Pattern:
    """A parsed pattern with every predictor's name replaced by what it predicts for these queries and keys.

    Args:
        predictors: of one layer, by the name that they have in the text.

    Raises:
        PatternError: a predictor that is not there, or settings that it does not have.
        ShapeError, NonFiniteError: q and k that do not fit.
    """

    def fill(leaf: Predicted) -> Pattern:
        if leaf.name not in predictors:
            raise PatternError(f"{leaf.name}: expected one of {', '.join(sorted(predictors)) or 'none'}, got none such")
        chosen = with_settings(predictors[leaf.name], dict(leaf.settings))
        return layer_pattern(chosen, q, k, legal, Nothing(), tile_size)

    return resolve(pattern, fill)


def _is_free(value: object) -> bool:
    """Numbers, and one number per head; maps and centroids are learned."""
    return value.ndim == 1 if isinstance(value, Tensor) else not isinstance(value, Projections)


def _like(name: str, old: object, value: Value) -> object:
    """`value` in the form of the old one: a tensor with one entry per head where that was one."""
    if isinstance(old, Tensor):
        kind: type = float if old.is_floating_point() else int
    else:
        kind = float if old is None else type(old)
    fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not fits or isinstance(value, bool) != (kind is bool):
        raise PatternError(f"{name}: expected a value of type {kind.__name__}, got {value!r}")
    return torch.full_like(old, value) if isinstance(old, Tensor) else value  # type: ignore[arg-type]
