"""The calibration of an artifact's card, laid out like the live figures, so that both can be read side by side."""

from collections.abc import Mapping
from typing import Any


def calibration_of(card: Mapping[str, Any]) -> dict[str, Any] | None:
    """Overall, per layer and per head, from a card's report (`set`, `overall`, `layers`, `heads`); None without one.

    A card may hold the report itself or one for each named set; the served set is the plan. What else the card says of
    its calibration (text, seed, curve) stays under `about`.
    """
    report = card if "heads" in card else card.get("plan")
    if not isinstance(report, Mapping) or "heads" not in report:
        return None
    return {
        "set": report.get("set", "plan"),
        "instances": report.get("instances"),
        "overall": report.get("overall"),
        "layers": _layers(report["layers"], report["heads"]),
        "about": {name: value for name, value in card.items() if name not in _REPORT and name != "plan"},
    }


_REPORT = ("set", "instances", "overall", "layers", "heads", "empty_gold")


def _layers(layers: Mapping[str, list[float]], heads: Mapping[str, list[list[float]]]) -> list[dict[str, Any]]:
    """From `{measure: [L]}` and `{measure: [L][H]}` to one entry per layer, with one entry per head inside."""
    count = len(next(iter(heads.values()), []))
    return [
        {"layer": layer}
        | {name: values[layer] for name, values in layers.items()}
        | {"heads": _heads({name: values[layer] for name, values in heads.items()})}
        for layer in range(count)
    ]


def _heads(values: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    count = len(next(iter(values.values()), []))
    return [{"head": head} | {name: row[head] for name, row in values.items()} for head in range(count)]
