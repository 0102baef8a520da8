"""Working points: one artifact served at several computed densities, by moving every cut by one shared number.

The cut is the least score that is kept: a log-share for tiles, log-odds, a budget, or a distance. Adding one `shift` to
the cuts of all layers and heads is the simplest form that is sound: what calibration allotted to heads stays, the
served cut itself is the point with shift 0, and of two points the denser one keeps every pair of the other, so recall
never falls as density rises, between the points that were measured too. It is also the better one by recall: at
densities of .15, .25 and .4 of the shipped artifact a shared threshold keeps .672, .859 and .956 of the gold pairs on
held-out text, thresholds allotted to every head anew .654, .837 and .943 (`sparsefinder-train calibrate --density`).
What calibration left without prediction, or with every key, stays so at every point.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparsefinder.errors import ArtifactError, ConfigError
from sparsefinder.predictors import Predictor
from sparsefinder.predictors.budget import RowBudget
from sparsefinder.predictors.distance import Distance
from sparsefinder.predictors.score import Score
from sparsefinder.predictors.tiles import EVERY_KEY, NO_KEY, Tiles

FIGURES = ("density", "sparsity", "recall", "mass", "exact_rows")


@dataclass(frozen=True)
class WorkingPoint:
    """How far all cuts are moved (positive: fewer pairs), and what plans then measured on held-out text.

    density: computed pairs / legal pairs, as `sparsity`, `recall`, `mass` and `exact_rows` of the plan, the mean over
    instances, heads and layers. layers: the density of each layer, None for one that keeps its sliding window.
    """

    shift: int | float
    density: int | float
    sparsity: int | float
    recall: int | float
    mass: int | float
    exact_rows: int | float
    layers: tuple[float | None, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, as cards hold it."""
        return asdict(self) | {"layers": list(self.layers)}

    def figures(self) -> dict[str, Any]:
        """What people are shown; `served` marks the point that is served where no density is asked for."""
        return {name: getattr(self, name) for name in FIGURES} | {"served": self.shift == 0}


def read_points(calibration: Any) -> tuple[WorkingPoint, ...]:
    """The points of a card's calibration, densities rising. None for artifacts of before there were any, which load and
    serve as they did, at the one density that they were fitted for.

    Raises:
        ArtifactError: points that are incomplete, not finite, or not in order.
    """
    found = calibration.get("points", []) if isinstance(calibration, Mapping) else None
    names = {field.name for field in fields(WorkingPoint)}
    if not isinstance(found, list) or not all(isinstance(entry, Mapping) and set(entry) == names for entry in found):
        raise ArtifactError(f"points: expected a list of objects with {', '.join(sorted(names))}")
    for entry in found:
        numbers = [value for name, value in entry.items() if name != "layers"]
        if not isinstance(entry["layers"], list):
            raise ArtifactError("points: expected the density of each layer in layers")
        numbers += [value for value in entry["layers"] if value is not None]
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in numbers):
            raise ArtifactError("points: expected finite numbers")
    points = tuple(WorkingPoint(**{**entry, "layers": tuple(entry["layers"])}) for entry in found)
    for low, high in pairwise(points):
        if low.density >= high.density or low.shift <= high.shift or len(low.layers) != len(high.layers):
            raise ArtifactError("points: expected rising densities with falling shifts, of the same layers")
    return points


def point_at(points: Sequence[WorkingPoint], density: int | float) -> WorkingPoint:
    """The point of this computed density; between two measured ones everything is on the straight line between them.

    Raises:
        ConfigError: no points, or a density outside of theirs: nothing is known there.
    """
    if not points:
        raise ConfigError("density: expected an artifact with working points (`evaluate --write` measures them)")
    if not points[0].density <= density <= points[-1].density:
        ends = f"{points[0].density:g} to {points[-1].density:g}"
        raise ConfigError(f"density: expected one of the artifact's working points, {ends}, got {density:g}")
    above = bisect.bisect_left([point.density for point in points], density)
    low, high = points[max(above - 1, 0)], points[above]
    if density == high.density:
        return high
    weight = (density - low.density) / (high.density - low.density)
    names = [field.name for field in fields(WorkingPoint) if field.name != "layers"]
    values = {name: _between(getattr(low, name), getattr(high, name), weight) for name in names}
    pairs = zip(low.layers, high.layers, strict=True)
    layers = tuple(None if a is None or b is None else _between(a, b, weight) for a, b in pairs)
    return WorkingPoint(**values | {"density": density}, layers=layers)


def _between(low: int | float, high: int | float, weight: int | float) -> float:
    return low + (high - low) * weight


def least_density(points: Sequence[WorkingPoint], recall: int | float) -> float | None:
    """The least density whose recall reaches `recall`; None where no point's does."""
    above = next((i for i, point in enumerate(points) if point.recall >= recall), None)
    if above is None:
        return None
    low, high = points[max(above - 1, 0)], points[above]
    if above == 0 or high.recall == recall:
        return float(high.density)
    return _between(low.density, high.density, (recall - low.recall) / (high.recall - low.recall))


def movable(predictor: Predictor) -> bool:
    """Whether the predictor has a cut that `at_point` can move."""
    if isinstance(predictor, Tiles):
        return predictor.threshold is not None
    return isinstance(predictor, Score | Distance | RowBudget)


def at_point(predictor: Predictor | None, point: WorkingPoint) -> Predictor | None:
    """The predictor at the point; at the served one, and for a layer without predictor, the same object. Errors as in
    `moved`."""
    return None if predictor is None else moved(predictor, point.shift)


def moved(predictor: Predictor, shift: int | float) -> Predictor:
    """The predictor with its cut moved: what is kept at a greater shift is kept at a smaller one too.

    Raises:
        ConfigError: a kind whose cut cannot be moved.
    """
    if shift == 0:
        return predictor
    if isinstance(predictor, Tiles) and predictor.threshold is not None:
        return replace(predictor, threshold=_raised(predictor.threshold, shift))
    if isinstance(predictor, Score):
        raised = _raised(predictor.threshold, shift)
        return replace(predictor, threshold=torch.as_tensor(raised))
    if isinstance(predictor, RowBudget):
        return replace(predictor, density=_smaller_budget(predictor, shift))
    if isinstance(predictor, Distance):
        return replace(predictor, threshold=_shorter(predictor.threshold, shift))
    raise ConfigError(f"density: expected predictors with a threshold or a budget, got {predictor.kind}")


def _raised(threshold: float | Tensor, shift: int | float) -> float | Tensor:
    """In float32 `NO_KEY` and `EVERY_KEY` are too large to be moved, and stay."""
    if isinstance(threshold, Tensor):
        return (threshold.double() + shift).clamp(EVERY_KEY, NO_KEY).to(threshold.dtype)
    return min(max(threshold + shift, EVERY_KEY), NO_KEY)


def _smaller_budget(predictor: RowBudget, shift: int | float) -> Tensor:
    heads = predictor.projections.heads
    density = torch.as_tensor(predictor.density, dtype=torch.float32).expand(heads)
    fixed = (density <= 0) | (density >= 1)
    return torch.where(fixed, density, (density.double() - shift).clamp(0.0, 1.0).float())


def _shorter(length: Tensor, shift: int | float) -> Tensor:
    """The score of a pair is its squared distance, negated; a negative length keeps nothing."""
    square = length.double().square() - shift
    moved = torch.where(square < 0, -1.0, square.clamp(min=0.0).sqrt()).to(length.dtype)
    return torch.where(length < 0, length, moved)
