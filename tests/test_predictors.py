"""Predictors against double loops, and the laws they keep: growth, exact budgets, padding, the past."""

import dataclasses
import tracemalloc
import warnings

import numpy as np
import oracles_predict as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparsefinder.errors import NonFiniteError, PatternError, ShapeError
from sparsefinder.patterns.algebra import Pattern, materialize
from sparsefinder.patterns.heads import Sequential
from sparsefinder.patterns.legal import Legal, legal_from_mask, legal_full
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window
from sparsefinder.patterns.random_keys import RandomKeys
from sparsefinder.plan import Plan, computed_pairs, plan_matrix
from sparsefinder.predictors import (
    PREDICTORS,
    Clusters,
    Distance,
    Predictor,
    Projections,
    RowBudget,
    Score,
    Tiles,
    WindowOnly,
    layer_pattern,
    layer_plan,
    mixed_share,
    predictor_to,
    project,
    random_projections,
    tile_means,
    tile_scores,
    true_score_projections,
)
from sparsefinder.predictors.tiles import _fill_by_item, normalized_scores

HEADS, DIM, RANK = 4, 8, 3


def maps(form: str = "metric", *, seed: int = 0, unit: bool = False) -> Projections:
    g = torch.Generator().manual_seed(seed)
    low, wide = (HEADS, RANK), (HEADS, RANK, DIM)
    parts = [torch.randn(*shape, generator=g) / 2 for shape in (wide, wide, low, low)]
    if form == "metric":
        return Projections(*parts, form="metric", unit=unit)
    linear = [torch.randn(HEADS, DIM, generator=g) / 4 for _ in range(2)]
    return Projections(
        *parts, form="bilinear", unit=unit, q_linear=linear[0], k_linear=linear[1], offset=torch.ones(HEADS)
    )


def sequences(batch: int, tokens: int, seed: int = 0, kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, HEADS, tokens, DIM, generator=g), torch.randn(batch, kv_heads, tokens, DIM, generator=g)


def every_predictor(seed: int = 0) -> dict[str, Predictor]:
    metric, bilinear = maps(seed=seed), maps("bilinear", seed=seed)
    centroids = torch.randn(HEADS, 70, RANK, generator=torch.Generator().manual_seed(seed))
    weight = torch.tensor([-0.5, 0.0, 0.25, -1.0])
    return {
        "distance": Distance(metric, torch.tensor([0.5, 1.0, 1.5, 2.0])),
        "score": Score(bilinear, torch.tensor([0.0, 1.0, 2.0, 3.0])),
        "clusters": Clusters(metric, centroids, torch.tensor([1, 2, 5, 9])),
        "budget near": RowBudget(metric, 0.2),
        "budget high": RowBudget(bilinear, 0.07),
        "budget unit": RowBudget(maps(unit=True, seed=seed), 0.3),
        "oracle": RowBudget(true_score_projections(HEADS, DIM, torch.ones(HEADS)), 0.1),
        "tiles": Tiles(bilinear, threshold=-4.0, distance_weight=weight),
        "tiles best": Tiles(metric, keys_per_tile=5),
        "tiles unit": Tiles(maps("bilinear", unit=True, seed=seed), keys_per_tile=3, distance_weight=weight),
        "window": WindowOnly(2),
    }


def graph(pattern: Pattern, legal: Legal, b: int, h: int) -> oracle.Graph:
    return {(int(i), int(j)) for i, j in materialize(pattern, legal, b, h).nonzero()}


def lists(plan: Plan, b: int, shift: int = 0) -> list[tuple[int, int, int, list[int], list[int]]]:
    """The tiles of one item, positions counted from `shift`."""
    out = []
    for t in (plan.tile_batch == b).nonzero().flatten().tolist():
        part = slice(int(plan.offsets[t]), int(plan.offsets[t + 1]))
        place = int(plan.tile_head[t]), int(plan.tile_start[t]) - shift, int(plan.tile_rows[t])
        out.append((*place, (plan.keys[part] - shift).tolist(), plan.first_row[part].tolist()))
    return out


