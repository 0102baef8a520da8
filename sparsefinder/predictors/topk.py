"""A fixed number of keys per query, by true scores (the oracle) or by projected ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.edges import Edges
from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.content import InEdges
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors.projections import Projections, Settings, item_scores, project_item
from sparsefinder.predictors.tokens import best_of, check_call


@dataclass(frozen=True, eq=False)
class TopKeys:
    """Every query keeps its `keys` best legal keys, by bilinear score or least distance (all where there are fewer).

    With `true_score_projections` it is the oracle "top-k by true scores". `RowBudget` keeps a share, not a number. Of
    equal scores the earlier key counts. Grid: `keys`.

    Raises:
        PatternError: fewer than one key.
    """

    kind: ClassVar[str] = "topk"
    projections: Projections
    keys: int

    def __post_init__(self) -> None:
        if self.keys < 1:
            raise PatternError(f"keys: expected at least 1 per query, got {self.keys}")

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The chosen pairs, as explicit edges, made one head at a time."""
        check_call(self.kind, q, k, legal, self.projections.heads, self.projections.q_map.shape[2])
        found: list[Tensor] = []
        for b in range(q.shape[0]):
            item = project_item(self.projections, q, k, legal, b)
            seen = legal.matrix(b)[item.rows][:, item.columns]
            for head in range(self.projections.heads):
                scores = item_scores(self.projections.form, item, head)
                i, j = (best_of(scores.masked_fill(~seen, -torch.inf), self.keys) & seen).nonzero(as_tuple=True)
                found.append(item.rows[i] * k.shape[2] + item.columns[j])
        counts = torch.tensor([0] + [edges.shape[0] for edges in found], device=q.device)
        return InEdges(Edges(counts.cumsum(0), torch.cat(found), (*q.shape[:3], k.shape[2])))

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return self.projections.to_tensors()

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return {"keys": self.keys, **self.projections.settings()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "TopKeys":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        return cls(Projections.from_tensors(tensors, settings), int(settings["keys"]))  # type: ignore[arg-type]
