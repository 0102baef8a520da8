"""Plans built on the device against those of the CPU: the same lists, key by key, and no look at a number there."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases_core import batches, make
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.attention.api import attend
from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.content import Listed
from sparsefinder.patterns.legal import legal_from_mask, legal_full
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window
from sparsefinder.plan import (
    KeysPerTile,
    Plan,
    ScoreAtLeast,
    ShareOfKeys,
    computed_pairs,
    plan_from_tile_scores,
    plan_matrix,
    plan_to,
    tile_count,
)
from sparsefinder.plan_device import place_tiles, placed_on, plan_on_device

RULES = (
    KeysPerTile(0), KeysPerTile(3), KeysPerTile((1, 5)), KeysPerTile(1000), ShareOfKeys(0.3), ShareOfKeys(1.0),
    ScoreAtLeast(1.0), ScoreAtLeast((0.0, 2.0)), ScoreAtLeast(float("inf")),
)  # fmt: skip
NAMES = ("tile_batch", "tile_head", "tile_start", "tile_rows", "offsets", "keys", "first_row")


def both(scores, rule, extra, legal, sizes):
    """The plan of the CPU and that of the device, the second without its room."""
    tile_size = torch.tensor(sizes)
    plan = plan_on_device(scores, rule, place_tiles(legal, sizes, extra))
    end = int(plan.offsets[-1])
    assert (plan.keys[end:] == 0).all()
    trimmed = replace(plan, keys=plan.keys[:end], first_row=plan.first_row[:end])
    return plan_from_tile_scores(scores, rule, extra, legal, tile_size), trimmed, plan


def same(a, b):
    assert a.shape == b.shape
    for name in NAMES:
        assert getattr(a, name).dtype == getattr(b, name).dtype, name
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def tile_scores(legal, heads, size, seed, levels):
    """Few different levels, so that many are equal; some −inf."""
    draw = torch.Generator().manual_seed(seed)
    count = tile_count(legal, size)
    shape = (legal.key_real.shape[0], heads, count, legal.key_real.shape[1])
    scores = torch.randint(levels, shape, generator=draw).float()
    return scores.masked_fill(torch.rand(shape, generator=draw) < 0.1, -torch.inf)


@given(batches(), st.sampled_from(RULES), st.sampled_from([(1, 4), (16, 3), (4, 4)]), st.sampled_from([2, 4, 1000]))
@settings(max_examples=150)
def test_the_lists_are_those_of_the_cpu(batch, rule, sizes, levels):
    extra = (Nothing() if batch.radius < 0 else Window(batch.radius)) | GlobalTokens(batch.globals_)
    scores = tile_scores(batch.legal, 2, min(sizes), 0, levels)
    expected, found, whole = both(scores, rule, extra, batch.legal, sizes)
    same(found, expected)
    assert torch.equal(computed_pairs(whole), computed_pairs(expected))
    for b in range(scores.shape[0]):
        assert torch.equal(plan_matrix(whole, batch.legal, b, 1), plan_matrix(expected, batch.legal, b, 1))


@given(st.integers(1, 400), st.sampled_from(RULES))
@settings(max_examples=40)
def test_holes_in_the_mask_caches_and_foreign_keys(bits, rule):
    mask = torch.tensor([[bool(bits >> i & 1) for i in range(9)]])
    cases = (
        legal_from_mask(mask, causal=True),
        legal_full(1, 5, 12, causal=True, query_offset=7),
        replace(legal_full(1, 9, 6), cross=True),
    )
    for legal in cases:
        scores = tile_scores(legal, 2, 2, bits, 3)
        same(*both(scores, rule, Window(1) | GlobalTokens((2,)), legal, (2, 4))[1::-1])


def test_nothing_is_read_back():
    """Tensors without data: whoever looks at a number fails."""
    batch = make([30, 17], pad_left=True, causal=True, seed=0)
    tiles = place_tiles(batch.legal, (8, 8), Window(2) | GlobalTokens(1))
    scores = tile_scores(batch.legal, 2, 8, 1, 100)
    for rule in RULES:
        plan = plan_on_device(scores.to("meta"), rule, placed_on(tiles, "meta"))
        assert plan.keys.is_meta
        assert plan.keys.shape == plan_on_device(scores, rule, tiles).keys.shape
    with pytest.raises(RuntimeError):
        plan_from_tile_scores(scores.to("meta"), RULES[1], Window(2), batch.legal, 8)


def test_the_tiles_of_a_batch_are_placed_once():
    legal = legal_full(1, 20, 20)
    first = place_tiles(legal, (8,), Window(1))
    assert place_tiles(legal, (8,), Window(1)) is first
    assert place_tiles(legal_full(1, 20, 20), (8,), Window(1)) is not first


def test_every_backend_takes_a_plan_with_room():
    batch = make([50, 21], pad_left=False, causal=True, seed=2)
    scores = tile_scores(batch.legal, 2, 8, 3, 100)
    expected, _, plan = both(scores, ScoreAtLeast(60.0), Window(1), batch.legal, (8, 8))
    assert plan.keys.shape[0] > expected.keys.shape[0]
    for name in ("cpu", "gather", "reference"):
        found, wanted = (
            attend(batch.q, batch.k, batch.v, x, legal=batch.legal, backend=name) for x in (plan, expected)
        )
        assert torch.equal(found, wanted)
    same(plan_to(plan, "cpu"), plan)


def test_bad_input_is_refused():
    legal = legal_full(1, 8, 8)
    with pytest.raises(PatternError, match="windows and global tokens only"):
        place_tiles(legal, (4,), Listed(torch.ones(1, 1, 8, 8, dtype=torch.bool)))
    with pytest.raises(PatternError, match="sliding window"):
        place_tiles(replace(legal, radius=2), (4,), Window(1))
    _, found, plan = both(torch.zeros(1, 1, 2, 8), KeysPerTile(1), Nothing(), legal, (4,))
    with pytest.raises(ShapeError, match="plan"):
        Plan(plan.shape, *(getattr(found, name) for name in NAMES[:5]), found.keys[:-1], found.first_row[:-1])
    assert np.array_equal(found.tile_start.numpy(), [0, 4])
