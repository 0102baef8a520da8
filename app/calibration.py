"""The calibration of an artifact's card, laid out like the live figures, so that both can be read side by side."""

from collections.abc import Mapping
from typing import Any

ESTIMATOR = "mean over held-out instances, then heads, then layers; q and k of the dense model"
SETS = ("plan", "pattern")


def calibration_of(card: Mapping[str, Any]) -> dict[str, Any] | None:
    """Overall, per layer and per head: the plan's report, the pattern's beside it where the card has one; None without.

    `loop`, measured with the plan in the loop, is laid out like that in the card.
    What else the card says of its calibration (curve, tokens) stays under `about`.
    """
    plan = card.get("plan")
    if plan is None:
        return None
    shown = _laid_out(plan) | {"estimator": ESTIMATOR}
    if "pattern" in card:
        shown["pattern"] = _laid_out(card["pattern"])
    if "loop" in card:
        shown["loop"] = card["loop"]
    return shown | {"about": {name: value for name, value in card.items() if name not in (*SETS, "loop")}}


def _laid_out(report: Mapping[str, Any]) -> dict[str, Any]:
    """From `{measure: [L]}` and `{measure: [L][H]}` to one entry per layer, with one entry per head inside."""
    layers, heads = report["layers"], report["heads"]
    count = len(next(iter(heads.values()), []))
    rows = [
        {"layer": layer}
        | {name: values[layer] for name, values in layers.items()}
        | {"heads": _heads({name: values[layer] for name, values in heads.items()})}
        for layer in range(count)
    ]
    return {name: report.get(name) for name in ("set", "instances", "overall")} | {"layers": rows}


def _heads(values: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    count = len(next(iter(values.values()), []))
    return [{"head": head} | {name: row[head] for name, row in values.items()} for head in range(count)]
