"""How a density is allotted to heads: each gets another key where that buys most (equal slopes, Lagrange).

A head's curve says what it loses at each density it can be cut at. On the lower convex hulls of the curves the steps
of all heads, steepest first, give allotments that nothing beats: no other choice of points with as little density
loses less (Everett, 1963, on generalised Lagrange multipliers).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float64

from sparsefinder.errors import ConfigError, ShapeError

SLACK = 1e-12  # a target that rounding alone misses is met


@dataclass(frozen=True, eq=False)
class HeadCurve:
    """The points at which one head can be cut: `loss[p]` at `density[p]`, densities ascending; heads weigh alike.

    Raises:
        ShapeError: no point, different numbers of both, or densities that fall.
    """

    density: Float64[np.ndarray, " P"]
    loss: Float64[np.ndarray, " P"]

    def __post_init__(self) -> None:
        points = self.density.shape[0]
        if not points or self.loss.shape != self.density.shape or (np.diff(self.density) < 0).any():
            raise ShapeError(f"curve: expected ascending densities with a loss each, got {points} points")


@dataclass(frozen=True)
class _Step:
    """From one point of a head's hull to the next: what it costs, and what it buys for that."""

    slope: float
    head: int
    to: int


def allot(curves: Sequence[HeadCurve], *, density: float | None = None, loss: float | None = None) -> list[int]:
    """The point of every head: the least mean loss at a mean `density`, or the least mean density at a mean `loss`.

    A target that cannot be met gives the nearest: every head's sparsest point, or the last that still gains anything.

    Raises:
        ConfigError: not exactly one target.
    """
    if (density is None) == (loss is None):
        raise ConfigError("allot: expected exactly one of density and loss")
    hulls = [hull(curve) for curve in curves]
    steps = sorted(_steps(curves, hulls), key=lambda step: -step.slope)  # stable: a head's own steps stay in order
    chosen = [points[0] for points in hulls]
    if density is not None:
        return _to_density(curves, steps, chosen, density * len(curves))
    return _to_loss(curves, steps, chosen, (loss or 0.0) * len(curves))


def hull(curve: HeadCurve) -> list[int]:
    """Points of the lower convex hull, from the sparsest (of equally sparse ones the best) to the least loss."""
    order = np.lexsort((curve.loss, curve.density)).tolist()
    points = [order[0]]
    for p in order[1:]:
        if curve.loss[p] >= curve.loss[points[-1]]:
            continue
        while len(points) > 1 and _slope(curve, points[-2], points[-1]) <= _slope(curve, points[-1], p):
            points.pop()
        points.append(p)
    return points


def _slope(curve: HeadCurve, a: int, b: int) -> float:
    width = float(curve.density[b] - curve.density[a])
    return float(curve.loss[a] - curve.loss[b]) / width if width > 0 else np.inf


def _steps(curves: Sequence[HeadCurve], hulls: Sequence[list[int]]) -> list[_Step]:
    return [
        _Step(_slope(curve, a, b), head, b)
        for head, (curve, points) in enumerate(zip(curves, hulls, strict=True))
        for a, b in pairwise(points)
    ]


def _to_density(curves: Sequence[HeadCurve], steps: Sequence[_Step], chosen: list[int], budget: float) -> list[int]:
    """Steps as long as they fit; a head whose next step does not fit goes as far as it may, off its hull."""
    left = budget - sum(float(curve.density[p]) for curve, p in zip(curves, chosen, strict=True))
    closed: set[int] = set()
    for step in steps:
        curve, at = curves[step.head], chosen[step.head]
        if step.head in closed:
            continue
        to = step.to
        if curve.density[to] - curve.density[at] > left + SLACK:
            closed.add(step.head)
            fits = [p for p in range(at + 1, to) if curve.density[p] - curve.density[at] <= left + SLACK]
            to = min((p for p in fits if curve.loss[p] < curve.loss[at]), key=lambda p: curve.loss[p], default=at)
        left -= float(curve.density[to] - curve.density[at])
        chosen[step.head] = to
    return chosen


def _to_loss(curves: Sequence[HeadCurve], steps: Sequence[_Step], chosen: list[int], target: float) -> list[int]:
    """Steps until the target is met; the last one is cut back to the sparsest point that still meets it."""
    over = sum(float(curve.loss[p]) for curve, p in zip(curves, chosen, strict=True)) - target
    for step in steps:
        if over <= SLACK:
            break
        curve, at = curves[step.head], chosen[step.head]
        enough = [p for p in range(at + 1, step.to + 1) if over - (curve.loss[at] - curve.loss[p]) <= SLACK]
        to = min(enough, key=lambda p: curve.density[p], default=step.to)
        over -= float(curve.loss[at] - curve.loss[to])
        chosen[step.head] = to
    return chosen
