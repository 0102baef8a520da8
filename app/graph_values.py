"""What is asked of attention graphs and what comes back; without torch, so that routes load at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int32]
Buckets = tuple[tuple[int, ...], ...]
SetName = Literal["plan", "pattern"]


@dataclass(frozen=True)
class GraphOptions:
    """Which graphs are asked for. layers, heads: None = all, in their order."""

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    gold: bool = False
    pattern: bool = False
    clusters: bool = False


@dataclass(frozen=True, eq=False)
class Rows:
    """Pairs in CSR form: query `i` has the keys `keys[offsets[i] : offsets[i + 1]]`, ascending."""

    offsets: Indices
    keys: Indices


@dataclass(frozen=True, eq=False)
class GoldRows(Rows):
    """The gold pairs and what attention gives to each."""

    weights: npt.NDArray[np.float32]


@dataclass(frozen=True)
class BucketSets:
    """The buckets of every token as a query and as a key. of: which set; served: whether it is what predicts."""

    of: str
    served: bool
    buckets: int
    queries: Buckets
    keys: Buckets


@dataclass(frozen=True, eq=False)
class HeadGraph:
    """One head. plan: what was computed. pattern: predicted before window, global tokens and (but for tile predictors)
    tiles. missed: gold pairs that the plan lacks. measures: of each set, fractions, None where there is no denominator.
    """

    head: int
    plan: Rows
    pattern: Rows | None
    gold: GoldRows | None
    missed: Rows | None
    measures: Mapping[SetName, Mapping[str, float | None]]
    clusters: BucketSets | None


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """One layer. ran: which path computed it. window: radius of its own sliding window, None where it has none."""

    layer: int
    ran: str
    window: int | None
    legal_pairs: int
    heads: tuple[HeadGraph, ...]
    finite: bool


@dataclass(frozen=True, eq=False)
class Graph:
    """The graphs of one text, in the order that was asked for.

    gold_mass: what the gold keys of a row hold together, of a softmax model; None where gold is the support of entmax.
    """

    layers: tuple[LayerGraph, ...]
    gold_mass: float | None = None

    @property
    def finite(self) -> bool:
        """Were all queries, keys and outputs of these layers numbers?"""
        return all(layer.finite for layer in self.layers)


def legal_pairs(tokens: int, causal: bool) -> int:
    """Legal pairs of a text in a layer without a sliding window."""
    return tokens * (tokens + 1) // 2 if causal else tokens * tokens
