"""Patterns against double loops, the algebra, and what padding may not change."""

import numpy as np
import oracles
import pytest
import torch
from cases_core import batches, bucket_sets, make
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.algebra import Context, materialize, union_leaves
from sparsefinder.patterns.content import BucketsMeet, Listed, ScoreAbove, pack_bits
from sparsefinder.patterns.legal import Legal, first_real, legal_from_mask, legal_full, legal_to
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window, window


def full(pattern, n, m=None, **context):
    m = n if m is None else m
    return materialize(pattern, legal_full(1, n, m), 0, 0, Context(n, m, **context)).numpy()


@given(batches())
@settings(max_examples=25)
def test_every_part_equals_its_definition(batch):
    n = batch.q.shape[2]
    for b in range(batch.q.shape[0]):
        real = batch.legal.query_real[b].tolist()
        legal = oracles.legal(real, real, batch.legal.causal)
        assert np.array_equal(batch.legal.matrix(b).numpy(), legal)
        assert batch.legal.count(b) == legal.sum()
        found = materialize(Window(2), batch.legal, b, 0).numpy()
        assert np.array_equal(found, oracles.window(n, n, 2) & legal)
        expected = oracles.global_tokens(n, n, batch.globals_, oracles.first_real(real)) & legal
        assert np.array_equal(materialize(GlobalTokens(batch.globals_), batch.legal, b, 0).numpy(), expected)
        for h in range(batch.heads):
            sets = bucket_sets(batch.bits.query_bits[b, h]), bucket_sets(batch.bits.key_bits[b, h])
            found = materialize(batch.bits, batch.legal, b, h).numpy()
            assert np.array_equal(found, oracles.buckets(*sets) & legal)


@pytest.mark.parametrize(("kind", "oracle"), [("euclidean", oracles.near), ("dot", oracles.alike)])
def test_scores_above_a_threshold(kind, oracle):
    q, k = torch.randn(2, 3, 9, 4, dtype=torch.float64), torch.randn(2, 3, 11, 4, dtype=torch.float64)
    limits = torch.tensor([0.5, 1.5, -0.3], dtype=torch.float64)
    pattern = ScoreAbove(q, k, limits, kind)
    rowwise = ScoreAbove(q, k, limits[None, :, None].expand(2, 3, 9), kind)
    for b in range(2):
        for h in range(3):
            expected = oracle(q[b, h].tolist(), k[b, h].tolist(), float(limits[h]))
            for p in (pattern, rowwise):
                assert np.array_equal(materialize(p, legal_full(2, 9, 11), b, h).numpy(), expected)


def test_many_buckets_and_packed_words():
    bits = torch.rand(1, 1, 30, 130) < 0.02
    bits[0, 0, 0], bits[0, 0, 1] = False, False
    bits[0, 0, 0, 63], bits[0, 0, 1, 63], bits[0, 0, 0, 129] = True, True, True  # the sign bit and the last one
    expected = oracles.buckets(bucket_sets(bits[0, 0]), bucket_sets(bits[0, 0]))
    assert expected[0, 1]
    assert np.array_equal(full(BucketsMeet(bits, bits), 30), expected)
    assert np.array_equal(full(BucketsMeet(pack_bits(bits), pack_bits(bits)), 30), expected)


@given(st.integers(1, 12), st.integers(0, 4), st.integers(0, 4))
@settings(max_examples=20)
def test_the_algebra_is_boolean(n, radius, count):
    w, g = Window(radius), GlobalTokens(count)
    a, b = full(w, n), full(g, n)
    assert np.array_equal(full(w | g, n), a | b)
    assert np.array_equal(full(w & g, n), a & b)
    assert np.array_equal(full(~w, n), ~a)
    assert np.array_equal(full(~(w | g), n), full(~w & ~g, n))
    assert np.array_equal(full(w | Nothing(), n), a)
    assert np.array_equal(full(~Nothing(), n), np.ones((n, n), bool))
    assert list(union_leaves(w | g | Nothing())) == [w, g, Nothing()]


