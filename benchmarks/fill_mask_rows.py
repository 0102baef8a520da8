"""The rows of `benchmarks.fill_mask`: the sweep's families at settings from sparse to dense, and an oracle."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.perplexity_rows import allotted_to
from sparsefinder.artifact import Artifact, Card
from sparsefinder.hf import LayerInput, PlanFor
from sparsefinder.plan import Plan, build_plan
from sparsefinder.predictors import Predictor, layer_plan
from training.config import SweepConfig
from training.fit import positional_of
from training.points import Points
from training.sweep_families import all_families
from training.sweep_fronts import Point
from training.sweep_quality import planner
from training.sweep_scores import AboveTau
from training.sweep_setup import Setup
from training.sweep_sheets import Family, LayerWork, Parameters, Role

GRID = SweepConfig(
    instances=16, train_instances=16, thresholds=(), densities=(0.01, 0.02, 0.04, 0.08, 0.15, 0.3),
    buckets=(4, 8, 16, 32, 64), counts=(2, 4, 8, 16, 32, 48), windows=(0, 3, 7, 13, 25, 51, 101), tile_sizes=(16,),
)  # fmt: skip
TILE_THRESHOLDS = (-7.0, -6.0, -5.0, -4.5, -4.0, -3.5, -3.0)  # log of a key's share, as `Tiles` cuts it
AIMS = (0.1, 0.12, 0.15, 0.2, 0.3)  # densities that are allotted to heads; a tile's own rows take 6 %, its window more
ATTENTION = (0.0, 0.005, 0.02, 0.05, 0.1, 0.2)  # probabilities that the oracle cuts at
FAMILIES = (
    "window", "random", "distance", "score", "clusters", "quantization", "hashing", "routing", "tiles",
    "random projection",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A curve of the picture: the family of the sweep behind it."""

    name: str
    family: str
    role: Role
    objective: str = ""
    rank: int | None = None


POSITIONAL = ("bigbird", "bigbird blocks", "longformer", "window")
LINES = (
    Line("tiles, one threshold", "tiles", "learned", "listwise", 8),
    Line("score", "score", "learned", "bilinear", 8),
    Line("distance", "distance", "learned", "logistic", 8),
    Line("distance (pair hinge)", "distance", "learned", "hinge", 4),
    Line("clusters", "clusters", "learned", "logistic", 8),
    Line("quantization", "quantization", "learned", "logistic", 4),
    Line("routing", "routing", "baseline"),
    Line("Reformer", "reformer", "baseline"),
    Line("LSH, keys apart", "lsh, separate", "baseline"),
    Line("BigBird", "bigbird", "baseline"),
    Line("Longformer", "longformer", "baseline"),
    Line("BigBird, blocks", "bigbird blocks", "baseline"),
    Line("window", "window", "control"),
    Line("distance, untrained", "distance", "control", "untrained", 8),
)


@dataclass(frozen=True)
class Row:
    """A point of a line: how the plan of a layer is made (None = all legal keys)."""

    line: str
    role: str
    setting: dict[str, Any]
    plan_for: PlanFor | None


def allotted_rows(artifact: Artifact, points: Sequence[Points]) -> Iterator[Row]:
    """What the artifact serves, a density allotted to heads where it buys most on graphs of other text."""
    positional, tile_size = positional_of(artifact.card), artifact.card.tile_size

    def plan(call: LayerInput, served: Sequence[Predictor]) -> Plan:
        return layer_plan(served[call.layer], call.q, call.k, call.legal, positional, tile_size, call.layer)

    for aim in AIMS:
        served = allotted_to(artifact.layers, points, aim)
        yield Row("tiles, budgets allotted", "learned", {"aim": aim}, functools.partial(plan, served=served))


def family_rows(setup: Setup, works: Sequence[LayerWork]) -> Iterator[Row]:
    """Every line at its settings, each ∪ the window and the global tokens that the artifact serves."""
    known = {(f.name, f.role, f.objective, f.rank): f for f in all_families(setup, FAMILIES)}
    for line in LINES:
        family = known.get((line.family, line.role, line.objective, line.rank))
        if family is None:
            continue
        for point in _points(family, setup.artifact.card):
            plan_for = planner(family, point, works)
            yield Row(line.name, line.role, point, _once(plan_for) if line.family in POSITIONAL else plan_for)


def _once(plan_for: PlanFor) -> PlanFor:
    """Plans that depend on nothing but layer and shape: texts have one length, and random keys take long to draw."""
    known: dict[tuple[int, ...], Plan | None] = {}

    def plan(call: LayerInput) -> Plan | None:
        at = (call.layer, *call.q.shape[:3])
        if at not in known:
            known[at] = plan_for(call)
        return known[at]

    return plan


def _points(family: Family, card: Card) -> Iterator[Point]:
    settings = [p for sheet in family.sheets for p in sheet.parameters if _wanted(family, p)]
    sizes = [size for size in GRID.windows if size] if family.name == "window" else [card.window_size]
    for parameters in settings:
        for size in sizes:
            yield {**parameters, "window": size, "global": card.global_tokens}


def _wanted(family: Family, parameters: Parameters) -> bool:
    """Not every setting that the sweep knows: tiles by threshold, one cluster of each token, one round of hashing."""
    if family.name == "tiles":
        return parameters.get("threshold") in TILE_THRESHOLDS
    if family.name == "bigbird blocks":
        return parameters["block"] == 16
    return "threshold" not in parameters and parameters.get("top", 1) == parameters.get("rounds", 1) == 1


def oracle_rows() -> Iterator[Row]:
    """The pairs that hold more than so much of a query's attention in the very pass: at 0 the gold graph itself."""

    def plan(call: LayerInput, least: float) -> Plan:
        cuts = torch.full((call.q.shape[1],), least ** (call.alpha - 1))
        pattern = AboveTau(call.scale, call.alpha, cuts).pattern(call.q, call.k, call.legal)
        return build_plan(pattern, call.legal, 1, heads=call.q.shape[1])

    for least in ATTENTION:
        name = "oracle: greatest attention" if least else "gold graph"
        yield Row(name, "oracle", {"attention": least}, functools.partial(plan, least=least))
