"""Tile predictors: scores by their definition, sizes per head, memory, and how many keys a tile reads."""

import tracemalloc

import oracles_predict as oracle
import pytest
import torch
from cases_predictors import DIM, HEADS, lists, maps, sequences
from hypothesis import given, settings
from hypothesis import strategies as st
from watching import largest_tensor

from sparsefinder.errors import NonFiniteError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import legal_from_mask, legal_full
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window
from sparsefinder.plan import ScoreAtLeast, plan_from_tile_scores
from sparsefinder.predictors import (
    Tiles,
    random_projections,
    tile_means,
    tile_scores,
)
from sparsefinder.predictors.tiles import EVERY_KEY, NO_KEY, _fill_by_item, normalized_scores


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["metric", "bilinear"])
@pytest.mark.parametrize("weight", [0.0, -0.7])
def test_tile_scores_are_their_definition(causal: bool, form: str, weight: float) -> None:
    n, size, before = 21, 6, 4
    q, k = sequences(1, n)
    projections = maps(form)
    tiles = Tiles(projections, -3.0, None, torch.full((HEADS,), weight), before)
    padded_q, padded_k = (torch.nn.functional.pad(x, (0, 0, 2, 3), value=torch.nan) for x in (q, k))
    legal = legal_from_mask((torch.arange(n + 5)[None] >= 2) & (torch.arange(n + 5)[None] < n + 2), causal)
    kernel = normalized_scores(tiles, padded_q, padded_k, legal, size)
    by_item = torch.full_like(kernel, -torch.inf)
    _fill_by_item(tiles, padded_q, padded_k, legal, (size,) * HEADS, by_item)
    trained = tile_scores(
        projections, torch.full((HEADS,), weight), tile_means(q, size, causal, before), k, size, causal
    )
    for h in range(HEADS):
        parts = [getattr(projections, name)[h].double().numpy() for name in ("q_map", "k_map", "q_bias", "k_bias")]
        linear = torch.zeros(DIM) if form == "metric" else projections.k_linear[h]
        arrays = q[0, h].double().numpy(), k[0, h // 2].double().numpy()
        options = {"size": size, "causal": causal, "before": before, "weight": weight, "metric": form == "metric"}
        shares = oracle.tile_log_shares(*arrays, tuple(parts), k_linear=linear.double().numpy(), **options)
        expected = torch.full((4, n), -torch.inf)
        for (t, j), value in shares.items():
            expected[t, j] = value
        for scores in (kernel[0, h, :, 2 : n + 2], by_item[0, h, :, 2 : n + 2], trained[0, h]):
            torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    outside = kernel.clone()
    outside[..., 2 : n + 2] = -torch.inf
    assert (outside == -torch.inf).all()
    torch.testing.assert_close(kernel.exp().sum(-1), torch.ones(1, HEADS, 4), atol=1e-5, rtol=0)


def test_tile_sizes_may_differ_per_head() -> None:
    q, k = sequences(1, 40)
    tiles, legal = Tiles(maps("bilinear"), keys_per_tile=4), legal_full(1, 40, 40)
    mixed = tiles.plan(q, k, legal, Nothing(), torch.tensor([8, 16, 32, 8]))
    for h, size in enumerate((8, 16, 32, 8)):
        same = tiles.plan(q, k, legal, Nothing(), size)
        assert [x for x in lists(mixed, 0) if x[0] == h] == [x for x in lists(same, 0) if x[0] == h]


@pytest.mark.parametrize("rank", [1, 4, 5, 8])
def test_scores_of_extreme_size_stay_finite(rank: int) -> None:
    q, k = sequences(1, 33)
    projections = random_projections(HEADS, rank, DIM, 0, "bilinear")
    scores = normalized_scores(Tiles(projections, threshold=-5.0), 1e4 * q, 1e4 * k, legal_full(1, 33, 33))
    assert torch.isfinite(scores).all()
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(scores.shape[:3]), atol=1e-4, rtol=0)


