"""The bound is never below a score, the certificate never wrong, and `attend_exact` is dense, whatever the plan."""

from dataclasses import replace

import numpy as np
import oracles
import pytest
import torch
from cases_core import batches, item, make
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.attention.call import checked
from sparsefinder.certificate import attend_exact, certify
from sparsefinder.edges import gold_edges
from sparsefinder.errors import AlphaError, BackendError, NonFiniteError, PatternError, ShapeError
from sparsefinder.patterns.content import InEdges
from sparsefinder.patterns.legal import Legal, legal_from_mask, legal_full
from sparsefinder.patterns.positional import Nothing, Window
from sparsefinder.plan import build_plan, plan_matrix
from sparsefinder.score_bound import RANK, cheapest_rank, dropped_bound

KINDS = ("offset", "tiny", "parallel", "lopsided", "outlier", "plain")


def close(a, b, tolerance):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def doubled(batch):
    return replace(batch, q=batch.q.double(), k=batch.k.double(), v=batch.v.double())


def hostile(kind, seed, dtype=torch.float32, tokens=24, dim=8):
    """q, k `[1, 2, tokens, dim]` where rounding hurts: what matters is small beside what does not."""
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, heads, tokens, dim, generator=draw, dtype=torch.float64) for heads in (2, 1))
    direction = torch.randn(dim, generator=draw, dtype=torch.float64)
    if kind == "offset":
        q, k = q + 1e4 * direction, k * 1e-2 - 1e5 * direction
    elif kind == "tiny":
        q, k = q * 1e-18, k * 1e-15
    elif kind == "parallel":
        q, k = 30 * direction + 1e-5 * q, 30 * direction + 1e-5 * k
    elif kind == "lopsided":  # keys are a thousandth outside the dims that a low rank keeps, some queries nothing else
        half = (torch.arange(dim) < dim // 2).double()
        q = q * 1000 * torch.where(torch.arange(tokens)[:, None] % 2 == 0, half, 0.7 * (1 - half))
        k = k * (1000 * half + 0.1 * (1 - half))
    elif kind == "outlier":
        k[:, :, 3] *= 1e6
    return q.to(dtype), k.to(dtype)


def bound_matrix(bound):
    """All bounds, added up in the dtype of the bound."""
    low = bound.query @ bound.key[..., : bound.rank, :]
    return (
        low + bound.rest[..., None] * bound.key[..., -2, None, :] + bound.key[..., -1, None, :] + bound.start[..., None]
    )


def exact_scores(q, k, scale):
    return (q.double() * scale) @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT


@given(st.sampled_from(KINDS), st.integers(0, 10_000), st.sampled_from([4, 5, 8, 64]), st.booleans())
@settings(max_examples=60)
def test_no_score_exceeds_its_bound(kind, seed, rank, double):
    q, k = hostile(kind, seed, torch.float64 if double else torch.float32)
    legal = legal_full(1, *q.shape[2:3], k.shape[2])
    found = bound_matrix(dropped_bound(checked(q, k, k, legal, 1.5, 0.5), rank))
    assert found.dtype == q.dtype
    assert (found >= exact_scores(q, k, 0.5)).all()
    assert (found >= (q * 0.5) @ k.repeat_interleave(2, 1).mT).all()


def norms_by_subtraction(q, k, rank):
    """The same idea, done badly: `‖k_⊥‖² = ‖k‖² − ‖Uᵀk‖²` in single precision, with a slack of 16 ε ‖q‖ ‖k‖."""
    key = k.repeat_interleave(2, 1)
    moments = [x.mT @ x for x in (q, key)]
    _, axes = torch.linalg.eigh(sum(m / m.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] for m in moments))
    low = [x @ axes[..., -rank:] for x in (q, key)]
    rest = [(x.square().sum(-1) - a.square().sum(-1)).clamp(min=0).sqrt() for x, a in zip((q, key), low, strict=True)]
    sizes = q.norm(dim=-1)[..., None] * key.norm(dim=-1)[..., None, :]
    slack = 16 * torch.finfo(q.dtype).eps * sizes
    return low[0] @ low[1].mT + rest[0][..., None] * rest[1][..., None, :] + slack


def test_the_inputs_are_hostile_enough():
    """What the bound survives breaks a bound whose rests are roots of differences."""
    broken = 0
    for kind in KINDS:
        for seed in range(5):
            q, k = hostile(kind, seed)
            broken += int((norms_by_subtraction(q, k, 4) < exact_scores(q, k, 1.0)).any())
    assert broken > 0


