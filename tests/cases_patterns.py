"""Random pattern expressions as hypothesis strategies, each with its naive matrix beside it; and attention calls."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import oracles
import oracles_patterns as naive
import torch
from cases_core import bucket_sets
from hypothesis import strategies as st

from sparsefinder.edges import Edges
from sparsefinder.patterns.algebra import Context, Pattern
from sparsefinder.patterns.content import BucketsMeet, InEdges, Listed, ScoreAbove
from sparsefinder.patterns.heads import Multihead, Sequential
from sparsefinder.patterns.legal import Legal
from sparsefinder.patterns.positional import (
    BlockDiagonal,
    Dilated,
    Fixed,
    GlobalPositions,
    GlobalTokens,
    Nothing,
    Past,
    Strided,
    Window,
)
from sparsefinder.patterns.random_keys import RandomBlocks, RandomKeys


@dataclass(frozen=True)
class Call:
    """Sizes and masks of one attention call."""

    legal: Legal
    heads: int
    layer: int
    seed: int

    @property
    def ctx(self) -> Context:
        return Context(*self.sizes, self.legal.query_offset, self.layer)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.legal.query_real.shape[1], self.legal.key_real.shape[1]

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(b, h) for b in range(self.legal.key_real.shape[0]) for h in range(self.heads)]

    def real(self, b: int) -> tuple[list[bool], list[bool]]:
        return self.legal.query_real[b].tolist(), self.legal.key_real[b].tolist()

    def legal_pairs(self, b: int) -> np.ndarray:
        return oracles.legal(*self.real(b), self.legal.causal, self.legal.query_offset)


@dataclass(frozen=True)
class Expression:
    """A pattern, its matrix by definition, and how many first tokens are rows of their own in a plan."""

    pattern: Pattern
    matrix: Callable[[int, int], np.ndarray]
    alone: Callable[[int], int] = lambda b: 0

    def __repr__(self) -> str:
        return repr(self.pattern)


@st.composite
def calls(draw, longest=13):
    """Ragged items padded on either side; or rows behind a cache whose keys are padded on the left."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=2))
    m = max(lengths)
    left = draw(st.booleans())
    key_real = torch.zeros(len(lengths), m, dtype=torch.bool)
    for b, length in enumerate(lengths):
        key_real[b, m - length if left else 0 : m if left else length] = True
    n = draw(st.sampled_from([m, max(1, m // 3)]))
    query_real = key_real[:, m - n :] if left else key_real[:, :n]
    offset = m - n if left else 0
    heads = draw(st.sampled_from([1, 2, 4]))
    legal = Legal(query_real, key_real, draw(st.booleans()), offset)
    return Call(legal, heads, draw(st.integers(0, 2)), draw(st.integers(0, 1000)))


def leaves(call: Call) -> list[Expression]:
    """One of every kind; in a causal layer none that counts from the end."""
    first = [oracles.first_real(call.real(b)[1]) for b in range(call.legal.key_real.shape[0])]
    last = [naive.last_real(call.real(b)[1]) for b in range(call.legal.key_real.shape[0])]
    causal = call.legal.causal

    def positional(pattern: Pattern, rule: Callable[..., bool], alone: int = 0) -> Expression:
        def matrix(b: int, h: int) -> np.ndarray:
            place = {"first": first[b], "last": last[b], "offset": call.legal.query_offset}
            return naive.matrix(rule, *call.sizes, **place, h=h, layer=call.layer)

        return Expression(pattern, matrix, lambda b: alone)

    counts = (3, 1)

    def ragged(b: int, h: int) -> np.ndarray:
        return oracles.global_tokens(*call.sizes, counts[b], first[b], call.legal.query_offset)

    ends = (1, 4) if causal else (1, -2)
    return [
        positional(Nothing(), naive.nothing()),
        positional(Past(), naive.past()),
        positional(Window(1), naive.window(1)),
        positional(Dilated(2, 2), naive.dilated(2, 2)),
        positional(GlobalTokens(2), naive.global_tokens(2), 2),
        Expression(GlobalTokens(counts), ragged, lambda b: counts[b]),
        positional(GlobalPositions(ends), naive.global_positions(ends)),
        positional(Strided(3), naive.strided(3)),
        positional(Fixed(3, 2), naive.fixed(3, 2)),
        positional(BlockDiagonal(4), naive.segment(4)),
        positional(BlockDiagonal(2, 1), naive.block_band(2, 1)),
        positional(RandomKeys(2, 1, causal), naive.random_blocks(1, 2, 1, causal)),
        positional(RandomBlocks(3, 1, 2, causal), naive.random_blocks(3, 1, 2, causal)),
        *_content(call),
    ]


def _content(call: Call) -> list[Expression]:
    draw = torch.Generator().manual_seed(call.seed)
    batch, (n, m) = call.legal.key_real.shape[0], call.sizes
    query, key = (torch.rand(batch, call.heads, size, 70, generator=draw) < 0.06 for size in (n, m))
    low_q, low_k = (torch.randint(-2, 3, (batch, call.heads, size, 2), generator=draw).float() for size in (n, m))
    listed = torch.rand(batch, call.heads, n, m, generator=draw) < 0.2
    flat = [x.flatten().nonzero().flatten() for x in listed.flatten(0, 1)]
    offsets = torch.tensor([0] + [x.shape[0] for x in flat]).cumsum(0)
    edges = Edges(offsets, torch.cat(flat), (batch, call.heads, n, m))
    limits = torch.full((call.heads,), 1.0)
    return [
        Expression(
            BucketsMeet(query, key), lambda b, h: oracles.buckets(bucket_sets(query[b, h]), bucket_sets(key[b, h]))
        ),
        Expression(
            ScoreAbove(low_q, low_k, limits, "euclidean"),
            lambda b, h: oracles.near(low_q[b, h].tolist(), low_k[b, h].tolist(), 1.0),
        ),
        Expression(Listed(listed), lambda b, h: listed[b, h].numpy()),
        Expression(InEdges(edges), lambda b, h: listed[b, h].numpy()),
    ]


def expressions(call: Call, max_leaves=6):
    """Unions, intersections, complements and head configurations of the leaves."""
    return st.recursive(st.sampled_from(leaves(call)), lambda inner: _composed(inner, call), max_leaves=max_leaves)


def _composed(inner, call):
    pairs, several = st.tuples(inner, inner), st.lists(inner, min_size=1, max_size=3)
    return st.one_of(pairs.map(_union), pairs.map(_intersection), inner.map(_complement)) | st.one_of(
        several.map(lambda parts: _sequential(parts, call.layer)), several.map(_multihead)
    )


def _union(pair):
    left, right = pair
    return Expression(
        left.pattern | right.pattern,
        lambda b, h: left.matrix(b, h) | right.matrix(b, h),
        lambda b: max(left.alone(b), right.alone(b)),
    )


def _intersection(pair):
    left, right = pair
    return Expression(left.pattern & right.pattern, lambda b, h: left.matrix(b, h) & right.matrix(b, h))


def _complement(inner):
    return Expression(~inner.pattern, lambda b, h: ~inner.matrix(b, h))


def _sequential(parts, layer):
    chosen = parts[layer % len(parts)]
    return Expression(Sequential(tuple(part.pattern for part in parts)), chosen.matrix)


def _multihead(parts):
    return Expression(Multihead(tuple(part.pattern for part in parts)), lambda b, h: parts[h % len(parts)].matrix(b, h))
