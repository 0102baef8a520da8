"""Positional patterns, compositions and head configurations against double loops; what random patterns promise."""

import numpy as np
import oracles
import oracles_patterns as naive
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Context, materialize
from sparsefinder.patterns.compositions import bigbird, longformer, sparse_transformer, star_transformer
from sparsefinder.patterns.heads import Multihead, Sequential, at_layer
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

CASES = {
    "past": (Past(), naive.past()),
    "dilated": (Dilated(2, 3), naive.dilated(2, 3)),
    "dilated-1": (Dilated(3, 1), naive.window(3)),
    "positions": (GlobalPositions((0, 5)), naive.global_positions((0, 5))),
    "last": (GlobalPositions((1, -1, -3)), naive.global_positions((1, -1, -3))),
    "strided": (Strided(3), naive.strided(3)),
    "fixed": (Fixed(4), naive.fixed(4, 1)),
    "fixed-2": (Fixed(4, 2), naive.fixed(4, 2)),
    "segment": (BlockDiagonal(4), naive.segment(4)),
    "band": (BlockDiagonal(3, 1), naive.block_band(3, 1)),
    "random": (RandomKeys(2, seed=3), naive.random_blocks(1, 2, 3, False)),
    "random-past": (RandomKeys(2, seed=4, causal=True), naive.random_blocks(1, 2, 4, True)),
    "blocks": (RandomBlocks(3, 2, seed=5), naive.random_blocks(3, 2, 5, False)),
    "blocks-past": (RandomBlocks(3, 2, causal=True), naive.random_blocks(3, 2, 0, True)),
    "star": (star_transformer(2), naive.either(naive.window(2), naive.global_tokens(1))),
    "longformer": (
        longformer(5, 2, positions=(-1,)),
        naive.either(naive.window(2), naive.global_tokens(2), naive.global_positions((-1,))),
    ),
    "longformer-dilated": (longformer(5, 1, 2), naive.either(naive.dilated(2, 2), naive.global_tokens(1))),
    "bigbird": (
        bigbird(2, 1, 3, 1, seed=7),
        naive.either(naive.block_band(2, 1), naive.global_tokens(2), naive.random_blocks(2, 1, 7, False)),
    ),
    "sequential": (
        sparse_transformer("strided", 3),
        naive.sequential(naive.window(3), naive.strided(3)),
    ),
    "multihead": (
        sparse_transformer("fixed", 3, heads="multihead"),
        naive.multihead(naive.segment(3), naive.fixed(3, 1)),
    ),
    "union": (
        sparse_transformer("fixed", 4, 2, heads="union"),
        naive.either(naive.segment(4), naive.fixed(4, 2)),
    ),
    "nested": (
        ~Sequential((Multihead((Window(1), Nothing(), Past())), Strided(2))) & Past(),
        naive.both(
            naive.neither(
                naive.sequential(naive.multihead(naive.window(1), naive.nothing(), naive.past()), naive.strided(2))
            ),
            naive.past(),
        ),
    ),
}
FROM_THE_END = {"last", "random", "blocks", "longformer", "bigbird"}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_every_pattern_equals_its_definition(name, pad_left, causal):
    pattern, rule = CASES[name]
    mask = torch.ones(2, 19, dtype=torch.bool)
    mask[1, slice(0, 8) if pad_left else slice(11, 19)] = False
    legal = legal_from_mask(mask, causal)
    if causal and name in FROM_THE_END:
        with pytest.raises(PatternError, match="causal"):
            materialize(pattern, legal, 0, 0)
        return
    for b, h, layer in [(0, 0, 0), (1, 0, 1), (1, 1, 0), (0, 2, 2), (1, 2, 0)]:
        real = mask[b].tolist()
        ends = {"first": oracles.first_real(real), "last": naive.last_real(real)}
        expected = naive.matrix(rule, 19, 19, **ends, h=h, layer=layer) & oracles.legal(real, real, causal)
        found = materialize(pattern, legal, b, h, Context(19, 19, layer=layer)).numpy()
        assert np.array_equal(found, expected)
        assert expected.any() or name == "nested"


@pytest.mark.parametrize("name", sorted(set(CASES) - FROM_THE_END))
def test_behind_a_cache_rows_go_on(name):
    pattern, rule = CASES[name]
    found = materialize(pattern, legal_full(1, 3, 15, True, 12), 0, 1, Context(3, 15, 12, 1)).numpy()
    expected = naive.matrix(rule, 3, 15, offset=12, h=1, layer=1) & oracles.legal([True] * 3, [True] * 15, True, 12)
    assert np.array_equal(found, expected)


@given(st.integers(1, 30), st.integers(1, 8), st.data())
@settings(max_examples=30)
def test_in_a_causal_layer_they_are_those_of_child_et_al(n, stride, data):
    summary = data.draw(st.integers(1, stride))
    legal = legal_full(1, n, n, causal=True)
    itself = np.eye(n, dtype=bool)  # their second fixed pattern may leave a token without itself; ours never does
    pairs = [
        ("strided", naive.child_strided(stride), 1, False),
        ("fixed", naive.child_fixed(stride, summary), summary, 1),
    ]
    for kind, rules, count, plus in pairs:
        pattern = sparse_transformer(kind, stride, count)
        for layer, rule in enumerate(rules):
            expected = naive.matrix(rule, n, n) | (itself if plus else False)
            assert np.array_equal(materialize(pattern, legal, 0, 0, Context(n, n, layer=layer)).numpy(), expected)
            past = materialize(pattern & Past(), legal_full(1, n, n), 0, 0, Context(n, n, layer=layer)).numpy()
            assert np.array_equal(past, expected)


