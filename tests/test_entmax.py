"""Entmax against sorting in float64, against the `entmax` package, and the numeric faults of public trackers."""

import entmax as package
import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.entmax import entmax, support, threshold
from sparsefinder.errors import AlphaError, ShapeError

ALPHAS = (1.0, 1.2, 1.5, 1.8, 2.0, 3.0, 10.0)
rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40)


def by_oracle(z, alpha):
    flat = z.reshape(-1, z.shape[-1]).double().numpy()
    return torch.from_numpy(np.stack([oracles.entmax(row, alpha) for row in flat])).view(z.shape)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("size", [1, 2, 17, 300])
def test_equals_the_definition(alpha, size):
    spread = torch.tensor([0.1, 1, 3, 10, 30, 1, 1], dtype=torch.float64)
    z = torch.randn(7, size, dtype=torch.float64) * spread[:, None]
    expected = by_oracle(z, alpha)
    # Above α = 2 the last step is a root, which near the threshold turns the last bit into more than that.
    tolerance = 1e-12 if alpha <= 2 else 1e-7 if alpha <= 3 else 1e-4
    torch.testing.assert_close(entmax(z, alpha), expected, rtol=0, atol=tolerance)
    single = entmax(z.float(), alpha)
    torch.testing.assert_close(single.double(), by_oracle(z.float(), alpha), rtol=0, atol=max(tolerance, 3e-7))
    if alpha in (1.5, 2.0):
        sure = expected > 1e-9
        assert torch.equal(entmax(z, alpha)[sure] > 0, torch.ones_like(sure[sure]))
        assert not (entmax(z, alpha) > 1e-9)[~sure].any()


@pytest.mark.parametrize(("alpha", "theirs"), [(1.5, package.entmax15), (2.0, package.sparsemax)])
def test_equals_the_package(alpha, theirs):
    z = torch.randn(50, 200, dtype=torch.float64) * 2
    torch.testing.assert_close(entmax(z, alpha), theirs(z, dim=-1), rtol=0, atol=1e-13)
    assert torch.equal(support(z, alpha), theirs(z, dim=-1) > 0)


@pytest.mark.parametrize("alpha", [1.1, 1.3, 1.7, 1.95])
def test_equals_the_bisection_of_the_package(alpha):
    z = torch.randn(20, 60, dtype=torch.float64)
    torch.testing.assert_close(entmax(z, alpha), package.entmax_bisect(z, alpha, n_iter=100), rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 3.0])
def test_gradient_in_the_scores(alpha):
    z = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: entmax(x, alpha), (z,), atol=1e-5)


@pytest.mark.parametrize("value", [1.3, 1.5, 1.9])
def test_gradient_in_alpha(value):
    z = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(entmax, (z, alpha), atol=1e-4, rtol=1e-3)


def test_fast_backward_equals_the_package():
    z = torch.randn(20, 90, requires_grad=True)
    ours, theirs = (
        torch.autograd.grad((f(z) * torch.arange(90)).sum(), z)[0]
        for f in (lambda x: entmax(x, 1.5), lambda x: package.entmax15(x, dim=-1))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@given(rows, st.sampled_from(ALPHAS))
@settings(max_examples=60)
def test_sums_to_one_and_keeps_the_order(row, alpha):
    z = torch.tensor(row, dtype=torch.float64)
    p = entmax(z, alpha)
    assert abs(float(p.sum()) - 1) < 1e-9
    order = z.argsort()
    assert (p[order].diff() >= -1e-12).all()
    assert (p >= 0).all()


@given(rows, st.floats(-50, 50), st.sampled_from((1.0, 1.5, 2.0, 3.0)))
@settings(max_examples=40)
def test_shift_changes_nothing_but_the_threshold(row, shift, alpha):
    z = torch.tensor(row, dtype=torch.float64)
    torch.testing.assert_close(entmax(z, alpha), entmax(z + shift, alpha), rtol=0, atol=1e-9)
    if alpha > 1:
        moved = threshold(z + shift, alpha) - threshold(z, alpha)
        assert abs(float(moved) - (alpha - 1) * shift) < 1e-6


@given(rows, st.data())
@settings(max_examples=60)
def test_any_superset_of_the_support_gives_the_same(row, data):
    z = torch.tensor(row, dtype=torch.float64)
    p = entmax(z, 1.5)
    extra = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))))
    torch.testing.assert_close(entmax(z, 1.5, (p > 0) | extra), p, rtol=0, atol=1e-14)