def test_a_bound_without_slack_breaks():
    """Rounding alone lifts a score above its bound: what `start` pays for is needed."""
    broken = 0
    for seed in range(20):
        q, k = hostile("parallel", seed)
        bound = dropped_bound(checked(q, k, k, legal_full(1, 24, 24), 1.5, 1.0), 8)
        bare = replace(bound, start=torch.zeros_like(bound.start))
        broken += int((bound_matrix(bare) < exact_scores(q, k, 1.0)).any())
    assert broken > 0


@pytest.mark.parametrize("left", [False, True])
def test_padding_has_no_bound_and_changes_none(left):
    batch = make([9, 16], left, False, seed=1, heads=4, kv_heads=2)
    call = checked(batch.q, batch.k, batch.v, batch.legal, 1.5, 0.3)
    found = bound_matrix(dropped_bound(call, 4))
    real = batch.legal.key_real[:, None, None, :].expand_as(found)
    assert (found[~real & batch.legal.query_real[:, None, :, None]] == -torch.inf).all()
    assert torch.isfinite(found[real & batch.legal.query_real[:, None, :, None]]).all()


def dropped_above(z, kept, legal, alpha):
    """Dropped legal keys whose score exceeds the threshold over the kept ones, from the definition."""
    limits = []
    for row, listed in zip(z, kept, strict=True):
        p = oracles.entmax(np.where(listed, row, -np.inf), alpha)
        top = row[listed].max() if listed.any() else -np.inf
        limits.append(top - p.max() ** (alpha - 1) / (alpha - 1))
    return (z > np.array(limits)[:, None]) & legal & ~kept


@given(batches(longest=24), st.sampled_from([1.3, 1.5, 2.0]), st.sampled_from([4, 8]))
@settings(max_examples=15)
def test_certificates_are_true(batch, alpha, rank):
    batch = doubled(batch)
    plan = build_plan(Window(1), batch.legal, 3, heads=batch.heads)
    found = certify(batch.q, batch.k, plan, legal=batch.legal, alpha=alpha, scale=0.2, rank=rank)
    assert torch.equal(found.proven, found.survivors == 0)
    for b in range(batch.q.shape[0]):
        legal = batch.legal.matrix(b).numpy()
        for h in range(batch.heads):
            q, k, _ = item(batch, b, h)
            matter = dropped_above(0.2 * q @ k.T, plan_matrix(plan, batch.legal, b, h).numpy(), legal, alpha).sum(-1)
            survivors = found.survivors[b, h].numpy()
            assert (survivors >= matter).all()
            if rank == 8:  # all dims: the bound is the score
                assert (survivors == matter).all()


def exact(batch, plan, alpha=1.5, scale=0.2, rank=4, bias=None):
    return attend_exact(
        batch.q, batch.k, batch.v, plan, legal=batch.legal, alpha=alpha, scale=scale, bias=bias, rank=rank
    )


@given(batches(longest=24), st.sampled_from([1.3, 1.5, 2.0, 3.0]), st.sampled_from(["diagonal", "random", "gold"]))
@settings(max_examples=30)
def test_exact_is_the_definition_whatever_the_plan(batch, alpha, predictor):
    batch = doubled(batch)
    gold = InEdges(gold_edges(batch.q, batch.k, batch.legal, alpha, 0.2))
    pattern, size = {"diagonal": (Window(0), 1), "random": (batch.pattern, 16), "gold": (gold, 1)}[predictor]
    plan = build_plan(pattern, batch.legal, size, heads=batch.heads)
    out, repair = exact(batch, plan, alpha)
    for b in range(batch.q.shape[0]):
        for h in range(batch.heads):
            q, k, v = item(batch, b, h)
            expected = oracles.attention(q, k, v, batch.legal.matrix(b).numpy(), alpha, 0.2)
            close(out[b, h], torch.from_numpy(expected), 1e-6 if alpha > 2 else 1e-9)
    assert repair.rows == batch.heads * int(batch.legal.query_real.sum())
    assert repair.proven + repair.repaired <= repair.rows
    assert repair.added <= repair.survivors <= repair.rows * max(repair.most_survivors, 0)
    assert predictor != "gold" or alpha > 2 or repair.added == 0


