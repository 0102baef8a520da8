"""Which working point a request gets: what it asks for, within the operator's limits and the artifact's points."""

import math
from collections.abc import Sequence
from typing import Any

from app.errors import ApiError
from app.schemas import Attended, Mode
from app.servable import Answer, Description
from app.settings import Settings
from sparsefinder.working_points import WorkingPoint, least_density, point_at

PLANNED: tuple[Mode, ...] = ("sparse", "exact", "auto")  # modes that read a plan, so that its density can be chosen
PARTS = 1000.0  # a density is served in thousandths, so that requests for nearly the same one share their batches


def resolved(asked: Attended, description: Description, settings: Settings) -> float | None:
    """The density that a request asks for, itself or by a recall; None where it asks for neither.

    Raises:
        ApiError: 422 `density_not_supported` for a mode without a plan, or an artifact without working points;
            `density_out_of_range`; `recall_not_reachable`.
    """
    if asked.requested is None:
        return None
    name, value = asked.requested
    _check_supported(name, asked.attention, description)
    low, high = _limits(name, value, description.points, settings)
    if name == "density":
        if not low <= value <= high:
            raise _out_of_range(name, value, low, high)
        return min(max(round(value * PARTS) / PARTS, low), high)
    found = least_density(description.points, value)
    if found is None or found > high:
        best = point_at(description.points, high).recall
        message = f"{name}: expected at most {_down(best)}, the recall at a density of {_down(high)}, got {value:g}"
        raise ApiError(422, "recall_not_reachable", message, name)
    return min(_up(max(found, low)), high)


def _check_supported(name: str, mode: Mode, description: Description) -> None:
    if mode not in PLANNED:
        modes = ", ".join(one for one in PLANNED if one in description.modes)
        message = f"{name}: expected one of the attention modes that read a plan ({modes}), got {mode}"
        raise ApiError(422, "density_not_supported", message, name)
    if not description.points:
        message = f"{name}: expected an artifact with working points, {description.artifact} has none"
        raise ApiError(422, "density_not_supported", message, name)


def _limits(name: str, value: float, points: Sequence[WorkingPoint], settings: Settings) -> tuple[float, float]:
    """The least and the greatest density of the artifact that the operator allows."""
    low, high = max(settings.min_density, points[0].density), min(settings.max_density, points[-1].density)
    if low > high:
        raise _out_of_range(name, value, low, high)
    return low, high


def _out_of_range(name: str, value: float, low: float, high: float) -> ApiError:
    if low > high:
        rule = f"expected none: this artifact begins at {_up(low)}, this service allows at most {_down(high)}"
    else:
        rule = f"expected a computed density from {_up(low)} to {_down(high)}"
    return ApiError(422, "density_out_of_range", f"{name}: {rule}, got {value:g}", name)


def _up(value: float) -> float:
    return math.ceil(value * PARTS - 1e-9) / PARTS


def _down(value: float) -> float:
    return math.floor(value * PARTS + 1e-9) / PARTS


def within(points: Sequence[WorkingPoint], density: float | None) -> float | None:
    """The nearest density that these points have; None where they are none.

    Between the check of a request and its batch another artifact may have been loaded: what it has must do then.
    """
    if density is None or not points:
        return None
    return min(max(density, points[0].density), points[-1].density)


def requested_part(answer: Answer) -> dict[str, Any]:
    """What an answer says of the working point that was asked for; nothing where none was."""
    density = within(answer.description.points, answer.lane.density)
    if answer.lane.requested is None or density is None:
        return {}
    name, value = answer.lane.requested
    point = point_at(answer.description.points, density)
    return {"requested": {name: value, "point": {"density": point.density, "recall": point.recall}}}


def requested_headers(answer: Answer) -> dict[str, str]:
    """The density of that point, as a header."""
    density = within(answer.description.points, answer.lane.density)
    return {} if density is None else {"x-sparsefinder-requested-density": f"{density:.6f}"}
