"""Working points of an artifact: shifts of its cuts over a grid of densities, measured on plans of held-out text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparsefinder.metrics import HeadCounts, Report, counts_of_each, join, no_counts, summarize
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import legal_from_mask
from sparsefinder.plan import Plan, computed_pairs
from sparsefinder.predictors import Predictor, layer_plan
from sparsefinder.working_points import WorkingPoint, movable, moved
from training.extract import LayerData, read_layer, read_manifest
from training.fit import calibration_items, measuring_items
from training.layers import asked_predictors, in_place, predicted_layers
from training.threads import over_layers, single_thread

# Computed densities; closer where little is kept. What the window and the global tokens exceed already is left out.
GRID = (0.05, 0.065, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 0.9, 0.95)
CHOSEN_ON = 2  # instances whose plans say which shift gives which density
STEPS = tuple(2.0**power for power in range(-4, 11))  # how far a cut is moved until the ends are found
HALVINGS = 8
CLOSE = 0.01  # relative: a density so near to the one of the grid is taken for it
APART = 0.004  # of two points nearer than this one is enough
DIGITS = 6
BATCH = 4  # instances whose plans are held at once

OnStep = Callable[[str, int, int], None]


def measure_points(
    heldout: Path,
    predictors: Sequence[Predictor | None],
    positional: Pattern,
    tile_size: int,
    on_step: OnStep = lambda what, done, total: None,
) -> list[WorkingPoint]:
    """The points of predictors over a grid of densities, the served one among them; none where no cut can be moved.

    Shifts are chosen on some of the instances that cuts are chosen on, by the density of their plans alone, and figures
    are those of the plans at these shifts on the instances that `evaluate` measures on.

    Raises:
        DataError: the split is missing, or has other layers than the predictors.
    """
    manifest = read_manifest(heldout)
    asked = asked_predictors(predictors, manifest)
    if not all(map(movable, asked)):
        return []
    with single_thread():
        shifts = choose_shifts(_density_of(heldout, asked, positional, tile_size, manifest, on_step))
        reports = _reports(heldout, asked, positional, tile_size, manifest, shifts, on_step)
    return apart([_point(shift, report) for shift, report in zip(shifts, reports, strict=True)])


def choose_shifts(density: Callable[[float], float], grid: Sequence[float] = GRID) -> list[float]:
    """Shifts, falling, at which `density` (which falls as the shift grows) comes near to the values of the grid, with
    the served cut (0) and both ends: nothing predicted, and every key."""
    known = {0.0: density(0.0)}
    for step in STEPS:
        known |= {step: density(step), -step: density(-step)}
    least, most = known[STEPS[-1]], known[-STEPS[-1]]
    chosen = {0.0, _end(density, known, least), _end(density, known, most)}
    for target in grid:
        if least < target < most:
            chosen.add(_near(density, known, target))
    return sorted(chosen, reverse=True)


def _near(density: Callable[[float], float], known: dict[float, float], target: float) -> float:
    """A shift whose density is close to the target, by halving between known ones."""
    low = min(shift for shift, share in known.items() if share < target)
    high = max(shift for shift, share in known.items() if share >= target)
    for _ in range(HALVINGS):
        nearest = min((low, high), key=lambda shift: abs(known[shift] - target))
        if abs(known[nearest] - target) <= CLOSE * target:
            break
        middle = (low + high) / 2
        known[middle] = density(middle)
        low, high = (middle, high) if known[middle] < target else (low, middle)
    return min((low, high), key=lambda shift: abs(known[shift] - target))


def _end(density: Callable[[float], float], known: dict[float, float], extreme: float) -> float:
    """The least move from 0 that gives the extreme density, up to a halved step."""
    there = [shift for shift, share in known.items() if share == extreme]
    inside = [shift for shift, share in known.items() if share != extreme]
    end = min(there, key=abs)
    if not inside or end == 0:
        return end
    start = max(inside) if end > max(inside) else min(inside)
    for _ in range(HALVINGS):
        middle = (start + end) / 2
        known[middle] = density(middle)
        start, end = (start, middle) if known[middle] == extreme else (middle, end)
    return end


def apart(points: Sequence[WorkingPoint]) -> list[WorkingPoint]:
    """Those whose densities rise by enough to be told apart; the served point always stays."""
    served = next(point.density for point in points if point.shift == 0)
    kept: list[WorkingPoint] = []
    for point in points:
        near = point.shift != 0 and abs(point.density - served) < APART
        if not near and (not kept or point.density - kept[-1].density >= APART or point.shift == 0):
            kept.append(point)
    return kept


def _density_of(
    heldout: Path,
    asked: Sequence[Predictor],
    positional: Pattern,
    tile_size: int,
    manifest: dict[str, Any],
    on_step: OnStep,
) -> Callable[[float], float]:
    """The mean computed density over instances, heads and layers as a function of the shift."""
    items = calibration_items(manifest["instances"])[:CHOSEN_ON]
    layers = predicted_layers(manifest)
    kept = []
    for layer in layers:
        data = read_layer(heldout, layer, manifest)
        legal = legal_from_mask(data.mask[items], data.causal)
        kept.append((data.q[items].clone(), data.k[items].clone(), legal))
    asked_for = 0

    def density(shift: float) -> float:
        nonlocal asked_for
        asked_for += 1
        on_step("choose working points", asked_for, asked_for)
        shares = []
        for layer, predictor, (q, k, legal) in zip(layers, asked, kept, strict=True):
            plan = layer_plan(moved(predictor, shift), q, k, legal, positional, tile_size, layer)
            pairs = [legal.count(b) for b in range(q.shape[0])]
            computed = computed_pairs(plan).double().mean(1)
            shares.append(sum(float(c) / n for c, n in zip(computed, pairs, strict=True)) / len(pairs))
        return sum(shares) / len(shares)

    return density


def _reports(
    heldout: Path,
    asked: Sequence[Predictor],
    positional: Pattern,
    tile_size: int,
    manifest: dict[str, Any],
    shifts: Sequence[float],
    on_step: OnStep,
) -> list[Report]:
    """The figures of the plans at every shift, each layer's gold graph computed once for all of them."""
    items = measuring_items(manifest["instances"])
    places = in_place(asked, manifest)

    def work(layer: int) -> list[HeadCounts]:
        predictor = places[layer]
        if predictor is None:
            return [no_counts(manifest["heads"])] * len(shifts)
        data = read_layer(heldout, layer, manifest)
        return _layer_counts(data, predictor, positional, tile_size, items, layer, shifts)

    layers = []
    for counted in over_layers(work, range(manifest["layers"]), manifest["tokens"]):
        layers.append(counted)
        on_step("measure working points", len(layers), manifest["layers"])
    return [summarize([layer[at] for layer in layers]) for at in range(len(shifts))]


