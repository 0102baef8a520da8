"""Plans against double loops: which tile reads which key, from which row on, and that no pair is counted twice."""

import numpy as np
import oracles
import pytest
import torch
from cases_core import batches, bucket_sets, make
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.errors import NonFiniteError, PatternError, ShapeError
from sparsefinder.patterns.algebra import materialize
from sparsefinder.patterns.content import Listed, ScoreAbove
from sparsefinder.patterns.legal import legal_from_mask, legal_full
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window
from sparsefinder.plan import (
    KeysPerTile,
    Plan,
    ScoreAtLeast,
    ShareOfKeys,
    build_plan,
    computed_pairs,
    plan_from_tile_scores,
    plan_matrix,
    plan_to,
    tile_count,
)


def lists(plan, b, h):
    """A plan as the oracle writes it."""
    found = {}
    for t in range(plan.tile_start.shape[0]):
        if (int(plan.tile_batch[t]), int(plan.tile_head[t])) == (b, h):
            part = slice(int(plan.offsets[t]), int(plan.offsets[t + 1]))
            keys, first = plan.keys[part].tolist(), plan.first_row[part].tolist()
            assert keys == sorted(set(keys))  # a key once, whether it is window, global and predicted at once or not
            found[int(plan.tile_start[t]), int(plan.tile_rows[t])] = dict(zip(keys, first, strict=True))
    return found


def check(plan, legal, b, h, chosen, tile_size, globals_):
    real = legal.query_real[b].tolist(), legal.key_real[b].tolist()
    pairs = legal.matrix(b).numpy()
    offset = legal.query_offset
    tiles, matrix = oracles.plan(chosen, pairs, *real, tile_size, globals_, legal.causal, offset)
    assert lists(plan, b, h) == tiles
    assert np.array_equal(plan_matrix(plan, legal, b, h).numpy(), matrix)
    assert int(computed_pairs(plan)[b, h]) == matrix.sum()
    assert not (chosen & pairs & ~matrix).any()


@given(batches(), st.sampled_from([1, 4, 16]))
@settings(max_examples=40)
def test_buckets_window_and_globals(batch, size):
    plan = build_plan(batch.pattern, batch.legal, size)
    n = batch.q.shape[2]
    for b in range(batch.q.shape[0]):
        first = oracles.first_real(batch.legal.key_real[b].tolist())
        positional = oracles.global_tokens(n, n, batch.globals_, first)
        if batch.radius >= 0:
            positional |= oracles.window(n, n, batch.radius)
        for h in range(batch.heads):
            sets = bucket_sets(batch.bits.query_bits[b, h]), bucket_sets(batch.bits.key_bits[b, h])
            check(plan, batch.legal, b, h, oracles.buckets(*sets) | positional, size, batch.globals_)


@given(batches(longest=20), st.integers(0, 100))
@settings(max_examples=20)
def test_any_pattern_goes_through_its_matrix(batch, seed):
    n, draw = batch.q.shape[2], torch.Generator().manual_seed(seed)
    listed = torch.rand(batch.q.shape[0], batch.heads, n, n, generator=draw) < 0.1
    low = torch.randn(batch.q.shape[0], batch.heads, n, 3, generator=draw)
    pattern = Listed(listed) & ~Window(0) | ScoreAbove(low, low, torch.full((batch.heads,), 0.7), "euclidean")
    plan = build_plan(pattern, batch.legal, 8)
    for b in range(batch.q.shape[0]):
        for h in range(batch.heads):
            near = oracles.near(low[b, h].tolist(), low[b, h].tolist(), 0.7)
            check(plan, batch.legal, b, h, listed[b, h].numpy() & ~np.eye(n, dtype=bool) | near, 8, 0)


def test_a_tile_size_for_every_head():
    batch = make([40, 33], pad_left=True, causal=True, seed=1, heads=3, kv_heads=3)
    sizes = (16, 32, 64)
    plan = build_plan(batch.pattern, batch.legal, torch.tensor(sizes))
    for h, size in enumerate(sizes):
        for b in range(2):
            check(plan, batch.legal, b, h, materialize(batch.pattern, batch.legal, b, h).numpy(), size, 1)


def best(scores, candidates, count, least):
    """The keys a tile takes: those that reach `least`, the best `count`, earlier ones first among equal."""
    able = [j for j in candidates if scores[j] >= least and scores[j] > -np.inf]
    return sorted(able, key=lambda j: (-scores[j], j))[:count]


