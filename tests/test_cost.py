"""Costs: formulas and counts, tile by tile or by bounds, against matrices and plans; prices by hand."""

import pytest
import torch
from cases_core import batches, make
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.cost import (
    Footprint,
    attention_price,
    closed_form_pairs,
    count_by_bounds,
    footprint,
    footprint_at,
    full_footprint,
    prediction_price,
)
from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.algebra import materialize
from sparsefinder.patterns.heads import Sequential
from sparsefinder.patterns.legal import legal_from_mask, legal_full
from sparsefinder.patterns.positional import (
    BlockDiagonal,
    Dilated,
    Fixed,
    GlobalTokens,
    Nothing,
    Past,
    Strided,
    Window,
)
from sparsefinder.patterns.random_keys import RandomBlocks, RandomKeys
from sparsefinder.plan import build_plan, computed_pairs

SMALL = st.integers(1, 5)
DISTANCES = st.recursive(
    st.one_of(
        st.builds(Window, st.integers(0, 4)),
        st.builds(Dilated, st.integers(0, 3), SMALL),
        st.builds(Strided, SMALL),
        st.just(Past()),
        st.just(Nothing()),
    ),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=3,
)
KNOWN = st.one_of(
    DISTANCES,
    st.builds(lambda a, g: a | GlobalTokens(g), DISTANCES, st.integers(0, 6)),
    st.builds(lambda a, g: ~(GlobalTokens((g,)) | a), DISTANCES, st.integers(0, 6)),
    st.builds(BlockDiagonal, SMALL, st.integers(0, 2)),
    st.integers(1, 5).flatmap(lambda stride: st.builds(Fixed, st.just(stride), st.integers(1, stride))),
    st.builds(RandomKeys, st.integers(0, 4), st.integers(0, 9), st.just(True)),
)


@given(KNOWN, st.integers(1, 23), st.booleans())
@settings(max_examples=80)
def test_formulas_count_what_the_matrix_holds(pattern, tokens, causal):
    expected = materialize(pattern, legal_full(1, tokens, tokens, causal), 0, 0)
    assert closed_form_pairs(pattern, tokens, causal) == int(expected.sum())


def test_random_patterns_have_formulas_where_draws_do_not_matter():
    legal = legal_full(1, 12, 12)
    for pattern in (RandomKeys(3), RandomKeys(50), RandomBlocks(4, 2), RandomBlocks(4, 9)):
        assert closed_form_pairs(pattern, 12) == int(materialize(pattern, legal, 0, 0).sum())
    assert closed_form_pairs(RandomBlocks(5, 1), 12) is None
    assert closed_form_pairs(RandomKeys(2), 12, causal=True) is None
    assert closed_form_pairs(BlockDiagonal(4) | Window(1), 12) is None
    with pytest.raises(PatternError, match="tokens"):
        closed_form_pairs(Window(1), 0)


@given(batches(longest=24), st.sampled_from([1, 3, 8]), st.booleans())
@settings(max_examples=25)
def test_footprints_are_those_of_the_plan(batch, tile_size, everything):
    """Ragged, padded on either side, causal, several heads, and buckets besides positions."""
    pattern = batch.pattern | (batch.bits & Strided(2)) if everything else batch.pattern
    plan = build_plan(pattern, batch.legal, tile_size)
    computed = computed_pairs(plan)
    owner = plan.tile_batch * batch.heads + plan.tile_head
    for b in range(batch.q.shape[0]):
        for h in range(batch.heads):
            found = footprint(pattern, batch.legal, tile_size, b=b, h=h)
            listed = int(plan.offsets.diff()[owner == b * batch.heads + h].sum())
            kept = int(materialize(pattern, batch.legal, b, h).sum())
            expected = (int(batch.legal.query_real[b].sum()), batch.legal.count(b), kept, listed)
            assert found == Footprint(*expected, int(computed[b, h]))


@given(batches(longest=24), st.integers(1, 7), DISTANCES)
@settings(max_examples=20)
def test_counting_by_bounds_misses_no_pair(batch, tile, rest):
    pattern = BlockDiagonal(4) | (rest & ~GlobalTokens(2)) | Fixed(3)
    for b in range(batch.q.shape[0]):
        expected = int(materialize(pattern, batch.legal, b, 0).sum())
        assert count_by_bounds(pattern, batch.legal, tile, b=b) == expected
        looked_at = count_by_bounds(pattern, batch.legal, tile, b=b, most=0)
        assert looked_at in (None, expected)


