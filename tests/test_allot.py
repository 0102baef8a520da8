"""Allotted budgets against every other choice of points, on curves small enough to try them all."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.errors import ConfigError, ShapeError
from training.allot import HeadCurve, allot, hull


def curve(density, loss):
    return HeadCurve(np.array(density, np.float64), np.array(loss, np.float64))


@st.composite
def heads(draw):
    """Two to four heads of up to four points on a lattice, falling or not, convex or not."""
    found = []
    for _ in range(draw(st.integers(2, 4))):
        size = draw(st.integers(1, 4))
        density = sorted(draw(st.lists(st.integers(0, 16), min_size=size, max_size=size)))
        loss = draw(st.lists(st.integers(0, 16), min_size=size, max_size=size))
        found.append(curve([d / 16 for d in density], [x / 16 for x in loss]))
    return found


def totals(curves, cuts):
    return (
        sum(float(c.density[p]) for c, p in zip(curves, cuts, strict=True)) / len(curves),
        sum(float(c.loss[p]) for c, p in zip(curves, cuts, strict=True)) / len(curves),
    )


def every_choice(curves):
    return [totals(curves, cuts) for cuts in itertools.product(*(range(len(c.density)) for c in curves))]


@given(heads(), st.integers(0, 16))
@settings(max_examples=150)
def test_a_density_is_kept_and_no_choice_beats_it_by_more_than_one_step(curves, sixteenths):
    choices, target = every_choice(curves), sixteenths / 16
    found = totals(curves, allot(curves, density=target))
    least = min(density for density, _ in choices)
    assert found[0] <= max(target, least) + 1e-9
    within = [loss for density, loss in choices if density <= max(target, least) + 1e-9]
    steps = [c.loss[a] - c.loss[b] for c in curves for a, b in itertools.pairwise(hull(c))]
    assert min(within) - 1e-9 <= found[1] <= min(within) + max(steps, default=0.0) / len(curves) + 1e-9


@given(heads(), st.integers(0, 16))
@settings(max_examples=150)
def test_a_loss_is_met_and_no_choice_is_sparser_by_more_than_one_step(curves, sixteenths):
    choices, target = every_choice(curves), sixteenths / 16
    found = totals(curves, allot(curves, loss=target))
    best = min(loss for _, loss in choices)
    assert found[1] <= max(target, best) + 1e-9
    enough = [density for density, loss in choices if loss <= max(target, best) + 1e-9]
    steps = [c.density[b] - c.density[a] for c in curves for a, b in itertools.pairwise(hull(c))]
    assert min(enough) - 1e-9 <= found[0] <= min(enough) + max(steps, default=0.0) / len(curves) + 1e-9


@given(heads(), st.integers(0, 16))
@settings(max_examples=100)
def test_where_the_hull_meets_the_target_exactly_nothing_is_better(curves, sixteenths):
    """The law of Lagrange multipliers: an allotment of whole steps is the best of all with as little density."""
    steps = sorted(
        ((c.loss[a] - c.loss[b]) / (c.density[b] - c.density[a]), h, b)
        for h, c in enumerate(curves) for a, b in itertools.pairwise(hull(c))
    )[::-1]  # fmt: skip
    slopes = [slope for slope, _, _ in steps]
    if len(set(slopes)) < len(slopes):
        return  # equal slopes of different heads: another order would be as good
    cuts = [hull(c)[0] for c in curves]
    for _, h, b in steps[: sixteenths % (len(steps) + 1)]:
        cuts[h] = b
    density, loss = totals(curves, cuts)
    assert allot(curves, density=density) == cuts
    assert loss <= min(x for d, x in every_choice(curves) if d <= density + 1e-12) + 1e-12


def test_a_head_that_needs_everything_gets_it_and_one_that_needs_nothing_gets_nothing():
    diffuse = curve([0.1, 0.5, 1.0], [1.0, 0.5, 0.0])
    local = curve([0.1, 0.5, 1.0], [0.01, 0.005, 0.0])
    assert allot([diffuse, local], density=0.55) == [2, 0]
    assert allot([diffuse, local], loss=0.005) == [2, 0]
    assert allot([diffuse, local], loss=0.0) == [2, 2]
    assert allot([diffuse, local], density=0.0) == [0, 0]
    assert allot([], density=0.5) == []


def test_a_step_that_does_not_fit_is_made_in_part():
    bent = curve([0.0, 0.3, 1.0], [1.0, 0.9, 0.0])  # the middle point lies above the hull
    assert hull(bent) == [0, 2]
    assert allot([bent], density=0.4) == [1]
    assert allot([bent], loss=0.95) == [1]


def test_what_is_no_curve_or_no_target_is_refused():
    with pytest.raises(ShapeError, match="curve: expected ascending"):
        curve([0.5, 0.1], [0.0, 0.0])
    with pytest.raises(ShapeError, match="got 0 points"):
        curve([], [])
    for targets in ({}, {"density": 0.1, "loss": 0.1}):
        with pytest.raises(ConfigError, match="exactly one of density and loss"):
            allot([curve([0.1], [0.0])], **targets)
