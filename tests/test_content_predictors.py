"""Content predictors against loops over plain numbers, and the laws that all of them keep."""

import json
import warnings
from dataclasses import replace

import oracles_content as oracle
import pytest
import torch
from cases_content import DIM, HEADS, RANK, content_predictors, gate_maps, maps, sequences, unit, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparsefinder.errors import NonFiniteError, PatternError, ShapeError
from sparsefinder.patterns.algebra import Pattern, materialize
from sparsefinder.patterns.legal import Legal, legal_from_mask, legal_full
from sparsefinder.patterns.positional import Nothing, Window
from sparsefinder.plan import plan_matrix
from sparsefinder.predictors import (
    PREDICTORS,
    ChunkClusters,
    Clustered,
    Clusters,
    Gate,
    InvertedClusters,
    InvertedLists,
    Lsh,
    Predictor,
    Projections,
    Quantization,
    RoutedChunks,
    Routing,
    Smyrf,
    TopKeys,
    clustered_hashes,
    ema_update,
    layer_plan,
    lsh_rotations,
    predictor_to,
    ranks_over_sequence,
    smyrf_directions,
    svd_projections,
    true_score_projections,
    unpicked_queries,
)
from sparsefinder.predictors.clustered import ITERATIONS

SAMPLES = content_predictors()
ANY_LAYER = [name for name, p in SAMPLES.items() if not ranks_over_sequence(p)]
INVERTED = ("inverted", "inverted root", "inverted metric")
RANKING = [name for name in SAMPLES if name not in ANY_LAYER]


def graph(pattern: Pattern, legal: Legal, h: int, b: int = 0) -> oracle.Graph:
    return {(int(i), int(j)) for i, j in materialize(pattern, legal, b, h).nonzero()}


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
    from sparsefinder.predictors.lsh import smyrf_transforms

    q, k = torch.randn(2, 9, DIM, dtype=torch.float64), torch.randn(2, 7, DIM, dtype=torch.float64)
    far_q, far_k = smyrf_transforms(q, k)
    limit = 2 * (q.square().sum(-1).amax(-1) + k.square().sum(-1).amax(-1))
    torch.testing.assert_close(torch.cdist(far_q, far_k).square(), limit[:, None, None] - 2 * q @ k.transpose(1, 2))


def test_more_rounds_and_fewer_bins_only_add_pairs() -> None:
    q, k = sequences(1, 25)
    legal = legal_full(1, 25, 25)
    for few, many in (
        (Lsh(lsh_rotations(HEADS, DIM, 8, 1, 3)), Lsh(lsh_rotations(HEADS, DIM, 8, 4, 3))),
        (Smyrf(smyrf_directions(HEADS, DIM, 1, 3), 5), Smyrf(smyrf_directions(HEADS, DIM, 4, 3), 5)),
        (TopKeys(maps(), 2), TopKeys(maps(), 6)),
        (Quantization(maps(), 25), Quantization(maps(), 1)),
        (Routing(unit(HEADS, 5, DIM, seed=0), 2), Routing(unit(HEADS, 5, DIM, seed=0), 9)),
        (Clustered(clustered_hashes(HEADS, DIM, 9, 0), 5, 2), Clustered(clustered_hashes(HEADS, DIM, 9, 0), 5, 9)),
        *(
            (replace(SAMPLES[name], **{cut: 1}), replace(SAMPLES[name], **{cut: 3}))
            for name, cut in (("chunks", "top_k"), ("routed tokens", "window"), ("gate top", "top"))
        ),
        *((replace(SAMPLES[name], threshold=-1.0), replace(SAMPLES[name], threshold=-9.0)) for name in INVERTED),
    ):
        for h in range(HEADS):
            assert graph(few.pattern(q, k, legal), legal, h) < graph(many.pattern(q, k, legal), legal, h)


def test_misses_of_lsh_fall_with_the_rounds_as_its_collision_probability_says() -> None:
    """A pair of collision probability c is missed by m rounds with probability (1 − c)^m; measured over many hashes."""
    from sparsefinder.predictors.lsh import angular_hash

    x, y = torch.randn(2, DIM, generator=torch.Generator().manual_seed(1)).repeat(1, 1)
    y = x + 0.5 * y
    rotations = lsh_rotations(4000, DIM, 6, 4, 5)
    met = torch.stack([
        angular_hash(x.expand(4000, 1, DIM), r) == angular_hash(y.expand(4000, 1, DIM), r) for r in rotations
    ]).squeeze(-1)  # fmt: skip
    c = float(met.double().mean())
    assert 0.3 < c < 0.9
    for rounds in (1, 2, 4):
        assert float((~met[:rounds]).all(0).double().mean()) == pytest.approx((1 - c) ** rounds, abs=0.02)


