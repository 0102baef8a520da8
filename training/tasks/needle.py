"""Needle retrieval: one sentence with a number hidden in long text, asked for at the end (gold = where it stands).

Texts are made of whole tokens of the teacher's tokenizer, so the positions of the number's tokens are known, and with
them the pairs that the answer must go through: last rows × needle keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sparsefinder.errors import DataError
from sparsefinder.hf import Attached, LayerCall, LayerInput
from sparsefinder.patterns.algebra import Pattern, context_of
from sparsefinder.patterns.heads import at_layer
from sparsefinder.plan import Plan, build_plan, computed_pairs

NEEDLE = " The secret number of {name} is {number}."
QUESTION = " Question: what is the secret number of {name}? Answer: the secret number of {name} is"
NAMES = ("Paris", "Rome", "Berlin", "Madrid", "London")

Logits = Callable[[Tensor], Tensor]  # ids `[1, n]` -> logits of the last rows `[1, rows, V]` or of all rows
PlanFor = Callable[[LayerInput], Plan]


@dataclass(frozen=True, eq=False)
class Needle:
    """One text. ids end with the question and the answer but its last token; `answer` are the rows that predict it.

    needle: positions of the number's tokens in the haystack. asked: first position of the question.
    """

    ids: Int[Tensor, " n"]
    needle: Int[Tensor, " a"]
    answer: Int[Tensor, " a"]
    target: Int[Tensor, " a"]
    asked: int
    depth: float


@dataclass(frozen=True)
class NeedleFigures:
    """found: every token of the answer is the best one of the whole vocabulary. margin: log-probability of the answer.

    computed: computed pairs of the plans over legal pairs. recall: share of (layer, head)s whose plan lets some answer
    row read some token of the needle. NaN where attention was dense.
    """

    found: float
    log_probability: float
    computed: float
    recall: float


def make_needle(tokenizer: Any, text: str, tokens: int, depth: float, number: int, name: str = NAMES[0]) -> Needle:
    """A haystack of `text`, `tokens` tokens in all, the needle at `depth` (0 = start, 1 = just before the question).

    Raises:
        DataError: the text is too short, or the depth no fraction.
    """
    if not 0.0 <= depth <= 1.0:
        raise DataError(f"depth: expected a fraction, got {depth}")

    def encode(words: str) -> list[int]:
        return [int(i) for i in tokenizer(words, add_special_tokens=False)["input_ids"]]

    number_ids = encode(f" {number}")
    before, after = encode(NEEDLE.format(name=name, number="#").split(" #")[0]), encode(".")
    question = encode(QUESTION.format(name=name))
    room = tokens - len(before) - len(after) - len(question) - 2 * len(number_ids)
    hay = encode(text)[: max(room, 0)]
    if room < 2 or len(hay) < room:
        raise DataError(f"needle: expected a text of at least {max(room, 2)} tokens for {tokens}, got {len(hay)}")
    at = round(depth * room)
    ids = hay[:at] + before + number_ids + after + hay[at:] + question + number_ids
    first, asked = at + len(before), tokens - len(question) - len(number_ids)
    rows = torch.arange(tokens - len(number_ids) - 1, tokens - 1)
    place = torch.arange(first, first + len(number_ids))
    return Needle(torch.tensor(ids), place, rows, torch.tensor(number_ids), asked, depth)


def pattern_plans(pattern: Pattern, tile_size: int) -> PlanFor:
    """`plan_for` of a fixed pattern, in whichever layer it is asked for."""

    def plan_for(call: LayerInput) -> Plan:
        ctx = context_of(call.legal, call.layer)
        return build_plan(at_layer(pattern, call.layer), call.legal, tile_size, ctx, heads=call.q.shape[1])

    return plan_for


@torch.no_grad()
def ask(attached: Attached, logits: Logits, needle: Needle, plan_for: PlanFor | None) -> NeedleFigures:
    """One forward pass with the answer given (dense where `plan_for` is None), and whether it is what the model says.

    logits: the language model on the attached base model; logits of all rows or of the last few.
    """
    hits: list[float] = []
    computed: list[float] = []

    def note(call: LayerCall) -> None:
        if call.plan is not None:
            hits.extend(reads_needle(call.plan, needle).float().tolist())
            pairs = computed_pairs(call.plan).double() / call.legal.count(0)
            computed.append(float(pairs.mean()))

    mode, plans = ("dense", None) if plan_for is None else ("sparse", plan_for)
    with attached.using(mode, observe=note, plan_for=plans):  # type: ignore[arg-type]
        out = logits(needle.ids[None])[0]
    rows = needle.answer - (needle.ids.shape[0] - out.shape[0])
    scores = torch.log_softmax(out[rows].float(), -1)
    right = scores.argmax(-1) == needle.target
    said = float(scores.gather(1, needle.target[:, None]).sum())
    return NeedleFigures(float(right.all()), said, _mean(computed), _mean(hits))


def reads_needle(plan: Plan, needle: Needle) -> Bool[Tensor, " H"]:
    """For every head: some row that predicts the answer may read some token of the needle (causal lists included)."""
    found = torch.zeros(plan.shape[1], dtype=torch.bool)
    last = plan.tile_start + plan.tile_rows
    for t in (last > int(needle.answer[0])).nonzero().flatten().tolist():
        part = slice(int(plan.offsets[t]), int(plan.offsets[t + 1]))
        reached = torch.isin(plan.keys[part].long(), needle.needle) & (plan.first_row[part] < plan.tile_rows[t])
        found[int(plan.tile_head[t])] |= bool(reached.any())
    return found


def needle_rows(
    attached: Attached, logits: Logits, needles: Sequence[Needle], plans: dict[str, PlanFor | None]
) -> dict[str, dict[str, float]]:
    """Means over the needles for every named way to attend."""
    rows = {}
    for name, plan_for in plans.items():
        found = [vars(ask(attached, logits, needle, plan_for)) for needle in needles]
        rows[name] = {key: _mean([one[key] for one in found]) for key in found[0]}
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
