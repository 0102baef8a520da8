"""Content predictors against loops over plain numbers, written from the papers."""

import warnings
from dataclasses import replace

import oracles_content as oracle
import pytest
import torch
from cases_content import DIM, HEADS, RANK, gate_maps, graph, maps, sequences, unit, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsefinder.errors import PatternError
from sparsefinder.patterns.legal import legal_from_mask, legal_full
from sparsefinder.predictors import (
    ChunkClusters,
    Clustered,
    Clusters,
    Gate,
    InvertedClusters,
    InvertedLists,
    Lsh,
    Predictor,
    Quantization,
    RoutedChunks,
    Routing,
    Smyrf,
    TopKeys,
    clustered_hashes,
    ema_update,
    lsh_rotations,
    smyrf_directions,
    svd_projections,
    true_score_projections,
    unpicked_queries,
)
from sparsefinder.predictors.clustered import ITERATIONS
from sparsefinder.predictors.lsh import smyrf_transforms


def head(x: Tensor, h: int) -> list[list[float]]:
    """Vectors of one head of item 0, one key set per query head."""
    return x[0, h // (HEADS // x.shape[1])].tolist()


def projected(predictor: Predictor, q: Tensor, k: Tensor, h: int) -> tuple[list[list[float]], list[list[float]]]:
    p = predictor.projections
    queries = [oracle.apply(p.q_map[h].tolist(), p.q_bias[h].tolist(), x) for x in head(q, h)]
    return queries, [oracle.apply(p.k_map[h].tolist(), p.k_bias[h].tolist(), x) for x in head(k, h)]


@given(seed=st.integers(0, 999), n=st.integers(1, 30), bins=st.integers(1, 33))
@settings(max_examples=10)
def test_quantization_is_its_definition(seed: int, n: int, bins: int) -> None:
    q, k = sequences(1, n, seed)
    k = k[:, :, : max(1, n - 4)]
    predictor, legal = Quantization(maps(seed=seed), bins), legal_full(1, n, k.shape[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pattern = predictor.pattern(q, k, legal)
    for h in range(HEADS):
        assert graph(pattern, legal, h) == oracle.quantization(*projected(predictor, q, k, h), bins)


@given(seed=st.integers(0, 999), n=st.integers(1, 20), keys=st.integers(1, 25), causal=st.booleans())
@settings(max_examples=10)
def test_top_keys_are_their_definition(seed: int, n: int, keys: int, causal: bool) -> None:
    q, k = sequences(1, n, seed)
    legal = legal_full(1, n, n, causal)
    true, near = TopKeys(true_score_projections(HEADS, DIM), keys), TopKeys(maps(seed=seed), keys)
    found_true, found_near = true.pattern(q, k, legal), near.pattern(q, k, legal)
    for h in range(HEADS):
        scores = [[oracle.dot(x, y) for y in head(k, h)] for x in head(q, h)]
        allowed = {(i, j) for i in range(n) for j in range(n) if j <= i or not causal}
        assert graph(found_true, legal, h) == oracle.top_keys(scores, allowed, keys)
        low_q, low_k = projected(near, q, k, h)
        gaps = [[-sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for y in low_k] for x in low_q]
        assert graph(found_near, legal, h) == oracle.top_keys(gaps, allowed, keys)


@given(seed=st.integers(0, 999), n=st.integers(1, 20), half=st.integers(1, 10), rounds=st.integers(1, 8))
@settings(max_examples=10)
def test_lsh_is_its_definition(seed: int, n: int, half: int, rounds: int) -> None:
    q, k = sequences(1, n, seed)
    legal = legal_full(1, n, n)
    for rotations in (lsh_rotations(HEADS, DIM, 2 * half, rounds, seed), whole(rounds, HEADS, half, DIM, seed=seed)):
        for shared in (False, True):
            pattern = Lsh(rotations, shared).pattern(q, k, legal)
            for h in range(HEADS):
                keys = head(q, h) if shared else head(k, h)
                assert graph(pattern, legal, h) == oracle.lsh(head(q, h), keys, rotations[:, h].tolist())


@given(seed=st.integers(0, 999), n=st.integers(1, 20), buckets=st.integers(1, 12), rounds=st.integers(1, 4))
@settings(max_examples=10)
def test_smyrf_is_its_definition(seed: int, n: int, buckets: int, rounds: int) -> None:
    q, k = sequences(1, n, seed)
    # Real numbers here: a projection of whole ones would meet ties that float32 and float64 break differently.
    q, k = q + torch.rand_like(q), k + torch.rand_like(k)
    legal, directions = legal_full(1, n, n), smyrf_directions(HEADS, DIM, rounds, seed)
    pattern = Smyrf(directions, buckets).pattern(q, k, legal)
    for h in range(HEADS):
        assert graph(pattern, legal, h) == oracle.smyrf(head(q, h), head(k, h), directions[:, h].tolist(), buckets)


@given(seed=st.integers(0, 999), n=st.integers(1, 20), clusters=st.integers(1, 9), window=st.integers(0, 22))
@settings(max_examples=10)
def test_routing_is_its_definition(seed: int, n: int, clusters: int, window: int) -> None:
    q, k = (x + torch.rand_like(x) for x in sequences(1, n, seed))
    predictor, legal = Routing(unit(HEADS, clusters, DIM, seed=seed), window or None), legal_full(1, n, n)
    pattern = predictor.pattern(q, k, legal)
    lonely = unpicked_queries(pattern, legal)
    for h in range(HEADS):
        expected = oracle.routing(head(q, h), head(k, h), predictor.centroids[h].tolist(), window or None)
        assert graph(pattern, legal, h) == expected
        assert int(lonely[0, h]) == n - len({i for i, _ in expected})


def test_an_online_step_moves_centroids_to_their_real_tokens() -> None:
    q, k = (x + torch.rand_like(x) for x in sequences(2, 15))
    mask = torch.arange(15)[None] < torch.tensor([[15], [6]])
    centroids = unit(HEADS, 5, DIM, seed=4)
    centroids[:, 4] = centroids[:, 0]  # of equally near ones the first counts, so nobody comes to this one
    q, k = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (q, k))
    moved = ema_update(centroids, q, k, legal_from_mask(mask), 0.7)
    for h in range(HEADS):
        points = [x for y in (q[:, h], k[:, h // 2]) for x in y[mask].tolist()]
        expected = oracle.moved_centroids(points, centroids[h].tolist(), 0.7)
        torch.testing.assert_close(moved[h], torch.tensor(expected), atol=1e-5, rtol=0)
    assert torch.equal(moved[:, 4], centroids[:, 4])
    assert torch.equal(ema_update(centroids, q, k, legal_from_mask(mask), 0.7), moved)
    with pytest.raises(PatternError, match="decay"):
        ema_update(centroids, q, k, legal_from_mask(mask), 1.5)


@given(seed=st.integers(0, 999), n=st.integers(1, 20), clusters=st.integers(1, 24), keys=st.integers(1, 22))
@settings(max_examples=10)
def test_clustered_attention_is_its_definition(seed: int, n: int, clusters: int, keys: int) -> None:
    q, k = (x + torch.rand_like(x) for x in sequences(1, n, seed))
    hashes, legal = clustered_hashes(HEADS, DIM, 9, seed), legal_full(1, n, n)
    pattern = Clustered(hashes, clusters, keys).pattern(q, k, legal)
    for h in range(HEADS):
        codes = [[oracle.dot(row, x) > 0 for row in hashes[h].tolist()] for x in head(q, h)]
        owner = oracle.hamming_clusters(codes, clusters, ITERATIONS)
        assert graph(pattern, legal, h) == oracle.clustered(head(q, h), head(k, h), owner, keys)


@given(seed=st.integers(0, 999), n=st.integers(1, 20), clusters=st.integers(1, 12), causal=st.booleans())
@settings(max_examples=10)
def test_inverted_lists_are_their_definition(seed: int, n: int, clusters: int, causal: bool) -> None:
    q, k = sequences(1, n, seed)
    legal = legal_full(1, n, n, causal)
    raw = InvertedLists(whole(HEADS, clusters, DIM, seed=seed), torch.tensor([0.1, 0.3, 0.5, 1.0]), -1.7)
    learned = InvertedClusters(maps(seed=seed), whole(HEADS, clusters, RANK, seed=seed, low=-9, high=9), -1.7)
    rooted = replace(raw, root=whole(HEADS, DIM, DIM, seed=seed + 9))
    found_raw, found_learned, found_rooted = (p.pattern(q, k, legal) for p in (raw, learned, rooted))
    for h in range(HEADS):
        centroids, factor = raw.centroids[h].tolist(), float(raw.scale[h])
        scores = [[factor * oracle.dot(x, c) for c in centroids] for x in head(q, h)]
        owner = [oracle.nearest(x, centroids) for x in head(k, h)]
        assert graph(found_raw, legal, h) == oracle.probing(scores, owner, causal, -1.7)
        root, zero = rooted.root[h].tolist(), [0.0] * DIM
        seen_c, seen_k = ([oracle.apply(root, zero, x) for x in side] for side in (centroids, head(k, h)))
        owner = [oracle.nearest(x, seen_c) for x in seen_k]
        assert graph(found_rooted, legal, h) == oracle.probing(scores, owner, causal, -1.7)
        low_q, low_k = projected(learned, q, k, h)
        centroids = learned.centroids[h].tolist()
        scores = [[-sum((a - b) ** 2 for a, b in zip(x, c, strict=True)) for c in centroids] for x in low_q]
        owner = [oracle.nearest(x, centroids) for x in low_k]
        assert graph(found_learned, legal, h) == oracle.probing(scores, owner, causal, -1.7)


@given(seed=st.integers(0, 999), n=st.integers(1, 20), size=st.integers(1, 22), count=st.integers(1, 6))
@settings(max_examples=10)
def test_chunks_are_their_definition(seed: int, n: int, size: int, count: int) -> None:
    q, k = (x + torch.rand_like(x) for x in sequences(1, n, seed))
    k = k[:, :, : max(1, n - 3)]
    legal, centroids = legal_full(1, n, k.shape[2]), whole(HEADS, 6, RANK, seed=seed)
    first = ChunkClusters(maps(seed=seed), centroids, count, size)
    second = [RoutedChunks(maps(seed=seed), centroids, window, size) for window in (None, count)]
    found = [p.pattern(q, k, legal) for p in (first, *second)]
    rows, columns = oracle.blocks(n, size), oracle.blocks(k.shape[2], size)
    for h in range(HEADS):
        low_q, low_k = projected(first, q, k, h)
        low_q, low_k = ([oracle.mean([x[i] for i in b]) for b in p] for x, p in ((low_q, rows), (low_k, columns)))
        c = centroids[h].tolist()
        query, key = ([oracle.nearest_few(x, c, count) for x in side] for side in (low_q, low_k))
        expected = [oracle.share_a_bucket(query, key), *(oracle.routed(low_q, low_k, c, p.window) for p in second)]
        assert [graph(p, legal, h) for p in found] == [oracle.spread(pairs, rows, columns) for pairs in expected]


@given(seed=st.integers(0, 999), n=st.integers(1, 20), size=st.integers(1, 22), top=st.integers(0, 4))
@settings(max_examples=10)
def test_the_gate_is_its_definition(seed: int, n: int, size: int, top: int) -> None:
    q, k = (x + torch.rand_like(x) for x in sequences(1, n, seed))
    predictor = Gate(gate_maps(seed), size, top=top or None, threshold=None if top else -1.5)
    legal, m = legal_full(1, n, n), predictor.maps
    pattern, parts = predictor.pattern(q, k, legal), oracle.blocks(n, size)
    for h in range(HEADS):
        queries, keys = ([oracle.mean_and_max([x[i] for i in b]) for b in parts] for x in (head(q, h), head(k, h)))
        low_q, low_k = (
            [[oracle.dot(row, x) for row in w[h].tolist()] for x in side]
            for w, side in ((m.q_map, queries), (m.k_map, keys))
        )
        column = [oracle.dot(m.k_linear[h].tolist(), y) for y in keys]
        scores = [[oracle.dot(x, y) + extra for y, extra in zip(low_k, column, strict=True)] for x in low_q]
        expected = oracle.gate(scores, top or None, predictor.threshold)
        assert graph(pattern, legal, h) == oracle.spread(expected, parts, parts)


def test_chunks_of_one_token_are_the_token_level_clusters() -> None:
    q, k = sequences(1, 15)
    legal, centroids = legal_full(1, 15, 15), whole(HEADS, 6, RANK, seed=1)
    one = ChunkClusters(maps(), centroids, 2, 1).pattern(q, k, legal)
    same = Clusters(maps(), centroids, torch.full((HEADS,), 2)).pattern(q, k, legal)
    for h in range(HEADS):
        assert graph(one, legal, h) == graph(same, legal, h)


def test_a_truncated_svd_is_the_best_map_of_its_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(2, HEADS, DIM, DIM, generator=generator, dtype=torch.float64)
    q = torch.randn(HEADS, 400, DIM, generator=generator, dtype=torch.float64) @ mix[0]
    k = torch.randn(HEADS, 300, DIM, generator=generator, dtype=torch.float64) @ mix[1] + 2
    centred = k - k.mean(1, keepdim=True)
    moments = q.transpose(1, 2) @ q / 400, centred.transpose(1, 2) @ centred / 300
    true = 0.5 * q @ k.transpose(1, 2)
    errors = []
    for rank in (1, 3, DIM, DIM + 2):
        maps_ = svd_projections(*moments, k.mean(1), rank, 0.5)
        assert maps_.form == "bilinear"
        low_q, low_k = q.float() @ maps_.q_map.transpose(1, 2), k.float() @ maps_.k_map.transpose(1, 2)
        scores = low_q @ (low_k + maps_.k_bias[:, None]).transpose(1, 2) + q.float() @ maps_.q_linear[..., None]
        errors.append((scores.double() - true).square().mean((1, 2)))
    # The least error is the tail of the squared singular values of the sampled score matrix (Eckart and Young, 1936).
    tail = torch.linalg.svdvals(0.5 * q @ centred.transpose(1, 2)).square() / (400 * 300)
    for error, rank in zip(errors, (1, 3, DIM, DIM + 2), strict=True):
        torch.testing.assert_close(error, tail[:, rank:].sum(-1), rtol=1e-3, atol=1e-6)
    with pytest.raises(PatternError, match="rank"):
        svd_projections(*moments, k.mean(1), 0)


def test_the_asymmetric_transforms_turn_inner_products_into_distances() -> None:
    q, k = torch.randn(2, 9, DIM, dtype=torch.float64), torch.randn(2, 7, DIM, dtype=torch.float64)
    far_q, far_k = smyrf_transforms(q, k)
    limit = 2 * (q.square().sum(-1).amax(-1) + k.square().sum(-1).amax(-1))
    torch.testing.assert_close(torch.cdist(far_q, far_k).square(), limit[:, None, None] - 2 * q @ k.transpose(1, 2))
