"""Patterns and predictors in the cross-attention of a trained copier: do they keep what must be read?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparsefinder.hf import LayerCall, LayerInput, attach
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal
from sparsefinder.plan import Plan, build_plan, plan_matrix
from sparsefinder.predictors import RowBudget, svd_projections, true_score_projections
from training.tasks.reversal import Pairs, accuracy_of, logits_of

PatternFor = Callable[[LayerInput], Pattern]
Call = TypeVar("Call", bound=LayerInput)


@dataclass(frozen=True, eq=False)
class CrossFigures:
    """Means over texts, heads and layers; recall and row reach speak of the known gold positions.

    gold_recall: share of target rows whose gold source is kept by some head of some layer. every_head: by a head, mean.
    """

    density: float
    gold_recall: float
    every_head: float
    accuracy: float


@torch.no_grad()
def seen_cross(model: Any, pairs: Pairs) -> list[LayerCall]:
    """The cross-attention calls of one dense forward pass, layer by layer."""
    found: list[LayerCall] = []

    def note(call: LayerCall) -> None:
        if call.legal.cross:
            found.append(_without_padding(call, pairs))

    with attach(model, alpha=1.0).using("dense", observe=note):
        logits_of(model, pairs)
    return found


def low_rank_budgets(calls: Sequence[LayerCall], rank: int, density: float) -> dict[int, RowBudget]:
    """For each layer, the maps that are best for its scores on these texts, and a share of keys per row."""
    found = {}
    for call in calls:
        q, k = _real(call.q, call.legal.query_real), _real(call.k, call.legal.key_real)
        mean = k.mean(1)
        centred = k - mean[:, None]
        moments = q.transpose(1, 2) @ q / q.shape[1], centred.transpose(1, 2) @ centred / k.shape[1]
        found[call.layer] = RowBudget(svd_projections(*moments, mean, rank, call.scale), density)
    return found


def true_budgets(calls: Sequence[LayerCall], density: float) -> dict[int, RowBudget]:
    """The oracle: the best keys by true scores."""
    maps = {call.layer: true_score_projections(call.q.shape[1], call.q.shape[3], call.scale) for call in calls}
    return {layer: RowBudget(projections, density) for layer, projections in maps.items()}


def by_budgets(budgets: Mapping[int, RowBudget]) -> PatternFor:
    """The pattern that each layer's predictor makes of its q and k."""
    return lambda call: budgets[call.layer].pattern(call.q, call.k, call.legal)


@torch.no_grad()
def measure_cross(model: Any, pairs: Pairs, pattern_for: PatternFor) -> CrossFigures:
    """One pass with cross-attention over the pattern (tiles of one row: a tile reads what its row reads)."""
    seen: list[tuple[Legal, Plan]] = []

    def plan_for(call: LayerInput) -> Plan | None:
        if not call.legal.cross:
            return None
        own = _without_padding(call, pairs)
        plan = build_plan(pattern_for(own), own.legal, 1, heads=call.q.shape[1])
        seen.append((own.legal, plan))
        return plan

    with attach(model, alpha=1.0).using("sparse", plan_for=plan_for):
        logits = logits_of(model, pairs)
    kept = torch.stack([plan_masks(plan, legal) for legal, plan in seen], 1)  # [B, L, H, N, M]
    legal = torch.stack([seen[0][0].matrix(b) for b in range(kept.shape[0])])
    b, i = (pairs.gold >= 0).nonzero(as_tuple=True)
    hit = kept[b, :, :, i, pairs.gold[b, i]].float()  # [rows, L, H]
    share = kept.float().sum((-1, -2)) / legal.float().sum((-1, -2))[:, None, None]
    whole = hit.flatten(1).amax(1).mean(), hit.mean()
    return CrossFigures(float(share.mean()), float(whole[0]), float(whole[1]), accuracy_of(logits, pairs))


def plan_masks(plan: Plan, legal: Legal) -> Bool[Tensor, "B H N M"]:
    """All pairs that a plan computes."""
    batch, heads = plan.shape[:2]
    return torch.stack([torch.stack([plan_matrix(plan, legal, b, h) for h in range(heads)]) for b in range(batch)])


def cross_rows(model: Any, pairs: Pairs, patterns: Mapping[str, PatternFor]) -> dict[str, dict[str, float]]:
    """`measure_cross` of every named pattern, as plain numbers."""
    return {name: vars(measure_cross(model, pairs, pattern)) for name, pattern in patterns.items()}


def _without_padding(call: Call, pairs: Pairs) -> Call:
    """The call with the rows of real target tokens only: cross-attention itself is not told which they are."""
    return replace(call, legal=replace(call.legal, query_real=pairs.target_real))


def _real(x: Float[Tensor, "B H n D"], real: Bool[Tensor, "B n"]) -> Float[Tensor, "H P D"]:
    return x.transpose(1, 2)[real].transpose(0, 1)
