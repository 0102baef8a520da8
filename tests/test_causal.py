"""Causal models with grouped-query attention: nothing of a row knows of a later token, and padding changes nothing."""

from dataclasses import replace
from typing import Any

import pytest
import tiny_llama
import torch
from causal_cases import KINDS, MIXED, attached_llama, grown_calls, seen_calls
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from sparsefinder.edges import edges_matrix, gold_edges
from sparsefinder.errors import IncompatibleModelError, PatternError
from sparsefinder.hf import LayerCall, LayerInput, attach
from sparsefinder.hf_legal import legal_of_call
from sparsefinder.patterns.legal import Legal
from sparsefinder.patterns.positional import window
from sparsefinder.plan import Plan, build_plan, plan_matrix
from sparsefinder.predictors import Quantization, WindowOnly, random_projections

HEADS, DIM, TOKENS, WIDTH = tiny_llama.HEADS, tiny_llama.DIM, 45, tiny_llama.HEADS * tiny_llama.DIM


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_llama_is_verified_and_shows_q_and_k_after_rope(kv_heads: int, head: bool) -> None:
    lm = tiny_llama.causal_lm(kv_heads=kv_heads)
    ids = torch.tensor([tiny_llama.token_ids(9)])
    mask = torch.ones_like(ids, dtype=torch.bool)
    expected = lm.base_model(input_ids=ids).last_hidden_state
    attached = attach(lm if head else lm.base_model, alpha=1.0)
    hidden, calls = seen_calls(attached, "dense", ids, mask)
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(lm(input_ids=ids).logits, lm.lm_head(expected), atol=1e-4, rtol=0)
    assert [call.layer for call in calls] == [0, 1]
    assert all(call.k.shape == call.v.shape == (1, kv_heads, 9, DIM) for call in calls)
    assert all(call.legal.causal for call in calls)
    # Position 0 is not rotated, later ones are: the first layer's keys of one token at two places differ.
    layer = lm.base_model.layers[0]
    plain = layer.self_attn.k_proj(layer.input_layernorm(lm.base_model.embed_tokens(ids))).view(1, 9, kv_heads, DIM)
    torch.testing.assert_close(calls[0].k[:, :, 0], plain[:, 0], atol=1e-5, rtol=0)
    assert (calls[0].k[:, :, 5] - plain[:, 5]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_knows_of_a_later_token(kind: str) -> None:
    ids = torch.tensor([tiny_llama.token_ids(TOKENS), tiny_llama.token_ids(TOKENS, seed=1)])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :3] = False
    for alpha, tile, t in ((1.0, 16, 19), (1.5, MIXED, 31)):  # inside tiles, and (of some heads) at a tile's end
        attached = attached_llama(kind, tile, alpha)
        other = ids.clone()
        other[:, t + 1 :] = (other[:, t + 1 :] + 7) % tiny_llama.VOCABULARY
        for mode in ("dense", "sparse"):
            (hidden, calls), (came, now) = (seen_calls(attached, mode, tokens, mask) for tokens in (ids, other))
            assert torch.equal(came[:, : t + 1], hidden[:, : t + 1])
            assert not torch.equal(came[:, t + 1 :], hidden[:, t + 1 :])
            for old, new in zip(calls, now, strict=True):
                assert torch.equal(old.output[:, :, : t + 1], new.output[:, :, : t + 1])
                read = [pairs(call)[:, :, : t + 1] for call in (old, new)]
                assert torch.equal(*read)