def _layer_counts(
    data: LayerData,
    predictor: Predictor,
    positional: Pattern,
    tile_size: int,
    items: Sequence[int],
    layer: int,
    shifts: Sequence[float],
) -> list[HeadCounts]:
    cut = [moved(predictor, shift) for shift in shifts]
    parts: list[list[HeadCounts]] = []
    for start in range(0, len(items), BATCH):
        chosen = list(items[start : start + BATCH])
        q, k, legal = data.q[chosen], data.k[chosen], legal_from_mask(data.mask[chosen], data.causal)
        plans: list[Pattern | Plan] = [layer_plan(one, q, k, legal, positional, tile_size, layer) for one in cut]
        parts.append(
            counts_of_each(q, k, plans, legal, data.alpha, data.scale, layer=layer, gold_mass=data.gold_mass)
        )  # fmt: skip
    return [join(found) for found in zip(*parts, strict=True)]


def _point(shift: float, report: Report) -> WorkingPoint:
    values = {name: round(report.overall[name], DIGITS) for name in ("sparsity", "recall", "mass", "exact_rows")}
    shares = report.as_dict()["layers"]["computed_density"]
    layers = tuple(None if share is None else round(share, DIGITS) for share in shares)
    return WorkingPoint(shift, round(report.overall["computed_density"], DIGITS), **values, layers=layers)
