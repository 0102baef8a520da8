"""Distance predictor (Treviso et al., 2022, section 4.3): an edge where the projections are near each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.content import ScoreAbove
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors.assemble import padded, require_heads
from sparsefinder.predictors.projections import Projections, Settings, require_metric


@dataclass(frozen=True, eq=False)
class Distance:
    """`‖q'_i − k'_j‖₂ ≤ threshold[h]`. The metric is Euclidean, not squared: thresholds are lengths.

    Raises:
        PatternError: bilinear projections.
        ShapeError: not one threshold per head.
    """

    kind: ClassVar[str] = "distance"
    projections: Projections
    threshold: Float[Tensor, " H"]

    def __post_init__(self) -> None:
        require_metric(self.projections, self.kind)
        require_heads("threshold", self.threshold, self.projections)

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The pairs within the threshold."""
        low_q, low_k = padded(self.projections, q, k, legal)
        return ScoreAbove(low_q, low_k, self.threshold, "euclidean")

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return {"threshold": self.threshold, **self.projections.to_tensors()}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return self.projections.settings()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "Distance":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        return cls(Projections.from_tensors(tensors, settings), tensors["threshold"])