def test_legal_is_applied_after_the_complement():
    batch = make([3, 6], pad_left=False, causal=True, seed=0)
    everything = materialize(~Nothing(), batch.legal, 0, 0)
    assert torch.equal(everything, batch.legal.matrix(0))
    assert not everything[3:].any()
    assert not everything.triu(1).any()


@pytest.mark.parametrize(("size", "radius"), [(1, 0), (3, 1), (9, 4)])
def test_window_size(size, radius):
    assert window(size) == Window(radius)
    assert window(0) == Nothing()
    assert full(window(size), 20).sum(1).max() == size


@pytest.mark.parametrize("size", [2, 8, -1])
def test_even_windows_are_refused(size):
    """Case 14: never asymmetric by accident."""
    with pytest.raises(PatternError, match="odd"):
        window(size)


def test_values_outside_their_range_are_refused():
    with pytest.raises(PatternError, match="radius"):
        Window(-1)
    with pytest.raises(PatternError, match="counts of at least 0"):
        GlobalTokens(-1)
    with pytest.raises(PatternError, match="context"):
        materialize(Window(1), legal_full(1, 4, 4), 0, 0, Context(5, 4))
    with pytest.raises(ShapeError, match="query_offset"):
        legal_full(1, 2, 2, query_offset=-1)


@pytest.mark.unchecked
def test_masks_of_different_batches_are_refused():
    with pytest.raises(ShapeError, match="one batch"):
        Legal(torch.ones(2, 3, dtype=torch.bool), torch.ones(1, 3, dtype=torch.bool))


def test_ragged_numbers_of_global_tokens():
    """Case 9 (transformers #5646)."""
    batch = make([5, 9], pad_left=True, causal=False, seed=1)
    for b, count in enumerate((3, 1)):
        real = batch.legal.key_real[b].tolist()
        expected = oracles.global_tokens(9, 9, count, oracles.first_real(real)) & batch.legal.matrix(b).numpy()
        assert np.array_equal(materialize(GlobalTokens((3, 1)), batch.legal, b, 0).numpy(), expected)
    with pytest.raises(PatternError, match="every item"):
        materialize(GlobalTokens((3,)), batch.legal, 1, 0)


@given(batches(longest=12, causal=False), st.integers(1, 20))
@settings(max_examples=15)
def test_padding_changes_no_pair(batch, more):
    """Case 6: 20 tokens padded to 32."""
    n = batch.q.shape[2]
    mask = torch.cat([torch.zeros(batch.q.shape[0], more, dtype=torch.bool), batch.legal.key_real], 1)
    low = torch.randn(batch.q.shape[0], batch.heads, n, 4)
    wide = torch.nn.functional.pad(low, (0, 0, more, 0), value=torch.nan)
    limits = torch.full((batch.heads,), 1.5)
    rest = Window(2) | GlobalTokens(2)
    for b in range(batch.q.shape[0]):
        narrow = materialize(ScoreAbove(low, low, limits, "euclidean") | rest, batch.legal, b, 0)
        padded = materialize(ScoreAbove(wide, wide, limits, "euclidean") | rest, legal_from_mask(mask), b, 0)
        assert torch.equal(padded[more:, more:], narrow)
        assert padded.sum() == narrow.sum()


def test_query_offset_counts_rows_among_the_keys():
    legal = legal_full(1, 3, 10, causal=True, query_offset=7)
    expected = oracles.legal([True] * 3, [True] * 10, True, 7)
    assert np.array_equal(legal.matrix(0).numpy(), expected)
    assert legal.count(0) == expected.sum()
    found = materialize(Window(1) | GlobalTokens(1), legal, 0, 0).numpy()
    pattern = oracles.window(3, 10, 1, 7) | oracles.global_tokens(3, 10, 1, offset=7)
    assert np.array_equal(found, pattern & expected)


def test_small_helpers():
    matrix = torch.rand(1, 2, 4, 4) < 0.5
    assert torch.equal(materialize(Listed(matrix), legal_full(1, 4, 4), 0, 1), matrix[0, 1])
    mask = torch.tensor([[False, True, True], [False, False, False]])
    legal = legal_to(legal_from_mask(mask), "cpu")
    assert first_real(legal).tolist() == [1, 0]
    assert legal.count(1) == 0
