"""What is read off a family's points: Pareto fronts, and recall at a stated sparsity."""

import math
from collections.abc import Callable, Sequence
from typing import Any

Point = dict[str, Any]

SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
THINNED = 120  # dominated points of a family that stay in the one JSON


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


def at_sparsity(points: Sequence[Point], sparsity: float, measure: str = "recall") -> tuple[float, Point | None]:
    """The measure at this sparsity: settings chosen on one half of the instances, figures read off the other.

    Between two neighbours of the front it is interpolated (both settings, each on a share of the queries); beyond the
    sparsest setting its pairs are dropped at random; below the least sparse one, that one's value stands. Also
    returned: the setting of the front that is nearest but at least this sparse (the sparsest where none is).
    """
    half = "chosen" if all(_measured(p) for p in points) else "all"
    line = front(points, measure, half)
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
    """The points that figures and tables need, whole; without layers and halves all those by themselves, and a few of
    the others."""
    keep: set[int] = set()
    fronts: list[tuple[str, str, Callable[[Point], bool]]] = [
        (measure, half, only)
        for measure in ("recall", "mass")
        for half in ("all", "chosen")
        for only in (alone, lambda _: True)
    ]
    for measure, half, only in fronts:
        keep |= {id(p) for p in front([p for p in points if only(p)], measure, half)}
    rest = [p for p in points if id(p) not in keep and not alone(p)]
    step = max(1, len(rest) // THINNED)
    some = {id(p) for p in rest[::step]}
    dropped = ("layers", "chosen", "measured")
    return [
        p if id(p) in keep else {name: v for name, v in p.items() if name not in dropped}
        for p in points
        if id(p) in keep or id(p) in some or alone(p)
    ]


def whole(points: Sequence[Point]) -> list[Point]:
    """Of thinned points those that still have everything."""
    return [p for p in points if "layers" in p]
