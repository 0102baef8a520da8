"""Budgets per head that meet a target: one pass over held-out graphs, density allotted where it buys most.

Chosen on one half of the held-out instances, measured on the other, beside one budget for all heads and one threshold
for all heads at the density that was allotted.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64

from sparsefinder.errors import DataError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.predictors import Predictor, RowBudget, Score, Tiles
from sparsefinder.predictors.tiles import EVERY_KEY, NO_KEY
from training.allot import HeadCurve, allot
from training.config import Target
from training.cut import bisect
from training.extract import read_layer, read_manifest, read_values
from training.fit import calibration_items, measuring_items
from training.layers import asked_predictors, in_place, predicted_layers
from training.points import Cuttable, Points, cuttable, layer_points
from training.threads import over_layers, single_thread

CURVE_DENSITIES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
BUDGET_HAIR = 1e-6
MEASURED = 8  # instances that the table is measured on, at most
WAYS = ("allotted", "one budget", "one threshold")

OnLayer = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Predictors with one threshold per head, and what they keep on instances that they were not chosen on.

    Layers that keep their sliding window have no predictor (None), and enter no figure.

    table: for every way of `WAYS` its density, recall, mass and output error. reached: those of the allotted budgets on
    the half that they were chosen on. curve: the same at several densities. density: of every predicted layer and
    head, there.
    every, none: heads that read every key, and that read none beside the positional pattern.
    """

    layers: tuple[Predictor | None, ...]
    target: Target
    loss: str
    table: dict[str, dict[str, float | None]]
    reached: dict[str, float | None]
    curve: dict[str, list[float | None]]
    density: Float64[np.ndarray, "L H"]
    every: int
    none: int

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, for cards and files."""
        return {
            "target": {self.target.measure: self.target.value},
            "loss": self.loss,
            "table": self.table,
            "reached": self.reached,
            "curve": self.curve,
            "density": [[round(float(x), 5) for x in row] for row in self.density],
            "dense_heads": self.every,
            "heads_without_prediction": self.none,
        }


def calibrate(
    heldout: Path,
    predictors: Sequence[Predictor | None],
    positional: Pattern,
    tile_size: int,
    target: Target,
    on_layer: OnLayer = lambda what, done, total: None,
) -> Calibration:
    """Thresholds of every head that meet the target with the least density, or lose least at that density.

    Raises:
        DataError: shards that are missing or of other layers, or without values where the output counts.
        ConfigError: predictors that no threshold cuts.
    """
    manifest = read_manifest(heldout)
    if target.measure == "output" and not manifest.get("values"):
        raise DataError(f"{heldout}: expected shards with values for an output error (delete them and extract again)")
    served = [cuttable(predictor) for predictor in asked_predictors(predictors, manifest)]

    def pass_over(what: str, items: list[int], thresholds: list[Float64[np.ndarray, "H P"]] | None) -> list[Points]:
        step = functools.partial(on_layer, what)
        return held_points(heldout, served, positional, tile_size, items, thresholds, step)

    points = pass_over("calibrate", calibration_items(manifest["instances"]), None)
    loss, cuts = choose(points, target)
    chosen = [thresholds_at(p, cut) for p, cut in zip(points, cuts, strict=True)]
    density = np.stack([np.take_along_axis(p.density, c[:, None], 1)[:, 0] for p, c in zip(points, cuts, strict=True)])
    ways = (chosen, one_budget(points, float(density.mean())), one_threshold(points, float(density.mean())))
    falling = [-np.sort(-np.stack(layer, 1), axis=1) for layer in zip(*ways, strict=True)]
    measured = pass_over("measure", measuring_items(manifest["instances"], MEASURED), falling)
    table = {name: _figures(measured, way) for name, way in zip(WAYS, ways, strict=True)}
    layers = in_place(
        [with_thresholds(predictor, cut) for predictor, cut in zip(served, chosen, strict=True)], manifest
    )
    last = [p.threshold.shape[1] - 1 for p in points]
    every = sum(int((cut == end).sum()) for cut, end in zip(cuts, last, strict=True))
    none = sum(int((cut == 0).sum()) for cut in cuts)
    reached = _totals(points, cuts)
    return Calibration(layers, target, loss, table, reached, _curve(points, loss), density, every, none)


def held_points(
    heldout: Path,
    predictors: Sequence[Cuttable],
    positional: Pattern,
    tile_size: int,
    items: list[int],
    thresholds: Sequence[Float64[np.ndarray, "H P"]] | None = None,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> list[Points]:
    """The points of every predicted layer over some held-out instances, in one pass; on a grid without thresholds.

    predictors, thresholds: of the predicted layers.

    Raises:
        DataError: shards that are missing.
    """
    manifest = read_manifest(heldout)
    layers = predicted_layers(manifest)

    def work(at: int) -> Points:
        data, values = read_layer(heldout, layers[at], manifest), read_values(heldout, layers[at], manifest)
        cut = None if thresholds is None else thresholds[at]
        return layer_points(predictors[at], data, items, positional, tile_size, values=values, thresholds=cut)

    found = []
    with single_thread():
        for part in over_layers(work, range(len(predictors)), manifest["tokens"]):
            found.append(part)
            on_layer(len(found), len(predictors))
    return found


def choose(points: Sequence[Points], target: Target) -> tuple[str, list[Int64[np.ndarray, " H"]]]:
    """(what is lost, the point of every head): budgets allotted for a target."""
    known = not any(np.isnan(p.error).any() for p in points)
    loss = {"recall": "recall", "mass": "mass", "output": "output"}.get(target.measure, "output" if known else "mass")
    curves = [c for p in points for c in head_curves(p, loss)]
    heads = points[0].density.shape[0]
    if target.measure == "density":
        cuts = allot(curves, density=target.value)
    elif target.measure == "output":
        cuts = allot(curves, loss=target.value**2 / heads)
    else:
        cuts = allot(curves, loss=1 - target.value)
    return loss, [np.array(cuts[at : at + heads]) for at in range(0, len(cuts), heads)]


def head_curves(points: Points, loss: str) -> list[HeadCurve]:
    """The curve of every head: lost `recall` or `mass`, or the squared error of the `output`."""
    lost = points.error if loss == "output" else 1 - getattr(points, loss)
    lost = np.nan_to_num(lost)  # a head without a gold pair loses none
    return [HeadCurve(density, values) for density, values in zip(points.density, lost, strict=True)]


def one_budget(points: Sequence[Points], density: float) -> list[Float64[np.ndarray, " H"]]:
    """The threshold at which each head keeps this density, between the points of its curve."""
    return [
        np.array([np.interp(density, d, t) for d, t in zip(p.density, p.threshold, strict=True)]) for p in points
    ]  # fmt: skip


def one_threshold(points: Sequence[Points], density: float) -> list[Float64[np.ndarray, " H"]]:
    """The one threshold at which all heads together keep this density, by bisection."""

    def few(threshold: float) -> bool:
        lines = ((t, d) for p in points for t, d in zip(p.threshold, p.density, strict=True))
        return bool(np.mean([np.interp(-threshold, -t, d) for t, d in lines]) <= density)

    ends = min(float(p.threshold.min()) for p in points), max(float(p.threshold.max()) for p in points)
    found = sum(bisect(*ends, few, 60)) / 2
    return [np.full(p.threshold.shape[0], found) for p in points]


def with_thresholds(predictor: Cuttable, thresholds: Float64[np.ndarray, " H"]) -> Predictor:
    """The predictor cut at a score per head, as `points` counts scores: more is sooner kept."""
    cut = torch.from_numpy(thresholds).float()
    if isinstance(predictor, Tiles):
        return replace(predictor, threshold=cut, keys_per_tile=None)
    if isinstance(predictor, Score):
        return replace(predictor, threshold=cut)
    if isinstance(predictor, RowBudget):
        # A row keeps the keys of rank below its budget, a score that equals the threshold is kept: a hair more, then.
        return replace(predictor, density=(BUDGET_HAIR - cut).clamp(0.0, 1.0))
    lengths = (-cut).clamp(min=0.0).sqrt()
    return replace(predictor, threshold=torch.where(cut > 0, -1.0, lengths))


def thresholds_at(points: Points, cuts: Int64[np.ndarray, " H"]) -> Float64[np.ndarray, " H"]:
    """The thresholds of the chosen points; the first and last ones keep nothing and everything on any text."""
    chosen = np.take_along_axis(points.threshold, cuts[:, None], 1)[:, 0]
    return np.where(cuts == 0, NO_KEY, np.where(cuts == points.threshold.shape[1] - 1, EVERY_KEY, chosen))


def _figures(measured: Sequence[Points], thresholds: Sequence[Float64[np.ndarray, " H"]]) -> dict[str, float | None]:
    cuts = [(p.threshold >= t[:, None]).sum(1) - 1 for p, t in zip(measured, thresholds, strict=True)]
    return _totals(measured, cuts)


def _totals(points: Sequence[Points], cuts: Sequence[Int64[np.ndarray, " H"]]) -> dict[str, float | None]:
    """Means over heads and layers; of the output error the root mean square over layers."""
    at = {
        name: np.stack([
            np.take_along_axis(getattr(p, name), cut[:, None], 1)[:, 0] for p, cut in zip(points, cuts, strict=True)
        ])
        for name in ("density", "recall", "mass", "error")
    }  # fmt: skip
    error = math.sqrt(float(at["error"].sum(1).mean()))
    return {
        "density": round(float(at["density"].mean()), 5),
        "recall": round(float(np.nanmean(at["recall"])), 5),
        "mass": round(float(at["mass"].mean()), 5),
        "output_error": None if math.isnan(error) else round(error, 5),
    }


def _curve(points: Sequence[Points], loss: str) -> dict[str, list[float | None]]:
    heads = points[0].density.shape[0]
    curves, rows = [c for p in points for c in head_curves(p, loss)], []
    for density in CURVE_DENSITIES:
        cuts = allot(curves, density=density)
        rows.append(_totals(points, [np.array(cuts[at : at + heads]) for at in range(0, len(cuts), heads)]))
    return {name: [row[name] for row in rows] for name in rows[0]}
