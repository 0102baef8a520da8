"""Probability maps against naive definitions, and Yun et al.'s Assumption 2 against its proofs."""

import math

import oracles
import oracles_theory
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.entmax import entmax
from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.probability_maps import (
    check_margin,
    hardmax,
    probability_maps,
    softmax,
    softmax_scale,
    sparselin_gen,
    sparsemax,
    topk_softmax,
)

ROWS = st.lists(st.one_of(st.integers(-3, 3).map(float), st.floats(-4, 4)), min_size=1, max_size=6)


def masked(row, hidden):
    """The row as a tensor and its mask, and the row as the oracle wants it."""
    mask = torch.tensor([not (hidden >> j) & 1 for j in range(len(row))])
    seen = [v if m else -math.inf for v, m in zip(row, mask.tolist(), strict=True)]
    return torch.tensor(row, dtype=torch.float64), mask, seen


@given(ROWS, st.integers(0, 63), st.integers(1, 7), st.floats(0, 0.9))
@settings(max_examples=40)
def test_every_map_equals_its_definition(row, hidden, top, strength):
    z, mask, seen = masked(row, hidden)
    pairs = {
        "softmax": (softmax(z, mask), oracles_theory.softmax(seen)),
        "top-k": (topk_softmax(z, top, mask), oracles_theory.topk_softmax(seen, top)),
        "sparsemax": (sparsemax(z, mask), oracles_theory.simplex_projection(seen)),
        "sparselin-gen": (
            sparselin_gen(z, strength, mask),
            oracles_theory.simplex_projection([v / (1 - strength) for v in seen]),
        ),
        "hardmax": (hardmax(z, mask), oracles_theory.hardmax(seen)),
        "entmax": (entmax(z, 1.5, mask), oracles.entmax(seen, 1.5)),
    }
    for name, (found, expected) in pairs.items():
        assert found.tolist() == pytest.approx(list(expected), abs=1e-7), name


@given(ROWS, st.integers(1, 7))
@settings(max_examples=30)
def test_top_k_keeps_no_more_than_k(row, top):
    p = topk_softmax(torch.tensor(row, dtype=torch.float64), top)
    assert int((p > 0).sum()) == min(top, len(row))
    assert float(p.sum()) == pytest.approx(1)


@pytest.mark.parametrize("name", list(probability_maps()))
def test_rows_do_not_disturb_each_other(name):
    """Cases 1, 2 and 4: rows without a legal key, half precision, NaN and +inf in a neighbour."""
    apply = probability_maps()[name].apply
    good = torch.randn(5, 12)
    rows = torch.cat([good, torch.full((1, 12), -math.inf), torch.full((1, 12), math.nan), torch.zeros(1, 12)])
    rows[7, 3] = math.inf
    p = apply(rows)
    assert torch.equal(p[:5], apply(good))
    assert torch.equal(p[5], torch.zeros(12))
    assert p[6].isnan().all()
    assert p[7].isnan().all()
    half = apply(torch.tensor([[-1000.0] * 128 + [-995.0]], dtype=torch.float16))
    assert half.dtype == torch.float16
    assert float(half.float().sum()) == pytest.approx(1, abs=2e-3)
    assert int(half.argmax()) == 128


def test_gradients_flow_through_top_k():
    z = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: topk_softmax(x, 3), z)


@pytest.mark.parametrize("name", list(probability_maps()))
@pytest.mark.parametrize(("margin", "rest", "tokens"), [(0.1, 0.01, 17), (1.0, 0.3, 2), (2.5, 1e-4, 6)])
def test_assumption_2_holds_with_the_scale_of_the_proof(name, margin, rest, tokens):
    """Yun et al. (2020), appendix B: the scale of the proof is enough, so the least one is not above it."""
    each = probability_maps(top=4)
    name = name.replace("top-8", "top-4")
    check = check_margin(each[name].apply, margin, rest, tokens)
    assert check.scale is not None
    assert check.on_best >= 1 - rest - 1e-8
    assert check.off_best <= rest + 1e-8
    assert check.scale <= max(each[name].enough(margin, rest, tokens), 2.0**-24 / margin) * (1 + 1e-6)


@pytest.mark.parametrize("tokens", [2, 5, 30])
@pytest.mark.parametrize(("margin", "rest"), [(0.5, 0.1), (2.0, 0.02)])
def test_the_least_scale_is_the_exact_one(margin, rest, tokens):
    """All other scores one margin below the best is the hardest case, and there the least scale has a closed form."""
    assert check_margin(softmax, margin, rest, tokens).scale == pytest.approx(
        softmax_scale(margin, rest, tokens), rel=1e-6
    )
    # sparsemax of (x, 0, …, 0) puts (1 + (n − 1) x) / n on the first.
    exact = max((1 - rest) * tokens - 1, 0) / (tokens - 1) / margin
    assert check_margin(sparsemax, margin, rest, tokens).scale == pytest.approx(exact, rel=1e-6)
    lin = check_margin(lambda z: sparselin_gen(z, 0.75), margin, rest, tokens)
    assert lin.scale == pytest.approx(exact / 4, rel=1e-6)


def test_maps_that_fail_the_assumption_are_found_out():
    def uniform(z):
        return torch.full_like(z, 1 / z.shape[-1])

    def proportional(z):  # blind to the scale
        positive = z - z.amin(-1, keepdim=True) + 1e-3 * z.abs().amax(-1, keepdim=True)
        return positive / positive.sum(-1, keepdim=True)

    def best_two(z):
        two = z.argsort(-1, descending=True)[..., :2]
        return torch.zeros_like(z).scatter(-1, two, 0.5)

    def doubled(z):  # sums to two: enough on the best, too much on the others
        return torch.softmax(z, -1) + 1 / z.shape[-1]

    for apply in (uniform, proportional, best_two, doubled):
        check = check_margin(apply, 1.0, 0.1, 9)
        assert check.scale is None
        assert check.on_best < 0.9 or check.off_best > 0.1
    assert check_margin(uniform, 1.0, 1.0, 9).scale is not None  # η = 1 asks for nothing


def test_values_outside_their_range_are_refused():
    z = torch.zeros(3)
    for wrong in (-0.1, 1.0, math.nan):
        with pytest.raises(PatternError, match="strength"):
            sparselin_gen(z, wrong)
    with pytest.raises(PatternError, match="top"):
        topk_softmax(z, 0)
    for bad in ((0.0, 0.1, 3), (1.0, 0.0, 3), (1.0, 1.1, 3), (1.0, 0.1, 1)):
        with pytest.raises(PatternError, match="check_margin"):
            check_margin(softmax, *bad)


@pytest.mark.unchecked
def test_wrong_shapes_are_refused():
    for apply in (hardmax, lambda z, mask=None: topk_softmax(z, 2, mask)):
        with pytest.raises(ShapeError, match="at least one"):
            apply(torch.zeros(3, 0))
        with pytest.raises(ShapeError, match="bool"):
            apply(torch.zeros(3), torch.ones(3))
        with pytest.raises(ShapeError, match="broadcast"):
            apply(torch.zeros(3), torch.ones(4, dtype=torch.bool))
