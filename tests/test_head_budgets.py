"""One threshold or budget per head: dense heads, heads without prediction, artifacts; training for softmax teachers."""

from dataclasses import replace

import pytest
import torch

from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.algebra import materialize
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.positional import Nothing
from sparsefinder.plan import plan_matrix
from sparsefinder.predictors import RowBudget, Tiles, random_projections, tile_means, tile_scores
from sparsefinder.predictors.tiles import EVERY_KEY, NO_KEY
from training import train_maps
from training.config import FitConfig
from training.extract import LayerData
from training.objectives import tile_targets
from training.train_maps import train_layer

HEADS, KV, DIM, N, SIZE = 4, 2, 8, 29, 6


def sequences(seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(2, heads, N, DIM, generator=g) * 2 for heads in (HEADS, KV))


@pytest.mark.parametrize("causal", [False, True])
def test_every_head_is_cut_at_its_own_threshold(causal):
    q, k = sequences()
    legal, maps = legal_full(2, N, N, causal), random_projections(HEADS, 3, DIM, 1, "bilinear")
    cuts = torch.tensor([EVERY_KEY, NO_KEY, -3.0, -4.5])
    mixed = Tiles(maps, cuts)
    plan = mixed.plan(q, k, legal, Nothing(), SIZE)
    for h in range(2, 4):
        alone = Tiles(maps, float(cuts[h])).plan(q, k, legal, Nothing(), SIZE)
        assert torch.equal(plan_matrix(plan, legal, 1, h), plan_matrix(alone, legal, 1, h))
    assert torch.equal(plan_matrix(plan, legal, 1, 0), legal.matrix(1))
    tile = torch.arange(N) // SIZE
    own = (tile[:, None] == tile[None, :]) & legal.matrix(1)
    assert torch.equal(plan_matrix(plan, legal, 1, 1), own)
    again = Tiles.from_tensors(mixed.to_tensors(), mixed.settings())
    assert torch.equal(again.threshold, cuts)
    assert all(torch.isfinite(tensor).all() for tensor in mixed.to_tensors().values())  # what an artifact demands
    with pytest.raises(ShapeError, match="threshold"):
        Tiles(maps, cuts[:3])


def test_every_head_has_its_own_row_budget():
    q, k = sequences()
    legal, maps = legal_full(2, N, N, True), random_projections(HEADS, 3, DIM, 1, "bilinear")
    densities = torch.tensor([0.0, 1.0, 0.3, 0.05])
    mixed = RowBudget(maps, densities)
    kept = [materialize(mixed.pattern(q, k, legal), legal, 1, h) for h in range(HEADS)]
    assert not kept[0].any()
    assert torch.equal(kept[1], legal.matrix(1))
    for h in range(2, 4):
        alone = RowBudget(maps, float(densities[h])).pattern(q, k, legal)
        assert torch.equal(kept[h], materialize(alone, legal, 1, h))
    again = RowBudget.from_tensors(mixed.to_tensors(), mixed.settings())
    assert torch.equal(again.density, densities)
    with pytest.raises(PatternError, match=r"density: expected fractions in \[0, 1\]"):
        RowBudget(maps, densities + 0.1)
    with pytest.raises(ShapeError, match="density"):
        RowBudget(maps, densities[:3])


@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_some_tiles_are_those_of_all(causal):
    q, k = sequences()
    maps, weight = random_projections(HEADS, 3, DIM, 1, "bilinear"), torch.linspace(-0.5, 0.5, HEADS)
    means, which = tile_means(q, SIZE, causal), torch.tensor([1, 4])
    whole = tile_scores(maps, weight, means, k, SIZE, causal)
    some = tile_scores(maps, weight, means[:, :, which], k, SIZE, causal, which)
    torch.testing.assert_close(some, whole[:, :, which], atol=1e-6, rtol=1e-6)


def softmax_layer(causal):
    q, k = sequences()
    mask = torch.arange(N)[None] < torch.tensor([N, N])[:, None]
    return LayerData(q, k, mask, None, causal, 1.0, torch.linspace(0.2, 0.5, HEADS), 0.95)


@pytest.mark.parametrize("causal", [False, True])
def test_targets_made_a_few_rows_at_a_time_are_those_of_the_whole_matrix(causal, monkeypatch):
    data, config = softmax_layer(causal), FitConfig(tile_size=SIZE)
    monkeypatch.setattr(train_maps, "CHUNK", 2 * SIZE)
    found = train_maps._TileData(data, config).targets[1]
    scores = data.scale[:, None, None] * data.q[1] @ data.k[1].repeat_interleave(2, 0).transpose(-1, -2)
    hidden = ~legal_full(1, N, N, causal).matrix(0)
    expected = tile_targets(scores.masked_fill(hidden, -torch.inf).softmax(-1), SIZE)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_maps_of_a_causal_softmax_teacher_learn_from_some_tiles_and_repeat():
    data, config = softmax_layer(True), FitConfig(steps=40, tile_size=SIZE, tiles=2, learning_rate=5e-2)
    first, second = (train_layer(data, config, "listwise", 3) for _ in range(2))
    assert torch.equal(first.projections.q_map, second.projections.q_map)
    start = train_layer(data, replace(config, steps=1), "listwise", 3)
    every = [_loss(trained, data, config) for trained in (start, first)]
    assert every[1] < every[0]


def _loss(trained, data, config):
    tiles = train_maps._TileData(data, config)
    whole = replace(config, tiles=None)
    return float(tiles.loss(trained.projections, trained.distance_weight, whole, torch.Generator()).sum())
