"""Score predictor: an edge where the learned bilinear score of the pair reaches a threshold (objective `logistic`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.content import ScoreAbove
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors.assemble import padded, require_heads
from sparsefinder.predictors.projections import Projections, Settings


@dataclass(frozen=True, eq=False)
class Score:
    """`q'_i · k'_j + uᵀq_i + wᵀk_j + b ≥ threshold[h]`, in log-odds where the maps were fitted by logistic loss.

    Raises:
        PatternError: metric projections (their score is a distance: use `Distance`).
        ShapeError: not one threshold per head.
    """

    kind: ClassVar[str] = "score"
    projections: Projections
    threshold: Float[Tensor, " H"]

    def __post_init__(self) -> None:
        if self.projections.form != "bilinear":
            raise PatternError("score: expected projections of the form bilinear, got metric (use distance)")
        require_heads("threshold", self.threshold, self.projections)

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The pairs whose score reaches the threshold."""
        low_q, low_k = padded(self.projections, q, k, legal)
        return ScoreAbove(low_q, low_k, self.threshold, "dot")

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return {"threshold": self.threshold, **self.projections.to_tensors()}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return self.projections.settings()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "Score":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        return cls(Projections.from_tensors(tensors, settings), tensors["threshold"])
