"""Every backend against the definition, against each other, and what padding, neighbours and the future may not do."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numba
import numpy as np
import oracles
import pytest
import torch
from cases_core import batches, item, make
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.attention.api import BACKENDS, attend, attend_dense
from sparsefinder.attention.call import Call, checked
from sparsefinder.edges import gold_edges
from sparsefinder.errors import AlphaError, BackendError, NonFiniteError, ShapeError
from sparsefinder.patterns.content import InEdges, Listed
from sparsefinder.patterns.legal import legal_from_mask, legal_full
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window
from sparsefinder.plan import build_plan, plan_matrix
from sparsefinder.shapes import check_qkv, group_size, head_scales
from sparsefinder.threads import GRAIN, threads_for

ALPHAS = (1.0, 1.5, 2.0, 3.0)
NAMES = ["cpu", "gather", "reference"]  # test_gpu and test_flex run the cases below with theirs


def close(a, b, tolerance):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def doubled(batch):
    return replace(batch, q=batch.q.double(), k=batch.k.double(), v=batch.v.double())


def run(batch, plan, backend, alpha=1.5, scale=0.2):
    return attend(batch.q, batch.k, batch.v, plan, legal=batch.legal, alpha=alpha, scale=scale, backend=backend)


def dense(batch, alpha=1.5, scale=0.2):
    return attend_dense(batch.q, batch.k, batch.v, batch.legal, alpha=alpha, scale=scale)


def by_oracle(batch, allowed, alpha, scales):
    out = torch.zeros(*batch.q.shape[:3], batch.v.shape[-1], dtype=torch.float64)
    for b in range(batch.q.shape[0]):
        for h in range(batch.heads):
            q, k, v = item(batch, b, h)
            out[b, h] = torch.from_numpy(oracles.attention(q, k, v, allowed(b, h), alpha, float(scales[h])))
    return out


@given(batches(longest=20), st.sampled_from(ALPHAS), st.sampled_from([3, 16]))
@settings(max_examples=12)
def test_all_backends_equal_the_definition(batch, alpha, size):
    exact, plan = doubled(batch), build_plan(batch.pattern, batch.legal, size)
    scales = torch.linspace(0.2, 0.4, batch.heads)
    expected = by_oracle(exact, lambda b, h: plan_matrix(plan, batch.legal, b, h).numpy(), alpha, scales)
    for name in NAMES:
        close(run(exact, plan, name, alpha, scales), expected, 1e-6 if alpha > 2 else 1e-10)
        assert torch.equal(run(batch, plan, name, alpha, scales), run(batch, plan, name, alpha, scales))
    single = [run(batch, plan, name, alpha) for name in NAMES]
    for other in single[1:]:
        close(other, single[0], 1e-5 if alpha > 2 else 1e-6)


@given(batches(longest=20), st.sampled_from(ALPHAS))
@settings(max_examples=12)
def test_dense_equals_the_definition(batch, alpha):
    exact, scales = doubled(batch), torch.full((batch.heads,), 0.3)
    expected = by_oracle(exact, lambda b, h: batch.legal.matrix(b).numpy(), alpha, scales)
    close(dense(exact, alpha, scales), expected, 1e-6 if alpha > 2 else 1e-10)
    exact.v.requires_grad_()
    close(dense(exact, alpha, scales).detach(), expected, 1e-6 if alpha > 2 else 1e-10)


@given(batches())
@settings(max_examples=8)
def test_sparse_consistency(batch):
    """A plan that holds the gold graph gives dense entmax, whatever else it holds."""
    edges = gold_edges(batch.q, batch.k, batch.legal, 1.5, 0.2)
    expected = dense(batch)
    for pattern in (InEdges(edges), InEdges(edges) | batch.pattern):
        plan = build_plan(pattern, batch.legal, 16)
        for name in NAMES:
            close(run(batch, plan, name), expected, 1e-6)


def test_a_plan_without_the_gold_graph_differs():
    batch = make([40], pad_left=False, causal=False, seed=1)
    assert (run(batch, build_plan(Window(0), batch.legal, 1, heads=2), "cpu") - dense(batch)).abs().max() > 0.1


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_neighbours_and_padding_change_nothing(left, causal):
    """Case 6: [5, 64] in one batch against each alone; padding holds NaN in all of these tests."""
    batch = make([5, 64], left, causal, seed=2, heads=4, kv_heads=2)
    plan = build_plan(batch.pattern, batch.legal, 16)
    for b, n in enumerate((5, 64)):
        part = slice(64 - n, 64) if left else slice(0, n)
        alone = [x[b : b + 1, :, part] for x in (batch.q, batch.k, batch.v)]
        bits = type(batch.bits)(*(x[b : b + 1, :, part] for x in (batch.bits.query_bits, batch.bits.key_bits)))
        single = replace(batch, q=alone[0], k=alone[1], v=alone[2], legal=legal_full(1, n, n, causal), bits=bits)
        own = build_plan(single.pattern, single.legal, 16)
        for name in NAMES:
            together = run(batch, plan, name)[b]
            close(together[:, part], run(single, own, name)[0], 1e-6)
            rest = batch.legal.query_real[b].logical_not()
            assert (together[:, rest] == 0).all()
        assert torch.equal(run(batch, plan, "cpu")[b, :, part], run(single, own, "cpu")[0])
        close(dense(batch)[b, :, part], dense(single)[0], 1e-6)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_strict_causality(alpha):
    """Whatever token t + 1 becomes, rows up to t keep every bit."""
    batch = make([40, 21], pad_left=True, causal=True, seed=3)
    plan, changed = build_plan(batch.pattern, batch.legal, 16), 30
    other = replace(batch, q=batch.q.clone(), k=batch.k.clone(), v=batch.v.clone())
    for x in (other.q, other.k, other.v):
        x[:, :, changed:] = torch.randn_like(x[:, :, changed:]) * 5
    for compute in (*(lambda x, name=name: run(x, plan, name, alpha) for name in NAMES), lambda x: dense(x, alpha)):
        before, after = compute(batch), compute(other)
        assert torch.equal(before[:, :, :changed], after[:, :, :changed])
        assert not torch.equal(before, after)


@pytest.mark.parametrize("n", [1, 63, 64, 65])
def test_lengths_around_a_tile(n):
    """Case 5."""
    batch = make([n], pad_left=False, causal=False, seed=4)
    plan = build_plan(~Nothing(), batch.legal, 64, heads=2)
    for name in NAMES:
        close(run(batch, plan, name), dense(batch), 1e-6)
    if n == 1:
        close(dense(batch), batch.v.expand_as(dense(batch)), 1e-6)


def test_a_window_that_lies_in_padding():
    """Case 7."""
    batch = make([3, 2048], pad_left=False, causal=False, seed=5, heads=1, kv_heads=1)
    plan = build_plan(Window(4), batch.legal, 64, heads=1)
    outputs = [run(batch, plan, name) for name in NAMES]
    assert all(torch.isfinite(x).all() for x in outputs)
    assert (outputs[0][0, :, 3:] == 0).all()
    for other in outputs[1:]:
        close(other, outputs[0], 1e-6)
    close(outputs[0][:1, :, :3], dense(batch)[:1, :, :3], 1e-6)


def test_rows_without_a_key_are_zero_and_harm_nobody():
    """Case 1, in attention: an item of padding only, and rows whose list is empty."""
    mask = torch.tensor([[False] * 8, [True] * 8])
    legal = legal_from_mask(mask)
    q = torch.randn(2, 1, 8, 4)
    plan = build_plan(Window(1), legal, 4, heads=1)
    for name in NAMES:
        out = attend(q, q, q, plan, legal=legal, backend=name)
        assert (out[0] == 0).all()
        close(
            out[1:],
            attend(
                q[1:],
                q[1:],
                q[1:],
                build_plan(Window(1), legal_full(1, 8, 8), 4, heads=1),
                legal=legal_full(1, 8, 8),
                backend=name,
            ),
            1e-6,
        )
    assert (attend_dense(q, q, q, legal)[0] == 0).all()
    away = legal_full(1, 3, 2, causal=False, query_offset=5)  # queries that are no keys, and a pattern without edges
    none = build_plan(Nothing(), away, 4, heads=1)
    for name in NAMES:
        assert (attend(q[:1, :, :3], q[:1, :, :2], q[:1, :, :2], none, legal=away, backend=name) == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_rows_behind_a_cache(causal):
    legal = legal_full(1, 5, 40, causal, query_offset=35)
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 40, 8), torch.randn(1, 1, 40, 8)
    plan = build_plan(~Nothing(), legal, 16, heads=2)
    for name in NAMES:
        close(attend(q, k, v, plan, legal=legal, backend=name), attend_dense(q, k, v, legal), 1e-6)


def test_grouped_heads_are_repeated_heads():
    batch = make([20, 9], pad_left=False, causal=False, seed=6, heads=6, kv_heads=2)
    plan = build_plan(batch.pattern, batch.legal, 16)
    repeated = replace(batch, k=batch.k.repeat_interleave(3, 1), v=batch.v.repeat_interleave(3, 1))
    for name in NAMES:
        close(run(batch, plan, name), run(repeated, plan, name), 1e-6)
    close(dense(batch), dense(repeated), 1e-6)


def test_dense_in_many_chunks(monkeypatch):
    """The chunks of heads and rows cover everything once, whatever their size."""
    batch = doubled(make([23, 17], pad_left=True, causal=True, seed=7, heads=6, kv_heads=2))
    expected = dense(batch)
    for chunk in (1, 40, 23 * 23, 23 * 23 * 2, 23 * 23 * 4):
        monkeypatch.setattr("sparsefinder.attention.dense.CHUNK", chunk)
        close(dense(batch), expected, 1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    batch = make([20, 9], pad_left=False, causal=False, seed=8)
    half = replace(batch, q=batch.q.to(dtype), k=batch.k.to(dtype), v=batch.v.to(dtype))
    single = replace(half, q=half.q.float(), k=half.k.float(), v=half.v.float())
    plan = build_plan(batch.pattern, batch.legal, 16)
    for name in NAMES:
        assert run(half, plan, name).dtype == dtype
        assert torch.equal(run(half, plan, name), run(single, plan, name).to(dtype))
    assert torch.equal(dense(half), dense(single).to(dtype))


@pytest.mark.parametrize("name", ["cpu", "gather"])
def test_only_pairs_of_the_plan_are_touched(name):
    """A key that no tile lists may hold NaN (handed to the backend behind the check of `attend`)."""
    q, k, v = (torch.randn(1, 1, 12, 4) for _ in range(3))
    legal = legal_full(1, 12, 12)
    listed = torch.zeros(1, 1, 12, 12, dtype=torch.bool)
    plan = build_plan(Listed(listed) | Window(1), legal, 4)
    good = checked(q, k, v, legal, 1.5, None)
    bad = [x.clone() for x in (k, v)]
    for x in bad:
        x[:, :, 8] = torch.nan
    call = Call(q, bad[0], bad[1], legal, 1.5, good.scales, good.dims)
    expected, found = (BACKENDS[name](x, plan)[:, :, :4] for x in (good, call))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_bad_numbers_in_real_tokens_are_refused(bad, which):
    """Case 4: a clear error, never another row's answer changed."""
    batch = make([6, 9], pad_left=False, causal=False, seed=9)
    plan = build_plan(batch.pattern, batch.legal, 16)
    tensors = [batch.q, batch.k, batch.v]
    tensors[which][1, 0, 4, 2] = bad
    for compute in (lambda: run(batch, plan, "auto"), lambda: dense(batch)):
        with pytest.raises(NonFiniteError, match=f"{'qkv'[which]}: .*item 1, head 0, token 4"):
            compute()


