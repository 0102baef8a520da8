"""Per-row budget: every query keeps the best keys, a fixed share of those it may see (design: what repairs the hinge)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.content import Edges
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors.projections import Projections, Settings, item_scores, project_item


@dataclass(frozen=True, eq=False)
class RowBudget:
    """Row i keeps its `max(1, ceil(density * legal keys of row i))` best keys, by bilinear score or least distance.

    Of equal scores the earlier key counts, so a row holds exactly its budget; a row without legal keys holds none.

    Raises:
        PatternError: a density outside (0, 1].
    """

    kind: ClassVar[str] = "budget"
    projections: Projections
    density: float

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise PatternError(f"density: expected a fraction in (0, 1], got {self.density}")

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return self.projections.to_tensors()

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return {"density": self.density, **self.projections.settings()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "RowBudget":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        return cls(Projections.from_tensors(tensors, settings), float(settings["density"]))  # type: ignore[arg-type]
