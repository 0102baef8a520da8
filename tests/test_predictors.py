"""Predictors against double loops, and the laws they keep: growth, exact budgets, padding, the past."""

import dataclasses
import warnings

import oracles_predict as oracle
import pytest
import torch
from cases_predictors import (
    DIM,
    HEADS,
    RANK,
    bilinear_scores,
    every_predictor,
    graph,
    head_arrays,
    lists,
    maps,
    sequences,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.algebra import materialize
from sparsefinder.patterns.heads import Sequential
from sparsefinder.patterns.legal import legal_from_mask, legal_full
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window
from sparsefinder.patterns.random_keys import RandomKeys
from sparsefinder.plan import computed_pairs, plan_matrix
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
)


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
