"""The laws that all content predictors keep; `test_content_definitions.py` says what each of them means."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from cases_content import DIM, HEADS, RANK, content_predictors, gate_maps, graph, maps, sequences, unit
from watching import largest_tensor

from sparsefinder.errors import NonFiniteError, PatternError, ShapeError
from sparsefinder.patterns.algebra import materialize
from sparsefinder.patterns.legal import legal_from_mask, legal_full
from sparsefinder.patterns.positional import Nothing, Window
from sparsefinder.plan import plan_matrix
from sparsefinder.predictors import (
    PREDICTORS,
    ChunkClusters,
    Clustered,
    Gate,
    InvertedClusters,
    InvertedLists,
    Lsh,
    Projections,
    Quantization,
    RoutedChunks,
    Routing,
    Smyrf,
    TopKeys,
    clustered_hashes,
    layer_plan,
    lsh_rotations,
    predictor_to,
    ranks_over_sequence,
    smyrf_directions,
    unpicked_queries,
)
from sparsefinder.predictors.lsh import angular_hash

SAMPLES = content_predictors()
ANY_LAYER = [name for name, p in SAMPLES.items() if not ranks_over_sequence(p)]
INVERTED = ("inverted", "inverted root", "inverted metric")
RANKING = [name for name in SAMPLES if name not in ANY_LAYER]


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
    n = 1500
    q, k = sequences(1, n)

    with largest_tensor() as largest:
        SAMPLES[name].pattern(q, k, legal_full(1, n, n, causal=name in INVERTED))
    assert 0 < largest.size < n * n / 2


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
