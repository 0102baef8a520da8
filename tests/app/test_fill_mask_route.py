"""POST /v1/fill-mask: words in the place of masks, against transformers' own; which head fits which weights."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from app_fakes import CLS, COMPUTED, MASK, MAX_TOKENS, SEP, embed, error_of, make_settings, serving, token
from starlette.testclient import TestClient
from tiny_bert import WORDS, make_artifact, make_delta, make_teacher
from transformers import BertForMaskedLM

from app import heads
from app.model import Content, ModelLoader, ServedModel
from app.outputs import FillMask
from app.routes import fill_mask as route
from app.servable import Lane
from app.settings import load_settings
from sparsefinder.artifact import delta_hash, load
from sparsefinder.errors import ArtifactError, IncompatibleModelError
from sparsefinder.mlm_head import MlmCard, load_mlm_head, new_mlm_head, save_mlm_head, with_mlm_head
from sparsefinder.teacher import load_teacher

SHORT = "w1 [MASK] w3"
LONG = " ".join("[MASK]" if n % 50 == 7 else WORDS[n * n % 60] for n in range(398))
REAL_MASK = 64
FAMILY = "👨\u200d👩\u200d👧"
SCRIPTS = "latin Ελληνικά кириллица עברית العربية हिन्दी ไทย 日本語 한국어 ქართული"


def fill(client: TestClient, text: Any = SHORT, **fields: Any) -> Any:
    return client.post("/v1/fill-mask", json={"input": text} | fields)


def masks(response: Any, item: int = 0) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return response.json()["data"][item]["masks"]


def test_shape_of_an_answer(client: TestClient) -> None:
    response = fill(client, ["one [MASK] two [MASK]", "[MASK]"], top_k=2, model="first", user="me")
    assert response.status_code == 200, response.text
    body = response.json()
    assert (body["object"], body["model"]) == ("list", "first")
    assert body["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    assert [(item["object"], item["index"]) for item in body["data"]] == [("fill_mask", 0), ("fill_mask", 1)]
    ours = body["sparsefinder"]
    assert (ours["attention"], ours["artifact_version"], ours["tokens"]) == ("sparse", "v1", [6, 3])
    assert ours["computed_density"] == pytest.approx(COMPUTED, abs=0.05)
    assert response.headers["x-sparsefinder-artifact"] == "v1"
    assert response.headers["x-sparsefinder-tokens"] == "9"
    first, second = masks(response)
    assert (first["position"], second["position"]) == (2, 4)
    assert first["words"][0] == {"id": 10, "piece": "piece10", "probability": math.exp(-1.0), "logprob": -1.0}
    assert [word["id"] for word in second["words"]] == [20, 21]
    assert len(masks(fill(client, "[MASK]"))[0]["words"]) == 5
    assert [mask["position"] for mask in masks(fill(client, [CLS, MASK, SEP]))] == [1]


def test_targets_in_their_order(client: TestClient) -> None:
    words = masks(fill(client, "a [MASK]", targets=["b", "[MASK]", "b"], top_k=1))[0]["words"]
    assert [word["target"] for word in words] == ["b", "[MASK]", "b"]
    assert [word["id"] for word in words] == [token("b"), MASK, token("b")]
    assert words[1]["logprob"] == pytest.approx(-MASK / 100)


@pytest.mark.parametrize(("target", "came"), [("two-pieces", "2 pieces"), ("unknown", "unknown"), ("", "unknown")])
def test_a_target_that_is_not_one_piece(client: TestClient, target: str, came: str) -> None:
    error = error_of(fill(client, targets=["fine", target]), 422, "invalid_target")
    assert error["param"] == "targets.1"
    assert came in error["message"]


def test_a_text_without_a_mask(client: TestClient) -> None:
    assert error_of(fill(client, "no mask"), 422, "no_mask_token")["param"] == "input"
    error = error_of(fill(client, ["[MASK]", "none"]), 422, "no_mask_token")
    assert error["param"] == "input.1"
    assert "[MASK]" in error["message"]
    assert error_of(fill(client, [CLS, SEP]), 422, "no_mask_token")["param"] == "input"


def test_a_cut_that_takes_all_masks(client: TestClient) -> None:
    late, early = "w " * MAX_TOKENS + "[MASK]", "[MASK]" + " w" * MAX_TOKENS + " [MASK]"
    error_of(fill(client, late), 422, "input_too_long")
    assert error_of(fill(client, ["[MASK]", late], truncate=True), 422, "no_mask_token")["param"] == "input.1"
    response = fill(client, ["[MASK]", early], truncate=True)
    assert [mask["position"] for mask in masks(response, 1)] == [1]
    assert response.json()["sparsefinder"]["truncated"] == [False, True]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": 101}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"targets": []}, "targets"),
        ({"targets": ["a"] * 101}, "targets"),
        ({"targets": "a"}, "targets"),
        ({"targets": [5]}, "targets.0"),
        ({"k": 5}, "k"),
        ({"attention": "none"}, "attention"),
    ],
)
def test_fields_outside_their_range(client: TestClient, fields: dict[str, Any], param: str) -> None:
    assert error_of(fill(client, **fields), 422, "invalid_request")["param"] == param


def test_every_script_and_signs_of_many_parts(client: TestClient) -> None:
    assert [mask["position"] for mask in masks(fill(client, f"{SCRIPTS} [MASK] {FAMILY}"))] == [11]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty_input"),
        ("   ", "empty_input"),
        ([], "empty_input"),
        ("\ud800", "invalid_unicode"),
        ([5, 10**9], "invalid_token"),
        ("trust [MASK] " * 1000, "input_too_long"),
        (None, "invalid_input"),
    ],
)
def test_inputs_that_no_route_takes(client: TestClient, text: Any, code: str) -> None:
    headers = {"content-type": "application/json"}
    error_of(client.post("/v1/fill-mask", content=json.dumps({"input": text}), headers=headers), 422, code)


def test_an_answer_has_a_limit(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "MOST_FIGURES", 10)
    assert fill(client, ["[MASK] [MASK]"], top_k=5).status_code == 200
    error_of(fill(client, ["[MASK] [MASK]", "[MASK]"], top_k=5), 422, "batch_too_large")
    error_of(fill(client, ["[MASK]"], targets=["a"] * 11), 422, "batch_too_large")
    assert fill(client, ["[MASK] [MASK]", "[MASK]"], targets=["a"] * 3, top_k=100).status_code == 200


def test_numbers_that_are_none_are_an_error(client: TestClient) -> None:
    error_of(fill(client, "[MASK] nan"), 500, "non_finite_output")
    assert fill(client).status_code == 200


def test_only_where_the_model_can_and_the_head_fits(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    fake = tmp_path / "first" / "fake.json"
    content = json.loads(fake.read_text())
    fake.write_text(json.dumps(content | {"tasks": ["embed"], "fill_mask_modes": []}))
    with serving(settings) as client:
        assert "embed" in error_of(fill(client), 422, "task_not_supported")["message"]
        fake.write_text(json.dumps(content | {"fill_mask_modes": ["dense", "sparse"]}))
        assert client.post("/admin/reload", json={}).status_code == 200
        assert fill(client, attention="dense").status_code == 200
        error = error_of(fill(client, attention="original"), 422, "attention_not_supported")
        assert error["param"] == "attention"
        assert "dense, sparse" in error["message"]
        assert embed(client, attention="original").status_code == 200


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Teachers with and without a head of their own; artifacts with and without a delta; heads for each."""
    root = tmp_path_factory.mktemp("real")
    own, bare = make_teacher(root / "own", mask=True, own_head=True), make_teacher(root / "bare", mask=True)
    delta = make_delta(own)
    make_artifact(root / "own-few", own, keys=20)
    make_artifact(root / "own-soft", own, keys=20, delta=delta, alpha=1.0)
    make_artifact(root / "changed", bare, keys=20, delta=delta)
    make_artifact(root / "plain", bare, keys=20)
    teacher = load_teacher(str(bare))
    for name, fitted in (("head-changed", delta_hash(load(root / "changed"))), ("head-plain", "")):
        save_mlm_head(root / name, new_mlm_head(teacher, seed=3), MlmCard(str(bare), teacher.fingerprint, fitted))
    return root


