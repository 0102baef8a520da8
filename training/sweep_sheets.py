"""What a family of patterns is to the sweep: sheets of nested settings, and the real predictor behind each setting."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from sparsefinder.entmax import entmax
from sparsefinder.metrics import SetName
from sparsefinder.patterns.algebra import Pattern, context_of, materialize, union_leaves
from sparsefinder.patterns.content import BucketsMeet, InEdges, pack_bits
from sparsefinder.patterns.legal import Legal, legal_full
from sparsefinder.patterns.positional import Nothing
from sparsefinder.predictors import Tiles
from sparsefinder.predictors.projections import expand_heads
from training.extract import LayerData
from training.sweep_kernels import level_bits

Bytes = npt.NDArray[np.uint8]
Role = Literal["learned", "baseline", "control", "oracle"]
Parameters = Mapping[str, float | int | str]

SAMPLE_ITEMS, SAMPLE_STEP = 8, 4  # of the instances that settings are chosen on: so many, and every fourth row


@runtime_checkable
class Choosing(Protocol):
    """Anything that says from q and k which pairs are kept: a predictor, or a stand-in for one."""

    def pattern(self, q: Tensor, k: Tensor, legal: Legal) -> Pattern:
        """The pairs."""


@dataclass(frozen=True, eq=False)
class Gold:
    """One instance's gold pairs of all heads, `flat[offsets[h] : offsets[h + 1]]` = i * n + j, with probabilities."""

    offsets: npt.NDArray[np.int64]
    flat: npt.NDArray[np.int32]
    mass: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class LayerWork:
    """One layer of the extracted graphs; instance b has `lengths[b]` real tokens, at the front."""

    layer: int
    data: LayerData
    lengths: tuple[int, ...]
    gold: tuple[Gold, ...]

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return int(self.data.q.shape[1])

    def item(self, b: int) -> tuple[Float[Tensor, "1 H n D"], Float[Tensor, "1 Hkv n D"], Legal]:
        """Queries and keys of the real tokens of one instance."""
        n = self.lengths[b]
        return self.data.q[b : b + 1, :, :n], self.data.k[b : b + 1, :, :n], legal_full(1, n, n, self.data.causal)

    def chosen(self) -> list[int]:
        """A few instances of the half that settings may be chosen on."""
        return list(range(0, len(self.lengths), 2))[:SAMPLE_ITEMS]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A sheet made ready for one layer.

    count: levels that there are; the level `count` is never kept. index `[H, P]`: setting p of head h keeps the pairs
    of level `≤ index[h, p]`. levels: of one instance `[H, n, n]`. predictor: what really keeps the pairs of setting p.
    """

    count: int
    index: Int64[np.ndarray, "H P"]
    levels: Callable[[int], Bytes]
    predictor: Callable[[int], Choosing | Tiles]


@dataclass(frozen=True, eq=False)
class Sheet:
    """Settings of which each keeps all that the one before kept, so that one matrix of levels holds them all."""

    parameters: tuple[Parameters, ...]
    prepare: Callable[[LayerWork], Prepared]
    tile: int = 0  # of a set `plan`: its tile size


@dataclass(frozen=True, eq=False)
class Family:
    """A row of the table.

    globals_: numbers of global tokens that its unions have. alone: leading rows that a plan makes tiles of their own
    because the pattern holds `GlobalTokens` itself. every: only so many-th pair of neighbouring instances is measured,
    where a predictor has to be asked for every instance and setting anew.
    """

    name: str
    role: Role
    sheets: Sequence[Sheet]
    objective: str = ""
    rank: int | None = None
    set_name: SetName = "pattern"
    globals_: tuple[int, ...] = (0, 1)
    alone: int = 0
    every: int = 1

    @property
    def key(self) -> str:
        """Its name in files: `distance.hinge.r4`."""
        parts = (self.name, self.objective, "" if self.rank is None else f"r{self.rank}")
        return ".".join(part for part in parts if part).replace(" ", "-")


def gold_of(data: LayerData, b: int, n: int) -> Gold:
    """Support and probabilities of the teacher's entmax, as `sparsefinder.metrics` computes them."""
    keys = expand_heads(data.k[b : b + 1], data.q.shape[1])[0]
    visible = torch.ones(n, n, dtype=torch.bool).tril() if data.causal else None
    flats, masses, counts = [], [], [0]
    for h in range(data.q.shape[1]):
        scores = (data.q[b, h, :n] * data.scale[h]) @ keys[h, :n].T
        p = entmax(scores, data.alpha, visible).flatten()
        at = np.flatnonzero(p.numpy() > 0)
        flats.append(at.astype(np.int32))
        masses.append(p.numpy()[at])
        counts.append(counts[-1] + at.shape[0])
    return Gold(np.asarray(counts, np.int64), np.concatenate(flats), np.concatenate(masses))


