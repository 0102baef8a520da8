"""Faults that users of other systems met, each on a causal model: a tiny random Llama with grouped-query attention."""

import itertools
import os
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import oracles
import pytest
import tiny_llama
import torch
from causal_cases import attached_llama, predictors, seen_calls
from torch import Tensor

import training.threads
from sparsefinder.artifact import Artifact, Card, load, save
from sparsefinder.attaching import attach_artifact
from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.edges import gold_edges, head_edges
from sparsefinder.entmax import entmax
from sparsefinder.errors import AlphaError, ArtifactError, IncompatibleModelError, NonFiniteError, PatternError
from sparsefinder.hf import Attached, LayerCall, attach
from sparsefinder.patterns.algebra import materialize
from sparsefinder.patterns.legal import legal_from_mask, legal_full
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window, window
from sparsefinder.patterns.random_keys import RandomKeys
from sparsefinder.plan import build_plan, computed_pairs, plan_matrix
from sparsefinder.predictors import Clusters, Tiles, layer_plan, random_projections
from sparsefinder.predictors.tiles import EVERY_KEY
from training.config import FitConfig
from training.extract import extract, make_manifest
from training.fit import fit
from training.objectives import sample_negatives

HEADS, DIM = tiny_llama.HEADS, tiny_llama.DIM
KV = tiny_llama.KV_HEADS


def left(*lengths: int) -> tuple[Tensor, Tensor]:
    return tiny_llama.padded([tiny_llama.token_ids(n, seed=n) for n in lengths], "left")


