"""Needles in long texts of a causal teacher: dense, predicted, and fixed patterns at the density of the predicted."""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from sparsefinder.artifact import Artifact, load
from sparsefinder.hf import Attached, LayerInput, attach
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.compositions import bigbird, longformer
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.positional import GlobalTokens, Nothing, window
from sparsefinder.plan import Plan, build_plan, computed_pairs
from sparsefinder.predictors import layer_plan
from sparsefinder.teacher import load_teacher
from training.corpus import default_texts, read_texts
from training.fit import positional_of
from training.tasks.needle import Logits, PlanFor, ask, make_needle, needle_rows, pattern_plans
from training.tasks.runs import Study
from training.tasks.together import OnStep

ROWS = 32  # last rows whose logits are computed: the answer is far shorter


@dataclass(frozen=True)
class NeedleRun:
    """What is asked: lengths in tokens, depths of the needle, numbers to hide, and in which texts (none = default)."""

    artifact: str
    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192)
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    numbers: tuple[int, ...] = (7421,)
    texts: tuple[str, ...] = ()


def needle_studies(run: NeedleRun) -> list[Study]:
    """One run for every length and depth. The teacher is loaded when the first is made, and kept."""
    opened, folder = cache(partial(_open, run.artifact)), Path(run.artifact)
    name = folder.parent.name if folder.name == "artifact" else folder.name  # a run's, or its own
    about = {"run": name, "artifact": load(folder).card.version, "texts": run.texts, "numbers": run.numbers}
    return [
        Study(
            f"needle-{name}-{tokens}-{round(100 * depth)}",
            {**about, "tokens": tokens, "depth": depth},
            partial(_needles, opened, run, tokens, depth),
        )
        for tokens in run.tokens
        for depth in run.depths
    ]


def predicted_plans(artifact: Artifact) -> PlanFor:
    """`plan_for` of an artifact's predictors; a layer without one (None) computes all its pairs."""
    card = artifact.card
    positional = positional_of(card)

    def plan_for(call: LayerInput) -> Plan:
        predictor: Any = artifact.layers[call.layer]
        if predictor is None:
            return build_plan(~Nothing(), call.legal, card.tile_size, heads=call.q.shape[1])
        return layer_plan(predictor, call.q, call.k, call.legal, positional, card.tile_size, call.layer)

    return plan_for


def at_density(make: Callable[[int], Pattern], sizes: Sequence[int], density: float, tokens: int, tile: int) -> Pattern:
    """The least of these growing sizes whose causal plan computes at least `density` of the pairs (or the last)."""
    legal = legal_full(1, tokens, tokens, causal=True)

    def computed(size: int) -> float:
        return float(computed_pairs(build_plan(make(size), legal, tile, heads=1))[0, 0])

    found = bisect.bisect_left(sizes, density * legal.count(0), key=computed)
    return make(sizes[min(found, len(sizes) - 1)])


def rivals(density: float, tokens: int, tile: int) -> dict[str, Pattern]:
    """Window with a sink, Longformer with 16 global tokens, BigBird with blocks of 32, none sparser than `density`."""
    odd = [2 * radius + 1 for radius in range(1, tokens, max(tokens // 256, 1))]
    make: dict[str, tuple[Callable[[int], Pattern], Sequence[int]]] = {
        "window and sink": (lambda size: window(size) | GlobalTokens(1), odd),
        "Longformer": (lambda size: longformer(size, 16), odd),
        "BigBird": (lambda size: bigbird(32, size, 3, 1, causal=True), range(1, tokens // 32)),
    }
    return {name: at_density(*parts, density, tokens, tile) for name, parts in make.items()}


def _open(path: str) -> tuple[Any, Attached, Logits, Artifact]:
    artifact = load(path)
    card = artifact.card
    teacher: Any = load_teacher(card.teacher)
    scale = torch.tensor(card.head_scale)
    attached = attach(teacher.lm.base_model, alpha=card.alpha, head_scale=scale, tile_size=card.tile_size)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = teacher.lm(input_ids=ids, use_cache=False, logits_to_keep=ROWS).logits
        return out

    return teacher, attached, logits, artifact


def _needles(
    opened: Callable[[], tuple[Any, Attached, Logits, Artifact]],
    run: NeedleRun,
    tokens: int,
    depth: float,
    on_step: OnStep,
) -> dict[str, Any]:
    teacher, attached, logits, artifact = opened()
    text = "\n".join(read_texts(run.texts) if run.texts else default_texts("heldout"))
    needles = [make_needle(teacher.tokenizer, text, tokens, depth, number) for number in run.numbers]
    predicted = predicted_plans(artifact)
    density = ask(attached, logits, needles[0], predicted).computed
    fixed = rivals(density, tokens, artifact.card.tile_size)
    ways: dict[str, PlanFor | None] = {"dense": None, "predicted": predicted}
    ways |= {name: pattern_plans(pattern, artifact.card.tile_size) for name, pattern in fixed.items()}
    rows: dict[str, dict[str, float]] = {}
    for done, (name, plan_for) in enumerate(ways.items()):
        rows |= needle_rows(attached, logits, needles, {name: plan_for})
        on_step(done + 1, len(ways))
    return {"rows": rows}
