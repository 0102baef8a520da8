"""Held-out figures with the sparse attention in the loop: every layer's q and k come from what the plans below gave.

The estimator is that of the service's audit, over all rows instead of a sample, so that live figures can be compared
with these: gold is the served model's own attention on its own q and k, and sums are divided, not instances averaged.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparsefinder.hf import Attached, LayerCall
from sparsefinder.metrics import HeadCounts, counts
from sparsefinder.teacher import Teacher, batch

ESTIMATOR = (
    "sum of kept gold pairs / sum of gold pairs over held-out instances, q and k of the sparse run;"
    " interval: 95 % bootstrap over instances"
)
FIELDS = ("legal", "kept", "gold", "kept_gold", "rows", "exact_rows", "mass_sum")
RESAMPLES = 1000
PERCENTILES = (2.5, 97.5)

Sums = npt.NDArray[np.float64]


@torch.inference_mode()
def loop_figures(
    teacher: Teacher,
    attached: Attached,
    ids: Sequence[Sequence[int]],
    gold_mass: float | None = None,
    on_item: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Figures of the served plans over texts (token ids): overall with an interval, per layer, and there per head.

    A layer that keeps its sliding window has no plan, so no figures and no heads. Plain JSON, None where nothing could
    be measured.
    """
    layers, heads = attached.head_scale.shape
    found = np.zeros((len(ids), layers, heads, len(FIELDS)))

    def observe(call: LayerCall) -> None:
        if call.plan is not None:
            found[at, call.layer] = _sums(
                counts(
                    call.q, call.k, call.plan, call.legal, call.alpha, call.scale,
                    layer=call.layer, gold_mass=gold_mass, bias=call.bias,
                )
            )  # fmt: skip

    for at, item in enumerate(ids):
        tokens, mask = batch(teacher, [item])
        with attached.using("sparse", observe=observe):
            teacher.model(input_ids=tokens, attention_mask=mask.long())
        on_item(at + 1, len(ids))
    overall = _ratios(found.sum((0, 1, 2))) | {"recall_interval": _interval(found.sum((1, 2)))}
    shown = [{"layer": layer} | _layer(found[:, layer].sum(0)) for layer in range(layers)]
    return {"estimator": ESTIMATOR, "instances": len(ids), "overall": overall, "layers": shown}


def _sums(counted: HeadCounts) -> Sums:
    return torch.stack([getattr(counted, name)[0].double() for name in FIELDS], -1).numpy()


def _layer(sums: Sums) -> dict[str, Any]:
    planned = bool(sums.any())
    heads = [{"head": head} | _ratios(row) for head, row in enumerate(sums)] if planned else []
    return _ratios(sums.sum(0)) | {"heads": heads}


def _ratios(sums: Sums) -> dict[str, float | None]:
    legal, kept, gold, kept_gold, rows, exact, mass = sums.tolist()
    pairs = {"recall": (kept_gold, gold), "mass": (mass, rows), "exact_rows": (exact, rows)}
    found: dict[str, float | None] = {name: a / b if b else None for name, (a, b) in pairs.items()}
    return found | {"sparsity": 1 - kept / legal if legal else None}


def _interval(sums: Sums) -> list[float] | None:
    """95 % bootstrap interval of recall over instances (percentiles); None for fewer than two."""
    gold, kept = sums[:, FIELDS.index("gold")], sums[:, FIELDS.index("kept_gold")]
    if len(gold) < 2 or not gold.all():
        return None
    drawn = np.random.default_rng(0).multinomial(len(gold), np.full(len(gold), 1 / len(gold)), RESAMPLES)
    ratios = (drawn @ kept) / (drawn @ gold)
    return [float(edge) for edge in np.percentile(ratios, PERCENTILES)]