def test_tile_plans_make_nothing_of_size_n_times_m() -> None:
    n = 2048
    q, k = sequences(1, n, kv_heads=4)
    tiles, legal = Tiles(maps("bilinear"), keys_per_tile=32), legal_full(1, n, n)
    tiles.plan(q[:, :, :64], k[:, :, :64], legal_full(1, 64, 64), Window(2) | GlobalTokens(1))  # compile
    with largest_tensor() as largest:
        tiles.plan(q, k, legal, Window(2) | GlobalTokens(1))
    tracemalloc.start()
    tiles.plan(q, k, legal, Window(2) | GlobalTokens(1))
    peak = tracemalloc.get_traced_memory()[1]  # numpy reports its arrays here
    tracemalloc.stop()
    assert largest.size < n * n / 4
    assert peak < n * n


def test_a_tile_reads_the_asked_number_of_keys_and_no_fewer_with_a_lower_threshold() -> None:
    q, k = sequences(1, 48)
    legal = legal_full(1, 48, 48)
    for count in (1, 7, 48, 100):
        plan = Tiles(maps("bilinear"), keys_per_tile=count).plan(q, k, legal, Nothing(), 16)
        own = [set(keys) - set(range(start, start + rows)) for _, start, rows, keys, _ in lists(plan, 0)]
        chosen = [set(keys) for *_, keys, _ in lists(plan, 0)]
        assert all(len(keys) <= count for keys in own)
        assert all(len(keys) >= min(count, 48) for keys in chosen)
    loose, strict = (Tiles(maps("bilinear"), threshold=t).plan(q, k, legal, Nothing(), 16) for t in (-6.0, -3.0))
    for (*_, many, _), (*_, few, _) in zip(lists(loose, 0), lists(strict, 0), strict=True):
        assert set(few) <= set(many)


def test_a_tile_predictor_refuses_nan_in_real_tokens() -> None:
    q, k = sequences(1, 20)
    for broken in ("q", "k"):
        bad_q, bad_k = q.clone(), k.clone()
        (bad_q if broken == "q" else bad_k)[0, 1, 3, 2] = torch.nan
        with pytest.raises(NonFiniteError):
            Tiles(maps("bilinear"), threshold=-3.0).plan(bad_q, bad_k, legal_full(1, 20, 20), Nothing(), 8)


@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    left=st.booleans(),
    causal=st.booleans(),
    form=st.sampled_from(["metric", "bilinear"]),
    sizes=st.lists(st.sampled_from([1, 3, 8, 16, 32]), min_size=HEADS, max_size=HEADS),
    cuts=st.lists(st.sampled_from([EVERY_KEY, -5.0, -4.0, -3.0, NO_KEY]), min_size=HEADS, max_size=HEADS),
    positional=st.sampled_from([Nothing(), Window(0), Window(5), GlobalTokens(2), Window(2) | GlobalTokens(1)]),
)
@settings(max_examples=60, deadline=None)
def test_a_plan_from_bits_is_the_plan_from_scores(
    seed: int,
    lengths: list[int],
    left: bool,
    causal: bool,
    form: str,
    sizes: list[int],
    cuts: list[float],
    positional: Pattern,
) -> None:
    """The quick way keeps no score, and chooses bit for bit what the scores say, padding and all."""
    torch.manual_seed(seed)
    most = max(max(lengths), 1) + 3
    places = torch.arange(most)[None]
    n = torch.tensor(lengths)[:, None]
    legal = legal_from_mask(places >= most - n if left else places < n, causal)
    q, k = torch.randn(len(lengths), HEADS, most, DIM), torch.randn(len(lengths), 2, most, DIM)
    q, k = (x.masked_fill(~legal.key_real[:, None, :, None], torch.nan) for x in (q, k))
    tiles = Tiles(maps(form), torch.tensor(cuts), None, torch.linspace(-0.7, 0.3, HEADS))
    tile_size = torch.tensor(sizes)
    quick = tiles.plan(q, k, legal, positional, tile_size)
    scores = normalized_scores(tiles, q, k, legal, tile_size)
    slow = plan_from_tile_scores(scores, ScoreAtLeast(tuple(cuts)), positional, legal, tile_size)
    assert quick.shape == slow.shape
    for name in ("tile_batch", "tile_head", "tile_start", "tile_rows", "offsets", "keys", "first_row"):
        assert torch.equal(getattr(quick, name), getattr(slow, name)), name
