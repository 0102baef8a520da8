"""Needles: where the number stands, and which plans let the answer's rows read it."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparsefinder.errors import DataError
from sparsefinder.hf import attach
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.text import parse_pattern
from sparsefinder.plan import build_plan, plan_matrix
from training.tasks.needle import NEEDLE, QUESTION, ask, make_needle, needle_rows, pattern_plans, reads_needle

TEXT = "the cat sat on the mat and looked at the moon, " * 40


def letters(words, add_special_tokens):
    assert not add_special_tokens
    return {"input_ids": [ord(c) for c in words]}


def spell(ids):
    return "".join(chr(i) for i in ids.tolist())


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.4, pad_token_id=0,
    )  # fmt: skip
    whole = LlamaForCausalLM(config).eval()
    attached = attach(whole.model, alpha=1.0)
    return attached, lambda ids: whole(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
def test_a_needle_text_holds_its_number_where_it_says(depth):
    needle = make_needle(letters, TEXT, 300, depth, 7421)
    text = spell(needle.ids)
    assert len(text) == 300
    assert spell(needle.ids[needle.needle]) == spell(needle.target) == " 7421"
    assert needle.answer.tolist() == list(range(294, 299))  # a row predicts the token after it
    assert NEEDLE.format(name="Paris", number=7421) in text
    assert text.endswith(QUESTION.format(name="Paris") + " 7421")
    assert text[needle.asked :] == QUESTION.format(name="Paris") + " 7421"
    hidden = text.replace(NEEDLE.format(name="Paris", number=7421), "", 1)
    assert TEXT.startswith(hidden[: hidden.index(" Question")])
    first = text.index(NEEDLE.format(name="Paris", number=7421))
    assert first == round(depth * (needle.asked - len(NEEDLE.format(name="Paris", number=7421))))


@pytest.mark.parametrize(("tokens", "depth"), [(20, 0.5), (9000, 0.5), (300, 1.5)])
def test_texts_that_do_not_fit_are_refused(tokens, depth):
    with pytest.raises(DataError):
        make_needle(letters, TEXT, tokens, depth, 7421)


@pytest.mark.parametrize("text", ["window(9)", "window(9) | global(1)", "strided(37)", "random(3, causal=True)"])
@pytest.mark.parametrize("tile_size", [1, 16])
def test_who_reads_the_needle_against_the_matrix_of_the_plan(text, tile_size):
    needle, legal = make_needle(letters, TEXT, 200, 0.2, 55), legal_full(1, 200, 200, causal=True)
    plan = build_plan(parse_pattern(text), legal, tile_size, heads=3)
    expected = []
    for h in range(3):
        matrix = plan_matrix(plan, legal, 0, h)
        expected.append(any(bool(matrix[i, j]) for i in needle.answer.tolist() for j in needle.needle.tolist()))
    assert reads_needle(plan, needle).tolist() == expected


def test_asking_over_all_pairs_is_asking_densely(model):
    needle = make_needle(letters, TEXT, 160, 0.5, 123)
    plain = ask(*model, needle, None)
    whole = ask(*model, needle, pattern_plans(parse_pattern("~window(0)"), 16))
    near = ask(*model, needle, pattern_plans(parse_pattern("window(5) | global(1)"), 16))
    assert plain.found in (0.0, 1.0)
    assert plain.log_probability < 0
    assert whole.log_probability == pytest.approx(plain.log_probability, abs=1e-3)
    assert (whole.recall, whole.computed) == (1.0, pytest.approx(1.0))
    assert near.recall == 0.0
    assert near.computed < 0.3
    assert abs(near.log_probability - plain.log_probability) > 1e-3


def test_the_answer_is_found_where_the_model_says_it(model):
    """A stand-in for the language model that names the right tokens after row 100 only."""
    attached, logits = model
    needles = [make_needle(letters, TEXT, 160, depth, 123) for depth in (0.1, 0.9)]

    def knowing(ids):
        out = logits(ids)
        scores = torch.nn.functional.one_hot(ids[0].roll(-1), 128).float() * 99
        return torch.where(torch.arange(160)[:, None] > 100, scores, out[0])[None]

    rows = needle_rows(attached, knowing, needles, {"dense": None})
    assert rows["dense"]["found"] == 1.0
    assert rows["dense"]["log_probability"] == pytest.approx(0.0, abs=1e-3)
    last_rows = needle_rows(attached, lambda ids: knowing(ids)[:, -8:], needles, {"dense": None})
    assert last_rows["dense"]["found"] == 1.0
    assert needle_rows(attached, lambda ids: -knowing(ids), needles, {"dense": None})["dense"]["found"] == 0.0