def plan_of(call: LayerCall, b: int, h: int) -> Tensor:
    assert call.plan is not None
    return plan_matrix(call.plan, call.legal, b, h)


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_1_rows_without_any_key_are_zero_and_harm_nobody(mode: Any) -> None:
    attached = attached_llama("tiles", 8)
    alone, _ = seen_calls(attached, mode, *left(21))
    ids, mask = left(21)
    ids, mask = torch.cat([ids, ids]), torch.cat([mask, torch.zeros_like(mask)])
    together, calls = seen_calls(attached, mode, ids, mask)
    torch.testing.assert_close(together[0], alone[0], atol=1e-5, rtol=0)
    assert together.isfinite().all()
    for call in calls:
        assert torch.equal(call.output[1], torch.zeros_like(call.output[1]))
        assert call.plan is None or not (call.plan.tile_batch == 1).any()
    nobody, _ = seen_calls(attached, mode, ids[1:], mask[1:])
    assert nobody.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_2_half_precision_has_the_graph_and_the_plan_of_single(dtype: torch.dtype) -> None:
    attached = attached_llama("tiles", 8)
    attached.model.to(dtype)
    for mode in ("dense", "sparse"):
        hidden, calls = seen_calls(attached, mode, *left(30, 11))
        assert hidden.dtype == dtype
        assert hidden.isfinite().all()
        for call in calls:
            single = call.q.float(), call.k.float(), call.v.float()
            assert call.q.dtype == dtype
            few = gold_edges(call.q, call.k, call.legal, 1.5, call.scale)
            assert torch.equal(few.flat, gold_edges(*single[:2], call.legal, 1.5, call.scale.float()).flat)
            if call.plan is not None:
                layer = attached.predictors[call.layer]
                assert layer is not None
                plan = layer_plan(layer, *single[:2], call.legal, attached.positional, 8, call.layer)
                assert torch.equal(plan.keys, call.plan.keys)
                output = attend(*single, plan, legal=call.legal, scale=call.scale.float())
                torch.testing.assert_close(call.output, output.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_2_a_lone_best_score_among_low_ones(dtype: torch.dtype, alpha: float) -> None:
    k = torch.full((1, 1, 129, 1), -1000.0, dtype=dtype)
    k[0, 0, 77] = -995  # of 128 others
    q = torch.ones(1, 1, 129, 1, dtype=dtype)
    gold = gold_edges(q, k, legal_full(1, 129, 129, causal=True), alpha, 1.0)
    support = {divmod(int(e), 129) for e in head_edges(gold, 0, 0)}
    lone = float(k[0, 0, 77] - k[0, 0, 0]) > 2  # bfloat16 knows no number between -992 and -996
    assert lone
    assert support == {(i, j) for i in range(129) for j in ([77] if i >= 77 else range(i + 1))}


def test_3_alpha_one_is_softmax_ten_is_finite_and_less_than_one_refused() -> None:
    lm = tiny_llama.causal_lm()
    ids, mask = left(20, 9)
    places = tiny_llama.positions(mask)
    expected = lm.model(input_ids=ids, attention_mask=mask.long(), position_ids=places).last_hidden_state
    hidden, _ = seen_calls(attach(lm, alpha=1.0), "dense", ids, mask)
    torch.testing.assert_close(hidden[mask], expected[mask], atol=1e-5, rtol=0)
    hidden, calls = seen_calls(attach(lm, alpha=10.0, predictors=predictors("tiles")), "sparse", ids, mask)
    assert hidden.isfinite().all()
    ones = [attend(c.q, c.k, torch.ones_like(c.v), c.plan, legal=c.legal, alpha=10.0) for c in calls if c.plan]
    assert all(torch.allclose(one.transpose(1, 2)[mask], torch.ones(())) for one in ones)
    with pytest.raises(AlphaError, match=r"at least 1, got 0\.9"):
        seen_calls(attach(lm, alpha=0.9), "dense", ids, mask)


@pytest.mark.parametrize("mode", ["dense", "sparse"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_4_numbers_that_are_not_finite_are_refused_in_tokens_and_ignored_in_padding(mode: Any, bad: float) -> None:
    attached = attached_llama("tiles", 8)
    ids, mask = left(20, 9)
    good, _ = seen_calls(attached, mode, ids, mask)
    with torch.no_grad():
        attached.model.embed_tokens.weight[0] = bad  # what padding is embedded as
    padded, _ = seen_calls(attached, mode, ids, mask)
    assert torch.equal(padded[mask], good[mask])
    ids[1, -2] = 0
    with pytest.raises(NonFiniteError, match=r"^(q|scores): expected (finite )?numbers.*got NaN"):
        seen_calls(attached, mode, ids, mask)


@pytest.mark.parametrize("n", [1, 2, 63, 64])
def test_5_a_text_within_one_tile_reads_all_its_past(n: int) -> None:
    attached = attached_llama("tiles", 64)
    (dense, _), (sparse, calls) = (seen_calls(attached, mode, *left(n)) for mode in ("dense", "sparse"))
    torch.testing.assert_close(sparse, dense, atol=1e-5, rtol=0)
    for call in calls:
        assert torch.equal(plan_of(call, 0, 1), torch.ones(n, n, dtype=torch.bool).tril())


@pytest.mark.parametrize("kind", ["tiles", "clusters", "budget"])
def test_6_padding_from_20_to_32_changes_not_one_edge(kind: str) -> None:
    attached = attached_llama(kind, 8)
    item = tiny_llama.token_ids(20)
    alone, calls = seen_calls(attached, "sparse", *tiny_llama.padded([item], "left"))
    for side in ("left", "right"):
        ids, mask = tiny_llama.padded([item, tiny_llama.token_ids(32, seed=1)], side)
        part = slice(12, 32) if side == "left" else slice(0, 20)
        hidden, wide = seen_calls(attached, "sparse", ids, mask)
        torch.testing.assert_close(hidden[0, part], alone[0], atol=1e-5, rtol=0)
        for call, one, h in itertools.product(wide[:1], calls[:1], range(HEADS)):
            gold, single = (gold_edges(c.q, c.k, c.legal, 1.5, c.scale) for c in (call, one))
            here, there = ({divmod(int(e), m) for e in head_edges(g, 0, h)} for g, m in ((gold, 32), (single, 20)))
            assert here == {(i + part.start, j + part.start) for i, j in there}
            assert torch.equal(plan_of(call, 0, h)[part, part], plan_of(one, 0, h))


@pytest.mark.parametrize("side", ["left", "right"])
def test_7_a_window_that_lies_in_padding(side: str) -> None:
    mask = torch.arange(2048)[None] < torch.tensor([[3], [2048]])
    mask = mask.flip(-1) if side == "left" else mask
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 2048, DIM, generator=generator) for h in (2, 1, 1))
    legal = legal_from_mask(mask, causal=True)
    plan = build_plan(window(9), legal, 32, heads=2)
    output = attend(q, k, v, plan, legal=legal)
    part = slice(2045, 2048) if side == "left" else slice(0, 3)
    alone = attend_dense(q[:1, :, part], k[:1, :, part], v[:1, :, part], legal_full(1, 3, 3, causal=True))
    torch.testing.assert_close(output[:1, :, part], alone, atol=1e-6, rtol=0)
    assert output.isfinite().all()
    assert (output[0].abs().sum((0, -1)) > 0).sum() == 3


@pytest.mark.parametrize("kind", ["tiles", "clusters"])
def test_8_the_same_text_twice_is_bit_equal_with_random_keys_too(kind: str) -> None:
    extra = window(3) | RandomKeys(3, causal=True)
    attached = attach(tiny_llama.causal_lm(), predictors=predictors(kind), positional=extra, tile_size=8)
    (one, first), (two, second) = (seen_calls(attached, "sparse", *left(40, 13)) for _ in range(2))
    assert torch.equal(one, two)
    for a, b in zip(first, second, strict=True):
        assert a.plan is not None
        assert b.plan is not None
        assert torch.equal(a.plan.keys, b.plan.keys)


@pytest.mark.parametrize("side", ["left", "right"])
def test_9_every_text_has_its_own_number_of_global_tokens(side: str) -> None:
    lengths, counts = (25, 11, 4), (0, 5, 2)
    items = [tiny_llama.token_ids(n, seed=n) for n in lengths]
    lm = tiny_llama.causal_lm()

    def attached(count: int | tuple[int, ...]) -> Attached:
        return attach(lm, predictors=predictors("tiles"), positional=GlobalTokens(count), tile_size=8)

    ids, mask = tiny_llama.padded(items, side)
    together, calls = seen_calls(attached(counts), "sparse", ids, mask)
    for b, (item, count) in enumerate(zip(items, counts, strict=True)):
        alone, single = seen_calls(attached(count), "sparse", *tiny_llama.padded([item], "left"))
        torch.testing.assert_close(together[b][mask[b]], alone[0], atol=1e-5, rtol=0)
        own = plan_of(calls[0], b, 0)[mask[b]][:, mask[b]]
        assert torch.equal(own, plan_of(single[0], 0, 0))
        assert own[:, : min(count, len(item))].sum() == own.new_ones(len(item), count).tril().sum()


def test_10_what_an_artifact_lacks_is_named(tmp_path: Any) -> None:
    teacher = tiny_llama.teacher()
    tiles = tuple(predictors("tiles"))
    card = Card(
        teacher.name, teacher.fingerprint, 2, HEADS, KV, DIM, 1.5, ((1.0,) * HEADS,) * 2, "none", "random",
        window_size=3, global_tokens=1, tile_size=8,
    )  # fmt: skip
    with pytest.raises(ArtifactError, match="layers: expected predictors for 2 layers, got 1"):
        save(tmp_path / "a", Artifact(card, tiles[:1]))
    with pytest.raises(ArtifactError, match="layer 1: expected a predictor, since it attends to the whole text"):
        attach_artifact(teacher, Artifact(card, (tiles[0], None)))
    with pytest.raises(IncompatibleModelError, match="predictors: expected one for each of 2 layers, got 1"):
        attach(teacher.model, predictors=tiles[:1])
    save(tmp_path / "a", Artifact(card, tiles))
    (tmp_path / "a" / "predictors.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"predictors\.safetensors: missing"):
        load(tmp_path / "a")


def test_11_a_query_whose_cluster_holds_no_earlier_key_reads_itself() -> None:
    attached = attach(tiny_llama.causal_lm(), predictors=predictors("clusters"), tile_size=1)
    hidden, calls = seen_calls(attached, "sparse", *left(30, 6))
    assert hidden.isfinite().all()
    lonely = 0
    for call, b, h in itertools.product(calls, range(2), range(HEADS)):
        matrix, real = plan_of(call, b, h), call.legal.query_real[b]
        assert matrix.diagonal()[real].all()
        alone = (matrix.sum(1) == 1) & real
        alone[24 if b else 0] = False  # the first token has no earlier key at all
        lonely += int(alone.sum())
        torch.testing.assert_close(call.output[b, h, alone], call.v[b, h // (HEADS // KV), alone])
    assert lonely > 10


def test_12_identical_vectors_use_one_cluster_and_say_so() -> None:
    maps = random_projections(HEADS, 4, DIM, 0, "metric")
    flat = replace(maps, q_map=torch.zeros_like(maps.q_map), k_map=torch.zeros_like(maps.k_map))
    one = Clusters(flat, torch.randn(HEADS, 5, 4), torch.ones(HEADS, dtype=torch.long))
    attached = attach(tiny_llama.causal_lm(), predictors=[one, one], tile_size=8)
    dense, _ = seen_calls(attached, "dense", *left(20, 9))
    with pytest.warns(UserWarning, match=r"all projected vectors of heads \[0, 1, 2, 3\] are identical"):
        sparse, calls = seen_calls(attached, "sparse", *left(20, 9))
    assert all(torch.equal(plan_of(call, b, 2), call.legal.matrix(b)) for call in calls for b in range(2))
    torch.testing.assert_close(sparse, dense, atol=1e-5, rtol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen_calls(attached_llama("clusters", 8), "sparse", *left(20, 9))


def test_13_a_fit_is_the_same_on_any_number_of_threads(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = tiny_llama.teacher()
    attached = attach(teacher.model)
    for split, first in (("train", 0), ("heldout", 3)):
        chunks = [tiny_llama.token_ids(24, seed=first + n) for n in range(3)]
        about = {"split": split, "shard_size": 3, "seed": 0}
        extract(teacher, attached, chunks, tmp_path / split, make_manifest(teacher, attached, chunks, **about))
    config = FitConfig(objective="hinge", kind="clusters", clusters=8, rank=2, steps=3, window_size=3)
    found = []
    for threads, long in ((1, 1024), (4, 1024), (4, 8)):  # then, as of long texts, several layers at once
        torch.set_num_threads(threads)
        monkeypatch.setattr(training.threads, "LONG", long)
        monkeypatch.setattr(os, "cpu_count", lambda: 2)
        found.append(fit(tmp_path / "train", tmp_path / "heldout", config))
        assert torch.get_num_threads() == threads
    for other in found[1:]:
        for a, b in zip(found[0].layers, other.layers, strict=True):
            assert a is not None
            assert b is not None
            assert all(torch.equal(x, y) for x, y in zip(a.to_tensors().values(), b.to_tensors().values(), strict=True))


def test_14_windows_are_odd_and_reach_as_far_back_as_their_radius() -> None:
    with pytest.raises(PatternError, match="odd number"):
        window(4)
    attached = attach(tiny_llama.causal_lm(), predictors=predictors("window"), positional=window(5), tile_size=1)
    _, calls = seen_calls(attached, "sparse", *left(12))
    apart = torch.arange(12)[:, None] - torch.arange(12)[None, :]
    assert torch.equal(plan_of(calls[0], 0, 3), (apart >= 0) & (apart <= 2))


def test_15_a_key_of_window_global_and_prediction_counts_once() -> None:
    attached = attach(
        tiny_llama.causal_lm(), predictors=predictors("score"), positional=window(5) | GlobalTokens(2), tile_size=1
    )
    _, calls = seen_calls(attached, "sparse", *left(18))
    for call, h in itertools.product(calls, range(HEADS)):
        assert call.plan is not None
        kv, read = h // (HEADS // KV), plan_of(call, 0, h)
        layer = attached.predictors[call.layer]
        assert layer is not None
        chosen = materialize(layer.pattern(call.q, call.k, call.legal), call.legal, 0, h)
        assert chosen[:, :2].any()  # which are global
        assert chosen.diagonal().any()  # in the window
        for i in range(18):
            keys = read[i].nonzero().flatten()
            scores = [float(call.scale[h] * call.q[0, h, i] @ call.k[0, kv, j]) for j in keys]
            expected = oracles.entmax(scores, 1.5) @ call.v[0, kv, keys].double().numpy()
            np.testing.assert_allclose(call.output[0, h, i].numpy(), expected, atol=1e-5)
    for call in calls:
        assert call.plan is not None
        for low, high in itertools.pairwise(call.plan.offsets.tolist()):
            assert (call.plan.keys[low:high].diff() > 0).all()


def test_16_negatives_are_never_from_the_future_nor_gold() -> None:
    attached = attach(tiny_llama.causal_lm())
    _, calls = seen_calls(attached, "dense", *left(24, 9))
    call = calls[1]
    legal = torch.stack([call.legal.matrix(b) for b in range(2)])
    scores = call.scale[:, None, None] * call.q @ call.k.repeat_interleave(HEADS // KV, 1).mT
    gold = entmax(scores, 1.5, legal[:, None]) > 0
    scarce = 0
    for seed in range(20):
        flat, counts = sample_negatives(gold, legal, torch.Generator().manual_seed(seed))
        chosen = torch.zeros(gold.numel(), dtype=torch.long).index_add_(0, flat, torch.ones_like(flat)).view(gold.shape)
        assert chosen.max() == 1
        assert not (chosen.bool() & (gold | ~legal[:, None])).any()
        free = (legal[:, None] & ~gold).sum(-1)
        assert torch.equal(counts, torch.minimum(gold.sum(-1), free))
        scarce += int((free < gold.sum(-1)).sum())
    assert scarce > 0  # first rows: more gold keys than others


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_17_a_length_that_is_no_power_of_two(alpha: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 1100, DIM, generator=generator) for h in (HEADS, KV, KV))
    legal = legal_full(1, 1100, 1100, causal=True)
    tiles = Tiles(random_projections(HEADS, 4, DIM, 0, "bilinear"), threshold=EVERY_KEY)
    every = layer_plan(tiles, q, k, legal, window(5), 32)
    assert computed_pairs(every).tolist() == [[1100 * 1101 // 2] * HEADS]
    dense = attend_dense(q, k, v, legal, alpha=alpha)
    torch.testing.assert_close(attend(q, k, v, every, legal=legal, alpha=alpha), dense, atol=2e-6, rtol=1e-5)
    few = layer_plan(replace(tiles, threshold=-6.0), q, k, legal, Window(2) | Nothing(), 32)
    assert (computed_pairs(few) < 0.6 * computed_pairs(every)).all()
    backends = [attend(q, k, v, few, legal=legal, alpha=alpha, backend=name) for name in ("cpu", "reference")]
    torch.testing.assert_close(*backends, atol=2e-6, rtol=1e-5)
