"""Generation with a key-value cache: token by token, the plans and outputs of one pass over the whole text."""

from dataclasses import replace

import causal_cases
import pytest
import tiny_llama
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from sparsefinder.errors import ConfigError, DataError, IncompatibleModelError, PatternError
from sparsefinder.generation import Generation
from sparsefinder.hf import Attached, attach
from sparsefinder.patterns.legal import Legal, legal_full
from sparsefinder.patterns.positional import GlobalTokens, window
from sparsefinder.plan import Plan, plan_matrix
from sparsefinder.predictors import Predictor, Quantization, Tiles, WindowOnly, layer_plan, random_projections

HEADS, DIM = tiny_llama.HEADS, tiny_llama.DIM


def in_float64(attached: Attached) -> Attached:
    """A product of another shape has other last bits; in float64 none of them reaches a threshold of float32."""
    attached.model.double()
    return attached


def require_equal(attached: Attached, ids: Tensor, mask: Tensor, prompt: int, step: int = 1) -> None:
    full, whole = causal_cases.seen_calls(attached, "sparse", ids, mask)
    hidden, parts = causal_cases.grown_calls(attached, ids, mask, prompt, step)
    torch.testing.assert_close(hidden[mask], full[mask], atol=1e-9, rtol=1e-9)
    assert len(parts) == len(whole) * (1 + ids.shape[1] - prompt)
    expected = [matrices(call.plan, call.legal) for call in whole]
    for part in parts:
        here, start = matrices(part.plan, part.legal), part.legal.query_offset
        assert torch.equal(here, expected[part.layer][:, :, start : start + here.shape[2], : here.shape[3]])


def matrices(plan: Plan | None, legal: Legal) -> Tensor:
    """`[B, H, N, M]`: which pairs a plan computes."""
    assert plan is not None
    batch, heads = plan.shape[:2]
    return torch.stack([torch.stack([plan_matrix(plan, legal, b, h) for h in range(heads)]) for b in range(batch)])


@pytest.mark.parametrize("kind", causal_cases.KINDS)
def test_decoding_equals_the_full_pass(kind: str) -> None:
    attached = in_float64(causal_cases.attached_llama(kind, causal_cases.MIXED))
    items = [tiny_llama.token_ids(n, seed=n) for n in (38, 25)]
    ids, mask = tiny_llama.padded(items, "left")
    require_equal(attached, ids, mask, 20)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_a_text_grows_from_its_first_token_or_several_at_a_time(alpha: float) -> None:
    attached = in_float64(causal_cases.attached_llama("tiles", 8, alpha))
    ids, mask = tiny_llama.padded([tiny_llama.token_ids(29)], "left")
    require_equal(attached, ids, mask, 1)
    require_equal(attached, ids, mask, 9, step=5)


def test_attached_to_generate_it_writes_what_greedy_full_passes_write() -> None:
    lm = tiny_llama.causal_lm()
    attached = attach(lm, predictors=causal_cases.predictors("tiles"), positional=window(5), tile_size=8)
    ids, mask = tiny_llama.padded([tiny_llama.token_ids(21), tiny_llama.token_ids(13, seed=1)], "left")
    with torch.no_grad(), attached.generation():
        written = lm.generate(
            input_ids=ids, attention_mask=mask.long(), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    for _ in range(12):
        places = tiny_llama.positions(mask)
        with torch.no_grad(), attached.using("sparse"):
            logits = lm(input_ids=ids, attention_mask=mask.long(), position_ids=places, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.bool)], 1)
    assert torch.equal(written, ids)


def test_dense_attention_needs_nothing_but_the_cache() -> None:
    lm = tiny_llama.causal_lm()
    attached = attach(lm, predictors=causal_cases.predictors("tiles"))
    ids, mask = tiny_llama.padded([tiny_llama.token_ids(21), tiny_llama.token_ids(13, seed=1)], "left")
    places = tiny_llama.positions(mask)
    with torch.no_grad(), attached.using("dense"):
        full = lm(input_ids=ids, attention_mask=mask.long(), position_ids=places).logits
        first = lm(input_ids=ids[:, :15], attention_mask=mask[:, :15].long(), position_ids=places[:, :15])
        rest = lm(
            input_ids=ids[:, 15:], attention_mask=mask.long(), position_ids=places[:, 15:],
            past_key_values=first.past_key_values,
        )  # fmt: skip
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1)[mask], full[mask], atol=1e-4, rtol=1e-4)