@pytest.mark.parametrize("name", list(SAMPLES))
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_and_an_item_alone_give_equal_graphs(name: str, left: bool, causal: bool) -> None:
    if causal and name in RANKING:
        return
    predictor, lengths, width = SAMPLES[name], (5, 40, 1, 23), 40
    q, k = sequences(4, width)
    q, k = q + 0.01 * torch.randn_like(q), k + 0.01 * torch.randn_like(k)  # last bits that could differ
    ends, position = torch.tensor(lengths)[:, None], torch.arange(width)[None]
    mask = position >= width - ends if left else position < ends
    q, k = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (q, k))
    legal = legal_from_mask(mask, causal)
    pattern = predictor.pattern(q, k, legal)
    for b, length in enumerate(lengths):
        part = slice(width - length, width) if left else slice(0, length)
        alone = legal_full(1, length, length, causal)
        pattern_alone = predictor.pattern(q[b : b + 1, :, part].clone(), k[b : b + 1, :, part].clone(), alone)
        for h in range(HEADS):
            wide = materialize(pattern, legal, b, h)
            assert torch.equal(wide[part, part], materialize(pattern_alone, alone, 0, h))
            assert wide.sum() == wide[part, part].sum()


@pytest.mark.parametrize("name", list(SAMPLES))
def test_keys_of_a_group_are_those_of_each_of_its_heads(name: str) -> None:
    q, k = sequences(1, 21)
    legal = legal_full(1, 21, 21)
    grouped, repeated = (SAMPLES[name].pattern(q, x, legal) for x in (k, k.repeat_interleave(2, 1)))
    for h in range(HEADS):
        assert graph(grouped, legal, h) == graph(repeated, legal, h) != set()


@pytest.mark.parametrize("name", list(SAMPLES))
def test_the_same_twice_and_after_saving(name: str) -> None:
    """Case 8, and that tensors and settings hold a whole predictor; what lacks one says which (case 10)."""
    predictor = SAMPLES[name]
    assert PREDICTORS[predictor.kind] is type(predictor)
    read = json.loads(json.dumps(predictor.settings()))  # what a card holds
    again = PREDICTORS[predictor.kind].from_tensors(predictor.to_tensors(), read)
    q, k = sequences(2, 20)
    legal = legal_full(2, 20, 20)
    for h in range(HEADS):
        found = [graph(p.pattern(q, k, legal), legal, h, 1) for p in (predictor, predictor, predictor_to(again, "cpu"))]
        assert found[0] == found[1] == found[2]
    for missing in set(predictor.to_tensors()) - {"k_linear", "root"}:
        rest = {key: value for key, value in predictor.to_tensors().items() if key != missing}
        with pytest.raises(KeyError, match=missing):
            PREDICTORS[predictor.kind].from_tensors(rest, predictor.settings())


@pytest.mark.parametrize("name", RANKING)
def test_ranking_over_the_sequence_refuses_a_causal_layer(name: str) -> None:
    q, k = sequences(1, 9)
    with pytest.raises(PatternError, match="bidirectional"):
        SAMPLES[name].pattern(q, k, legal_full(1, 9, 9, causal=True))


@pytest.mark.parametrize("name", ANY_LAYER)
def test_no_causal_row_depends_on_what_comes_later(name: str) -> None:
    q, k = sequences(1, 17)
    legal = legal_full(1, 17, 17, causal=True)
    before = SAMPLES[name].pattern(q, k, legal)
    for t in (0, 5, 11):
        q_new, k_new = q.clone(), k.clone()
        q_new[:, :, t + 1 :], k_new[:, :, t + 1 :] = 7 - q_new[:, :, t + 1 :], k_new[:, :, t + 1 :].flip(3) - 5
        after = SAMPLES[name].pattern(q_new, k_new, legal)
        for h in range(HEADS):
            rows = [materialize(p, legal, 0, h)[: t + 1] for p in (before, after)]
            assert torch.equal(*rows)