@given(batches(), st.sampled_from([1.5, 2.0]), st.booleans())
@settings(max_examples=15)
def test_single_precision_equals_dense(batch, alpha, diagonal):
    plan = build_plan(Window(0) if diagonal else batch.pattern, batch.legal, 1 if diagonal else 16, heads=batch.heads)
    out, _ = exact(batch, plan, alpha)
    close(out, attend_dense(batch.q, batch.k, batch.v, batch.legal, alpha=alpha, scale=0.2), 1e-5)
    assert (out.masked_select(~batch.legal.query_real[:, None, :, None]) == 0).all()


def test_the_rank_is_low_only_where_that_pays():
    def chosen(tokens, dim):
        q = torch.zeros(1, 1, tokens, dim)
        return cheapest_rank(checked(q, q, q, legal_full(1, tokens, tokens, causal=True), 1.5, None))

    assert [chosen(n, 64) for n in (512, 2048, 8192)] == [64, 64, RANK]
    assert chosen(8192, RANK) == RANK
    assert [chosen(n, 128) for n in (2048, 4096)] == [128, RANK]


def test_the_default_rank_is_exact_too():
    batch = make([90], pad_left=False, causal=True, seed=10, dim=48)
    plan = build_plan(Window(0), batch.legal, 1, heads=2)
    for rank in (None, 12, 41):
        close(exact(batch, plan, rank=rank)[0], attend_dense(batch.q, batch.k, batch.v, batch.legal, scale=0.2), 1e-5)


def test_a_diagonal_plan_is_repaired_and_says_so():
    batch = make([300], pad_left=False, causal=True, seed=2, dim=16)
    plan = build_plan(Window(0), batch.legal, 1, heads=2)
    dense = attend_dense(batch.q, batch.k, batch.v, batch.legal, scale=0.2)
    out, repair = exact(batch, plan)
    close(out, dense, 1e-5)
    kept = attend(batch.q, batch.k, batch.v, plan, legal=batch.legal, scale=0.2)
    differing = int(((kept - dense).abs().amax(-1) > 1e-5).sum())
    assert differing > 500
    assert differing <= repair.repaired <= repair.rows - repair.proven
    assert repair.rows == 600
    assert repair.mean_survivors == repair.survivors / 600
    all_keys, nothing_to_do = exact(batch, build_plan(~Nothing(), batch.legal, 32, heads=2))
    close(all_keys, dense, 1e-6)
    assert (nothing_to_do.proven, nothing_to_do.repaired, nothing_to_do.survivors) == (600, 0, 0)


def test_rows_that_need_nothing_keep_every_bit():
    batch = make([200], pad_left=False, causal=False, seed=3)
    gold = gold_edges(batch.q, batch.k, batch.legal, 1.5, 0.2)
    plan = build_plan(InEdges(gold), batch.legal, 8)
    out, repair = exact(batch, plan)
    assert repair.repaired == 0
    assert torch.equal(out, attend(batch.q, batch.k, batch.v, plan, legal=batch.legal, scale=0.2, backend="cpu"))


@pytest.mark.parametrize("rank", [4, 8])
def test_strict_causality(rank):
    """Whatever tokens 30 … become, rows up to 29 keep every bit, though the coordinates of the bound are others."""
    batch = make([300, 200], pad_left=True, causal=True, seed=4)
    plan, changed = build_plan(Window(1), batch.legal, 16, heads=2), 250
    other = replace(batch, q=batch.q.clone(), k=batch.k.clone(), v=batch.v.clone())
    for x in (other.q, other.k, other.v):
        x[:, :, changed:] = torch.randn_like(x[:, :, changed:]) * 5
    (before, repair), (after, _) = exact(batch, plan, rank=rank), exact(other, plan, rank=rank)
    assert repair.repaired > 0
    assert torch.equal(before[:, :, :changed], after[:, :, :changed])
    assert not torch.equal(before, after)