@pytest.fixture(scope="module")
def real(root: Path) -> Iterator[TestClient]:
    settings = load_settings(teacher=str(root / "own"), artifact=root / "own-few", device="cpu", audit_rate=0.0)
    with serving(settings, ModelLoader(settings.teacher, settings.device, "default")) as client:
        yield client


def own_logprobs(root: Path, text: str, delta: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Log-probabilities at the masks as transformers alone computes them `[masks, V]`."""
    model = BertForMaskedLM.from_pretrained(root / "own").eval()
    parameters = dict(model.bert.named_parameters())
    with torch.no_grad():
        for name, added in (delta or {}).items():
            parameters[name.removesuffix(".full")] += added.float()
        ids = torch.tensor([load_teacher(str(root / "own")).tokenizer(text)["input_ids"]])
        return model(input_ids=ids).logits[ids == REAL_MASK].log_softmax(-1)


def check_masks(came: list[dict[str, Any]], expected: torch.Tensor) -> None:
    assert len(came) == len(expected)
    for mask, row in zip(came, expected, strict=True):
        logprobs = [word["logprob"] for word in mask["words"]]
        assert logprobs == sorted(logprobs, reverse=True)
        np.testing.assert_allclose(logprobs, row.topk(len(logprobs)).values, atol=1e-5)
        np.testing.assert_allclose(row[[word["id"] for word in mask["words"]]], logprobs, atol=1e-5)
        assert sum(word["probability"] for word in mask["words"]) <= 1 + 1e-6


@pytest.mark.parametrize("text", [SHORT, LONG])
def test_original_is_transformers_own_answer(real: TestClient, root: Path, text: str) -> None:
    came = masks(fill(real, text, attention="original", top_k=7))
    check_masks(came, own_logprobs(root, text))
    words = load_teacher(str(root / "own")).tokenizer.convert_ids_to_tokens([word["id"] for word in came[0]["words"]])
    assert [word["piece"] for word in came[0]["words"]] == words


def test_all_words_together_are_certain_and_targets_are_some_of_them(real: TestClient, root: Path) -> None:
    expected = own_logprobs(root, SHORT)[0]
    (mask,) = masks(fill(real, SHORT, attention="original", top_k=100))
    assert len(mask["words"]) == 65
    assert sum(word["probability"] for word in mask["words"]) == pytest.approx(1, abs=1e-5)
    (mask,) = masks(fill(real, SHORT, attention="original", targets=["w59", "W7"]))
    assert [(word["target"], word["piece"]) for word in mask["words"]] == [("w59", "w59"), ("W7", "w7")]
    for word in mask["words"]:
        assert word["logprob"] == pytest.approx(float(expected[word["id"]]), abs=1e-5)
    error_of(fill(real, SHORT, targets=["nonsense"]), 422, "invalid_target")


@pytest.mark.parametrize("mode", ["original", "dense", "sparse", "exact"])
def test_a_batch_equals_each_alone(real: TestClient, mode: str) -> None:
    together = fill(real, [SHORT, LONG], attention=mode, targets=WORDS)
    for item, text in enumerate((SHORT, LONG)):
        alone = masks(fill(real, text, attention=mode, targets=WORDS))
        for one, other in zip(masks(together, item), alone, strict=True):
            assert one["position"] == other["position"]
            first, second = ([word["logprob"] for word in mask["words"]] for mask in (one, other))
            np.testing.assert_allclose(first, second, atol=1e-5)


def test_the_mode_that_was_asked_for_runs(real: TestClient) -> None:
    original, dense, sparse, exact = (
        [word["logprob"] for mask in masks(fill(real, LONG, attention=mode, targets=WORDS)) for word in mask["words"]]
        for mode in ("original", "dense", "sparse", "exact")
    )
    np.testing.assert_allclose(exact, dense, rtol=1e-5, atol=1e-5)
    assert np.abs(np.subtract(original, dense)).max() > 1e-3
    assert np.abs(np.subtract(sparse, dense)).max() > 1e-3


def model_of(root: Path, artifact: str, head: Path | None = None) -> ServedModel:
    content = Content(root / artifact, load(root / artifact))
    return ServedModel(load_teacher(content.artifact.card.teacher), content, "cpu", "default", head)


def logprobs(model: ServedModel, mode: Any, text: str = LONG) -> np.ndarray[Any, Any]:
    lane = Lane("fill_mask", mode, options=FillMask(0, tuple(range(65))))
    return model.forward(model.tokenize([text]), lane, ()).outputs[0].logprobs


def test_the_twin_has_the_delta_and_the_untouched_model_has_not(root: Path) -> None:
    model = model_of(root, "own-soft")
    changed = own_logprobs(root, LONG, dict(load(root / "own-soft").delta))
    np.testing.assert_allclose(logprobs(model, "dense"), changed, atol=1e-5)
    np.testing.assert_allclose(logprobs(model, "original"), own_logprobs(root, LONG), atol=1e-5)
    assert (changed - own_logprobs(root, LONG)).abs().max() > 1e-2
    assert model.description.fill_mask_modes == ("original", "dense", "sparse", "auto")


def test_a_head_in_parts_of_rows_is_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(root, "own-soft")
    whole = logprobs(model, "dense")
    monkeypatch.setattr(heads, "LOGITS_AT_ONCE", 3 * 65)
    seen: list[int] = []
    head = model.heads.twin
    assert head is not None
    model.heads = dataclasses.replace(model.heads, twin=lambda rows: (seen.append(len(rows)), head(rows))[1])
    np.testing.assert_allclose(logprobs(model, "dense"), whole, atol=1e-5)
    assert seen[1:] == [3, 3, 2]  # the first call asks how many words there are


def test_a_head_serves_only_the_weights_that_it_learned_on(root: Path) -> None:
    fitted = model_of(root, "changed", root / "head-changed")
    assert fitted.description.tasks == ("embed", "fill_mask", "graph")
    assert fitted.description.fill_mask_modes == ("dense", "sparse", "exact", "auto")
    assert "original" in model_of(root, "plain", root / "head-plain").description.fill_mask_modes
    for artifact, head in (("plain", "head-changed"), ("changed", "head-plain")):
        with pytest.raises(IncompatibleModelError, match="expected a head for delta"):
            model_of(root, artifact, root / head)
    with pytest.raises(ArtifactError, match="expected an artifact folder"):
        model_of(root, "plain", root / "nothing")


def test_the_shipped_head_is_taken_where_it_fits_and_a_reload_asks_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "_shipped", lambda: root / "head-changed")
    settings = load_settings(teacher=str(root / "bare"), artifact=root / "changed", device="cpu", audit_rate=0.0)
    with serving(settings, ModelLoader(settings.teacher, settings.device, "default")) as client:
        assert len(masks(fill(client, LONG))) == 8
        error_of(fill(client, LONG, attention="original"), 422, "attention_not_supported")
        assert client.post("/admin/reload", json={"artifact": "plain"}).status_code == 200
        error_of(fill(client, LONG), 422, "task_not_supported")
        assert embed(client, LONG).status_code == 200
        assert client.post("/admin/reload", json={"artifact": "changed"}).status_code == 200
        assert len(masks(fill(client, LONG))) == 8


def test_an_explicit_head_that_does_not_fit_is_an_error_at_reload(root: Path) -> None:
    values = {"teacher": str(root / "bare"), "artifact": root / "changed", "head": root / "head-changed"}
    settings = load_settings(device="cpu", audit_rate=0.0, **values)
    with serving(settings, ModelLoader(settings.teacher, settings.device, "default", settings.head)) as client:
        error = error_of(client.post("/admin/reload", json={"artifact": "plain"}), 409, "artifact_unusable")
        assert "head for delta" in error["message"]
        assert len(masks(fill(client, LONG))) == 8  # the old one serves on


def test_a_tokenizer_without_a_mask_has_no_fill_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = make_teacher(tmp_path / "teacher")
    make_artifact(tmp_path / "few", teacher, keys=20)
    assert model_of(tmp_path, "few").description.tasks == ("embed", "graph")
    opened = load_teacher(str(teacher))
    save_mlm_head(tmp_path / "head", new_mlm_head(opened), MlmCard(str(teacher), opened.fingerprint, ""))
    with pytest.raises(IncompatibleModelError, match="mask token"):
        model_of(tmp_path, "few", tmp_path / "head")


@pytest.mark.slow
def test_the_shipped_model_with_its_head() -> None:
    from sparsefinder.attaching import attach_artifact
    from sparsefinder.shipped import default_artifact

    text = "The capital of France is [MASK]."
    artifact = load(default_artifact())
    teacher = load_teacher("minilm")
    attached = attach_artifact(teacher, artifact)
    headed = with_mlm_head(teacher, load_mlm_head(default_artifact("minilm-mlm-head"), teacher, artifact))
    ids = torch.tensor([teacher.tokenizer(text)["input_ids"]])
    settings = load_settings(device="cpu", audit_rate=0.0)
    with serving(settings, ModelLoader(settings.teacher, settings.device, "default")) as client:
        for mode in ("dense", "sparse"):
            with torch.inference_mode(), attached.using(mode):
                logits = headed.mlm(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            came = masks(fill(client, text, attention=mode, top_k=20))
            check_masks(came, logits[ids == teacher.tokenizer.mask_token_id].log_softmax(-1))
            assert all(math.isfinite(word["probability"]) for word in came[0]["words"])
        assert masks(fill(client, text, targets=["paris", "banana"]))[0]["words"][0]["target"] == "paris"
        error_of(fill(client, text, attention="original"), 422, "attention_not_supported")