@pytest.mark.parametrize("name", ANY_LAYER)
def test_a_causal_query_alone_in_its_bucket_still_reads_itself(name: str) -> None:
    """Case 11 (smyrf #4): the plan adds every query itself."""
    q, k = sequences(1, 19)
    legal = legal_full(1, 19, 19, causal=True)
    plan = layer_plan(SAMPLES[name], q, k, legal, Nothing(), 1)
    for h in range(HEADS):
        assert plan_matrix(plan, legal, 0, h).diagonal().all()


@pytest.mark.parametrize("name", list(SAMPLES))
def test_identical_vectors_do_no_harm_and_are_named(name: str) -> None:
    """Case 12 (sklearn #10059)."""
    predictor, legal = SAMPLES[name], legal_full(2, 12, 12)
    q, k = torch.ones(2, HEADS, 12, DIM), torch.ones(2, HEADS, 12, DIM)
    if hasattr(predictor, "projections"):  # biases would tell queries from keys
        p = predictor.projections
        tensors = predictor.to_tensors() | {"k_map": p.q_map, "k_bias": p.q_bias}
        predictor = predictor.from_tensors(tensors, predictor.settings())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pattern = predictor.pattern(q, k, legal)
    assert isinstance(predictor, TopKeys) or all("identical" in str(w.message) for w in said)
    assert isinstance(predictor, TopKeys) or said
    for h in range(HEADS):
        assert graph(pattern, legal, h, 1) == graph(pattern, legal, h, 0) != set()


@pytest.mark.parametrize("name", list(SAMPLES))
def test_empty_items_and_single_tokens(name: str) -> None:
    q, k = sequences(2, 1)
    legal = legal_from_mask(torch.tensor([[True], [False]]))
    pattern = SAMPLES[name].pattern(q, k, legal)
    assert [graph(pattern, legal, h, 1) for h in range(HEADS)] == [set()] * HEADS
    layer_plan(SAMPLES[name], q, k, legal, Window(1), 64)


@pytest.mark.parametrize("name", list(SAMPLES))
def test_nan_in_a_real_token_is_refused(name: str) -> None:
    """Case 4."""
    for side in (0, 1):
        parts = list(sequences(1, 9))
        parts[side][0, 1, 3, 2] = torch.nan
        with pytest.raises(NonFiniteError, match=f"^{'qk'[side]}: .* head 1, token 3"):
            SAMPLES[name].pattern(*parts, legal_full(1, 9, 9))


@pytest.mark.parametrize("name", list(SAMPLES))
def test_other_precisions_are_welcome(name: str) -> None:
    q, k = sequences(1, 14)
    legal = legal_full(1, 14, 14)
    for dtype in (torch.bfloat16, torch.float64):  # whole numbers are the same in all of them
        pattern = SAMPLES[name].pattern(q.to(dtype), k.to(dtype), legal)
        assert graph(pattern, legal, 1) == graph(SAMPLES[name].pattern(q, k, legal), legal, 1)


def test_buckets_are_held_as_words() -> None:
    q, k = sequences(1, 2000)
    pattern = Quantization(maps(), 40).pattern(q, k, legal_full(1, 2000, 2000))
    assert pattern.query_bits.shape == (1, HEADS, 2000, 2)  # 120 buckets
    assert unpicked_queries(pattern, legal_full(1, 2000, 2000)).tolist() == [[0] * HEADS]


@pytest.mark.parametrize("name", [n for n in SAMPLES if not n.startswith(("topk", "gate"))])
def test_nothing_of_size_n_times_n_is_made(name: str) -> None:
    """`TopKeys` makes one head's scores; a gate of blocks of one token would be N × N by definition."""
    n, largest = 1500, 0
    q, k = sequences(1, n)

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, Tensor) else 0)
            return out

    with Watch():
        SAMPLES[name].pattern(q, k, legal_full(1, n, n, causal=name in INVERTED))
    assert 0 < largest < n * n / 2


@pytest.mark.unchecked
@pytest.mark.parametrize("name", list(SAMPLES))
def test_sizes_that_do_not_fit_are_typed_errors(name: str) -> None:
    q, k = sequences(1, 9)
    legal = legal_full(1, 9, 9)
    for bad_q, bad_k in ((q[..., :5], k[..., :5]), (q[:, :2], k), (q, k[:, :, :8]), (q, k[0])):
        with pytest.raises(ShapeError):
            SAMPLES[name].pattern(bad_q, bad_k, legal)


