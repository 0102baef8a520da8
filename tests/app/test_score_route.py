"""POST /v1/score: log-probabilities of a causal model, against transformers' own; causal models in the service."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
import torch
from app_fakes import (
    CLS,
    COMPUTED,
    MAX_TOKENS,
    MODE_OFFSET,
    embed,
    error_of,
    make_settings,
    serving,
    token,
    write_artifact,
)
from starlette.testclient import TestClient
from tiny_llama import HEADS, LAYERS, POSITIONS, VOCABULARY, token_ids
from transformers import LlamaForCausalLM

from app import heads
from app.audit import Sample
from app.model import Content, ModelLoader, ServedModel
from app.outputs import Score, Scored
from app.routes import score as route
from app.servable import Lane
from app.settings import load_settings
from sparsefinder.artifact import load
from sparsefinder.errors import IncompatibleModelError
from sparsefinder.teacher import load_teacher

FAMILY = "👨\u200d👩\u200d👧"
SCRIPTS = "latin Ελληνικά кириллица עברית العربية हिन्दी ไทย 日本語 한국어 ქართული"
SHORT, LONG = token_ids(5, seed=1), token_ids(400, seed=2)


def score(client: TestClient, text: Any = "one two", **fields: Any) -> Any:
    return client.post("/v1/score", json={"input": text} | fields)


def entry(response: Any, item: int = 0) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["data"][item]
    return found


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[TestClient]:
    settings = make_settings(tmp_path)
    write_artifact(tmp_path / "first", version="v1", causal=True)
    with serving(settings) as client:
        yield client


def test_shape_of_an_answer(fake: TestClient) -> None:
    response = score(fake, ["one two", "three"], model="first", user="me", attention="dense")
    first, second = entry(response), entry(response, 1)
    body = response.json()
    assert (body["object"], body["model"]) == ("list", "first")
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert body["sparsefinder"]["attention"] == response.headers["x-sparsefinder-attention"] == "dense"
    assert response.headers["x-sparsefinder-artifact"] == body["sparsefinder"]["artifact_version"] == "v1"
    assert score(fake).json()["sparsefinder"]["computed_density"] == pytest.approx(COMPUTED, abs=0.1)
    ids = [CLS, token("one"), token("two")]
    assert (first["object"], first["index"], second["index"]) == ("score", 0, 1)
    assert first["ids"] == ids
    assert first["pieces"] == [f"piece{number}" for number in ids]
    assert first["logprobs"][0] is None
    assert first["logprobs"][1:] == pytest.approx([-number / 100 for number in ids[1:]])
    assert first["sum"] == pytest.approx(sum(first["logprobs"][1:]))
    assert first["mean"] == pytest.approx(first["sum"] / 2)
    assert first["perplexity"] == pytest.approx(math.exp(-first["mean"]))
    assert (first["scored_tokens"], second["scored_tokens"]) == (2, 1)
    assert "top" not in first


def test_the_best_words_of_each_place(fake: TestClient) -> None:
    top = entry(score(fake, top_k=2))["top"]
    assert top[0] is None
    assert (
        top[1:]
        == [[{"id": 10, "piece": "piece10", "logprob": -10.0}, {"id": 11, "piece": "piece11", "logprob": -11.0}]] * 2
    )


@pytest.mark.parametrize("mode", list(MODE_OFFSET))
def test_every_mode(fake: TestClient, mode: str) -> None:
    assert score(fake, attention=mode).json()["sparsefinder"]["attention"] == mode


def test_a_text_of_one_token_has_nothing_to_score(fake: TestClient) -> None:
    assert error_of(score(fake, [5]), 422, "too_short")["param"] == "input"
    assert error_of(score(fake, [[5, 6], [5]]), 422, "too_short")["param"] == "input.1"
    assert entry(score(fake, [5, 6]))["scored_tokens"] == 1


def test_every_script_and_signs_of_many_parts(fake: TestClient) -> None:
    assert entry(score(fake, f"{SCRIPTS} {FAMILY}"))["scored_tokens"] == 11


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty_input"),
        ("   ", "empty_input"),
        ([], "empty_input"),
        ([[]], "empty_input"),
        ("\ud800", "invalid_unicode"),
        ([5, -1], "invalid_token"),
        ("trust " * 1000, "input_too_long"),
        (None, "invalid_input"),
    ],
)
def test_inputs_that_no_route_takes(fake: TestClient, text: Any, code: str) -> None:
    headers = {"content-type": "application/json"}
    error_of(fake.post("/v1/score", content=json.dumps({"input": text}), headers=headers), 422, code)


@pytest.mark.parametrize("fields", [{"top_k": -1}, {"top_k": 21}, {"top_k": True}, {"targets": ["a"]}])
def test_fields_outside_their_range(fake: TestClient, fields: dict[str, Any]) -> None:
    error_of(score(fake, **fields), 422, "invalid_request")


def test_truncate_keeps_the_first_tokens_of_every_item(fake: TestClient) -> None:
    response = score(fake, ["hello", "one " + "hello " * 5000], truncate=True)
    assert response.json()["sparsefinder"]["truncated"] == [False, True]
    assert entry(response, 1)["ids"] == [CLS, token("one"), *[token("hello")] * (MAX_TOKENS - 2)]


def test_an_answer_has_a_limit(fake: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "MOST_FIGURES", 12)
    assert score(fake, ["one two", "one two"], top_k=2).status_code == 200
    assert error_of(score(fake, ["one two", "one two"], top_k=3), 422, "batch_too_large")["param"] == "top_k"
    assert score(fake, ["one two"] * 5).status_code == 200


def test_numbers_that_are_none_are_an_error(fake: TestClient) -> None:
    error_of(score(fake, "nan"), 500, "non_finite_output")
    unlikely = Scored(
        np.full(3, -701.0, dtype=np.float32), np.zeros((3, 0), dtype=np.int64), np.zeros((3, 0), np.float32)
    )
    assert not unlikely.finite  # its perplexity is no float64


def test_each_model_does_what_it_can(fake: TestClient, client: TestClient) -> None:
    error = error_of(embed(fake), 422, "task_not_supported")
    assert "score" in error["message"]
    error_of(fake.post("/v1/fill-mask", json={"input": "[MASK]"}), 422, "task_not_supported")
    error_of(score(client), 422, "task_not_supported")
    assert fake.post("/tokenize", json={"input": "one"}).status_code == 200


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("causal")
    teacher = tiny_llama.save_teacher(root / "teacher")
    tiny_llama.make_artifact(root / "few", teacher, keys=8)
    tiny_llama.make_artifact(root / "soft", teacher, keys=POSITIONS, alpha=1.0)
    return root


@pytest.fixture(scope="module")
def real(root: Path) -> Iterator[TestClient]:
    settings = load_settings(teacher=str(root / "teacher"), artifact=root / "few", device="cpu", audit_rate=1.0)
    with serving(settings, ModelLoader(settings.teacher, settings.device, "default")) as client:
        yield client


def own_logprobs(root: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of every next word as transformers alone computes them `[N − 1, V]`."""
    model = LlamaForCausalLM.from_pretrained(root / "teacher").eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1)


