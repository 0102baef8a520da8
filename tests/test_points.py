"""Points of the cut curves against what the plan of the cut predictor computes, loses and gets wrong."""

import numpy as np
import oracles
import pytest
import torch

from sparsefinder.errors import ConfigError
from sparsefinder.metrics import counts, instance_measures
from sparsefinder.patterns.legal import legal_from_mask
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window
from sparsefinder.plan import plan_matrix
from sparsefinder.predictors import Distance, RowBudget, Score, Tiles, WindowOnly, layer_plan, random_projections
from training.calibrate import thresholds_at, with_thresholds
from training.extract import LayerData
from training.points import GRID, layer_points
from training.values import LayerValues

HEADS, KV, DIM, SIZE = 4, 2, 8, 6
LENGTHS = (23, 9, 1)


def layer(alpha, causal, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(len(LENGTHS), heads, 23, DIM, generator=g) * 1.5 for heads in (HEADS, KV))
    mask = torch.arange(23)[None] < torch.tensor(LENGTHS)[:, None]
    scale = torch.linspace(0.3, 0.6, HEADS)
    return LayerData(q, k, mask, None, causal, alpha, scale, 0.9 if alpha == 1 else None)


def values(data, seed=1):
    g = torch.Generator().manual_seed(seed)
    v, weight = torch.randn(len(LENGTHS), KV, 23, 5, generator=g), torch.randn(7, HEADS * 5, generator=g)
    root = torch.linalg.qr(weight.view(7, HEADS, 5).transpose(0, 1), mode="r").R
    return LayerValues(v, root, torch.tensor([3.0, 2.0, 1.0])), weight


def predictor(kind, causal):
    metric, bilinear = (random_projections(HEADS, 3, DIM, 5, form) for form in ("metric", "bilinear"))
    one = torch.ones(HEADS)
    made = {
        "tiles": Tiles(bilinear, threshold=0.0, distance_weight=torch.linspace(-0.4, 0.2, HEADS)),
        "distance": Distance(metric, one),
        "score": Score(bilinear, one),
        "budget": RowBudget(bilinear, 0.1),
    }
    return made[kind]


@pytest.mark.parametrize("kind", ["tiles", "distance", "score", "budget"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_a_point_is_what_the_plan_of_that_cut_computes_and_gets_wrong(kind, causal, alpha):
    data, served = layer(alpha, causal), predictor(kind, causal)
    known, weight = values(data)
    positional, size = Window(1) | GlobalTokens(1), SIZE
    points = layer_points(served, data, range(3), positional, size, values=known)
    assert points.density.shape == (HEADS, len(GRID))
    assert (np.diff(points.density, axis=1) >= 0).all()
    legal = legal_from_mask(data.mask, causal)
    for p in (0, 4, 12, 20, len(GRID) - 1):
        cut = with_thresholds(served, thresholds_at(points, np.full(HEADS, p)))
        plan = layer_plan(cut, data.q, data.k, legal, positional, size)
        counted = counts(data.q, data.k, plan, legal, alpha, data.scale, gold_mass=data.gold_mass)
        measured = instance_measures(counted)
        for name, found in (("computed_density", points.density), ("recall", points.recall), ("mass", points.mass)):
            np.testing.assert_allclose(found[:, p], measured[name].mean(0).numpy(), rtol=0, atol=1e-5)
        expected = np.mean([_errors(data, known, weight, plan, legal, b) for b in range(3)], 0)
        np.testing.assert_allclose(points.error[:, p], expected, rtol=1e-3, atol=1e-5)


def _errors(data, known, weight, plan, legal, b):
    """`‖Wo (o − o_g)‖² / power` of every head of one instance, by the definition of attention over given pairs."""
    found = []
    for h in range(HEADS):
        args = data.q[b, h].numpy(), data.k[b, h // 2].numpy(), known.v[b, h // 2].numpy()
        allowed, scale = legal.matrix(b).numpy(), float(data.scale[h])
        full = oracles.attention(*args, allowed, data.alpha, scale)
        part = oracles.attention(*args, plan_matrix(plan, legal, b, h).numpy(), data.alpha, scale)
        moved = (full - part) @ weight[:, h * 5 : h * 5 + 5].double().numpy().T
        found.append((moved**2).sum() / float(known.power[b]))
    return found


def test_some_rows_stand_for_all_and_points_without_values_know_no_error():
    data, served = layer(1.0, True), predictor("tiles", True)
    whole = layer_points(served, data, [0], Nothing(), SIZE)
    some = layer_points(served, data, [0], Nothing(), SIZE, thresholds=whole.threshold, rows=8)
    assert np.isnan(whole.error).all()
    assert np.abs(some.density - whole.density).max() < 0.15
    assert not np.array_equal(some.density, whole.density)


def test_what_no_threshold_cuts_is_refused():
    with pytest.raises(
        ConfigError, match="calibrate: expected tiles, distance, score or budget predictors, got window"
    ):
        layer_points(WindowOnly(3), layer(1.5, False), [0], Nothing(), SIZE)