@given(batches(), st.sampled_from([4, 16]), st.sampled_from(["count", "share", "least"]), st.booleans())
@settings(max_examples=40)
def test_tile_scores(batch, size, kind, ties):
    n, items = batch.q.shape[2], batch.q.shape[0]
    scores = torch.randn(items, batch.heads, tile_count(batch.legal, size), n)
    scores = scores.round() if ties else scores
    scores[..., 0] = -torch.inf
    scores.masked_fill_(~batch.legal.key_real[:, None, None], torch.nan)  # what padding holds does not matter
    rule = {"count": KeysPerTile(3), "share": ShareOfKeys(0.2), "least": ScoreAtLeast(0.8)}[kind]
    extra = (Nothing() if batch.radius < 0 else Window(batch.radius)) | GlobalTokens(batch.globals_)
    plan = plan_from_tile_scores(scores, rule, extra, batch.legal, size)
    for b in range(items):
        real = batch.legal.key_real[b].tolist()
        first = oracles.first_real(real)
        for h in range(batch.heads):
            chosen = materialize(extra, batch.legal, b, h).numpy()
            for i in range(first, n):
                t = (i - first) // size
                seen = [
                    j
                    for j in range(n)
                    if real[j]
                    and (not batch.legal.causal or j < max(first + t * size, start(first, t * size, batch.globals_)))
                ]
                count = {"count": 3, "share": int(np.ceil(0.2 * len(seen))), "least": n}[kind]
                if i - first >= batch.globals_:
                    chosen[i, best(scores[b, h, t], seen, count, 0.8 if kind == "least" else -np.inf)] = True
            check(plan, batch.legal, b, h, chosen, size, batch.globals_)


def start(first, position, globals_):
    """Where a tile really begins: after the global rows, which are tiles of their own."""
    return first + max(position, globals_)


def test_rules_per_head():
    legal = legal_full(1, 8, 8)
    scores = torch.arange(8.0).expand(1, 2, 1, 8)
    plan = plan_from_tile_scores(scores, KeysPerTile((1, 3)), Nothing(), legal, 8)
    assert [len(keys) for h in range(2) for keys in lists(plan, 0, h).values()] == [8, 8]  # a tile reads itself
    wide = legal_full(1, 4, 20)
    scores = torch.arange(20.0).expand(1, 2, 1, 20)
    plan = plan_from_tile_scores(scores, ScoreAtLeast((18.0, 16.0)), Nothing(), wide, 4)
    assert [sorted(keys) for h in range(2) for keys in lists(plan, 0, h).values()] == [
        [0, 1, 2, 3, 18, 19],
        [0, 1, 2, 3, 16, 17, 18, 19],
    ]


def test_a_key_that_is_window_global_and_predicted_counts_once():
    """Case 15."""
    legal = legal_full(1, 6, 6)
    scores = torch.full((1, 1, 2, 6), 1.0)
    plan = plan_from_tile_scores(scores, KeysPerTile(6), Window(3) | GlobalTokens(2), legal, 4)
    assert computed_pairs(plan).tolist() == [[36]]
    assert lists(plan, 0, 0) == {key: dict.fromkeys(range(6), 0) for key in ((0, 1), (1, 1), (2, 2), (4, 2))}


@pytest.mark.parametrize("n", [1, 63, 64, 65])
def test_lengths_around_a_tile(n):
    """Case 5 (reformer-pytorch #72, #123)."""
    plan = build_plan(Window(0), legal_full(1, n, n), 64, heads=1)
    assert [rows for _, rows in lists(plan, 0, 0)] == [min(64, n - s) for s in range(0, n, 64)]


def test_a_window_that_lies_in_padding():
    """Case 7: lengths [3, 2048], window 8 (transformers PR #45511, fast-transformers #37)."""
    mask = torch.arange(2048)[None] < torch.tensor([[3], [2048]])
    plan = build_plan(Window(4), legal_from_mask(mask), 64, heads=1)
    assert lists(plan, 0, 0) == {(0, 3): {0: 0, 1: 0, 2: 0}}
    assert int(plan.tile_batch.eq(1).sum()) == 32