def pairs(call: LayerCall) -> Tensor:
    """`[B, H, N, M]`: what is read by the plan, and in mode dense the gold graph."""
    graph = call.plan or gold_edges(
        call.q, call.k, call.legal, call.alpha, call.scale, 0.9 if call.alpha == 1 else None
    )
    return torch.stack(
        [
            torch.stack(
                [
                    plan_matrix(graph, call.legal, b, h) if isinstance(graph, Plan) else edges_matrix(graph, b, h)
                    for h in range(HEADS)
                ]
            )
            for b in range(call.q.shape[0])
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_equals_each_text_alone(kind: str) -> None:
    attached = attached_llama(kind, MIXED)
    items = [tiny_llama.token_ids(n, seed=n) for n in (29, 7, 1)]
    alone = [seen_calls(attached, "sparse", *tiny_llama.padded([item], "left")) for item in items]
    for side in ("left", "right"):
        ids, mask = tiny_llama.padded(items, side)
        hidden, calls = seen_calls(attached, "sparse", ids, mask)
        for row, (item, (single, single_calls)) in enumerate(zip(items, alone, strict=True)):
            first = ids.shape[1] - len(item) if side == "left" else 0
            part = slice(first, first + len(item))
            torch.testing.assert_close(hidden[row, part], single[0], atol=1e-5, rtol=0)
            for call, one in zip(calls, single_calls, strict=True):
                assert call.plan is not None
                assert one.plan is not None
                for h in range(HEADS):
                    here = plan_matrix(call.plan, call.legal, row, h)[part, part]
                    assert torch.equal(here, plan_matrix(one.plan, one.legal, 0, h))


def test_predictors_that_rank_over_the_sequence_refuse_a_causal_model() -> None:
    chosen = [Quantization(random_projections(HEADS, 4, DIM, seed, "metric"), 3) for seed in range(2)]
    attached = attach(tiny_llama.causal_lm(), predictors=chosen)
    with pytest.raises(PatternError, match="bidirectional"), torch.no_grad():
        attached.model(input_ids=torch.tensor([tiny_llama.token_ids(9)]))


def mistral(size: int = 6) -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=tiny_llama.VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, intermediate_size=32, max_position_embeddings=128, sliding_window=size,
        initializer_range=0.4, pad_token_id=0,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def test_a_cache_of_windows_gives_what_a_full_pass_gives() -> None:
    attached = attach(mistral(), predictors=[WindowOnly(), None])
    ids, mask = tiny_llama.padded([tiny_llama.token_ids(23), tiny_llama.token_ids(11, seed=1)], "left")
    full, _ = seen_calls(attached, "sparse", ids, mask)
    hidden, parts = grown_calls(attached, ids, mask, 14)
    torch.testing.assert_close(hidden[mask], full[mask], atol=1e-5, rtol=1e-5)
    assert [part.k.shape[2] for part in parts[-2:]] == [6, 6]  # older keys are forgotten


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_sliding_window_layers_stay_windows(alpha: float) -> None:
    model = mistral()
    ids, mask = tiny_llama.padded([tiny_llama.token_ids(30), tiny_llama.token_ids(11, seed=1)], "left")
    expected = model.base_model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    attached = attach(model, alpha=alpha, predictors=[WindowOnly(), None])

    def whole(call: LayerInput) -> Plan:
        raise AssertionError("a sliding-window layer was asked for a plan")

    with torch.no_grad():
        hidden, calls = seen_calls(attached, "sparse", ids, mask)
        with attached.using("sparse", plan_for=whole):
            again = model.base_model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    assert [call.legal.radius for call in calls] == [5, 5]
    if alpha == 1.0:
        torch.testing.assert_close(again[mask], expected[mask], atol=1e-5, rtol=0)
    for call in calls:
        assert call.plan is None
        apart = torch.arange(30)[:, None] - torch.arange(30)[None, :]
        band = (apart >= 0) & (apart <= 5)
        group = HEADS // call.k.shape[1]
        for b in range(2):
            for h in range(HEADS):
                scores = call.scale[h] * call.q[b, h] @ call.k[b, h // group].T
                read = band & mask[b][:, None] & mask[b][None, :]
                assert torch.equal(read, call.legal.matrix(b))
                if alpha == 1.0:
                    weights = torch.softmax(scores.masked_fill(~read, -torch.inf), -1).nan_to_num()
                    output = weights @ call.v[b, h // group]
                    torch.testing.assert_close(call.output[b, h], output, atol=1e-5, rtol=0)
        assert [call.legal.count(b) for b in range(2)] == [int(call.legal.matrix(b).sum()) for b in range(2)]
        for b, h in ((0, 1), (1, 2)):
            gold = edges_matrix(gold_edges(call.q, call.k, call.legal, alpha, call.scale), b, h)
            assert not (gold & ~call.legal.matrix(b)).any()
            assert torch.equal(gold.any(1), mask[b])
        with pytest.raises(PatternError, match="radius 5"):
            build_plan(window(3), call.legal, heads=HEADS)
    assert hidden.isfinite().all()


def test_packed_texts_are_refused() -> None:
    attached = attach(tiny_llama.causal_lm(), predictors=[WindowOnly()] * 2)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    with pytest.raises(IncompatibleModelError, match="packed"), torch.no_grad():
        attached.model(input_ids=torch.tensor([tiny_llama.token_ids(7)]), position_ids=packed, use_cache=False)


@pytest.mark.parametrize("size", [6, 40])
def test_the_probe_reaches_the_edge_of_a_window(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    def wider(*call: Any) -> Legal:
        legal = legal_of_call(*call)
        return replace(legal, radius=size)

    attach(mistral(size))
    monkeypatch.setattr("sparsefinder.hf.legal_of_call", wider)
    with pytest.raises(IncompatibleModelError, match="moved the output"):
        attach(mistral(size))