@given(rows, st.data())
@settings(max_examples=40)
def test_mask_is_minus_infinity(row, data):
    z = torch.tensor(row, dtype=torch.float64)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))))
    assert torch.equal(entmax(z, 1.5, mask), entmax(z.masked_fill(~mask, -torch.inf), 1.5))
    assert (entmax(z, 1.5, mask)[~mask] == 0).all()


def test_threshold_is_in_raw_units():
    z = torch.randn(30, 50, dtype=torch.float64) * 3
    for alpha in (1.5, 2.0, 3.0):
        tau = threshold(z, alpha)[:, None]
        expected = ((alpha - 1) * z - tau).clamp(min=0) ** (1 / (alpha - 1))
        torch.testing.assert_close(entmax(z, alpha), expected, rtol=0, atol=1e-9)
    assert threshold(z, 1.0).eq(-torch.inf).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_row_without_a_legal_entry_is_zero_alone_and_in_a_batch(alpha):
    """Case 1 (entmax #19, #17)."""
    z = torch.randn(3, 9)
    alone = entmax(torch.full((1, 9), -torch.inf), alpha)
    together = entmax(torch.cat([z[:1], torch.full((1, 9), -torch.inf), z[1:]]), alpha)
    assert torch.equal(alone, torch.zeros(1, 9))
    assert torch.equal(together[1], torch.zeros(9))
    assert torch.equal(together[[0, 2, 3]], entmax(z, alpha))
    masked = entmax(z, alpha, torch.tensor([[True], [False], [True]]).expand(3, 9))
    assert torch.equal(masked[1], torch.zeros(9))
    if alpha > 1:
        assert float(threshold(torch.full((9,), -torch.inf), alpha)) == torch.inf


def test_the_gradient_of_an_empty_row_is_zero():
    z = torch.randn(2, 5, requires_grad=True)
    mask = torch.tensor([[False] * 5, [True] * 5])
    for alpha in (1.0, 1.3, 1.5, 3.0):
        (entmax(z, alpha, mask) ** 2).sum().backward()
        assert torch.isfinite(z.grad).all()
        assert (z.grad[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_half_precision_has_the_support_of_single(dtype, alpha):
    """Case 2 (entmax #30): 128 logits at −1000, one at −995."""
    z = torch.full((129,), -1000.0)
    z[77] = -995.0
    z = z.to(dtype)
    p = entmax(z, alpha)
    assert p.dtype == dtype
    assert torch.equal(support(z, alpha), support(z.float(), alpha))
    assert torch.equal(p, entmax(z.float(), alpha).to(dtype))
    assert abs(float(p.float().sum()) - 1) < 1e-2
    assert alpha == 1.0 or (float(p[77]) == 1.0 and int((p > 0).sum()) == 1)


def test_alpha_one_is_softmax_and_ten_is_finite():
    """Case 3 (entmax #23, #24, #36)."""
    z = torch.randn(5, 50)
    torch.testing.assert_close(entmax(z, 1.0), torch.softmax(z, -1))
    p = entmax(z, 10.0)
    assert torch.isfinite(p).all()
    torch.testing.assert_close(p.sum(-1), torch.ones(5))


@pytest.mark.parametrize("alpha", [0.9, 0.0, -1.0, float("nan"), float("inf")])
def test_alpha_below_one_is_refused(alpha):
    """Case 3 (entmax #39)."""
    with pytest.raises(AlphaError, match="at least 1"):
        entmax(torch.randn(4), alpha)


def test_a_learned_alpha_that_drifts_below_one_is_refused():
    """Case 3: after a step of the optimiser, not at the start."""
    alpha = torch.tensor(1.02, requires_grad=True)
    z = torch.randn(4, 8)
    entmax(z, alpha).square().sum().backward()
    assert torch.isfinite(alpha.grad)
    with torch.no_grad():
        alpha -= 0.05
    with pytest.raises(AlphaError, match="at least 1"):
        entmax(z, alpha)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_harms_no_other(alpha, bad):
    """Case 4."""
    z = torch.randn(4, 12)
    expected = entmax(z, alpha)
    z[2, 5] = bad
    p = entmax(z, alpha)
    assert torch.equal(p[[0, 1, 3]], expected[[0, 1, 3]])
    assert not torch.isfinite(p[2]).all()


@pytest.mark.unchecked
def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="at least one score"):
        entmax(torch.zeros(3, 0))
    with pytest.raises(ShapeError, match="broadcast"):
        entmax(torch.zeros(3, 4), 1.5, torch.ones(5, dtype=torch.bool))
    with pytest.raises(ShapeError, match="dtype bool"):
        entmax(torch.zeros(3, 4), 1.5, torch.ones(4))
