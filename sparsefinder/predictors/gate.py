"""Pooled block gate, in the manner of SeerAttention (Gao et al., 2024): pooled blocks are scored against each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors.chunks import chunk_of
from sparsefinder.predictors.projections import Projections, Settings, project_keys, project_queries
from sparsefinder.predictors.tokens import (
    Members,
    best_of,
    check_call,
    item_tokens,
    meet,
    one_hot,
    refuse_causal,
    warn_if_identical,
)


@dataclass(frozen=True, eq=False)
class Gate:
    """A block of queries reads its `top` blocks of keys, or those whose log-share of the gate reaches `threshold`.

    The gate's input is `[mean; max]` over the block's real tokens, of queries and of keys (`block_features`); its score
    is bilinear in them, and the share is a softmax over the key blocks (`gate_scores`). Blocks of `block` tokens are
    counted from the first real token, the last may be shorter. A block's pools look ahead, so causal layers are
    refused. Learned against the teacher's pooled attention: `training.fit_content.fit_gate`.
    maps: bilinear, on `2 * head_dim` features. Grid: `block`, `top` or `threshold` (natural log of a share).

    Raises:
        PatternError: metric maps; not exactly one of `top` and `threshold`; a block or a top below 1.
        ShapeError: maps of an odd number of features.
    """

    kind: ClassVar[str] = "gate"
    whole_sequence: ClassVar[bool] = True
    maps: Projections
    block: int
    top: int | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.maps.form != "bilinear":
            raise PatternError(f"gate: expected maps of the form bilinear, got {self.maps.form}")
        if self.maps.q_map.shape[2] % 2:
            raise ShapeError(f"gate: expected maps of [mean; max], got {self.maps.q_map.shape[2]} features")
        if (self.top is None) == (self.threshold is None):
            raise PatternError("gate: expected exactly one of top and threshold")
        if self.block < 1 or (self.top is not None and self.top < 1):
            raise PatternError(f"gate: expected a block and a top of at least 1, got {self.block} and {self.top}")

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The pairs of the chosen blocks. PatternError where `legal` is causal."""
        refuse_causal(self.kind, legal)
        check_call(self.kind, q, k, legal, self.maps.heads, self.maps.q_map.shape[2] // 2)

        def assign(b: int, rows: Tensor, columns: Tensor) -> Members:
            tokens = item_tokens(q, k, legal, b, self.maps.q_map.dtype)
            queries, keys = (block_features(x, self.block) for x in (tokens.q, tokens.k))
            warn_if_identical(self.kind, queries, keys)
            shares = gate_scores(self.maps, queries[None], keys[None])[0]
            chosen = shares >= self.threshold if self.threshold is not None else best_of(shares, self.top or 0)
            query, key = (chunk_of(x.shape[0], self.block, x.device) for x in (rows, columns))
            return chosen[:, query], one_hot(key, shares.shape[-1]).expand(shares.shape[0], -1, -1)

        return meet(q, k, legal, assign)

    def to_tensors(self) -> dict[str, Tensor]:
        """Parameters by name."""
        return self.maps.to_tensors()

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        cut: dict[str, str | int | float | bool | None] = {"top": self.top, "threshold": self.threshold}
        return {"block": self.block, **cut, **self.maps.settings()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "Gate":
        """The inverse of `to_tensors` and `settings`; KeyError names what is missing."""
        cut = settings["top"], settings["threshold"]
        return cls(Projections.from_tensors(tensors, settings), int(settings["block"]), *cut)  # type: ignore[arg-type]


def block_features(x: Float[Tensor, "*rest n D"], size: int) -> Float[Tensor, "*rest T F"]:
    """`[mean; max]` over every block of one item's real tokens; F = 2 D. The last block may be shorter."""
    parts = torch.split(x, size, dim=-2)
    return torch.stack([torch.cat([part.mean(-2), part.amax(-2)], -1) for part in parts], -2)


def gate_scores(
    maps: Projections, queries: Float[Tensor, "*B H T F"], keys: Float[Tensor, "*B H S F"]
) -> Float[Tensor, "*B H T S"]:
    """Log-shares of key blocks for every block of queries: `log softmax(f'_q · f'_k + k_linear · f_k)`. Differentiable.

    What is the same for a whole row of blocks (`q_linear`, the offset) cancels in the share.
    """
    scores = project_queries(maps, queries) @ project_keys(maps, keys).transpose(-1, -2)
    if maps.k_linear is not None:
        scores = scores + (keys @ maps.k_linear[:, :, None]).transpose(-1, -2)
    return torch.log_softmax(scores, -1)