@pytest.mark.parametrize("causal", [False, True])
def test_other_lengths(causal):
    """Rows behind a cache, and rows whose list is empty."""
    q, k, v = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 5) * 0.3
    legal = legal_full(1, 7, 300, causal, query_offset=293)
    across = Legal(legal.query_real, legal.key_real, cross=True)
    for place, pattern in ((legal, Window(2)), (across, Nothing())):
        plan = build_plan(pattern, place, 4, heads=4)
        out, repair = attend_exact(q, k, v, plan, legal=place)
        close(out, attend_dense(q, k, v, place), 1e-5)
        assert repair.repaired > 0


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rank", [4, 8])
def test_a_bias_is_part_of_the_score(shared, rank):
    batch = make([40, 60], pad_left=False, causal=True, seed=5, heads=4, kv_heads=2)
    bias = torch.randn(1 if shared else 2, 4, 60, 60, generator=torch.Generator().manual_seed(0)) * 3
    plan = build_plan(Window(0), batch.legal, 8, heads=4)
    out, repair = exact(batch, plan, bias=bias, rank=rank)
    close(out, attend_dense(batch.q, batch.k, batch.v, batch.legal, scale=0.2, bias=bias), 1e-5)
    assert repair.repaired > 0
    without, _ = exact(batch, plan, rank=rank)
    assert (out - without).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    batch = make([20, 9], pad_left=False, causal=False, seed=6)
    half = replace(batch, q=batch.q.to(dtype), k=batch.k.to(dtype), v=batch.v.to(dtype))
    single = replace(half, q=half.q.float(), k=half.k.float(), v=half.v.float())
    plan = build_plan(Window(0), batch.legal, 4, heads=2)
    assert torch.equal(exact(half, plan)[0], exact(single, plan)[0].to(dtype))


def test_a_scale_per_head_may_be_negative():
    batch = make([50], pad_left=False, causal=False, seed=7)
    plan, scales = build_plan(Window(0), batch.legal, 4, heads=2), torch.tensor([0.3, -0.2])
    dense = attend_dense(batch.q, batch.k, batch.v, batch.legal, scale=scales)
    close(exact(batch, plan, scale=scales)[0], dense, 1e-5)


def test_neighbours_and_the_number_of_threads_change_nothing():
    batch = make([300, 120], pad_left=True, causal=True, seed=8, heads=4, kv_heads=2)
    plan = build_plan(Window(1), batch.legal, 16, heads=4)
    together, _ = exact(batch, plan)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(exact(batch, plan)[0], together)
    torch.set_num_threads(threads)
    part = slice(180, 300)
    legal = legal_from_mask(torch.ones(1, 120, dtype=torch.bool), causal=True)
    alone = replace(batch, **{name: getattr(batch, name)[1:, :, part] for name in "qkv"}, legal=legal)
    single, _ = exact(alone, build_plan(Window(1), legal, 16, heads=4))
    assert torch.equal(single[0], together[1, :, part])


def test_scores_that_overflow_are_visible():
    """Finite q and k, infinite product: NaN in that row and in no other, though no bound can be computed."""
    q, v = torch.randn(1, 1, 6, 4), torch.randn(1, 1, 6, 4)
    q[0, 0, 2] = 3e38
    k = q.abs() + 1
    k[0, 0, 2] = 1
    legal = legal_full(1, 6, 6)
    out, _ = attend_exact(q, k, v, build_plan(Window(0), legal, 1, heads=1), legal=legal, scale=1.0)
    assert torch.isnan(out[0, 0, 2]).all()
    others = [0, 1, 3, 4, 5]
    close(out[0, 0, others], attend_dense(q, k, v, legal, scale=1.0)[0, 0, others], 1e-5)


def test_what_is_refused():
    batch = make([12], pad_left=False, causal=False, seed=9)
    plan = build_plan(Window(1), batch.legal, 4, heads=2)
    with pytest.raises(AlphaError, match="more than 1, got 1"):
        exact(batch, plan, alpha=1.0)
    with pytest.raises(AlphaError, match="more than 1"):
        certify(batch.q, batch.k, plan, legal=batch.legal, alpha=1.0)
    with pytest.raises(ShapeError, match="plan: expected shape"):
        exact(batch, build_plan(Window(1), legal_full(1, 11, 12), 4, heads=2))
    with pytest.raises(PatternError, match="radius 3"):
        exact(replace(batch, legal=replace(batch.legal, radius=3)), plan)
    with pytest.raises(BackendError, match="no gradient"):
        exact(replace(batch, q=batch.q.clone().requires_grad_()), plan)
    bad = batch.k.clone()
    bad[0, 0, 3, 1] = torch.nan
    with pytest.raises(NonFiniteError, match="k: "):
        exact(replace(batch, k=bad), plan)
