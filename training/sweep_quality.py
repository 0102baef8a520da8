"""What a sparse pattern does to the task: at a few settings the attention is really replaced, in all layers."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.hf import LayerInput
from sparsefinder.patterns.algebra import Pattern, context_of
from sparsefinder.patterns.positional import GlobalTokens, Nothing, window
from sparsefinder.plan import Plan, build_plan
from sparsefinder.predictors import Tiles
from sparsefinder.teacher import Teacher, batch, embed, load_teacher
from training.finetune import correlation
from training.masking import MASKED_SHARE, Ids, mask_texts
from training.pipeline import Opened
from training.sweep_fronts import Point, front, value
from training.sweep_measure import HALVES, MEASURES, number
from training.sweep_sheets import Family, LayerWork, Sheet

BATCH = 4
TARGETS = (0.9, 0.7, 0.95, 0.8)  # sparsities at which each row's best family is tried, the most telling first
ROWS = (
    ("window", "control"), ("distance", "learned"), ("clusters", "learned"), ("score", "learned"), ("tiles", "learned"),
    ("quantization", "learned"), ("routing", "baseline"), ("reformer", "baseline"), ("bigbird", "baseline"),
    ("true score, budget", "oracle"),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Yardstick:
    """Embeddings of the same text by the original softmax model and by the dense entmax model."""

    original: Float[Tensor, "n d"]
    dense: Float[Tensor, "n d"]


def choose_points(results: Sequence[dict[str, Any]], limit: int) -> list[tuple[int, Point]]:
    """(place of the family, point): at each target sparsity the best point of every row that is at least so sparse.

    A row (name and role) is spoken for by its family with the highest recall there. The rows of `ROWS` come first, at
    all targets, so that they make curves; others while there is room.
    """
    known = [r for r in results if (r["family"], r["role"]) in ROWS]
    others = [r for r in results if (r["family"], r["role"]) not in ROWS]
    place = {id(result): at for at, result in enumerate(results)}
    chosen = [(place[id(result)], point) for group in (known, others) for result, point in _best_of_rows(group)]
    return chosen[:limit]


def _best_of_rows(results: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], Point]]:
    found: list[tuple[dict[str, Any], Point]] = []
    for target in TARGETS:
        best: dict[tuple[str, str], tuple[dict[str, Any], Point]] = {}
        for result in results:
            able = [p for p in front(result["points"]) if value(p, "sparsity") >= target]
            row = (result["family"], result["role"])
            if able and (row not in best or value(able[-1], "recall") > value(best[row][1], "recall")):
                best[row] = (result, able[-1])
        found += [pair for pair in best.values() if not any(pair[1] is point for _, point in found)]
    return found


@torch.no_grad()
def embeddings(teacher: Teacher, chunks: Ids, how: Callable[[], AbstractContextManager[None]]) -> Float[Tensor, "n d"]:
    """Embeddings of the chunks, a few at a time, inside `how()` (a mode of the attached model)."""
    parts = []
    for start in range(0, len(chunks), BATCH):
        tokens, mask = batch(teacher, chunks[start : start + BATCH])
        with how():
            parts.append(embed(teacher, tokens, mask))
    return torch.cat(parts)


def yardstick(opened: Opened, chunks: Ids) -> Yardstick:
    """What the sparse embeddings are compared with."""
    original = load_teacher(opened.teacher.name)
    with torch.no_grad():
        parts = [embed(original, *batch(original, chunks[at : at + BATCH])) for at in range(0, len(chunks), BATCH)]
    return Yardstick(torch.cat(parts), embeddings(opened.teacher, chunks, lambda: opened.attached.using("dense")))


def quality_of(
    family: Family, point: Point, works: Sequence[LayerWork], opened: Opened, chunks: Ids, known: Yardstick
) -> dict[str, Any]:
    """Mean cosine and correlation of pairwise similarities to both yardsticks, with the attention replaced.

    A pattern is computed pair by pair (tiles of one row), so nothing beyond it is read; a plan as it is.
    """
    plan_for = planner(family, point, works)
    sparse = embeddings(opened.teacher, chunks, lambda: opened.attached.using("sparse", plan_for=plan_for))
    figures: dict[str, Any] = {}
    for name, other in (("dense", known.dense), ("original", known.original)):
        figures[f"cosine_{name}"] = number(float(torch.cosine_similarity(sparse, other).mean()))
        enough = len(chunks) > 2
        figures[f"correlation_{name}"] = number(correlation(sparse, other)) if enough else None
    if opened.teacher.mlm is not None:
        with opened.attached.using("sparse", plan_for=plan_for):
            figures["perplexity"] = number(perplexity(opened.teacher, chunks))
    return figures


@torch.no_grad()
def perplexity(teacher: Teacher, chunks: Ids, seed: int = 0) -> float:
    """exp of the mean cross entropy at masked tokens, the same in every call, in the mode that is on."""
    generator = torch.Generator().manual_seed(seed)
    total, count = 0.0, 0
    for start in range(0, len(chunks), BATCH):
        masked = mask_texts(teacher, chunks[start : start + BATCH], MASKED_SHARE, generator)
        logits = teacher.mlm(input_ids=masked.tokens, attention_mask=masked.real.long()).logits[masked.hidden]
        total += float(torch.nn.functional.cross_entropy(logits, masked.words, reduction="sum"))
        count += masked.words.shape[0]
    return math.exp(total / count) if count else math.nan


def planner(family: Family, point: Point, works: Sequence[LayerWork]) -> Callable[[LayerInput], Plan]:
    """What `Attached.using` asks for every layer: the plan of this setting ∪ its window ∪ its global tokens."""
    sheet, setting = locate(family, point)
    predictors = [sheet.prepare(work).predictor(setting) for work in works]
    positional = union_of(point)

    def plan_for(call: LayerInput) -> Plan:
        predictor, heads = predictors[call.layer], call.q.shape[1]
        if isinstance(predictor, Tiles):
            return predictor.plan(call.q, call.k, call.legal, positional, sheet.tile)
        pattern = predictor.pattern(call.q, call.k, call.legal) | positional
        return build_plan(pattern, call.legal, 1, context_of(call.legal, call.layer), heads=heads)

    return plan_for


def union_of(point: Point) -> Pattern:
    """The window and the global tokens of a point."""
    count = int(point["global"])
    return window(int(point["window"])) | (GlobalTokens(count) if count else Nothing())


def locate(family: Family, point: Point) -> tuple[Sheet, int]:
    """The sheet, and the place in it, of a point's parameters."""
    for sheet in family.sheets:
        for at, parameters in enumerate(sheet.parameters):
            if point_parameters(point) == dict(parameters):
                return sheet, at
    raise KeyError(f"{family.key} has no such setting")


def point_parameters(point: Point) -> dict[str, Any]:
    """The parameters of a point's own pattern, without its union."""
    other = (*MEASURES, *HALVES, "layers", "window", "global")
    return {name: setting for name, setting in point.items() if name not in other}
