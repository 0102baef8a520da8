"""Cuts, k-means and the whole fit on small planted graphs: learned beats random, same seed same maps, clear errors."""

import math
from dataclasses import replace

import pytest
import torch

from sparsefinder.edges import gold_edges
from sparsefinder.errors import ConfigError, DataError
from sparsefinder.metrics import counts, summarize
from sparsefinder.patterns.legal import legal_from_mask
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window
from sparsefinder.plan import computed_pairs
from sparsefinder.predictors import Clusters, Distance, RowBudget, Score, Tiles, random_projections
from sparsefinder.predictors.projections import project_keys, project_queries
from training.config import FitConfig
from training.cut import Curve, Part, curve, cut_at, recalls_at, recalls_by_selection, threshold_at
from training.evaluate import layer_counts
from training.extract import LayerData
from training.fit import fit_clusters
from training.kmeans import kmeans
from training.maps import score_svd
from training.scores import cluster_parts, meeting_top, pair_parts, tile_parts
from training.train_maps import train_layer

HEADS, DIM, TOKENS = 2, 8, 24


def planted(items=6, seed=0, lengths=None, causal=False, rank=2):
    """Queries and keys whose product lives in `rank` hidden directions, drowned in a larger common noise elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(99)))[0]
    angle = torch.rand(items, HEADS, TOKENS, 1, generator=generator) * 2 * math.pi
    inner = torch.cat([angle.cos(), angle.sin()], -1) * 3
    zero = torch.zeros(items, HEADS, TOKENS, (DIM - rank) // 2)
    noise = [3 * torch.randn(items, HEADS, TOKENS, (DIM - rank) // 2, generator=generator) for _ in range(2)]
    q = torch.cat([inner, noise[0], zero], -1) @ basis.T
    k = torch.cat([inner.roll(1, 2), zero, noise[1]], -1) @ basis.T  # the noise of q never meets that of k
    mask = torch.arange(TOKENS)[None, :] < torch.tensor(lengths or [TOKENS] * items)[:, None]
    scale = torch.tensor([0.6, 0.9])
    return LayerData(q, k, mask, gold_edges(q, k, legal_from_mask(mask, causal), 1.5, scale), causal, 1.5, scale)


def recall_at(projections, data, sparsity, budget=False):
    parts = pair_parts(projections, data, range(data.q.shape[0]), Nothing(), budget)
    return sum(recalls_at(curve(head), [sparsity])[0] for head in parts) / len(parts)


CONFIG = FitConfig(steps=80, instances=4, rows=16, tile_size=8, learning_rate=5e-2)


@pytest.mark.parametrize("objective", ["hinge", "logistic", "bilinear"])
def test_learned_maps_beat_random_ones_on_a_planted_graph(objective):
    data, held = planted(), planted(4, seed=1)
    trained = train_layer(data, CONFIG, objective, 2)
    form = trained.projections.form
    random = max(recall_at(random_projections(HEADS, 2, DIM, seed, form), held, 0.8) for seed in range(3))
    assert recall_at(trained.projections, held, 0.8) > random + 0.1
    assert trained.losses[-10:].mean() < trained.losses[:3].mean()


def test_listwise_maps_know_where_the_mass_of_a_tile_is():
    data, held = planted(), planted(4, seed=1)
    trained = train_layer(data, CONFIG, "listwise", 2)
    assert trained.distance_weight is not None
    parts = [tile_parts(Tiles(maps, threshold=0.0), held, range(4), Nothing(), 8)
             for maps in (trained.projections, random_projections(HEADS, 2, DIM, 0, "bilinear"))]  # fmt: skip
    learned, random = (sum(recalls_at(curve(head), [0.5])[0] for head in heads) for heads in parts)
    assert learned > random


@pytest.mark.parametrize("objective", ["hinge", "listwise"])
def test_padding_and_causality_train_too(objective):
    trained = train_layer(planted(lengths=[24, 9, 24, 17, 1, 24], causal=True), replace(CONFIG, steps=10), objective, 2)
    assert all(torch.isfinite(tensor).all() for tensor in trained.projections.to_tensors().values())


def test_shared_maps_are_one_map_and_seeds_decide():
    data, config = planted(), replace(CONFIG, steps=5)
    shared = train_layer(data, replace(config, shared=True), "hinge", 2).projections
    assert torch.equal(shared.q_map, shared.k_map)
    assert torch.equal(shared.q_bias, shared.k_bias)
    maps = [train_layer(data, replace(config, seed=seed), "logistic", 2).projections.q_map for seed in (1, 1, 2)]
    assert torch.equal(maps[0], maps[1])
    assert not torch.equal(maps[0], maps[2])


def test_a_layer_without_gold_pairs_is_refused():
    data = planted()
    nobody = replace(data, mask=torch.zeros_like(data.mask))
    empty = gold_edges(data.q, data.k, legal_from_mask(nobody.mask), 1.5, data.scale)
    with pytest.raises(DataError, match="at least one gold pair"):
        train_layer(replace(nobody, stored=empty), CONFIG, "hinge", 2)


def test_svd_start_gives_the_true_score_at_full_rank_and_the_planted_one_below():
    data = planted()
    q, k = (x.transpose(0, 1).flatten(1, 2) for x in (data.q, data.k))
    for rank in (2, DIM, DIM + 3):
        q_map, k_map = score_svd(q, k, rank)
        assert q_map.shape == (HEADS, rank, DIM)
        scores = (q @ q_map.transpose(1, 2)) @ (k @ k_map.transpose(1, 2)).transpose(1, 2)
        true = q @ k.transpose(1, 2)
        scores, true = (x - x.mean(-1, keepdim=True) for x in (scores, true))
        assert (scores - true).norm() < 0.05 * true.norm()


# Curves and cuts


def naive_point(parts, threshold):
    sparsity = [1 - float(p.pairs[p.scores >= threshold].sum()) / float(p.pairs.sum()) for p in parts]
    recall = [float(p.gold[p.scores >= threshold].sum()) / float(p.gold.sum()) for p in parts if p.gold.any()]
    return sum(sparsity) / len(sparsity), sum(recall) / len(recall)


def some_parts(seed=0, forced=False):
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for size in (7, 30, 12):
        scores = torch.randint(-8, 8, (size,), generator=generator).float()
        if forced:
            scores[:3] = torch.inf
        gold = torch.rand(size, generator=generator) < 0.4
        parts.append(Part(scores, torch.ones(size, dtype=torch.bool), gold))
    return [*parts, replace(parts[0], gold=torch.zeros_like(parts[0].gold))]


@pytest.mark.parametrize("forced", [False, True])
def test_every_point_of_the_curve_is_what_its_threshold_gives(forced):
    parts = some_parts(forced=forced)
    found = curve(parts)
    assert found.forced == forced
    for at in range(found.threshold.shape[0]):
        sparsity, recall = naive_point(parts, float(found.threshold[at]))
        assert float(found.sparsity[at]) == pytest.approx(sparsity, abs=1e-12)
        assert float(found.recall[at]) == pytest.approx(recall, abs=1e-12)
    for target in (0.2, 0.5, 0.9, 1.0):
        at = cut_at(found, recall=target)
        assert float(found.recall[at]) >= target - 1e-9
        assert at == 0 or float(found.recall[at - 1]) < target
        at = cut_at(found, sparsity=target)
        assert float(found.sparsity[at]) >= target - 1e-9 or at == 0


def test_a_curve_needs_gold_and_a_cut_needs_a_target():
    part = some_parts()[0]
    with pytest.raises(DataError, match="at least one gold pair"):
        curve([replace(part, gold=torch.zeros_like(part.gold))])
    with pytest.raises(DataError, match="target"):
        threshold_at(curve([part]))


def test_recalls_between_points_are_linear_and_nan_where_nothing_can_be_dropped():
    points = Curve(*(torch.tensor(x).double() for x in ([2.0, 1.0], [0.8, 0.4], [0.5, 0.9])))
    assert recalls_at(points, [1.0, 0.9, 0.8, 0.6, 0.4, 0.1]) == pytest.approx([0.0, 0.25, 0.5, 0.7, 0.9, 0.9])
    forced = recalls_at(replace(points, forced=True), [0.9, 0.8, 0.6])
    assert math.isnan(forced[0])
    assert forced[1:] == pytest.approx([0.5, 0.7])


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_selection_gives_the_recalls_of_the_whole_curve(seed, forced):
    parts = some_parts(seed, forced)
    targets = [0.0, 0.3, 0.5, 0.77, 0.9, 0.95]
    equal = [parts[1], replace(parts[1], scores=parts[1].scores.flip(0)), replace(parts[1], gold=parts[1].gold & False)]
    for some in (parts, equal):
        assert recalls_by_selection(some, targets) == pytest.approx(recalls_at(curve(some), targets), nan_ok=True)
    with pytest.raises(DataError, match="at least one gold pair"):
        recalls_by_selection(equal[2:])


@pytest.mark.parametrize("kind", ["distance", "score", "budget", "clusters"])
def test_a_point_of_the_curve_is_what_metrics_say_of_the_predictor(kind):
    data = planted(3, lengths=[24, 15, 20])
    positional = Window(1) | GlobalTokens(1)
    form = "bilinear" if kind == "score" else "metric"
    maps = random_projections(HEADS, 3, DIM, 0, form)
    fitted = fit_clusters(maps, data, 6, 0)[0] if kind == "clusters" else None
    parts = (
        cluster_parts(fitted, data, range(3), positional)
        if fitted
        else pair_parts(maps, data, range(3), positional, budget=kind == "budget")
    )
    curves = [curve(head) for head in parts]
    at = [cut_at(c, sparsity=0.6) for c in curves]
    cuts = torch.tensor([float(c.threshold[i]) for c, i in zip(curves, at, strict=True)])
    predictors = {
        "distance": lambda: Distance(maps, (-cuts).clamp(min=0).sqrt()),
        "score": lambda: Score(maps, cuts),
        "budget": lambda: RowBudget(maps, -float(cuts[0])),
        "clusters": lambda: replace(fitted, top_k=(-cuts).long().clamp(1, 6)),
    }
    report = summarize([layer_counts(data, predictors[kind](), positional, 8, "pattern", range(3))])
    for head in range(1 if kind == "budget" else HEADS):  # a budget is one number for all heads
        assert float(report.heads["sparsity"][0, head]) == pytest.approx(
            float(curves[head].sparsity[at[head]]), abs=1e-9
        )
        assert float(report.heads["recall"][0, head]) == pytest.approx(float(curves[head].recall[at[head]]), abs=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_a_point_of_the_tile_curve_is_what_the_plan_computes(causal):
    data = planted(3, lengths=[24, 16, 24], causal=causal)
    maps = random_projections(HEADS, 3, DIM, 0, "bilinear")
    curves = [curve(head) for head in tile_parts(Tiles(maps, threshold=0.0), data, range(3), Window(1), 8)]
    threshold = float(curves[0].threshold[curves[0].threshold.shape[0] // 3])
    tiles = Tiles(maps, threshold=threshold)
    legal = legal_from_mask(data.mask, causal)
    plan = tiles.plan(data.q, data.k, legal, Window(1), 8)
    measured = summarize([counts(data.q, data.k, plan, legal, 1.5, data.scale)])
    at = int((curves[0].threshold >= threshold).sum()) - 1
    assert float(measured.heads["sparsity"][0, 0]) == pytest.approx(float(curves[0].sparsity[at]), abs=1e-9)
    assert float(measured.heads["recall"][0, 0]) == pytest.approx(float(curves[0].recall[at]), abs=1e-9)
    assert computed_pairs(plan).shape == (3, HEADS)


# k-means


def blobs(points=400, clusters=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres = 20 * torch.randn(clusters, 3, generator=generator)
    return centres[torch.arange(points) % clusters] + torch.randn(points, 3, generator=generator)


def inertia(points, centroids):
    return float(torch.cdist(points, centroids).min(1).values.square().mean())


@pytest.mark.parametrize("backend", ["faiss-cpu", "sklearn"])
def test_kmeans_has_one_answer_for_a_seed_on_one_and_on_four_threads(backend):
    pytest.importorskip("faiss" if backend == "faiss-cpu" else "sklearn")
    points, found = blobs(), []
    for threads in (1, 4, 1):
        torch.set_num_threads(threads)
        if backend == "faiss-cpu":
            import faiss

            faiss.omp_set_num_threads(threads)
        found.append(kmeans(points, 8, seed=3, backend=backend))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)
    assert torch.equal(found[0], found[2])
    assert inertia(points, found[0]) < 0.2 * inertia(points, points[:1])


def test_kmeans_without_faiss_is_scikit_learn(monkeypatch):
    monkeypatch.setattr("training.kmeans.kmeans_backend", lambda: "sklearn")
    points = blobs()
    assert torch.equal(kmeans(points, 8), kmeans(points, 8, backend="sklearn"))
    with pytest.raises(ConfigError, match="sklearn"):
        kmeans(points, 8, backend="other")


def test_too_few_points_for_the_clusters():
    with pytest.raises(DataError, match="at least 64 points for 64 clusters, got 12"):
        kmeans(torch.randn(12, 3), 64)
    with pytest.raises(DataError, match="finite"):
        kmeans(torch.full((12, 3), math.nan), 4)
    data = planted(1, lengths=[6])
    with pytest.raises(DataError, match="64 clusters, got 12"):
        fit_clusters(random_projections(HEADS, 2, DIM, 0), data, 64, 0)


def test_identical_vectors_use_one_cluster_and_say_so():
    with pytest.warns(UserWarning, match="only 1 distinct points for 5 clusters"):
        centroids = kmeans(torch.ones(50, 3), 5)
    assert torch.equal(centroids, torch.ones(5, 3))
    maps = random_projections(1, 3, DIM, 0)
    clusters = Clusters(maps, centroids[None], torch.ones(1, dtype=torch.long))
    assert clusters.members(torch.ones(1, 4, 3)).sum(1).tolist() == [[4, 0, 0, 0, 0]]


def test_queries_and_keys_meet_at_the_least_top_k_of_the_definition():
    generator = torch.Generator().manual_seed(0)
    q, k, centroids = (torch.randn(n, 3, generator=generator) for n in (7, 9, 5))
    order = [torch.cdist(x, centroids).argsort(1) for x in (q, k)]
    found = meeting_top(q, k, centroids)
    for i in range(7):
        for j in range(9):
            first = next(t for t in range(1, 6) if set(order[0][i, :t].tolist()) & set(order[1][j, :t].tolist()))
            assert found[i, j] == first


def test_clusters_are_fitted_on_real_tokens_of_queries_and_keys():
    data = planted(lengths=[24, 5, 24, 24, 24, 2])
    data.q[1, :, 5:], data.k[1, :, 5:] = 1e6, 1e6  # padding must not matter
    maps = random_projections(HEADS, 2, DIM, 0)
    clusters, mixed = fit_clusters(maps, data, 4, 0)
    real = data.mask[0]
    q, k = project_queries(maps, data.q[:1])[0, :, real], project_keys(maps, data.k[:1])[0, :, real]
    assert float(clusters.centroids.abs().max()) <= float(torch.cat([q, k]).abs().max()) * 3
    assert mixed.shape == (HEADS,)
    assert bool(((mixed >= 0) & (mixed <= 1)).all())