def test_padding_and_neighbours_change_no_list():
    """Case 6: each item alone, and shifted by left padding, has the lists that it has in the batch."""
    for causal in (False, True):
        for left in (False, True):
            batch = make([5, 64], left, causal, seed=2)
            together = build_plan(batch.pattern, batch.legal, 16)
            for b, n in enumerate((5, 64)):
                part = slice(64 - n, 64) if left else slice(0, n)
                bits = [x[b : b + 1, :, part] for x in (batch.bits.query_bits, batch.bits.key_bits)]
                pattern = type(batch.bits)(*bits) | Window(1) | GlobalTokens(1)
                alone = build_plan(pattern, legal_full(1, n, n, causal), 16)
                for h in range(2):
                    moved = {
                        (s + part.start, rows): {j + part.start: r for j, r in keys.items()}
                        for (s, rows), keys in lists(alone, 0, h).items()
                    }
                    assert lists(together, b, h) == moved


def test_causal_sets_do_not_depend_on_later_tokens():
    """Buckets of token 9 and later may change nothing of rows 0 to 8, though they share a tile."""
    batch = make([32], pad_left=False, causal=True, seed=3)
    before = build_plan(batch.pattern, batch.legal, 16)
    for bits in (batch.bits.query_bits, batch.bits.key_bits):
        bits[:, :, 9:] = ~bits[:, :, 9:]
    after = build_plan(batch.pattern, batch.legal, 16)
    assert torch.equal(plan_matrix(before, batch.legal, 0, 1)[:9], plan_matrix(after, batch.legal, 0, 1)[:9])
    assert not torch.equal(plan_matrix(before, batch.legal, 0, 1), plan_matrix(after, batch.legal, 0, 1))


def test_rows_behind_a_cache():
    legal = legal_full(1, 5, 40, causal=True, query_offset=35)
    plan = build_plan(Window(2) | GlobalTokens(1), legal, 16, heads=1)
    chosen = oracles.window(5, 40, 2, 35) | oracles.global_tokens(5, 40, 1, offset=35)
    check(plan, legal, 0, 0, chosen, 16, 1)


def test_items_of_padding_and_holes_in_the_mask():
    mask = torch.tensor([[False] * 6, [True, True, False, True, True, True]])
    legal = legal_from_mask(mask)
    plan = build_plan(Window(1), legal, 4, heads=2)
    assert computed_pairs(plan)[0].tolist() == [0, 0]
    assert lists(plan, 1, 0) == {(0, 2): {0: 0, 1: 0}, (3, 1): {3: 0, 4: 0}, (4, 2): {3: 0, 4: 0, 5: 0}}
    nothing = build_plan(Window(1), legal_from_mask(mask[:1]), 4, heads=2)
    assert nothing.keys.shape == (0,)


def test_the_same_input_twice_gives_the_same_plan():
    """Case 8."""
    batch = make([30, 12], pad_left=False, causal=False, seed=4)
    first, second = (build_plan(batch.pattern, batch.legal, 16) for _ in range(2))
    moved = plan_to(first, "cpu")
    for name in ("tile_batch", "tile_head", "tile_start", "tile_rows", "offsets", "keys", "first_row"):
        assert torch.equal(getattr(first, name), getattr(second, name))
        assert torch.equal(getattr(first, name), getattr(moved, name))


def test_bad_input_is_refused():
    legal = legal_full(1, 8, 8)
    with pytest.raises(PatternError, match="number of heads"):
        build_plan(Window(1), legal)
    with pytest.raises(PatternError, match="number of heads"):
        build_plan(Listed(torch.ones(1, 2, 8, 8, dtype=torch.bool)), legal, heads=3)
    with pytest.raises(ShapeError, match="between 1 and 128"):
        build_plan(Window(1), legal, 0, heads=1)
    scores = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ShapeError, match="scores"):
        plan_from_tile_scores(scores, KeysPerTile(1), Nothing(), legal, 2)
    scores[0, 0, 1, 3] = torch.nan
    with pytest.raises(NonFiniteError, match="scores"):
        plan_from_tile_scores(scores, KeysPerTile(1), Nothing(), legal, 4)
    plan = build_plan(Window(1), legal, heads=1)
    with pytest.raises(ShapeError, match="plan"):
        Plan(
            plan.shape,
            plan.tile_batch,
            plan.tile_head,
            plan.tile_start,
            plan.tile_rows,
            *[plan.offsets[:1]],
            plan.keys,
            plan.first_row,
        )
