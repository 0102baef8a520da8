"""The part of `benchmarks.attention` on a language model's own queries, keys and values, reading held-out text."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from benchmarks.attention_random import density
from benchmarks.paired import paired, shares
from benchmarks.perplexity import Subject, attention_name
from benchmarks.rivals import bigbird, flex, fused_softmax, package_entmax
from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.attention.crossover import ExpectedDensity
from sparsefinder.entmax import entmax
from sparsefinder.hf import LayerCall, LayerInput
from sparsefinder.hf_modes import compute
from sparsefinder.plan import Plan
from sparsefinder.predictors import Predictor, layer_plan
from training.calibrate import choose, thresholds_at, with_thresholds
from training.config import Target
from training.extract import read_layer, read_manifest
from training.fit import calibration_items
from training.points import Points, cuttable, layer_points
from training.threads import single_thread

SAMPLED = 256  # rows of a text whose attention mass is measured
COMMON = ("sdpa", "dense", "dense entmax", "package")  # ways that no plan changes
OnStep = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Served:
    """Predictors of some layers, cut where they keep a share of attention, and the density that each then had."""

    predictors: Mapping[int, Predictor]
    expected: Mapping[int, ExpectedDensity]


def points_of(subject: Subject, layers: Sequence[int], on_step: OnStep) -> list[Points]:
    """What these layers keep at every threshold, on the half of the run's held-out text that budgets are chosen on."""
    card, heldout, found = subject.artifact.card, subject.folder / "shards" / "heldout", []
    manifest = read_manifest(heldout)
    with single_thread():
        for layer in layers:
            predictor, data = cuttable(subject.artifact.layers[layer]), read_layer(heldout, layer, manifest)
            items = calibration_items(manifest["instances"])
            found.append(layer_points(predictor, data, items, subject.positional, card.tile_size))
            on_step(len(found), len(layers))
    return found


def calibrated(subject: Subject, layers: Sequence[int], points: Sequence[Points], mass: float) -> Served:
    """These layers cut where all their heads together keep this attention mass on the text behind the points, with the
    least density."""
    tokens = read_manifest(subject.folder / "shards" / "heldout")["tokens"]
    predictors, expected = {}, {}
    for layer, part, cut in zip(layers, points, choose(points, Target("mass", mass))[1], strict=True):
        predictors[layer] = with_thresholds(cuttable(subject.artifact.layers[layer]), thresholds_at(part, cut))
        share = float(np.take_along_axis(part.density, cut[:, None], 1).mean())
        expected[layer] = ExpectedDensity(share, tokens)
    return Served(predictors, expected)


def calls_of(subject: Subject, layers: Sequence[int], text: list[int]) -> list[LayerInput]:
    """What the layers get while the model reads a text with all legal pairs."""
    seen: list[LayerInput] = []

    def keep(call: LayerCall) -> None:
        if call.layer in layers:
            seen.append(LayerInput(**{name: getattr(call, name) for name in LayerInput.__dataclass_fields__}))

    with torch.inference_mode(), subject.attached.using("dense", observe=keep):
        subject.teacher.model(input_ids=torch.tensor([text]))
    return seen


@dataclass(frozen=True)
class Rivals:
    """Up to how many tokens the slow ones are timed, and in which layer FlexAttention is (it compiles for minutes).

    eager: tokens at which FlexAttention may run without compiler.
    """

    package: int
    flex_layer: int
    eager: int