def layer_work(layer: int, data: LayerData) -> LayerWork:
    """Everything that all the families need of a layer (the stored edges are made again, with their probabilities)."""
    lengths = tuple(int(n) for n in data.mask.sum(-1))
    return LayerWork(layer, data, lengths, tuple(gold_of(data, b, n) for b, n in enumerate(lengths)))


def kept_levels(pattern: Pattern, legal: Legal, heads: int, layer: int) -> Bytes:
    """`[H, n, n]`, 0 where the pattern allows the pair, else 1; buckets by their bits, other patterns by definition."""
    n = legal.query_real.shape[1]
    levels = np.ones((heads, n, n), np.uint8)
    for leaf in union_leaves(pattern):
        part = np.ones_like(levels)
        if isinstance(leaf, BucketsMeet):
            words = (pack_bits(bits)[0].contiguous().numpy() for bits in (leaf.query_bits, leaf.key_bits))
            level_bits(*words, part)
        elif isinstance(leaf, InEdges):
            offsets = leaf.edges.offsets
            owner = torch.arange(heads).repeat_interleave(offsets.diff()).numpy()
            part.reshape(heads, -1)[owner, leaf.edges.flat.numpy()] = 0
        elif not isinstance(leaf, Nothing):
            ctx = context_of(legal, layer)
            part = np.stack([~materialize(leaf, legal, 0, h, ctx).numpy() for h in range(heads)]).astype(np.uint8)
        levels &= part
    return levels


def one_setting(parameters: Parameters, make: Callable[[LayerWork], Choosing]) -> Sheet:
    """A sheet of a single setting: any predictor, through its own pattern."""

    def prepare(work: LayerWork) -> Prepared:
        predictor = make(work)

        def levels(b: int) -> Bytes:
            q, k, legal = work.item(b)
            return kept_levels(predictor.pattern(q, k, legal), legal, work.heads, work.layer)

        return Prepared(1, np.zeros((work.heads, 1), np.int64), levels, lambda _: predictor)

    return Sheet((parameters,), prepare)


def nested_settings(parameters: Sequence[Parameters], make: Callable[[LayerWork], Sequence[Choosing]]) -> Sheet:
    """Settings of any predictors of which each keeps all that the one before it kept."""

    def prepare(work: LayerWork) -> Prepared:
        predictors = make(work)

        def levels(b: int) -> Bytes:
            q, k, legal = work.item(b)
            parts = (kept_levels(p.pattern(q, k, legal), legal, work.heads, work.layer) for p in predictors)
            total: Bytes = functools.reduce(np.add, parts)
            return total

        index = np.tile(np.arange(len(predictors)), (work.heads, 1))
        return Prepared(len(predictors), index, levels, lambda p: predictors[p])

    return Sheet(tuple(parameters), prepare)


@dataclass(frozen=True, eq=False)
class Positional:
    """A pattern that looks at neither q nor k, in a predictor's place."""

    positional: Pattern

    def pattern(self, q: Tensor, k: Tensor, legal: Legal) -> Pattern:
        """The pattern itself."""
        return self.positional


def fixed_setting(parameters: Parameters, pattern: Pattern) -> Sheet:
    """A sheet of one positional pattern: worked out once for each length, layer and head (random ones too)."""

    def prepare(work: LayerWork) -> Prepared:
        @functools.cache
        def of_length(n: int) -> Bytes:
            return kept_levels(pattern, legal_full(1, n, n, work.data.causal), work.heads, work.layer)

        index = np.zeros((work.heads, 1), np.int64)
        return Prepared(1, index, lambda b: of_length(work.lengths[b]), lambda _: Positional(pattern))

    return Sheet((parameters,), prepare)
