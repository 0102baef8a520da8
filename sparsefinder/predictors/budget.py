"""Per-row budget: every query keeps its best keys, a fixed share of those it may see (it repairs the hinge)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsefinder.edges import Edges
from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.content import InEdges
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors.assemble import require_heads
from sparsefinder.predictors.projections import Item, Projections, Settings, item_scores, project_item


@dataclass(frozen=True, eq=False)
class RowBudget:
    """Row i keeps its `max(1, ceil(density * legal keys of row i))` best keys, by bilinear score or least distance.

    Of equal scores the earlier key counts, so a row holds exactly its budget; a row without legal keys holds none.
    density: one number, or one per head, where 0 is a head that keeps nothing.

    Raises:
        PatternError: a density outside (0, 1].
        ShapeError: not one density per head.
    """

    kind: ClassVar[str] = "budget"
    projections: Projections
    density: float | Float[Tensor, " H"]

    def __post_init__(self) -> None:
        if isinstance(self.density, Tensor):
            require_heads("density", self.density, self.projections)
            if not bool(((self.density >= 0) & (self.density <= 1)).all()):
                raise PatternError(f"density: expected fractions in [0, 1], got {self.density.tolist()}")
        elif not 0.0 < self.density <= 1.0:
            raise PatternError(f"density: expected a fraction in (0, 1], got {self.density}")

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The chosen pairs, as explicit edges (`density` of the legal pairs), made one head at a time."""
        found: list[Tensor] = []
        densities = torch.as_tensor(self.density, dtype=torch.float64).expand(self.projections.heads).tolist()
        for b in range(q.shape[0]):
            item = project_item(self.projections, q, k, legal, b)
            visible = _visible(item, legal)
            for head in range(self.projections.heads):
                seen = visible if densities[head] > 0 else torch.zeros_like(visible)
                i, j = best_keys(item_scores(self.projections.form, item, head), seen, densities[head])
                found.append(item.rows[i] * k.shape[2] + item.columns[j])
        counts = torch.tensor([0] + [edges.shape[0] for edges in found], device=q.device)
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        return InEdges(Edges(counts.cumsum(0), torch.cat(found), shape))

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        own = {"density": self.density} if isinstance(self.density, Tensor) else {}
        return {**own, **self.projections.to_tensors()}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        shared = None if isinstance(self.density, Tensor) else self.density
        return {"density": shared, **self.projections.settings()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "RowBudget":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        shared = tensors["density"] if "density" in tensors else float(settings["density"])  # type: ignore[arg-type]
        return cls(Projections.from_tensors(tensors, settings), shared)


def _visible(item: Item, legal: Legal) -> Int[Tensor, " n"]:
    """How many of the item's real keys each of its rows may see; those are always the first ones."""
    if not legal.causal:
        return torch.full_like(item.rows, item.columns.shape[0])
    return torch.searchsorted(item.columns, item.rows + legal.query_offset, right=True)


def best_keys(
    scores: Float[Tensor, "n m"], visible: Int[Tensor, " n"], density: float
) -> tuple[Int[Tensor, " e"], Int[Tensor, " e"]]:
    """Rows and columns, sorted, of the `max(1, ceil(density * visible))` best of the first `visible[i]` of each row."""
    # In float32 a budget such as 0.1 * 30 would round up to 4 keys: count in float64, and forgive its last bits.
    budget = (density * visible.double() - 1e-9).ceil().long().clamp(min=1).minimum(visible)
    hidden = torch.arange(scores.shape[1], device=scores.device) >= visible[:, None]
    order = scores.masked_fill(hidden, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(hidden)
    kept.scatter_(1, order, torch.arange(scores.shape[1], device=scores.device) < budget[:, None])
    i, j = kept.nonzero(as_tuple=True)
    return i, j
