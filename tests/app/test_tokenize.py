"""POST /tokenize, and the vocabularies behind it: pieces, places in the text, nothing cut."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
from app_fakes import CLS, MASK, MAX_TOKENS, SEP, FakeLoader, error_of, make_settings, serving, token
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from app.routes import tokenize as route
from app.vocabulary import Vocabulary

FAMILY = "👨\u200d👩\u200d👧"
SCRIPTS = "latin Ελληνικά кириллица עברית العربية हिन्दी ไทย 日本語 한국어 ქართული"


def tokenize(client: TestClient, text: Any = "hello there", **fields: Any) -> Any:
    return client.post("/tokenize", json={"input": text} | fields)


def test_shape_of_an_answer(client: TestClient, loader: FakeLoader) -> None:
    loader.calls.clear()
    response = tokenize(client, ["one  two", "[MASK]"], model="first", user="me")
    assert response.status_code == 200, response.text
    body = response.json()
    assert (body["object"], body["model"], body["max_tokens"]) == ("list", "first", MAX_TOKENS)
    assert body["sparsefinder"] == {"artifact": "first", "artifact_version": "v1"}
    assert response.headers["x-sparsefinder-artifact"] == "v1"
    first, second = body["data"]
    ids = [CLS, token("one"), token("two"), SEP]
    assert first == {
        "object": "tokens",
        "index": 0,
        "ids": ids,
        "pieces": [f"piece{number}" for number in ids],
        "offsets": [None, [0, 3], [5, 8], None],
        "tokens": 4,
        "exceeds_max_tokens": False,
    }
    assert (second["index"], second["ids"]) == (1, [CLS, MASK, SEP])
    assert not loader.calls  # the model does not run


def test_nothing_is_cut_and_too_long_is_said(client: TestClient) -> None:
    texts = ["w " * (MAX_TOKENS - 2), "w " * (MAX_TOKENS - 1), "trust " * 1000]
    data = tokenize(client, texts).json()["data"]
    assert [item["tokens"] for item in data] == [MAX_TOKENS, MAX_TOKENS + 1, 1002]
    assert [item["exceeds_max_tokens"] for item in data] == [False, True, True]
    assert all(len(item["ids"]) == len(item["offsets"]) == item["tokens"] for item in data)


@pytest.mark.parametrize("text", ["", "   "])
def test_a_text_without_words_has_its_special_tokens(client: TestClient, text: str) -> None:
    assert tokenize(client, text).json()["data"][0]["ids"] == [CLS, SEP]


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        ([], "empty_input", "input"),
        ("\ud800", "invalid_unicode", "input"),
        (["a", "\udfff"], "invalid_unicode", "input.1"),
        ([5, 6], "invalid_input", "input.0"),
        ([[5, 6]], "invalid_input", "input.0"),
        (["a", 5], "invalid_input", "input.1"),
        (None, "invalid_input", "input"),
        (5, "invalid_input", "input"),
        ({"a": "b"}, "invalid_input", "input"),
    ],
)
def test_what_is_no_text_is_refused(client: TestClient, text: Any, code: str, param: str) -> None:
    content = json.dumps({"input": text})  # a lone surrogate is an escape there
    response = client.post("/tokenize", content=content, headers={"content-type": "application/json"})
    assert error_of(response, 422, code)["param"] == param


def test_other_models_fields_and_too_many_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(make_settings(tmp_path, max_items=3, api_keys="k")) as client:
        error_of(tokenize(client), 401, "missing_api_key")
        client.headers["authorization"] = "Bearer k"
        error_of(tokenize(client, model="gpt-4"), 404, "model_not_found")
        error_of(tokenize(client, truncate=True), 422, "invalid_request")
        error_of(tokenize(client, ["a"] * 4), 422, "batch_too_large")
        monkeypatch.setattr(route, "MOST_TOKENS", 9)
        assert tokenize(client, ["a"] * 3).status_code == 200
        assert "at most 9 tokens" in error_of(tokenize(client, ["a", "b b", "c"]), 422, "batch_too_large")["message"]


def test_it_answers_while_the_model_is_busy(client: TestClient, loader: FakeLoader) -> None:
    loader.gate.clear()
    loader.calls.clear()
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(lambda: client.post("/v1/embeddings", json={"input": "slow"}))
        while not loader.calls:
            pass
        assert tokenize(client).status_code == 200
        assert not busy.done()
        loader.gate.set()
        assert busy.result(20).status_code == 200


def test_offsets_are_characters_of_the_text_as_it_was_sent(tmp_path: Path) -> None:
    words = Vocabulary(tiny.tokenizer(tmp_path), 64)
    text = f"Ab {FAMILY} c[MASK]d  É"  # accents fall away, capitals become small: the text itself does not move
    (found,) = words.encode([text])
    assert len(found.ids) == len(found.pieces) == len(found.offsets)
    assert found.pieces == ["[CLS]", "a", "##b", "[UNK]", "c", "[MASK]", "d", "e", "[SEP]"]
    assert [None if span is None else text[slice(*span)] for span in found.offsets] == [
        None, "A", "b", FAMILY, "c", "[MASK]", "d", "É", None,
    ]  # fmt: skip
    assert words.encode(["", SCRIPTS])[0].offsets == [None, None]
    assert [SCRIPTS[slice(*span)] for span in words.encode([SCRIPTS])[0].offsets[1:-1]][-1] == SCRIPTS.split()[-1]


def test_pieces_of_a_character_have_its_place() -> None:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    (found,) = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=made), 256).encode(["a é👍"])
    assert found.offsets == [(0, 1), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4), (3, 4), (3, 4)]


def test_a_word_is_split_as_the_vocabulary_does(tmp_path: Path) -> None:
    words = Vocabulary(tiny.tokenizer(tmp_path), 64)
    assert words.split("b") == words.split("B") == [6]
    assert words.pieces(words.split("##b")) == ["##b"]
    assert words.pieces(words.split("bc")) == ["b", "##c"]
    assert words.pieces(words.split("[MASK]")) == ["[MASK]"]
    assert words.split("é?") == words.split("") == []
    assert (words.mask, words.mask_piece) == (4, "[MASK]")
    assert words.pieces([63, 5, 999]) == [None, "a", None]  # words that the model has and the tokenizer has not
