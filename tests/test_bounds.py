"""Bounds per tile: exact for positional patterns, sound for all (see also test_algebra_laws.py)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_algebra_laws import tile

from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.algebra import Context, Pattern, materialize
from sparsefinder.patterns.bounds import bounds
from sparsefinder.patterns.heads import Multihead, Sequential
from sparsefinder.patterns.legal import Legal, legal_from_mask, legal_full
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

SIZES = st.integers(1, 9)
numbers = st.integers(0, 9)
exact = st.one_of(
    st.just(Nothing()),
    st.just(Past()),
    numbers.map(Window),
    st.builds(Dilated, numbers, SIZES),
    numbers.map(GlobalTokens),
    st.lists(st.integers(-9, 9), max_size=3).map(lambda at: GlobalPositions(tuple(at))),
    SIZES.map(Strided),
    st.builds(BlockDiagonal, SIZES, st.integers(0, 2)),
)
inexact = st.one_of(
    st.tuples(SIZES, SIZES).map(lambda pair: Fixed(max(pair), min(pair))),
    st.builds(RandomKeys, st.integers(0, 4), numbers, st.booleans()),
    st.builds(RandomBlocks, SIZES, st.integers(0, 4), numbers, st.booleans()),
)


@given(exact, st.integers(1, 25), st.integers(1, 25), SIZES, SIZES, st.integers(0, 2))
@settings(max_examples=60)
def test_positional_bounds_are_exact(pattern, n, m, tile_q, tile_k, h):
    offset = max(0, m - n)
    legal = legal_full(1, n, m, query_offset=offset)
    matrix = materialize(pattern, legal, 0, h).numpy()
    some, every = bounds(pattern, legal, tile_q, tile_k, 0, h)
    assert np.array_equal(some.numpy(), tile(matrix, tile_q, tile_k, np.any))
    assert np.array_equal(every.numpy(), tile(matrix, tile_q, tile_k, np.all))
    some, every = bounds(~pattern, legal, tile_q, tile_k, 0, h)
    assert np.array_equal(some.numpy(), tile(~matrix, tile_q, tile_k, np.any))
    assert np.array_equal(every.numpy(), tile(~matrix, tile_q, tile_k, np.all))


@given(inexact, st.integers(1, 25), st.integers(1, 25), SIZES, SIZES, st.integers(0, 2))
@settings(max_examples=40)
def test_others_know_every_tile_with_a_pair(pattern, n, m, tile_q, tile_k, h):
    legal = legal_full(1, n, m, query_offset=max(0, m - n))
    matrix = materialize(pattern, legal, 0, h).numpy()
    some, every = bounds(pattern, legal, tile_q, tile_k, 0, h)
    assert np.array_equal(some.numpy(), tile(matrix, tile_q, tile_k, np.any))
    assert not (every.numpy() & ~tile(matrix, tile_q, tile_k, np.all)).any()


def test_blocks_that_fit_the_tiles_are_full():
    """BigBird's blocks, asked for in tiles of the same size or smaller."""
    pattern, legal = RandomBlocks(8, 2, 3), legal_full(1, 40, 40)
    for size in (8, 4):
        matrix = materialize(pattern, legal, 0, 0).numpy()
        some, every = bounds(pattern, legal, size, size, 0, 0)
        assert torch.equal(some, every)
        assert np.array_equal(every.numpy(), tile(matrix, size, size, np.all))


@given(st.integers(0, 20), st.integers(0, 20), st.booleans(), st.booleans(), SIZES, SIZES)
@settings(max_examples=30)
def test_legal_pairs_alone_are_exact(real, padding, left, causal, tile_q, tile_k):
    mask = torch.zeros(1, real + padding + 1, dtype=torch.bool)
    mask[0, padding if left else 0 : (real + padding + 1) if left else real] = True
    legal = legal_from_mask(mask, causal)
    some, every = bounds(~Nothing(), legal, tile_q, tile_k, 0, 0)
    matrix = legal.matrix(0).numpy()
    assert np.array_equal(some.numpy(), tile(matrix, tile_q, tile_k, np.any))
    assert np.array_equal(every.numpy(), tile(matrix, tile_q, tile_k, np.all))


def test_layer_and_head_choose():
    legal, none = legal_full(1, 8, 8), torch.zeros(2, 2, dtype=torch.bool)
    pattern = Sequential((Multihead((Nothing(), ~Nothing())), Window(0)))
    assert torch.equal(bounds(pattern, legal, 4, 4, 0, 0)[0], none)
    assert torch.equal(bounds(pattern, legal, 4, 4, 0, 1)[1], ~none)
    found = bounds(pattern, legal, 4, 4, 0, 1, Context(8, 8, layer=1))
    assert torch.equal(found[0], torch.eye(2, dtype=torch.bool))
    assert torch.equal(found[1], none)


def test_long_sequences_need_no_matrix(monkeypatch):
    """A window over 200,000 tokens: 1563 × 1563 tiles, and no pair is looked at."""

    def refuse(*_):
        raise AssertionError("a pair was looked at")

    for cls in (Window, GlobalTokens, Strided, RandomBlocks):
        monkeypatch.setattr(cls, "allows", refuse)
    legal = legal_full(1, 200_000, 200_000)
    some, every = bounds(Window(128) | GlobalTokens(1) | RandomBlocks(128, 2), legal, 128, 128, 0, 0)
    assert some.shape == (1563, 1563)
    assert some[1:, 1:].float().mean() < 0.004
    assert every.sum() > 2 * 1500  # the random blocks


def test_an_unknown_pattern_is_evaluated():
    class Odd(Pattern):
        def allows(self, ctx, b, h, i, j):
            return (i % 2 == 1) & (j >= 0)

    some, every = bounds(Odd(), legal_full(1, 5, 5), 1, 2, 0, 0)
    assert some[:, 0].tolist() == every[:, 2].tolist() == [False, True, False, True, False]


def test_bad_input_is_refused():
    with pytest.raises(ShapeError, match="at least one row"):
        bounds(Window(1), legal_full(1, 4, 4), 0, 4, 0, 0)
    with pytest.raises(PatternError, match="context"):
        bounds(Window(1), legal_full(1, 4, 4), 2, 2, 0, 0, Context(5, 4))
    with pytest.raises(PatternError, match="causal"):
        bounds(GlobalPositions((-1,)), legal_full(1, 4, 4, causal=True), 2, 2, 0, 0)
    empty = Legal(torch.zeros(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.bool))
    assert not bounds(~Nothing(), empty, 2, 2, 0, 0)[0].any()