def test_finite_numbers_whose_sum_overflows_are_fine():
    q = torch.full((1, 1, 4, 2), 1e38)
    legal = legal_full(1, 4, 4)
    assert torch.isfinite(attend_dense(q * 0, q, q, legal)).all()


def test_scores_that_overflow_are_visible():
    """Finite q and k, infinite product: NaN in that row, in every backend, and in no other."""
    q, v = torch.randn(1, 1, 6, 4), torch.randn(1, 1, 6, 4)
    q[0, 0, 2] = 3e38
    legal = legal_full(1, 6, 6)
    plan = build_plan(~Nothing(), legal, 4, heads=1)
    k = q.abs() + 1
    k[0, 0, 2] = 1
    for name in NAMES:
        out = attend(q, k, v, plan, legal=legal, backend=name, scale=1.0)
        assert torch.isnan(out[0, 0, 2]).all()
        assert torch.isfinite(out[0, 0, [0, 1, 3, 4, 5]]).all()


def test_gradients():
    batch = make([5, 3], pad_left=False, causal=True, seed=10, dim=2)
    q, k, v = (torch.nan_to_num(x).double().requires_grad_() for x in (batch.q, batch.k, batch.v))
    plan = build_plan(batch.pattern, batch.legal, 4)
    assert torch.autograd.gradcheck(lambda *x: attend_dense(*x, batch.legal), (q, k, v), fast_mode=True)
    for name in ("auto", "reference"):
        assert torch.autograd.gradcheck(
            lambda *x, n=name: attend(*x, plan, legal=batch.legal, backend=n), (q, k, v), fast_mode=True
        )
    with pytest.raises(BackendError, match="no gradient"):
        attend(q, k, v, plan, legal=batch.legal, backend="cpu")
    with torch.no_grad():
        assert attend(q, k, v, plan, legal=batch.legal, backend="cpu").shape == (2, 2, 5, 2)


