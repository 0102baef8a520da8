"""Offline fitting of the content predictors on small planted graphs: it helps, it repeats, it refuses."""

from dataclasses import replace

import pytest
import torch
from test_fit import DIM, HEADS, planted

from sparsefinder.edges import edges_matrix, gold_edges
from sparsefinder.errors import DataError, PatternError
from sparsefinder.patterns.algebra import materialize
from sparsefinder.patterns.legal import legal_from_mask
from sparsefinder.predictors import (
    Gate,
    Predictor,
    RoutedChunks,
    Routing,
    Score,
    TopKeys,
    gate_scores,
    random_projections,
    true_score_projections,
)
from training.config import FitConfig
from training.extract import LayerData
from training.fit_content import (
    _gate_data,
    chunk_data,
    fit_chunks,
    fit_gate,
    fit_inverted,
    fit_inverted_clusters,
    fit_routing,
    fit_svd,
)
from training.objectives import listwise

CONFIG = FitConfig(steps=40, instances=4, rows=6, learning_rate=5e-2)


def recall_and_density(predictor: Predictor, data: LayerData) -> tuple[float, float]:
    legal = legal_from_mask(data.mask)
    pattern = predictor.pattern(data.q, data.k, legal)
    kept, gold, pairs, found = 0, 0, 0, 0
    for b in range(data.q.shape[0]):
        for h in range(data.q.shape[1]):
            matrix, true = materialize(pattern, legal, b, h), edges_matrix(data.edges, b, h)
            kept, gold = kept + int((matrix & true).sum()), gold + int(true.sum())
            pairs, found = pairs + legal.count(b), found + int(matrix.sum())
    return kept / gold, found / pairs


def in_pairs(data: LayerData) -> LayerData:
    """Every two neighbouring tokens alike, so that a chunk of two loses nothing."""
    q, k = (x[:, :, ::2].repeat_interleave(2, 2) for x in (data.q, data.k))
    return replace(data, q=q, k=k, stored=gold_edges(q, k, legal_from_mask(data.mask), data.alpha, data.scale))


def divergence(gate: Gate, data: LayerData) -> float:
    """From the teacher's pooled attention, summed over heads and instances."""
    parts = zip(*_gate_data(data, gate.block), strict=True)
    return sum(float(listwise(gate_scores(gate.maps, q[None], k[None]), goal[None]).sum()) for q, k, goal in parts)


def same(a: Predictor, b: Predictor) -> bool:
    return all(torch.equal(x, b.to_tensors()[name]) for name, x in a.to_tensors().items())


def test_svd_maps_find_the_hidden_directions() -> None:
    data, held = planted(), planted(4, seed=1)
    oracle = true_score_projections(HEADS, DIM, data.scale)
    every = fit_svd(data, 2), oracle, random_projections(HEADS, 2, DIM, 0, "bilinear")
    learned, best, random = (recall_and_density(TopKeys(maps, 5), held)[0] for maps in every)
    assert learned > best - 0.01
    assert learned > random + 0.2
    full, q, k = fit_svd(data, DIM), held.q[:1], held.k[:1]
    scores = [Score(m, torch.full((HEADS,), 0.5)) for m in (full, oracle)]
    legal = legal_from_mask(held.mask[:1])
    matrices = [materialize(p.pattern(q, k, legal), legal, 0, 1) for p in scores]
    assert int((matrices[0] != matrices[1]).sum()) == 0


def test_inverted_lists_keep_more_than_their_share() -> None:
    data, held = planted(), planted(4, seed=1)
    # The keys' own noise is greater than what matters, so the lists in a space without it must do better.
    metric = fit_inverted_clusters(replace(fit_svd(data, 2), form="metric", q_linear=None, k_linear=None, offset=None),
                                   data, 12, -2.0)  # fmt: skip
    for fitted in (fit_inverted(data, 12, -2.5), metric):
        recall, density = recall_and_density(fitted, held)
        assert recall > density + 0.2
        assert fitted.centroids.shape[:2] == (HEADS, 12)
    assert same(fit_inverted(data, 12, -2.5), fit_inverted(data, 12, -1.0))
    with pytest.raises(DataError, match="points for 500 clusters"):
        fit_inverted(data, 500, -1.0)
    with pytest.raises(PatternError, match="form metric"):
        fit_inverted_clusters(fit_svd(data, 2), data, 4, -1.0)


def test_routing_centroids_move_from_their_start_and_ignore_padding() -> None:
    data = planted(lengths=[24, 9, 24, 17, 1, 24])
    filled = replace(data, q=data.q.masked_fill(~data.mask[:, None, :, None], torch.nan))
    start, moved, again = fit_routing(data, 5, decay=1.0), fit_routing(data, 5), fit_routing(filled, 5)
    assert same(moved, again)
    assert not same(start, moved)
    torch.testing.assert_close(moved.centroids.norm(dim=-1), torch.ones(HEADS, 5))
    assert isinstance(moved, Routing)
    with pytest.raises(DataError, match="clusters"):
        fit_routing(data, 500)


def test_the_graph_of_chunks_holds_every_pair_of_chunks_with_a_gold_pair() -> None:
    data = planted(lengths=[24, 9, 24, 17, 1, 24])
    chunks = chunk_data(data, 5)
    assert chunks.mask.sum(1).tolist() == [5, 2, 5, 4, 1, 5]
    for b in range(6):
        for h in range(HEADS):
            gold = edges_matrix(data.edges, b, h)
            expected = [[bool(gold[t : t + 5, s : s + 5].any()) for s in range(0, 24, 5)] for t in range(0, 24, 5)]
            assert edges_matrix(chunks.edges, b, h).tolist() == expected
    torch.testing.assert_close(chunks.q[1, :, 1], data.q[1, :, 5:9].mean(1))
    assert not chunks.k[1, :, 2:].any()


def test_chunk_maps_beat_their_density_in_both_versions() -> None:
    data, held = in_pairs(planted()), in_pairs(planted(4, seed=1))
    first = fit_chunks(data, 2, 2, 8, CONFIG)
    second = RoutedChunks(first.projections, first.centroids, None, 2)
    for fitted in (first, second):
        recall, density = recall_and_density(fitted, held)
        assert recall > density + 0.1
    assert same(first, fit_chunks(data, 2, 2, 8, CONFIG))
    with pytest.raises(DataError, match="bidirectional"):
        fit_chunks(planted(causal=True), 2, 2, 8, CONFIG)


def test_a_gate_learns_where_the_teacher_looks() -> None:
    data, held = in_pairs(planted(lengths=[24, 9, 24, 17, 1, 24])), in_pairs(planted(4, seed=1))
    learned = fit_gate(data, 2, 3, 60, top=3)
    recall, density = recall_and_density(learned, held)
    assert recall > density + 0.2
    rough = planted(lengths=[24, 9, 24, 17, 1, 24])  # two unlike tokens in a block: the start cannot be right
    after, before = (divergence(fit_gate(rough, 2, 3, steps), rough) for steps in (60, 0))
    assert after < 0.9 * before
    assert same(learned, fit_gate(data, 2, 3, 60))
    assert isinstance(learned, Gate)
    with pytest.raises(DataError, match="bidirectional"):
        fit_gate(planted(causal=True), 2, 3)