def real_rows(
    subject: Subject, call: LayerInput, served: Mapping[float, Served], rivals: Rivals, rounds: int
) -> Iterator[dict[str, Any]]:
    """A row for every attention mass, all of them timed in turn."""
    tokens, ways, facts = call.q.shape[2], _dense_ways(call, rivals), dict[float, dict[str, Any]]()
    for mass, cut in served.items():
        plan_of = functools.partial(_plan, subject, cut)
        plan = plan_of(call)
        facts[mass] = {"density": density(plan, call.legal), "kept": kept_mass(call, plan)}
        ways[f"plan {mass}"] = functools.partial(plan_of, call)
        ways[f"attend {mass}"] = functools.partial(_attend, call, plan)
        ways[f"auto {mass}"] = auto = functools.partial(_auto, subject, cut, call)
        facts[mass]["ran"] = auto()
        rival = bigbird(call, facts[mass]["density"])
        if rival:
            ways[f"bigbird {mass}"], facts[mass]["bigbird_density"] = rival.attend, rival.density
        blocks = flex(call, plan, eager_too=tokens == rivals.eager) if call.layer == rivals.flex_layer else None
        if blocks:
            ways[f"flex {mass}"], facts[mass]["flex"] = blocks.attend, blocks.form
    times, _ = paired(ways, rounds)
    for mass, cut in served.items():
        parts = shares(lambda cut=cut: _attend(call, _plan(subject, cut, call)), rounds)  # type: ignore[misc]
        own = {name.removesuffix(f" {mass}"): found for name, found in times.items() if name.endswith(f" {mass}")}
        common = {name: found for name, found in times.items() if name in COMMON}
        row = {"attention": attention_name(subject.artifact), "tokens": tokens, "layer": call.layer, "mass": mass}
        yield row | facts[mass] | {"ms": common | own, "shares": parts}


def _dense_ways(call: LayerInput, rivals: Rivals) -> dict[str, Callable[[], object]]:
    """`dense` is this project's form of the layer's own transform, `dense entmax` that of 1.5-entmax."""
    named: dict[str, Any] = {"scale": call.scale}
    dense = functools.partial(attend_dense, call.q, call.k, call.v, call.legal, **named)
    ways: dict[str, Callable[[], object]] = {
        "sdpa": fused_softmax(call),
        "dense": functools.partial(dense, alpha=call.alpha),
    }
    if call.alpha != 1.5:
        ways["dense entmax"] = functools.partial(dense, alpha=1.5)
    if call.q.shape[2] <= rivals.package:
        ways["package"] = functools.partial(package_entmax, call)
    return ways


def _plan(subject: Subject, served: Served, call: LayerInput) -> Plan:
    card = subject.artifact.card
    predictor = served.predictors[call.layer]
    return layer_plan(predictor, call.q, call.k, call.legal, subject.positional, card.tile_size, call.layer)


def _attend(call: LayerInput, plan: Plan) -> Tensor:
    return attend(call.q, call.k, call.v, plan, legal=call.legal, alpha=call.alpha, scale=call.scale)


def _auto(subject: Subject, served: Served, call: LayerInput) -> str:
    """The layer in mode `auto`, by the very code of an attached model; says what ran."""
    ran: list[str] = []
    attached = subject.attached
    attached.expected = tuple(served.expected.get(layer) for layer in range(len(attached.predictors)))
    plan_for = functools.partial(_plan, subject, served)
    with attached.using("auto", plan_for=plan_for, observe=lambda seen: ran.append(seen.ran)):
        compute(attached, call)
    return ran[0]


def kept_mass(call: LayerInput, plan: Plan, most: int = SAMPLED) -> float:
    """The share of attention that falls on the plan's pairs: the mean over heads and evenly spread rows of a text
    without padding. Only these rows' scores are made."""
    rows = torch.arange(0, call.q.shape[2], max(1, call.q.shape[2] // most))
    visible = call.legal.allows(0, rows[:, None], torch.arange(call.k.shape[2])[None])
    group, kept = call.q.shape[1] // call.k.shape[1], 0.0
    for h in range(call.q.shape[1]):
        scores = (call.q[0, h, rows] * call.scale[h]) @ call.k[0, h // group].T
        p = entmax(scores, call.alpha, visible)
        kept += float((p * _read(plan, h, rows)).sum(-1).mean())
    return kept / call.q.shape[1]


def _read(plan: Plan, head: int, rows: Tensor) -> Bool[Tensor, "R M"]:
    """Which keys the plan of the first item reads for these rows of a head."""
    mine = ((plan.tile_batch == 0) & (plan.tile_head == head)).nonzero().flatten()
    tile = mine[torch.searchsorted(plan.tile_start[mine].long(), rows, right=True) - 1]
    found = torch.zeros(rows.shape[0], plan.shape[3], dtype=torch.bool)
    for at, (t, row) in enumerate(zip(tile.tolist(), rows.tolist(), strict=True)):
        part = slice(int(plan.offsets[t]), int(plan.offsets[t + 1]))
        found[at, plan.keys[part].long()] = plan.first_row[part] <= row - int(plan.tile_start[t])
    return found