def test_bad_arguments_are_refused():
    batch = make([6], pad_left=False, causal=False, seed=11)
    plan = build_plan(batch.pattern, batch.legal, 16)
    with pytest.raises(BackendError, match="one of cpu, flex, gather, gpu, reference, got magic"):
        run(batch, plan, "magic")
    with pytest.raises(AlphaError, match="at least 1"):
        run(batch, plan, "auto", 0.9)
    with pytest.raises(ShapeError, match="scale"):
        run(batch, plan, "auto", 1.5, torch.ones(3))
    with pytest.raises(NonFiniteError, match="scale"):
        run(batch, plan, "auto", 1.5, float("nan"))
    with pytest.raises(ShapeError, match="plan: expected shape"):
        run(batch, build_plan(Window(1), legal_full(1, 5, 6), heads=2), "auto")
    longer = replace(batch, legal=legal_full(1, 7, 6))
    with pytest.raises(ShapeError, match="query_real"):
        run(longer, plan, "auto")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4)], "q: expected 4"),
        ([(1, 2, 0, 4), (1, 2, 3, 4), (1, 2, 3, 4)], "q: expected 4 non-empty"),
        ([(1, 2, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4)], "k: expected the batch"),
        ([(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 5)], "k: expected the batch"),
        ([(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4, 4)], "v: expected batch"),
        ([(1, 3, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)], "multiple of kv heads"),
    ],
)
def test_shapes_that_do_not_fit(shapes, message):
    with pytest.raises(ShapeError, match=message):
        check_qkv(*(torch.zeros(shape) for shape in shapes))


