"""One family of patterns over all layers, heads and instances: its points, averaged as `sparsefinder.metrics` does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from training.sweep_kernels import count_gold, count_pairs, count_planned
from training.sweep_sheets import Bytes, Family, LayerWork, Sheet

MEASURES = ("sparsity", "recall", "precision", "mass", "exact_rows", "computed_density")
OF_HALVES = ("sparsity", "recall", "mass")
HALVES = ("all", "chosen", "measured")  # settings may be chosen on the second and are then read off the third
TILE = 16  # rows of the tiles in which a pattern's computed density is counted
DIGITS = 5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Geometry:
    """What the unions need of one length: `near`, `globe` and (cell) `place` of `sweep_kernels`, for rows or tiles."""

    near: Bytes
    globe: Bytes
    cell: npt.NDArray[np.uint16]


def geometry(n: int, windows: Sequence[int], counts: Sequence[int], tile: int) -> Geometry:
    """The first window and the first number of global tokens that hold each pair; with `tile` > 0 what a plan of that
    tile size reads for them: a key that one row of a tile wants is read by all its rows."""
    i = np.arange(n)
    distance = np.abs(i[:, None] - i[None, :])
    near = np.zeros((n, n), np.uint8)
    for size in windows:
        near += (distance > (size - 1) // 2) | (size == 0)
    first = np.minimum(i[:, None], i[None, :])
    globe = np.zeros((n, n), np.uint8)
    for count in counts:
        globe += first >= count
    if tile:
        start = np.arange(0, n, tile)
        near = np.repeat(np.minimum.reduceat(near, start, 0), tile, 0)[:n].copy()
    return Geometry(near, globe, near.astype(np.uint16) * np.uint16(len(counts) + 1) + globe)


def measure_family(family: Family, works: Sequence[LayerWork], windows: Sequence[int]) -> dict[str, Any]:
    """All points of a family as plain JSON: parameters, and every measure over all instances, over the half that
    settings may be chosen on, and over the other half; and per layer.

    windows must ascend and start with 0 (no window).
    """
    points: list[dict[str, Any]] = []
    tables: list[list[Floats]] = [[] for _ in family.sheets]
    for work in works:  # the outer loop, so that sheets can share what they make of a layer
        for table, sheet in zip(tables, family.sheets, strict=True):
            table.append(_measure_sheet(sheet, family, work, windows))
    for table, sheet in zip(tables, family.sheets, strict=True):
        points += _points(sheet, family, windows, np.stack(table, 2))  # half, measure, layer, P, W, G
    return {
        "family": family.name,
        "objective": family.objective,
        "rank": family.rank,
        "role": family.role,
        "set": family.set_name,
        "instances": len(items_of(family, len(works[0].lengths))),
        "points": points,
    }


def _measure_sheet(sheet: Sheet, family: Family, work: LayerWork, windows: Sequence[int]) -> Floats:
    """`[half, measure, P, W, G]` of one layer: mean over instances, then over heads."""
    ready = sheet.prepare(work)
    shape = (work.heads, ready.count, len(windows), len(family.globals_))
    total = np.zeros((2, len(MEASURES), work.heads, ready.index.shape[1], *shape[2:]))
    valid = np.zeros(total.shape)
    places: dict[int, Geometry] = {}
    head = np.arange(work.heads)[:, None]
    out = [np.zeros(shape) for _ in range(5)]
    counts, last = np.asarray(family.globals_, np.int64), None
    for b in items_of(family, len(work.lengths)):
        levels = ready.levels(b)
        n = work.lengths[b]
        place = places.get(n) or places.setdefault(n, geometry(n, windows, family.globals_, sheet.tile))
        gold = work.gold[b]
        if levels is not last:  # patterns that look at no token have one matrix for all instances of a length
            count_pairs(levels, place.cell, work.data.causal, out[0])
            count_planned(levels, place.near, counts, family.alone, sheet.tile or TILE, out[4])
            last = levels
        count_gold(levels, place.near, place.globe, gold.offsets, gold.flat, gold.mass, *out[1:4])
        kept, kept_gold, mass, exact, planned = (x[head, ready.index] for x in out)
        legal, gold_pairs = float(n * n), np.diff(gold.offsets)[:, None, None, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            recall, precision = kept_gold / gold_pairs, kept_gold / kept
        values = np.stack((1 - kept / legal, recall, precision, mass / n, exact / n, planned / legal))
        measured = np.isfinite(values)
        total[b % 2] += np.where(measured, values, 0)
        valid[b % 2] += measured
    return _means(total, valid)


def items_of(family: Family, instances: int) -> list[int]:
    """The instances that a family is measured on; both halves stay equally large."""
    return [b for b in range(instances) if b // 2 % family.every == 0]


def _means(total: Floats, valid: Floats) -> Floats:
    """Means over the instances of all, of the even and of the odd ones, then over heads; NaN where nothing counted."""
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.stack([total.sum(0), *total]) / np.stack([valid.sum(0), *valid])
        counted = np.isfinite(means)
        result: Floats = np.where(counted, means, 0).sum(2) / counted.sum(2)
    return result


def _points(sheet: Sheet, family: Family, windows: Sequence[int], table: Floats) -> list[dict[str, Any]]:
    overall = table.mean(2)
    found = []
    for p, parameters in enumerate(sheet.parameters):
        for w, size in enumerate(windows):
            for g, count in enumerate(family.globals_):
                point: dict[str, Any] = {**parameters, "window": size, "global": count}
                for half, name in enumerate(HALVES):
                    values = {m: number(overall[half, k, p, w, g]) for k, m in enumerate(MEASURES)}
                    point |= values if name == "all" else {name: {m: values[m] for m in OF_HALVES}}
                point["layers"] = {m: [number(v) for v in table[0, k, :, p, w, g]] for k, m in enumerate(MEASURES)}
                found.append(point)
    return found


def number(value: float) -> float | None:
    """A figure as JSON holds it: None for what could not be measured."""
    return round(float(value), DIGITS) + 0.0 if math.isfinite(value) else None
