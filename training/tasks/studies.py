"""Every run of the tables, in full and in quick size: what `benchmarks/tasks.py` goes through."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from sparsefinder.hf import LayerInput
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.text import parse_pattern
from training.config import Objective
from training.tasks import memory_studies
from training.tasks.copy_model import pattern_masks
from training.tasks.copy_patterns import (
    DENSE,
    THIN,
    WIDE,
    CopySize,
    by_predictors,
    copy_rows,
    entmax_map,
    fit_predictors,
    softmax_map,
    static_pairs,
    support_pairs,
    train_copying,
    train_teacher,
    under_teacher,
)
from training.tasks.copying import Copying
from training.tasks.cross_attention import by_budgets, cross_rows, low_rank_budgets, seen_cross, true_budgets
from training.tasks.memory_studies import Plan
from training.tasks.reversal import Reversal, accuracy_of, logits_of, marian, reversal_batch, train_reversal
from training.tasks.runs import Study
from training.tasks.together import OnStep, Schedule

LEARNED: tuple[tuple[Objective, int], ...] = (("bilinear", 4), ("bilinear", 8), ("hinge", 4), ("hinge", 8))
DENSITIES = (0.02, 0.05, 0.125)
CROSS_DENSITY = 0.25
ADAPTIVE_JUMP = 3
NESTED = ((0, 2, 3), (6, 1, 2), (3, 2, 3))  # longest jump (0: the Boolean example), nesting K, most layers
COPYING, COPY_SIZE, PLAN, REVERSAL = Copying(), CopySize(), Plan(), Schedule(600, 5e-3)


@dataclass(frozen=True)
class Scale:
    """How much is run. `copy_layers`: depths of the copying task; `point_lags`, `point_heads`: of the kernel table."""

    copying: Copying = COPYING
    copy_size: CopySize = COPY_SIZE
    copy_layers: tuple[int, ...] = (1, 2, 3, 4)
    fit_steps: int = 150
    memories: Plan = PLAN
    point_lags: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    point_heads: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32)
    starts: int = 8
    search_steps: int = 400
    reversal: Schedule = REVERSAL


def quick_scale() -> Scale:
    """Everything once, with too few steps to be believed: a few minutes."""
    return Scale(
        copying=Copying(14, 8), copy_size=CopySize(width=32, test_texts=4, schedule=Schedule(20, 1e-2), entmax_steps=5),
        copy_layers=(1, 2), fit_steps=20, memories=memory_studies.quick(Plan()), point_lags=(1, 4), point_heads=(1, 4),
        starts=2, search_steps=30, reversal=Schedule(40, 5e-3),
    )  # fmt: skip


def all_studies(scale: Scale) -> list[Study]:
    """The runs, cheapest kinds first."""
    return [*kernel_studies(scale), *reversal_studies(scale), *memories(scale), *copy_studies(scale)]


def kernel_studies(scale: Scale) -> list[Study]:
    """Errors of H heads for kernels, by search."""
    search: dict[str, Any] = {"starts": scale.starts, "steps": scale.search_steps, "length": 128}
    points = {"lags": scale.point_lags, "heads": scale.point_heads, **search}
    decays = {"heads": tuple(count for count in scale.point_heads if count <= 8), **search}
    return [
        Study("kernels-points", points, lambda on: {"rows": memory_studies.point_study(**points, on_step=on)}),
        Study("kernels-decays", decays, lambda on: {"rows": memory_studies.decay_study(**decays, on_step=on)}),
    ]


def memories(scale: Scale) -> list[Study]:
    """Trained transformers on the three kinds of memories."""
    plan = scale.memories
    about = asdict(plan)
    kinds: dict[str, tuple[dict[str, Any], Callable[[Plan, OnStep], list[dict[str, Any]]]]] = {
        "fixed": ({}, memory_studies.fixed_study),
        "essential": ({}, memory_studies.essential_study),
    }
    for product in memory_studies.PRODUCTS:
        own: dict[str, Any] = {"product": product, "longest": ADAPTIVE_JUMP}
        kinds[f"adaptive-{product}"] = (own, partial(memory_studies.adaptive_study, **own))
    for longest, depth, most in NESTED:
        for layers in range(1, most + 1):
            own = {"longest": longest, "depth": depth, "layers": layers}
            name = f"nested-{longest or 'boolean'}-k{depth}-l{layers}"
            kinds[name] = (own, partial(memory_studies.nested_study, **own))
    for layers in (2, 3):
        kinds[f"parallel-l{layers}"] = ({"layers": layers}, partial(memory_studies.parallel_study, layers=layers))
    return [_memory(f"memory-{name}", {**about, **own}, plan, make) for name, (own, make) in kinds.items()]


def copy_studies(scale: Scale) -> list[Study]:
    """Every pattern at every depth, trained; and patterns under a trained dense teacher."""
    studies = []
    for layers in scale.copy_layers:
        size = replace(scale.copy_size, layers=layers)
        about = {"task": asdict(scale.copying), **asdict(size)}
        for group, patterns in (("dense", {"dense": DENSE}), ("thin", THIN), ("wide", WIDE)):
            for name, text in patterns.items():
                slug = "".join(c if c.isalnum() else "-" for c in name.lower()).replace("--", "-").strip("-")
                make = partial(_copy, scale.copying, {name: text}, size)
                settings = {**about, "group": group, "pattern": {name: text}}
                studies.append(Study(f"copy-l{layers}-{group}-{slug}", settings, make))
        teacher = {**about, "fit_steps": scale.fit_steps, "learned": LEARNED, "densities": DENSITIES}
        make = partial(_teacher, scale.copying, size, scale.fit_steps)
        studies.append(Study(f"copy-l{layers}-teacher", {**teacher, "thin": THIN, "wide": WIDE}, make))
    return studies


def reversal_studies(scale: Scale) -> list[Study]:
    """An encoder–decoder trained to copy, and one to reverse; patterns in its cross-attention.

    own_keys: whether plans add pair (i, i) there. They once did: those figures are others, so the runs are made again.
    """
    tasks = [Reversal("copy"), Reversal("reverse")]
    return [
        Study(
            f"cross-{task.order}",
            {**asdict(task), **asdict(scale.reversal), "density": CROSS_DENSITY, "own_keys": False},
            partial(_reversal, task, scale.reversal),
        )
        for task in tasks
    ]


def _memory(
    name: str, settings: Mapping[str, Any], plan: Plan, make: Callable[[Plan, OnStep], list[dict[str, Any]]]
) -> Study:
    return Study(name, settings, lambda on_step: {"rows": make(plan, on_step)})


def _copy(task: Copying, patterns: dict[str, str], size: CopySize, on_step: OnStep) -> dict[str, Any]:
    model, masks = train_copying(task, list(patterns.values()), size, softmax_map, on_step)
    return {"rows": copy_rows(task, list(patterns), model, masks, size, softmax_map)}


def _teacher(task: Copying, size: CopySize, fit_steps: int, on_step: OnStep) -> dict[str, Any]:
    model, masks = train_teacher(task, size, on_step)
    rows = copy_rows(task, ["dense entmax teacher"], model, masks, size, entmax_map)
    rows["support of the teacher's entmax"] = under_teacher(task, model, size, support_pairs)
    for objective, rank in LEARNED:
        fitted = fit_predictors(task, model, size, objective, rank, DENSITIES[0], fit_steps)
        for density in DENSITIES:
            cut = [replace(predictor, density=density) for predictor in fitted]
            choose = partial(by_predictors, cut, task.tokens)
            rows[f"learned, {objective} rank {rank}, {density:g}"] = under_teacher(task, model, size, choose)
    for group, patterns in (("thin", THIN), ("wide", WIDE)):
        fixed = pattern_masks([parse_pattern(t) for t in patterns.values()], size.layers, size.heads, task.tokens)
        for name, own in zip(patterns, fixed, strict=True):
            rows[f"{group}: {name}"] = under_teacher(task, model, size, static_pairs(own, size.test_texts))
    return {"rows": rows}


def _reversal(task: Reversal, schedule: Schedule, on_step: OnStep) -> dict[str, Any]:
    model = marian(task, seed=schedule.seed)
    train_reversal(task, model, schedule, on_step=on_step)
    model.train(False)
    draw = torch.Generator().manual_seed(1_000_003 + schedule.seed)
    fitting, unseen = reversal_batch(task, 64, draw), reversal_batch(task, 64, draw)
    with torch.no_grad():
        dense = accuracy_of(logits_of(model, unseen), unseen)
    calls = seen_cross(model, fitting)
    budgets = {f"low rank {rank}": low_rank_budgets(calls, rank, CROSS_DENSITY) for rank in (2, 4, 8)}
    budgets["true scores"] = true_budgets(calls, CROSS_DENSITY)
    patterns = {name: by_budgets(own) for name, own in budgets.items()}
    patterns |= {text: _fixed(parse_pattern(text)) for text in ("window(3)", "window(1) | global(2)", "random(3)")}
    return {"dense_accuracy": dense, "rows": cross_rows(model, unseen, patterns)}


def _fixed(pattern: Pattern) -> Callable[[LayerInput], Pattern]:
    return lambda call: pattern