def test_bounds_make_long_counts_exact():
    pattern = BlockDiagonal(64, 1) | Window(100) | GlobalTokens(3)
    tokens = 65 * 64  # just too many to be counted tile by tile
    found = footprint_at(pattern, tokens, sample=4)
    local = (torch.arange(512)[:, None] // 64 - torch.arange(512) // 64).abs() <= 1
    local |= (torch.arange(512)[:, None] - torch.arange(512)).abs() <= 100
    # Shifting a row of blocks changes nothing away from the ends: one block more is as much as from 7 to 8 blocks.
    sums = [int(local[: 64 * n, : 64 * n].sum()) for n in (7, 8)]
    without = sums[1] + (65 - 8) * (sums[1] - sums[0])
    columns = 2 * 3 * tokens - 9 - int(local[:3].sum()) - int(local[3:, :3].sum())
    assert found.pairs == without + columns
    assert footprint(pattern, legal_full(1, tokens, tokens), 32, sample=4).pairs != found.pairs
    assert count_by_bounds(Strided(64), legal_full(1, 2048, 2048), most=1 << 20) is None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 31, 32, 70])
def test_full_attention(tokens, causal):
    everything = footprint(~Nothing(), legal_full(1, tokens, tokens, causal), 32)
    assert full_footprint(tokens, 32, causal) == everything
    assert everything.density == everything.computed_density == 1


def test_sampled_tiles_estimate_the_whole():
    legal = legal_full(1, 1000, 1000)
    pattern = Window(20) | GlobalTokens(3) | RandomBlocks(8, 2)
    exact = footprint(pattern, legal, 16)
    assert exact.error == 0
    sampled = footprint(pattern, legal, 16, sample=16)
    assert 0 < sampled.error < 0.05
    for name in ("pairs", "listed", "computed"):
        assert getattr(sampled, name) == pytest.approx(getattr(exact, name), rel=5 * sampled.error)
    assert footprint(pattern, legal, 16, sample=10_000) == exact
    regular = footprint(Window(20), legal, 10, sample=4)  # only the tiles at both ends differ in a window
    assert regular.pairs == pytest.approx(closed_form_pairs(Window(20), 1000), rel=1e-2)


def test_long_texts_need_no_matrix():
    """Exercise 1 of the lecture: 16384 tokens, stride 128, both layers of the causal strided pattern."""
    pattern = Sequential((Window(128), Strided(128)))
    local, jump = (footprint_at(pattern, 16_384, causal=True, layer=layer, sample=8) for layer in range(2))
    assert local.pairs == 16_384 * 129 - 128 * 129 // 2
    assert jump.pairs == 128 * (128 * 129 // 2)
    full = full_footprint(16_384, causal=True)
    assert (local.pairs + jump.pairs) / (2 * full.pairs) == pytest.approx(1 / 85.2, rel=0.01)
    # A tile of 32 neighbours shares its window. Of a stride's keys it shares none: each is computed for all rows after.
    assert local.computed / local.pairs < 1.3
    assert jump.computed / jump.pairs == pytest.approx(33 / 2, rel=0.01)


def test_prices_by_hand():
    size = Footprint(queries=10, legal=100, pairs=40, listed=25, computed=50)
    found = attention_price(size, 8, heads=3, number_bytes=2)
    assert found.flops == 3 * 50 * (2 * 8 + 2 * 8)
    assert found.bytes == 3 * ((10 + 25) * 16 * 2 + 25 * 8)
    assert attention_price(size, 8, value_dim=4, number_bytes=4, lists=False).bytes == 35 * 12 * 4
    distance = prediction_price(64, 16, 4, against=64)
    assert distance.flops == 2 * 64 * 16 * 4 * 2 + 64 * 64 * 4 * 2
    assert prediction_price(64, 16, 4, against=64, shared_by=32).flops == 2 * 64 * 16 * 4 * 2 + 2 * 64 * 4 * 2
    clusters = prediction_price(64, 16, 4, against=8, heads=2)
    assert clusters.flops == 2 * (2 * 64 * 16 * 4 * 2 + 2 * 64 * 8 * 4 * 2)
    assert (clusters + distance).flops == clusters.flops + distance.flops
    with pytest.raises(PatternError, match="dim"):
        attention_price(size, 0)
    with pytest.raises(PatternError, match="rank"):
        prediction_price(64, 16, 0, against=64)


def test_footprints_refuse_what_they_cannot_count():
    with pytest.raises(ShapeError, match="tile_size"):
        footprint(Window(1), legal_full(1, 4, 4), 0)
    with pytest.raises(ShapeError, match="sample"):
        footprint(Window(1), legal_full(1, 4, 4), sample=0)
    with pytest.raises(ShapeError, match="tokens"):
        full_footprint(0)
    with pytest.raises(PatternError, match="real query"):
        footprint(Window(1), legal_from_mask(torch.zeros(1, 4, dtype=torch.bool)))
    batch = make([3, 6], pad_left=True, causal=False, seed=0)
    assert footprint(Window(1), batch.legal, b=0).pairs == 7