def head_arrays(projections: Projections, q: Tensor, k: Tensor, h: int) -> tuple[np.ndarray, np.ndarray]:
    """q' and k' of one head of item 0 by the naive loop, float64."""
    group = q.shape[1] // k.shape[1]
    parts = (projections.q_map, projections.q_bias, q[0, h]), (projections.k_map, projections.k_bias, k[0, h // group])
    low_q, low_k = (
        oracle.linear(w[h].double().numpy(), b[h].double().numpy(), x.double().numpy()) for w, b, x in parts
    )
    return low_q, low_k


def bilinear_scores(projections: Projections, q: Tensor, k: Tensor, h: int) -> np.ndarray:
    low_q, low_k = head_arrays(projections, q, k, h)
    u, w = projections.q_linear[h].double().numpy(), projections.k_linear[h].double().numpy()
    x, y = q[0, h].double().numpy(), k[0, h // (q.shape[1] // k.shape[1])].double().numpy()
    return low_q @ low_k.T + (x @ u)[:, None] + (y @ w)[None, :] + float(projections.offset[h])


@pytest.mark.parametrize("causal", [False, True])
def test_patterns_are_their_definitions(causal: bool) -> None:
    q, k = sequences(1, 17)
    mask = torch.arange(17)[None] < 15
    legal, allowed = legal_from_mask(mask, causal), oracle.legal_pairs(mask[0].tolist(), causal)
    predictors = every_predictor()
    found = {name: predictors[name].pattern(q, k, legal) for name in ("distance", "score", "clusters", "budget near")}
    bilinear = RowBudget(maps("bilinear"), 0.3).pattern(q, k, legal)
    for h in range(HEADS):
        low_q, low_k = head_arrays(maps(), q, k, h)
        near = -((low_q[:, None] - low_k[None]) ** 2).sum(-1)
        scores = bilinear_scores(maps("bilinear"), q, k, h)
        limit = float(predictors["distance"].threshold[h])
        assert graph(found["distance"], legal, 0, h) == oracle.distance_graph(low_q, low_k, limit, allowed)
        assert graph(found["score"], legal, 0, h) == oracle.score_graph(scores, float(h), allowed)
        centroids, top = predictors["clusters"].centroids[h].double().numpy(), int(predictors["clusters"].top_k[h])
        assert graph(found["clusters"], legal, 0, h) == oracle.cluster_graph(low_q, low_k, centroids, top, allowed)
        assert graph(found["budget near"], legal, 0, h) == oracle.budget_graph(near, "0.2", allowed)
        assert graph(bilinear, legal, 0, h) == oracle.budget_graph(scores, "0.3", allowed)


@settings(max_examples=30)
@given(seed=st.integers(0, 999), low=st.floats(0, 3), more=st.floats(0, 3), causal=st.booleans())
def test_distance_grows_with_its_threshold(seed: int, low: float, more: float, causal: bool) -> None:
    q, k = sequences(1, 12, seed)
    legal = legal_full(1, 12, 12, causal)
    small, big = (Distance(maps(seed=seed), torch.full((HEADS,), t)).pattern(q, k, legal) for t in (low, low + more))
    for h in range(HEADS):
        assert graph(small, legal, 0, h) <= graph(big, legal, 0, h)


@settings(max_examples=30)
@given(seed=st.integers(0, 999), count=st.integers(2, 70), data=st.data())
def test_clusters_grow_with_top_k_to_everything(seed: int, count: int, data: st.DataObject) -> None:
    k_low = data.draw(st.integers(1, count))
    k_high = data.draw(st.integers(k_low, count))
    q, k = sequences(1, 9, seed)
    legal = legal_full(1, 9, 9)
    centroids = torch.randn(HEADS, count, RANK, generator=torch.Generator().manual_seed(seed))
    tops = (torch.full((HEADS,), top) for top in (k_low, k_high, count))
    small, big, full = (Clusters(maps(seed=seed), centroids, top).pattern(q, k, legal) for top in tops)
    for h in range(HEADS):
        assert graph(small, legal, 0, h) <= graph(big, legal, 0, h) <= graph(full, legal, 0, h)
        assert len(graph(full, legal, 0, h)) == 81


@settings(max_examples=30)
@given(
    density=st.sampled_from(["0.01", "0.07", "0.1", "0.3", "0.35", "0.7", "1"]),
    length=st.integers(1, 40),
    causal=st.booleans(),
    form=st.sampled_from(["metric", "bilinear"]),
)
def test_a_budget_has_exactly_its_row_sums(density: str, length: int, causal: bool, form: str) -> None:
    q, k = sequences(1, 40)
    k[:, :, ::2] = k[:, :, :1]  # ties everywhere
    legal = legal_from_mask(torch.arange(40)[None] < length, causal)
    pattern = RowBudget(maps(form), float(density)).pattern(q, k, legal)
    expected = [oracle.budget(density, i + 1 if causal else length) if i < length else 0 for i in range(40)]
    for h in range(HEADS):
        assert materialize(pattern, legal, 0, h).sum(1).tolist() == expected


def test_of_equal_scores_the_earlier_key_counts() -> None:
    q, k = torch.ones(1, HEADS, 10, DIM), torch.ones(1, HEADS, 10, DIM)
    legal = legal_full(1, 10, 10)
    for form in ("metric", "bilinear"):
        kept = materialize(RowBudget(maps(form), 0.3).pattern(q, k, legal), legal, 0, 1)
        assert kept[:, :3].all()
        assert not kept[:, 3:].any()
    plan = Tiles(maps("bilinear"), keys_per_tile=3).plan(q, k, legal, Nothing(), 4)
    assert [keys for h, _, _, keys, _ in lists(plan, 0) if h == 0] == [
        [0, 1, 2, 3],
        [0, 1, 2, 4, 5, 6, 7],
        [0, 1, 2, 8, 9],
    ]


def test_identical_vectors_use_one_cluster_and_say_so() -> None:
    q, k = torch.ones(2, HEADS, 6, DIM), torch.ones(2, HEADS, 6, DIM)
    same = dataclasses.replace(maps(), k_map=maps().q_map, k_bias=maps().q_bias)
    clusters = Clusters(same, torch.randn(HEADS, 5, RANK), torch.ones(HEADS, dtype=torch.int64))
    legal = legal_full(2, 6, 6)
    with pytest.warns(UserWarning, match=r"all projected vectors of heads \[0, 1, 2, 3\] are identical"):
        pattern = clusters.pattern(q, k, legal)
    assert (clusters.members(project(same, q, k)[0][0]).any(1).sum(-1) == 1).all()
    assert len(graph(pattern, legal, 1, 2)) == 36
    same_centroids = dataclasses.replace(clusters, centroids=torch.zeros(HEADS, 5, RANK))
    with pytest.warns(UserWarning, match="identical"):
        assert len(graph(same_centroids.pattern(q, k, legal), legal, 0, 0)) == 36
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clusters.pattern(*sequences(1, 6), legal_full(1, 6, 6))


@pytest.mark.parametrize("predictor", [WindowOnly(), Tiles(maps("bilinear"), keys_per_tile=3)])
def test_positional_patterns_may_differ_from_layer_to_layer(predictor: Predictor) -> None:
    q, k = sequences(1, 24)
    legal = legal_full(1, 24, 24)
    plain = {pairs: layer_plan(predictor, q, k, legal, pairs, 1) for pairs in (Window(0), Window(3))}
    for layer, pairs in enumerate((Window(0), Window(3), Window(0))):
        plan = layer_plan(predictor, q, k, legal, Sequential((Window(0), Window(3))), 1, layer)
        assert torch.equal(plan.keys, plain[pairs].keys)
    drawn = [layer_plan(predictor, q, k, legal, RandomKeys(4), 1, layer).keys for layer in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("name", list(every_predictor()))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_a_batch_and_an_item_alone_give_equal_graphs(name: str, causal: bool, left: bool) -> None:
    predictor, lengths, width = every_predictor()[name], (5, 64, 33), 64
    q, k = sequences(3, width)
    position = torch.arange(width)[None]
    ends = torch.tensor(lengths)[:, None]
    mask = position >= width - ends if left else position < ends
    q, k = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (q, k))  # padding may hold anything
    positional = Window(1) | GlobalTokens(1)
    batch_legal = legal_from_mask(mask, causal)
    plan = layer_plan(predictor, q, k, batch_legal, positional, 8)
    pattern = layer_pattern(predictor, q, k, batch_legal, positional, 8)
    for b, length in enumerate(lengths):
        part = slice(width - length, width) if left else slice(0, length)
        q_alone, k_alone = q[b : b + 1, :, part].clone(), k[b : b + 1, :, part].clone()
        legal = legal_full(1, length, length, causal)
        alone = layer_plan(predictor, q_alone, k_alone, legal, positional, 8)
        assert lists(plan, b, part.start) == lists(alone, 0)
        pattern_alone = layer_pattern(predictor, q_alone, k_alone, legal, positional, 8)
        for h in range(HEADS):
            wide = materialize(pattern, batch_legal, b, h)
            assert torch.equal(wide[part, part], materialize(pattern_alone, legal, 0, h))
            assert wide.sum() == wide[part, part].sum()


@pytest.mark.parametrize("name", list(every_predictor()))
def test_more_padding_changes_not_one_edge(name: str) -> None:
    predictor = every_predictor(1)[name]
    q, k = sequences(1, 32, 5)
    q[:, :, ::3], k[:, :, 1::3] = q[:, :, :1].clone(), k[:, :, :1].clone()  # exact ties
    plans = []
    for width in (20, 32):
        legal = legal_from_mask(torch.arange(width)[None] < 20)
        plans.append(lists(layer_plan(predictor, q[:, :, :width], k[:, :, :width], legal, Window(1), 16), 0))
    assert plans[0] == plans[1]


@pytest.mark.parametrize("name", list(every_predictor()))
@pytest.mark.parametrize("left", [0, 3])
def test_causal_plans_do_not_look_ahead(name: str, left: int) -> None:
    predictor, n = every_predictor()[name], 19
    q, k = sequences(1, n)
    legal = legal_from_mask(torch.arange(n)[None] >= left, causal=True)
    plan = layer_plan(predictor, q, k, legal, Window(1) | GlobalTokens(1), 8)
    for t in range(left, n - 1, 2):  # both parities, by `left`
        q_new, k_new = q.clone(), k.clone()
        q_new[:, :, t + 1 :] = 30 * torch.randn_like(q_new[:, :, t + 1 :])
        k_new[:, :, t + 1 :] = 30 * torch.randn_like(k_new[:, :, t + 1 :])
        other = layer_plan(predictor, q_new, k_new, legal, Window(1) | GlobalTokens(1), 8)
        for h in range(HEADS):
            past = slice(0, t + 1)
            assert torch.equal(plan_matrix(plan, legal, 0, h)[past], plan_matrix(other, legal, 0, h)[past])


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
    largest = 0

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, Tensor) else 0)
            return out

    with Watch():
        tiles.plan(q, k, legal, Window(2) | GlobalTokens(1))
    tracemalloc.start()
    tiles.plan(q, k, legal, Window(2) | GlobalTokens(1))
    peak = tracemalloc.get_traced_memory()[1]  # numpy reports its arrays here
    tracemalloc.stop()
    assert largest < n * n / 4
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


def test_a_causal_query_alone_in_its_cluster_still_reads_itself() -> None:
    low = torch.tensor([[0.0], [0.0], [5.0], [0.0]]).expand(1, 1, 4, 1)  # token 2 is the first of its cluster
    identity = Projections(*[torch.ones(1, 1, 1)] * 2, *[torch.zeros(1, 1)] * 2)
    clusters = Clusters(identity, torch.tensor([[[0.0], [5.0]]]), torch.tensor([1]))
    keys = torch.tensor([[0.0], [0.0], [0.0], [5.0]]).expand(1, 1, 4, 1)
    legal = legal_full(1, 4, 4, causal=True)
    assert not materialize(clusters.pattern(low, keys, legal), legal, 0, 0)[2].any()
    for tile in (1, 2, 4):
        plan = layer_plan(clusters, low, keys, legal, Nothing(), tile)
        assert plan_matrix(plan, legal, 0, 0)[2].tolist()[2:] == [True, False]


def test_a_key_of_window_global_and_prediction_counts_once() -> None:
    q, k = sequences(1, 24)
    for predictor in every_predictor().values():
        plan = layer_plan(predictor, q, k, legal_full(1, 24, 24), Window(8) | GlobalTokens(3) | Window(2), 8)
        for *_, keys, _ in lists(plan, 0):
            assert keys == sorted(set(keys))
        everything = [plan_matrix(plan, legal_full(1, 24, 24), 0, h).sum() for h in range(HEADS)]
        assert computed_pairs(plan)[0].tolist() == [int(n) for n in everything]


@pytest.mark.parametrize("name", list(every_predictor()))
@pytest.mark.parametrize("tokens", [1, 63])
def test_short_and_empty_items(name: str, tokens: int) -> None:
    predictor = every_predictor()[name]
    q, k = sequences(2, tokens)
    mask = torch.tensor([[True] * tokens, [False] * tokens])
    plan = layer_plan(predictor, q, k, legal_from_mask(mask), Window(1), 64)
    assert lists(plan, 1) == []
    assert all(0 in keys for *_, keys, _ in lists(plan, 0) if tokens == 1)
    layer_pattern(predictor, q, k, legal_from_mask(mask), Window(1))


def test_mixed_share_counts_clusters_that_hold_both() -> None:
    q, k = sequences(1, 11)
    clusters = Clusters(maps(), torch.randn(HEADS, 9, RANK), torch.tensor([1, 2, 1, 3]))
    share = mixed_share(clusters, q, k, legal_full(1, 11, 11))
    for h in range(HEADS):
        low_q, low_k = head_arrays(maps(), q, k, h)
        centroids = clusters.centroids[h].double().numpy()
        assert float(share[h]) == pytest.approx(oracle.mixed_share(low_q, low_k, centroids, int(clusters.top_k[h])))


@pytest.mark.parametrize("name", list(every_predictor()))
def test_tensors_and_settings_hold_a_whole_predictor(name: str) -> None:
    predictor = every_predictor()[name]
    assert PREDICTORS[predictor.kind] is type(predictor)
    again = PREDICTORS[predictor.kind].from_tensors(predictor.to_tensors(), predictor.settings())
    q, k = sequences(1, 20)
    plans = [
        layer_plan(p, q, k, legal_full(1, 20, 20), Nothing(), 8) for p in (predictor, again, predictor_to(again, "cpu"))
    ]
    assert lists(plans[0], 0) == lists(plans[1], 0) == lists(plans[2], 0)
    for missing in predictor.to_tensors():
        if missing in {"q_linear", "k_linear", "offset", "distance_weight"}:
            continue
        rest = {key: value for key, value in predictor.to_tensors().items() if key != missing}
        with pytest.raises(KeyError, match=missing):
            PREDICTORS[predictor.kind].from_tensors(rest, predictor.settings())


def test_half_precision_sequences_are_projected_in_the_precision_of_the_maps() -> None:
    q, k = sequences(1, 20)
    for predictor in every_predictor().values():
        for dtype in (torch.bfloat16, torch.float64):
            layer_plan(predictor, q.to(dtype), k.to(dtype), legal_full(1, 20, 20), Window(1), 8)


def test_projections_are_differentiable_and_random_ones_repeat() -> None:
    q, k = sequences(2, 7)
    weight = torch.randn(HEADS, RANK, DIM, requires_grad=True)
    low_q, low_k = project(dataclasses.replace(maps(), q_map=weight), q, k)
    (low_q.sum() + low_k.sum()).backward()
    assert weight.grad is not None
    assert torch.equal(random_projections(2, 3, 4, 7).q_map, random_projections(2, 3, 4, 7).q_map)
    assert not torch.equal(random_projections(2, 3, 4, 7).q_map, random_projections(2, 3, 4, 8).q_map)


@pytest.mark.unchecked
def test_what_cannot_be_is_a_typed_error() -> None:
    one, centroids = torch.ones(HEADS, dtype=torch.int64), torch.zeros(HEADS, 4, RANK)
    q, k = sequences(1, 6)
    legal = legal_full(1, 6, 6)
    for make in (
        lambda: Distance(maps("bilinear"), torch.ones(HEADS)),
        lambda: Clusters(maps("bilinear"), centroids, one),
    ):
        with pytest.raises(PatternError, match="expected projections of the form metric, got bilinear"):
            make()
    with pytest.raises(PatternError, match="form bilinear, got metric"):
        Score(maps(), torch.ones(HEADS))
    with pytest.raises(PatternError, match="fit them first"):
        Clusters(maps(), torch.zeros(HEADS, 0, RANK), one)
    with pytest.raises(PatternError, match="1 to 4 clusters, got"):
        Clusters(maps(), centroids, 5 * one)
    with pytest.raises(ShapeError, match="centroids"):
        Clusters(maps(), torch.zeros(HEADS, 4, RANK + 1), one)
    with pytest.raises(ShapeError, match="threshold: expected one for each of 4 heads"):
        Distance(maps(), torch.ones(3))
    for density in (0.0, 1.5, float("nan")):
        with pytest.raises(PatternError, match="density"):
            RowBudget(maps(), density)
    for options in (
        {},
        {"threshold": 1.0, "keys_per_tile": 3},
        {"keys_per_tile": 0},
        {"threshold": 1.0, "queries_before": -1},
    ):
        with pytest.raises(PatternError, match="expected"):
            Tiles(maps(), **options)
    with pytest.raises(PatternError, match="radius"):
        WindowOnly(-2)
    with pytest.raises(PatternError, match="form"):
        dataclasses.replace(maps(), form="cosine")
    with pytest.raises(ShapeError, match="k_bias"):
        dataclasses.replace(maps(), k_bias=torch.zeros(HEADS, RANK + 1))
    with pytest.raises(ShapeError, match="project"):
        RowBudget(maps(), 0.1).pattern(q[..., :4], k, legal)
    with pytest.raises(ShapeError, match="kv heads"):
        RowBudget(maps(), 0.1).pattern(q, torch.zeros(1, 3, 6, DIM), legal)
    with pytest.raises(PatternError, match="query_offset"):
        Tiles(maps(), threshold=0.0).plan(q, k, legal_full(1, 6, 6, causal=True, query_offset=3), Nothing())


def test_a_tile_predictor_refuses_nan_in_real_tokens() -> None:
    q, k = sequences(1, 20)
    for broken in ("q", "k"):
        bad_q, bad_k = q.clone(), k.clone()
        (bad_q if broken == "q" else bad_k)[0, 1, 3, 2] = torch.nan
        with pytest.raises(NonFiniteError):
            Tiles(maps("bilinear"), threshold=-3.0).plan(bad_q, bad_k, legal_full(1, 20, 20), Nothing(), 8)