def random_qkv(seed: int, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, HEADS, tokens, DIM), (batch, 2, tokens, DIM)
    q, k = (torch.randn(*shape, generator=generator) * 2 for shape in shapes)
    return q, k


@settings(max_examples=60)
@given(st.data())
def test_given_the_same_q_and_k_every_list_is_bit_equal(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(2, 40), "tokens")
    padding = data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=2), "padding")
    prompt = data.draw(st.integers(max(padding) + 1, tokens), "prompt")
    size = data.draw(st.one_of(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=4, max_size=4)), "tile size")
    kind = data.draw(st.sampled_from(causal_cases.KINDS), "predictor")
    before, globals_ = data.draw(st.integers(0, 9), "queries before"), data.draw(st.integers(0, 12), "globals")
    predictor = causal_cases.predictors(kind)[0]
    if isinstance(predictor, Tiles):
        predictor = replace(predictor, queries_before=before)
    positional = window(data.draw(st.sampled_from([0, 1, 5]), "window")) | GlobalTokens(globals_)
    tiles: int | Tensor = size if isinstance(size, int) else torch.tensor(size)
    q, k = random_qkv(data.draw(st.integers(0, 99), "seed"), len(padding), tokens)
    real = torch.arange(tokens)[None, :] >= torch.tensor(padding)[:, None]
    legal = Legal(real, real, True)
    whole = layer_plan(predictor, q, k, legal, positional, tiles)
    generation, expected = Generation([predictor], positional, tiles), matrices(whole, legal)
    for start, end in ((0, prompt), *((t, t + 1) for t in range(prompt, tokens))):
        so_far = Legal(real[:, start:end], real[:, :end], True, start)
        for rows, part, plan in generation.plans(0, q[:, :, start:end], k[:, :, :end], so_far):
            assert torch.equal(matrices(plan, part), expected[:, :, start + rows.start : start + rows.stop, :end])


def test_what_does_not_continue_the_text_is_an_error() -> None:
    attached = causal_cases.attached_llama("tiles", 8)
    model, cache = attached.model, DynamicCache(config=attached.model.config)
    ids = torch.tensor([tiny_llama.token_ids(20), tiny_llama.token_ids(20, seed=1)])
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        with pytest.raises(ConfigError, match="generation"):
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        with attached.generation(), pytest.raises(DataError, match="the token after 0"):  # no prefill here
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
    with torch.no_grad(), attached.generation():
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache.batch_select_indices(torch.tensor([1, 0]))  # as beam search does
        with pytest.raises(DataError, match="beam search"):
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
    with torch.no_grad(), attached.generation():
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        with pytest.raises(DataError, match="left only"):
            model(input_ids=ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config))


def test_what_cannot_answer_for_one_token_refuses() -> None:
    ranking: list[Predictor] = [Quantization(random_projections(HEADS, 4, DIM, seed, "metric"), 3) for seed in range(2)]
    attached = attach(tiny_llama.causal_lm(), predictors=ranking)
    with pytest.raises(PatternError, match="quantization, which ranks over"), attached.generation():
        pass
    with pytest.raises(ConfigError, match="without any"), attach(tiny_llama.causal_lm()).generation():
        pass
    with pytest.raises(PatternError, match="bidirectional"):
        list(Generation([WindowOnly()], window(3)).plans(0, *random_qkv(0, 1, 5), legal_full(1, 5, 5)))


def test_a_static_cache_is_refused() -> None:
    lm = tiny_llama.causal_lm()
    attached = attach(lm, predictors=causal_cases.predictors("tiles"))
    ids = torch.tensor([tiny_llama.token_ids(8)])
    for mode in (attached.generation(), attached.using("dense")):
        with torch.no_grad(), mode, pytest.raises(IncompatibleModelError, match="cache: expected one that holds the 8"):
            lm.generate(input_ids=ids, max_new_tokens=3, cache_implementation="static", eos_token_id=None)