@pytest.mark.unchecked
def test_what_cannot_be_is_a_typed_error() -> None:
    q, k = sequences(1, 9)
    centroids = torch.zeros(HEADS, 3, RANK)
    for make in (
        lambda: Quantization(maps("bilinear"), 4),
        lambda: InvertedClusters(maps("bilinear"), centroids, -1.0),
        lambda: ChunkClusters(maps("bilinear"), centroids, 1, 4),
        lambda: RoutedChunks(maps("bilinear"), centroids),
    ):
        with pytest.raises(PatternError, match="expected projections of the form metric, got bilinear"):
            make()
    for make in (
        lambda: Routing(torch.zeros(HEADS, 0, DIM)),
        lambda: InvertedLists(torch.zeros(HEADS, 0, DIM), torch.ones(HEADS), -1.0),
        lambda: InvertedClusters(maps(), centroids[:, :0], -1.0),
        lambda: RoutedChunks(maps(), centroids[:, :0]),
    ):
        with pytest.raises(PatternError, match="fit them first"):  # case 10
            make()
    for make in (
        lambda: Routing(torch.zeros(HEADS, DIM)),
        lambda: InvertedClusters(maps(), torch.zeros(HEADS, 3, RANK + 1), -1.0),
        lambda: InvertedClusters(maps(), torch.zeros(2, 3, RANK), -1.0),
        lambda: ChunkClusters(maps(), torch.zeros(HEADS, 3, RANK + 1), 1, 4),
    ):
        with pytest.raises(ShapeError, match="centroids"):
            make()
    with pytest.raises(ShapeError, match="scale"):
        InvertedLists(torch.zeros(HEADS, 3, DIM), torch.ones(2), -1.0)
    with pytest.raises(ShapeError, match="root"):
        InvertedLists(torch.zeros(HEADS, 3, DIM), torch.ones(HEADS), -1.0, torch.zeros(HEADS, DIM, 2))
    with pytest.raises(ShapeError, match="hashes"):
        Clustered(torch.zeros(HEADS, DIM), 3, 3)
    with pytest.raises(PatternError, match="1 cluster and key"):
        Clustered(clustered_hashes(HEADS, DIM, 5, 0), 3, 0)
    with pytest.raises(PatternError, match="window"):
        Routing(unit(HEADS, 3, DIM, seed=0), 0)
    for make, word in (
        (lambda: ChunkClusters(maps(), centroids, 4, 4), "top_k"),
        (lambda: ChunkClusters(maps(), centroids, 1, 0), "chunk"),
        (lambda: RoutedChunks(maps(), centroids, 0), "window"),
        (lambda: Gate(maps(), 4, top=1), "bilinear, got metric"),
        (lambda: Gate(gate_maps(), 4), "exactly one"),
        (lambda: Gate(gate_maps(), 4, top=1, threshold=-1.0), "exactly one"),
        (lambda: Gate(gate_maps(), 0, top=1), "block"),
        (lambda: Gate(gate_maps(), 4, top=0), "top"),
    ):
        with pytest.raises(PatternError, match=word):
            make()
    with pytest.raises(ShapeError, match="features"):
        Gate(Projections(*[torch.ones(1, 2, 5)] * 2, *[torch.ones(1, 2)] * 2, "bilinear"), 4, top=1)
    with pytest.raises(PatternError, match="bins"):
        Quantization(maps(), 0)
    with pytest.raises(PatternError, match="keys"):
        TopKeys(maps(), 0)
    for buckets, rounds in ((3, 1), (0, 1), (4, 0)):
        with pytest.raises(PatternError, match="lsh: expected an even number"):
            lsh_rotations(HEADS, DIM, buckets, rounds, 0)
    with pytest.raises(PatternError, match="smyrf"):
        smyrf_directions(HEADS, DIM, 0, 0)
    with pytest.raises(ShapeError, match="rotations"):
        Lsh(torch.zeros(0, HEADS, RANK, DIM))
    with pytest.raises(ShapeError, match="directions"):
        Smyrf(torch.zeros(2, HEADS, 2), 4)
    with pytest.raises(PatternError, match="buckets"):
        Smyrf(smyrf_directions(HEADS, DIM, 1, 0), 0)
    with pytest.raises(PatternError, match="same tokens"):
        Lsh(lsh_rotations(HEADS, DIM, 4, 1, 0), shared=True).pattern(q, k[:, :, :8], legal_full(1, 9, 8))
    with pytest.raises(PatternError, match="same tokens"):
        Lsh(lsh_rotations(HEADS, DIM, 4, 1, 0), shared=True).pattern(q, k, legal_full(1, 9, 9, query_offset=1))
