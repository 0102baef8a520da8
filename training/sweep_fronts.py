"""What is read off a family's points: Pareto fronts, and recall at a stated sparsity."""

import math
from collections.abc import Callable, Sequence
from typing import Any

Point = dict[str, Any]

SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
THINNED = 120  # dominated points of a family that stay in the one JSON
LAYERED = 20  # points of its front that keep the figures of every layer there
SPACING = 0.005  # of sparsity, between two points of a front


def value(point: Point, measure: str, half: str = "all") -> float:
    """A measure over all instances, or over one half; NaN where it could not be measured."""
    found = point[measure] if half == "all" else point[half][measure]
    return math.nan if found is None else float(found)


def alone(point: Point) -> bool:
    """Without window and without global tokens."""
    return not point["window"] and not point["global"]


def front(points: Sequence[Point], measure: str = "recall", half: str = "all") -> list[Point]:
    """The points that no other beats in both sparsity and the measure, sparsest first."""
    finite = [p for p in points if math.isfinite(value(p, measure, half)) and math.isfinite(value(p, "sparsity", half))]
    ordered = sorted(finite, key=lambda p: (-value(p, "sparsity", half), -value(p, measure, half)))
    best, found = -math.inf, []
    for point in ordered:
        if value(point, measure, half) > best:
            best = value(point, measure, half)
            found.append(point)
    return found


def hull(points: Sequence[Point], measure: str = "recall", half: str = "all") -> list[Point]:
    """The points of the front that no mixture of two others beats (each of the two settings on a share of the queries;
    everything can be dropped, too), sparsest first: the upper concave hull."""
    found: list[Point] = []
    for point in front(points, measure, half):
        while found:
            before = found[-2] if len(found) > 1 else None
            x0, y0 = (value(before, "sparsity", half), value(before, measure, half)) if before else (1.0, 0.0)
            x1, y1 = value(found[-1], "sparsity", half), value(found[-1], measure, half)
            x2, y2 = value(point, "sparsity", half), value(point, measure, half)
            if (y1 - y0) * (x0 - x2) > (y2 - y0) * (x0 - x1):
                break
            found.pop()
        found.append(point)
    return found


def at_sparsity(points: Sequence[Point], sparsity: float, measure: str = "recall") -> tuple[float, Point | None]:
    """The measure at this sparsity: settings chosen on one half of the instances, figures read off the other.

    Between two neighbours of the hull it is interpolated (both settings, each on a share of the queries); beyond the
    sparsest setting its pairs are dropped at random; below the least sparse one, that one's value stands. Also
    returned: the setting of the hull that is nearest but at least this sparse (the sparsest where none is).
    """
    half = "chosen" if all(_measured(p) for p in points) else "all"
    line = hull(points, measure, half)
    if not line:
        return math.nan, None
    right = next((at for at, p in enumerate(line) if value(p, "sparsity", half) < sparsity), len(line))
    read = "measured" if half == "chosen" else "all"
    if right == len(line):
        return value(line[-1], measure, read), line[-1]
    low = (value(line[right], "sparsity", read), value(line[right], measure, read))
    high = (1.0, 0.0)
    if right:
        high = (value(line[right - 1], "sparsity", read), value(line[right - 1], measure, read))
    share = 0.0 if high[0] == low[0] else (sparsity - low[0]) / (high[0] - low[0])
    share = min(max(share, 0.0), 1.0)
    return low[1] + share * (high[1] - low[1]), line[max(right - 1, 0)]


def _measured(point: Point) -> bool:
    return all(point[half]["sparsity"] is not None for half in ("chosen", "measured"))


def thinned(points: Sequence[Point]) -> list[Point]:
    """What tables and pictures need: the points of the fronts (of two that are hardly apart, one) with their halves,
    the best of them with their layers; all points by themselves, and a few of the others."""
    keep: set[int] = set()
    for measure, half, only in _KEPT_FRONTS:
        some = [p for p in points if only(p)]
        keep |= {id(p) for p in [*_spaced(front(some, measure, half), half), *hull(some, measure, half)]}
    best = [p for p in front(points) if id(p) in keep]
    layered = {id(p) for p in best[:: max(1, len(best) // LAYERED)]}
    rest = [p for p in points if id(p) not in keep and not alone(p)]
    few = {id(p) for p in rest[:: max(1, len(rest) // THINNED)]}
    found = []
    for point in points:
        if id(point) in keep:
            found.append(point if id(point) in layered else _without(point, "layers"))
        elif id(point) in few or alone(point):
            found.append(_without(point, "layers", "chosen", "measured"))
    return found


def _anything(_: Point) -> bool:
    return True


_KEPT_FRONTS: tuple[tuple[str, str, Callable[[Point], bool]], ...] = (
    ("recall", "all", _anything),
    ("recall", "chosen", _anything),
    ("recall", "all", alone),
    ("recall", "chosen", alone),
    ("mass", "all", _anything),
)


def _spaced(line: Sequence[Point], half: str) -> list[Point]:
    """Of a front's points those that lie apart in sparsity, and its two ends."""
    found: list[Point] = []
    for point in line:
        if not found or value(found[-1], "sparsity", half) - value(point, "sparsity", half) >= SPACING:
            found.append(point)
    return found if not line or found[-1] is line[-1] else [*found, line[-1]]


def _without(point: Point, *names: str) -> Point:
    return {name: part for name, part in point.items() if name not in names}


def whole(points: Sequence[Point]) -> list[Point]:
    """Of thinned points those that still have their halves."""
    return [p for p in points if "chosen" in p]
