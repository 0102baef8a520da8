"""Encoder–decoder models of random weights: decoder self-attention and cross-attention, position biases included."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import MarianConfig, MarianModel, T5Config, T5ForConditionalGeneration, T5Model

from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.edges import edges_matrix, gold_edges
from sparsefinder.errors import IncompatibleModelError, NonFiniteError, ShapeError
from sparsefinder.hf import Attached, LayerCall, LayerInput, attach
from sparsefinder.metrics import counts
from sparsefinder.patterns.legal import Legal
from sparsefinder.patterns.positional import GlobalTokens, Nothing, window
from sparsefinder.plan import Plan, build_plan, plan_matrix
from sparsefinder.predictors import Tiles, layer_plan, random_projections

HEADS, WIDTH, LAYERS = 2, 16, 2
T5 = {
    "vocab_size": 40, "d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": LAYERS, "num_heads": HEADS,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "dropout_rate": 0.0,
    "initializer_factor": 2.0, "decoder_start_token_id": 0,
}  # fmt: skip
MARIAN = {
    "vocab_size": 40, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "init_std": 0.4,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": 39, "decoder_start_token_id": 39, "eos_token_id": 1,
    "forced_eos_token_id": None,
}  # fmt: skip
SCALE = 0.75  # the same number in float32 and float64
CROSS = [3, 5]  # encoder 0 1, then self 2 and cross 3, self 4 and cross 5


def make(name: str) -> Any:
    torch.manual_seed(0)
    return (T5Model(T5Config(**T5)) if name == "T5" else MarianModel(MarianConfig(**MARIAN))).eval()


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(2, 38, (2, n), generator=generator) for n in (19, 11))
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[1, 12:] = 0
    return {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}


def seen(attached: Attached, mode: Any, given_: dict[str, Tensor], **how: Any) -> tuple[Tensor, list[LayerCall]]:
    calls: list[LayerCall] = []
    with torch.no_grad(), attached.using(mode, observe=calls.append, **how):
        hidden: Tensor = attached.model(**given_).last_hidden_state
    return hidden, calls


def ragged() -> dict[str, Tensor]:
    """Padding on the right of both texts."""
    target = torch.ones(2, 11, dtype=torch.long)
    target[0, 7:] = 0
    return {**inputs(), "decoder_attention_mask": target}


def every_pair(call: LayerInput) -> Plan:
    return build_plan(~Nothing(), call.legal, 8, heads=HEADS)


@pytest.mark.parametrize("name", ["T5", "Marian"])
def test_every_attention_of_both_halves_is_seen(name: str) -> None:
    model, given_ = make(name), inputs()
    with torch.no_grad():
        expected = model(**given_).last_hidden_state
    attached = attach(model, alpha=1.0)
    dense, calls = seen(attached, "dense", given_)
    planned, _ = seen(attached, "sparse", given_, plan_for=every_pair)
    torch.testing.assert_close(dense, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(planned, expected, atol=2e-5, rtol=1e-5)
    assert [call.layer for call in calls] == list(range(3 * LAYERS))
    assert [call.layer for call in calls if call.legal.cross] == CROSS
    assert [call.layer for call in calls if call.legal.causal] == [2, 4]
    assert all(call.q.shape[2] == 11 and call.k.shape[2] == 19 for call in calls if call.legal.cross)
    assert [call.bias is not None for call in calls] == [name == "T5" and not call.legal.cross for call in calls]


@pytest.mark.parametrize("name", ["T5", "Marian"])
def test_gold_graphs_patterns_plans_and_metrics_take_every_part(name: str) -> None:
    """Against loops over the model's own calls: entmax of scores with T5's bias over legal pairs."""
    model, given_ = make(name), ragged()
    _, calls = seen(attach(model, alpha=1.5), "dense", given_)
    for call in calls:
        pattern = window(3) | GlobalTokens(1)
        plan = build_plan(pattern, call.legal, 2, heads=HEADS)
        gold = gold_edges(call.q, call.k, call.legal, 1.5, call.scale, bias=call.bias)
        sets = [counts(call.q, call.k, s, call.legal, 1.5, call.scale, bias=call.bias) for s in (pattern, plan)]
        for b, h in itertools.product(range(2), range(HEADS)):
            legal = legal_pairs(call, given_, b)
            assert torch.equal(call.legal.matrix(b), legal)
            bias = torch.zeros(legal.shape) if call.bias is None else call.bias[min(b, call.bias.shape[0] - 1), h]
            p = _weights(call.q[b, h], call.k[b, h], bias, legal.numpy(), 1.5, float(call.scale[h]))
            edges = edges_matrix(gold, b, h).numpy()
            assert (p[edges != (p > 0)] < 1e-9).all()  # scores at the threshold itself
            near = [[abs(i - j) <= 1 or 0 in (i, j) for j in range(legal.shape[1])] for i in range(legal.shape[0])]
            kept = [torch.tensor(near) & legal, plan_matrix(plan, call.legal, b, h)]
            assert not (kept[0] & ~kept[1]).any()
            for table, matrix in zip(sets, kept, strict=True):
                assert table.legal[b, h] == legal.sum()
                assert table.kept[b, h] == matrix.sum()
                assert table.kept_gold[b, h] == (matrix.numpy() & edges).sum()
                assert float(table.mass_sum[b, h]) == pytest.approx(p[matrix.numpy()].sum(), abs=1e-4)


def legal_pairs(call: LayerCall, given_: dict[str, Tensor], b: int) -> Tensor:
    source, target = (given_[f"{part}attention_mask"][b].bool() for part in ("", "decoder_"))
    if call.layer < LAYERS:
        return source[:, None] & source[None, :]
    if call.layer in CROSS:  # which rows are real is not told there
        return torch.ones(11, 1, dtype=torch.bool) & source[None, :]
    return target[:, None] & target[None, :] & torch.ones(11, 11, dtype=torch.bool).tril()


def test_in_cross_attention_no_query_has_a_key_of_its_own() -> None:
    _, calls = seen(attach(make("Marian")), "dense", inputs())
    call = calls[CROSS[0]]
    tiles = Tiles(random_projections(HEADS, 3, 8, seed=0, form="bilinear"), keys_per_tile=2)
    for size in (1, 4):
        plan = layer_plan(tiles, call.q, call.k, call.legal, Nothing(), size)
        assert plan.offsets.diff().tolist() == [2] * plan.tile_start.shape[0]
    nothing = build_plan(Nothing(), call.legal, 4, heads=HEADS)
    assert nothing.keys.shape == (0,)
    for name in ("reference", "gather", "cpu"):
        output = attend(call.q, call.k, call.v, nothing, legal=call.legal, backend=name)
        assert torch.equal(output, torch.zeros_like(call.q))
    own = build_plan(Nothing(), replace(call.legal, cross=False), 1, heads=HEADS)
    assert own.keys.tolist() == list(range(11)) * 2 * HEADS
    band = build_plan(window(3), call.legal, 1, heads=HEADS)
    assert torch.equal(plan_matrix(band, call.legal, 1, 0), build_band(11, 19) & call.legal.matrix(1))


def build_band(n: int, m: int) -> Tensor:
    return torch.tensor([[abs(i - j) <= 1 for j in range(m)] for i in range(n)])


@pytest.mark.parametrize("name", ["T5", "Marian"])
def test_texts_of_equal_length_still_have_cross_attention(name: str) -> None:
    given_ = inputs()
    given_["decoder_input_ids"] = given_["input_ids"].flip(-1)
    model = make(name)
    with torch.no_grad():
        expected = model(**given_).last_hidden_state
    dense, calls = seen(attach(model, alpha=1.0), "dense", given_)
    torch.testing.assert_close(dense, expected, atol=2e-5, rtol=1e-5)
    assert all(call.legal.query_real.all() for call in calls if call.legal.cross)


@pytest.mark.parametrize("name", ["T5", "Marian"])
def test_no_decoder_row_knows_of_a_later_token_and_padding_changes_nothing(name: str) -> None:
    model, given_ = make(name), inputs()
    maps = [random_projections(HEADS, 4, 8, seed, "bilinear") for seed in range(3 * LAYERS)]
    tiles = [Tiles(m, keys_per_tile=3, distance_weight=torch.full((HEADS,), -0.2)) for m in maps]
    attached = attach(model, predictors=tiles, positional=window(3), tile_size=4)
    hidden, _ = seen(attached, "sparse", given_)
    changed = dict(given_, decoder_input_ids=given_["decoder_input_ids"].clone())
    changed["decoder_input_ids"][:, 6:] = (changed["decoder_input_ids"][:, 6:] + 3) % 38
    other, _ = seen(attached, "sparse", changed)
    assert torch.equal(other[:, :6], hidden[:, :6])
    assert not torch.equal(other[:, 6:], hidden[:, 6:])
    alone = {"input_ids": given_["input_ids"][1:, :12], "decoder_input_ids": given_["decoder_input_ids"][1:]}
    torch.testing.assert_close(seen(attached, "sparse", alone)[0][0], hidden[1], atol=2e-5, rtol=1e-5)
    left = dict(given_, attention_mask=given_["attention_mask"].flip(-1))
    with pytest.raises(IncompatibleModelError, match="padded on the right"):
        seen(attached, "sparse", left)


def test_a_t5_writes_the_same_token_by_token() -> None:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**T5)).eval()
    maps = [random_projections(HEADS, 4, 8, seed, "bilinear") for seed in range(3 * LAYERS)]
    attached = attach(model, predictors=[Tiles(m, keys_per_tile=3) for m in maps], positional=window(3), tile_size=4)
    given_ = {name: tensor for name, tensor in inputs().items() if not name.startswith("decoder")}
    with torch.no_grad(), attached.generation():
        written = model.generate(**given_, max_new_tokens=13, do_sample=False, eos_token_id=None)
    ids = torch.zeros(2, 1, dtype=torch.long)
    for _ in range(13):
        with torch.no_grad(), attached.using("sparse"):
            logits = model(**given_, decoder_input_ids=ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(written, ids)


@given(st.integers(0, 999), st.booleans(), st.sampled_from([1.0, 1.5, 2.0]))
def test_a_bias_is_added_to_the_scores(seed: int, own: bool, alpha: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, m = (int(x) for x in torch.randint(1, 12, (2,), generator=generator))
    q, k, v = (torch.randn(2, h, t, 4, generator=generator) for h, t in ((4, n), (2, m), (2, m)))
    bias = torch.randn(2 if own else 1, 4, n, m, generator=generator) * 2
    real = torch.rand(2, m, generator=generator) < 0.8
    legal = Legal(torch.ones(2, n, dtype=torch.bool), real)
    plan = build_plan(window(5), legal, 4, heads=4)
    scale = SCALE
    for name in ("reference", "gather", "cpu"):
        came = attend(q, k, v, plan, legal=legal, alpha=alpha, scale=scale, bias=bias, backend=name)
        for b in range(2):
            for h in range(4):
                allowed = plan_matrix(plan, legal, b, h).numpy()
                expected = _attention(q[b, h], k[b, h // 2], v[b, h // 2], bias[b if own else 0, h], allowed, alpha)
                np.testing.assert_allclose(came[b, h].numpy(), expected, atol=2e-6)
    full = attend_dense(q, k, v, legal, alpha=alpha, scale=scale, bias=bias)
    b, h = 1, 3
    expected = _attention(q[b, h], k[b, 1], v[b, 1], bias[-1, h], legal.matrix(b).numpy(), alpha)
    np.testing.assert_allclose(full[b, h].numpy(), expected, atol=2e-6)
    asked = bias.clone().requires_grad_()
    torch.testing.assert_close(
        attend_dense(q, k, v, legal, alpha=alpha, scale=scale, bias=asked), full, atol=2e-6, rtol=0
    )


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, allowed: np.ndarray, alpha: float) -> np.ndarray:
    p = _weights(q, k, bias, allowed, alpha)
    out = np.zeros((q.shape[0], v.shape[1]))
    for i in range(q.shape[0]):
        for j in range(k.shape[0]):
            out[i] += p[i, j] * v[j].double().numpy()
    return out


def _weights(q: Tensor, k: Tensor, bias: Tensor, allowed: np.ndarray, alpha: float, scale: float = SCALE) -> np.ndarray:
    p = np.zeros(allowed.shape)
    for i in range(q.shape[0]):
        keys = [j for j in range(k.shape[0]) if allowed[i, j]]
        products = [sum(float(a) * float(b) for a, b in zip(q[i], k[j], strict=True)) for j in keys]
        scores = [scale * product + float(bias[i, j]) for j, product in zip(keys, products, strict=True)]
        for j, share in zip(keys, oracles.entmax(scores, alpha), strict=True):
            p[i, j] = share
    return p


@given(st.integers(0, 999), st.booleans())
def test_gold_graphs_and_counts_know_of_the_bias(seed: int, causal: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, more = (int(x) for x in torch.randint(1, 9, (2,), generator=generator))
    m = n + more
    q, k = (torch.randn(1, h, t, 4, generator=generator, dtype=torch.float64) for h, t in ((4, n), (2, m)))
    bias = torch.randn(1, 4, n, m, generator=generator, dtype=torch.float64) * 2
    real = torch.rand(1, m, generator=generator) < 0.8
    legal = Legal(torch.ones(1, n, dtype=torch.bool), real, causal, more if causal else 0)
    plan = build_plan(window(3), legal, 4, heads=4)
    gold = gold_edges(q, k, legal, 1.5, SCALE, bias=bias)
    table = counts(q, k, plan, legal, 1.5, SCALE, bias=bias)
    for h in range(4):
        p = _weights(q[0, h], k[0, h // 2], bias[0, h], legal.matrix(0).numpy(), 1.5)
        kept = plan_matrix(plan, legal, 0, h).numpy()
        assert np.array_equal(edges_matrix(gold, 0, h).numpy(), p > 0)
        assert int(table.gold[0, h]) == (p > 0).sum()
        assert int(table.kept_gold[0, h]) == ((p > 0) & kept).sum()
        assert float(table.mass_sum[0, h]) == pytest.approx(p[kept].sum(), abs=1e-9)


@pytest.mark.unchecked
def test_a_bias_that_does_not_fit_is_an_error() -> None:
    q, k = torch.randn(2, 4, 5, 4), torch.randn(2, 4, 6, 4)
    legal = Legal(torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"bias: expected \(2, 4, 5, 6\).*got \(1, 4, 5, 5\)"):
        attend_dense(q, k, k, legal, bias=torch.zeros(1, 4, 5, 5))
    with pytest.raises(NonFiniteError, match="bias"):
        attend_dense(q, k, k, legal, bias=torch.full((1, 4, 5, 6), -torch.inf))