def check_scores(came: dict[str, Any], ids: list[int], expected: torch.Tensor) -> None:
    own = expected[torch.arange(len(ids) - 1), ids[1:]]
    assert came["ids"] == ids
    np.testing.assert_allclose(came["logprobs"][1:], own, rtol=1e-5, atol=1e-5)
    assert came["perplexity"] == pytest.approx(math.exp(-float(own.double().mean())), rel=1e-4)
    for place, best in enumerate(came["top"][1:]):
        row = expected[place]
        found = [word["logprob"] for word in best]
        np.testing.assert_allclose(found, row.topk(3).values, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(row[[word["id"] for word in best]], found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ids", [SHORT, LONG])
def test_original_is_transformers_own_answer(real: TestClient, root: Path, ids: list[int]) -> None:
    came = entry(score(real, ids, attention="original", top_k=3))
    check_scores(came, ids, own_logprobs(root, ids))
    assert came["pieces"] == load_teacher(str(root / "teacher")).tokenizer.convert_ids_to_tokens(ids)


def test_softmax_over_a_plan_of_everything_is_the_model_too(real: TestClient, root: Path) -> None:
    assert real.post("/admin/reload", json={"artifact": "soft"}).status_code == 200
    for mode in ("dense", "sparse"):
        response = score(real, LONG, attention=mode, top_k=3)
        assert response.json()["sparsefinder"]["computed_density"] == 1
        check_scores(entry(response), LONG, own_logprobs(root, LONG))
    assert real.post("/admin/reload", json={"artifact": "few"}).status_code == 200


@pytest.mark.parametrize("mode", ["original", "dense", "sparse", "exact"])
def test_a_batch_equals_each_alone(real: TestClient, mode: str) -> None:
    together = score(real, [SHORT, LONG, LONG[:33]], attention=mode)
    assert together.json()["sparsefinder"]["tokens"] == [5, 400, 33]
    for item, ids in enumerate((SHORT, LONG, LONG[:33])):
        alone = entry(score(real, ids, attention=mode))
        np.testing.assert_allclose(entry(together, item)["logprobs"][1:], alone["logprobs"][1:], rtol=1e-5, atol=1e-5)


def test_no_score_depends_on_later_tokens(real: TestClient) -> None:
    whole, part = (entry(score(real, ids))["logprobs"] for ids in (LONG, LONG[:200]))
    np.testing.assert_allclose(whole[1:200], part[1:], rtol=1e-5, atol=1e-5)


def test_the_mode_that_was_asked_for_runs(real: TestClient) -> None:
    original, dense, sparse, exact = (
        np.array(entry(score(real, LONG, attention=mode))["logprobs"][1:])
        for mode in ("original", "dense", "sparse", "exact")
    )
    np.testing.assert_allclose(exact, dense, rtol=1e-5, atol=1e-5)
    assert np.abs(original - dense).max() > 1e-3
    assert np.abs(sparse - dense).max() > 1e-3


def test_density_is_of_the_pairs_that_a_causal_model_has(real: TestClient) -> None:
    for mode in ("original", "dense"):
        assert score(real, LONG, attention=mode).json()["sparsefinder"]["computed_density"] == 1
    assert 0.01 < score(real, LONG).json()["sparsefinder"]["computed_density"] < 0.4


def test_live_recall_of_scored_texts(real: TestClient) -> None:
    score(real, LONG)
    for _ in range(500):
        if (live := real.get("/v1/sparsity").json()["live"])["requests"]:
            break
        score(real, SHORT, attention="dense")
    assert 0 < live["overall"]["recall"] <= 1
    assert 0 < live["overall"]["sparsity"] < 1
    assert len(live["layers"]) == LAYERS
    assert len(live["layers"][0]["heads"]) == HEADS


def test_texts_and_limits_of_the_real_tokenizer(real: TestClient) -> None:
    error_of(score(real, ["w1 w2", "w3"]), 422, "too_short")
    error_of(score(real, ["w1 w2", ""]), 422, "empty_input")  # no token at all: this tokenizer adds none
    error_of(score(real, [1, VOCABULARY]), 422, "invalid_token")
    assert "513" in error_of(score(real, "w1 " * 513), 422, "input_too_long")["message"]
    cut = entry(score(real, "w1 " * 513 + "[EOS]", truncate=True))["ids"]
    assert cut == [5] * POSITIONS  # the first tokens, and no special one in the place of the last
    assert entry(score(real, [4] * 600, truncate=True))["ids"] == [4] * POSITIONS
    assert entry(score(real, "🙂 日本語"))["pieces"] == ["[UNK]", "[UNK]"]
    error_of(embed(real, "w1 w2"), 422, "task_not_supported")
    about = real.get("/info").json()["artifact"]
    assert (about["tasks"], about["causal"], about["fill_mask_modes"]) == (["score", "graph"], True, [])


def test_logits_are_never_all_in_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ServedModel(
        load_teacher(str(root / "teacher")), Content(root / "few", load(root / "few")), "cpu", "default"
    )
    ids, lane = [LONG, SHORT], Lane("score", "sparse", options=Score(3))
    whole = model.forward(ids, lane, ()).outputs
    monkeypatch.setattr(heads, "LOGITS_AT_ONCE", 7 * VOCABULARY)
    seen: list[int] = []
    head = model.heads.twin
    assert head is not None
    monkeypatch.setattr(model, "heads", heads.Heads(None, lambda rows: (seen.append(len(rows)), head(rows))[1]))
    for one, other in zip(model.forward(ids, lane, ()).outputs, whole, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(one.word_logprobs, other.word_logprobs, rtol=1e-5, atol=1e-5)
    assert max(seen) == 7
    assert sum(seen[1:]) == 399 + 4


def test_audited_rows_look_back_only(root: Path) -> None:
    model = ServedModel(
        load_teacher(str(root / "teacher")), Content(root / "few", load(root / "few")), "cpu", "default"
    )
    rows = (0, 17, 399)
    (audit,) = model.forward([SHORT, LONG], Lane("score", "sparse"), (Sample(1, rows),)).audits
    for layer in audit:
        for place, row in enumerate(rows):
            assert layer.legal[place].sum() == row + 1
            assert not bool(layer.kept[:, place, row + 1 :].any())


def test_a_fill_mask_head_on_a_causal_model_is_refused(root: Path) -> None:
    content = Content(root / "few", load(root / "few"))
    with pytest.raises(IncompatibleModelError, match="expected an encoder"):
        ServedModel(load_teacher(str(root / "teacher")), content, "cpu", "default", root / "head")