def test_dtypes_that_do_not_fit():
    q = torch.zeros(1, 1, 2, 2)
    with pytest.raises(ShapeError, match="floating point"):
        check_qkv(q.long(), q)
    with pytest.raises(ShapeError, match="like q"):
        check_qkv(q, q.double())
    assert group_size(6, 2) == 3
    assert head_scales(None, check_qkv(q, q), q).tolist() == pytest.approx([2**-0.5])


def test_two_threads_at_once():
    """numba's `workqueue` layer kills the process when two threads enter it: one lock surrounds all kernels."""
    batch = make([64, 30], pad_left=False, causal=False, seed=12)
    plan = build_plan(batch.pattern, batch.legal, 16)
    expected = run(batch, plan, "cpu")
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: run(batch, plan, "cpu"), range(16)))
    assert all(torch.equal(out, expected) for out in outputs)


def test_kernels_keep_to_the_threads_of_torch():
    before = numba.get_num_threads()
    torch.set_num_threads(1)
    with threads_for(100 * GRAIN) as count:
        assert count == numba.get_num_threads() == 1
    with threads_for(1) as count:
        assert count == 1
    assert numba.get_num_threads() == before


def test_the_number_of_threads_changes_nothing():
    batch = make([300], pad_left=False, causal=False, seed=13, dim=32, heads=4, kv_heads=4)
    plan = build_plan(~Nothing(), batch.legal, 32, heads=4)
    many = run(batch, plan, "cpu")
    torch.set_num_threads(1)
    assert torch.equal(run(batch, plan, "cpu"), many)


def test_global_rows_are_dense_rows():
    batch = make([50], pad_left=False, causal=False, seed=14)
    plan = build_plan(GlobalTokens(2), batch.legal, 16, heads=2)
    for name in NAMES:
        close(run(batch, plan, name)[:, :, :2], dense(batch)[:, :, :2], 1e-6)
    assert np.array_equal(plan_matrix(plan, batch.legal, 0, 0)[:2].numpy(), np.ones((2, 50), bool))