def test_batched_indices_give_the_same_answers():
    """The predicate of a block mask is asked with tensors for item and head."""
    legal = Legal(*[torch.arange(12)[None] >= torch.tensor([[0], [4]])] * 2)
    index = torch.meshgrid(*[torch.arange(n) for n in (2, 3, 12, 12)], indexing="ij")
    ends = {"first_real": torch.tensor([0, 4]), "last_real": torch.tensor([11, 11])}
    for name, (pattern, _) in CASES.items():
        found = pattern.allows(Context(12, 12, layer=1, **ends), *index)
        for b in range(2):
            for h in range(3):
                expected = materialize(pattern, legal, b, h, Context(12, 12, layer=1))
                assert torch.equal(found[b, h] & legal.matrix(b), expected), name


@given(st.integers(1, 40), st.integers(0, 12), st.integers(0, 10**6), st.booleans())
@settings(max_examples=40)
def test_random_draws_are_different_keys(n, count, seed, causal):
    found = materialize(RandomKeys(count, seed, causal), legal_full(1, n, n, causal), 0, 0)
    assert found.sum(1).tolist() == [min(count, i + 1 if causal else n) for i in range(n)]


def test_random_draws_are_uniform():
    """Each of 12 keys is drawn 3 in 12 times: χ² of 11 degrees of freedom is below 31.3 in 999 of 1000 cases."""
    heads, j = torch.arange(720)[:, None], torch.arange(12)[None]
    for causal in (False, True):
        pattern = RandomKeys(3, seed=1, causal=causal)
        found = pattern.allows(Context(12, 12), 0, heads, torch.tensor([[11]]), j)
        assert ((found.sum(0) - 180.0).square() / 180).sum() < 31.3
    sets = {tuple(row.nonzero().flatten().tolist()) for row in found}
    assert len(sets) > 200  # of 220, where 720 draws leave out 8 on average


def test_heads_layers_seeds_and_rows_draw_differently_and_twice_the_same():
    """Case 8: the same input twice is bit-equal."""
    legal = legal_full(1, 32, 32)

    def drawn(seed=0, h=0, layer=0):
        return materialize(RandomKeys(4, seed), legal, 0, h, Context(32, 32, layer=layer))

    base = drawn()
    assert torch.equal(base, drawn())
    assert len({tuple(row.nonzero().flatten().tolist()) for row in base}) > 25
    for other in (drawn(seed=1), drawn(h=1), drawn(layer=1)):
        assert (base & other).sum() < 64  # 16 by chance, 128 if they were the same


@given(st.integers(1, 12), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=8)
def test_neither_padding_nor_neighbours_change_a_pair(n, left, right):
    """Case 6, and batch invariance of random patterns."""
    mask = torch.zeros(3, left + n + right, dtype=torch.bool)
    mask[1, left : left + n], mask[2] = True, True
    for name, (pattern, _) in CASES.items():
        alone = materialize(pattern, legal_full(1, n, n), 0, 1)
        padded = materialize(pattern, legal_from_mask(mask), 1, 1)
        assert torch.equal(padded[left : left + n, left : left + n], alone), name
        assert padded.sum() == alone.sum(), name


def test_at_layer_leaves_no_layer():
    pattern = Window(0) | ~Sequential((Sequential((GlobalTokens(1), Strided(2))), Multihead((Sequential((Past(),)),))))
    assert at_layer(pattern, 0) == Window(0) | ~GlobalTokens(1)
    assert at_layer(pattern, 2) == Window(0) | ~GlobalTokens(1)
    assert at_layer(pattern, 3) == Window(0) | ~Multihead((Past(),))
    assert at_layer(Window(0), 3) == Window(0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Dilated(-1, 2), "radius"),
        (lambda: Dilated(1, 0), "step"),
        (lambda: Strided(0), "stride"),
        (lambda: Strided(2.0), "whole number"),
        (lambda: Fixed(4, 5), "at most the stride"),
        (lambda: BlockDiagonal(0), "block"),
        (lambda: RandomKeys(-1), "count"),
        (lambda: RandomKeys(1, -1), "seed"),
        (lambda: RandomBlocks(0, 1), "block"),
        (lambda: GlobalPositions([0]), "tuple"),
        (lambda: GlobalPositions((True,)), "whole number"),
        (lambda: GlobalTokens((1, -1)), "at least 0"),
        (lambda: Window(10**12), "radius"),
        (lambda: longformer(4), "odd"),
        (lambda: bigbird(window_blocks=2), "odd"),
        (lambda: bigbird(global_blocks=-1), "global_blocks"),
        (lambda: sparse_transformer("random", 2), "strided or fixed"),
        (lambda: sparse_transformer("fixed", 2, heads="all"), "multihead"),
        (lambda: Sequential(()), "one or more"),
        (lambda: Multihead((Window(1), 3)), "one or more"),
    ],
)
@pytest.mark.unchecked
def test_values_outside_their_range_are_refused(build, message):
    with pytest.raises(PatternError, match=message):
        build()


def test_special_lengths():
    """Positions beyond the item are nobody; a global position that is asked for twice is there once."""
    found = materialize(GlobalPositions((7, -9)), legal_full(1, 4, 4), 0, 0)
    assert not found.any()
    assert torch.equal(
        materialize(GlobalPositions((3, -1, 3)), legal_full(1, 4, 4), 0, 0),
        materialize(GlobalPositions((-1,)), legal_full(1, 4, 4), 0, 0),
    )
    assert longformer(0, 0, 3) == Nothing() | GlobalTokens(0)
