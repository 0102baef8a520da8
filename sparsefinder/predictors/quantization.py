"""Quantization predictor (Treviso et al., 2022, section 4.3): an edge where any dimension shares a bin."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float
from torch import Tensor

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors.projections import Projections, Settings, project_item, require_metric
from sparsefinder.predictors.tokens import (
    Members,
    check_call,
    equal_bins,
    meet,
    one_hot,
    refuse_causal,
    warn_if_identical,
)


@dataclass(frozen=True, eq=False)
class Quantization:
    """Each of the r dimensions is cut into β = `bins` bins of equal count; an edge if q'_i and k'_j share one of the
    rβ buckets.

    Queries are cut by `ceil(n / β)` and keys by `ceil(m / β)`, separately, over the item's real tokens: nothing is
    learned, and the bins rank over the whole sequence. Grid: `bins`, from 1 (everything) on.

    Raises:
        PatternError: bilinear projections, fewer than one bin.
    """

    kind: ClassVar[str] = "quantization"
    whole_sequence: ClassVar[bool] = True
    projections: Projections
    bins: int

    def __post_init__(self) -> None:
        require_metric(self.projections, self.kind)
        if self.bins < 1:
            raise PatternError(f"bins: expected at least 1 per dimension, got {self.bins}")

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The pairs that share a bin. PatternError where `legal` is causal."""
        refuse_causal(self.kind, legal)
        check_call(self.kind, q, k, legal, self.projections.heads, self.projections.q_map.shape[2])

        def assign(b: int, rows: Tensor, columns: Tensor) -> Members:
            item = project_item(self.projections, q, k, legal, b)
            warn_if_identical(self.kind, item.q, item.k)
            return self._members(item.q), self._members(item.k)

        return meet(q, k, legal, assign)

    def _members(self, x: Float[Tensor, "H n r"]) -> Bool[Tensor, "H n W"]:
        bins = equal_bins(x.transpose(1, 2), self.bins).transpose(1, 2)
        return one_hot(bins, self.bins).flatten(2)  # bucket `dimension * β + bin`

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return self.projections.to_tensors()

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return {"bins": self.bins, **self.projections.settings()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "Quantization":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        return cls(Projections.from_tensors(tensors, settings), int(settings["bins"]))  # type: ignore[arg-type]
