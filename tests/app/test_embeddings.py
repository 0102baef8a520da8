"""POST /v1/embeddings with a model whose answers are known."""

import base64
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from app_fakes import (
    CLS,
    COMPUTED,
    LAYERS,
    MAX_TOKENS,
    MODE_OFFSET,
    REPAIR,
    SEP,
    FakeLoader,
    embed,
    error_of,
    make_settings,
    serving,
    token,
    write_artifact,
)
from starlette.testclient import TestClient


def vectors(response: Any) -> list[list[float]]:
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["embedding"] for item in data]


def test_shape_of_an_answer(client: TestClient) -> None:
    response = embed(client, ["one two", "three"], model="first", user="me")
    body = response.json()
    assert body["object"] == "list"
    assert body["model"] == "first"
    assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [item["object"] for item in body["data"]] == ["embedding"] * 2
    ours = body["sparsefinder"]
    assert ours["attention"] == "sparse"
    assert ours["artifact_version"] == "v1"
    assert ours["computed_density"] == pytest.approx(COMPUTED, abs=0.05)
    assert len(ours["layers"]) == LAYERS
    assert ours["layers"][0]["sparsity"] == pytest.approx(1 - ours["layers"][0]["computed_density"])
    assert ours["tokens"] == [4, 3]
    assert ours["truncated"] == [False, False]


def test_headers(client: TestClient) -> None:
    response = client.post("/v1/embeddings", json={"input": "a b c"}, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.headers["x-sparsefinder-attention"] == "sparse"
    assert response.headers["x-sparsefinder-artifact"] == "v1"
    assert float(response.headers["x-sparsefinder-computed-density"]) == pytest.approx(6 / 25, abs=1e-6)
    assert response.headers["x-sparsefinder-tokens"] == "5"
    assert float(response.headers["x-sparsefinder-inference-ms"]) >= 0
    strange = client.get("/livez", headers={"x-request-id": "<script>"})
    assert strange.headers["x-request-id"].isalnum()


def test_the_four_kinds_of_input_agree(client: TestClient) -> None:
    ids = [CLS, token("one"), token("two"), SEP]
    expected = vectors(embed(client, "one two"))
    for same in (["one two"], ids, [ids]):
        assert vectors(embed(client, same)) == expected


@pytest.mark.parametrize("mode", ["original", "dense", "sparse"])
def test_the_mode_that_was_asked_for_runs(client: TestClient, loader: FakeLoader, mode: str) -> None:
    loader.calls.clear()
    response = embed(client, attention=mode)
    assert vectors(response)[0][2] == MODE_OFFSET[mode]
    assert response.json()["sparsefinder"]["attention"] == response.headers["x-sparsefinder-attention"] == mode
    assert [call[0] for call in loader.calls] == [mode]
    density = response.json()["sparsefinder"]["computed_density"]
    assert density < 0.5 if mode == "sparse" else density == 1.0


def ran(response: Any) -> list[dict[str, int]]:
    return [layer["ran"] for layer in response.json()["sparsefinder"]["layers"]]


def test_auto_says_what_ran_in_each_layer_and_batch(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path, max_batch_tokens=8)) as client:
        assert ran(embed(client, "one two", attention="auto")) == [{"dense": 1}] * 2
        both = embed(client, ["one two three four five", "one"], attention="auto")
        assert ran(both) == [{"sparse": 1, "dense": 1}, {"dense": 2}]
        assert both.headers["x-sparsefinder-ran"] == "dense,sparse"
        assert ran(embed(client, "one", attention="original")) == [{"original": 1}] * 2


def test_exact_says_what_it_proved_and_repaired(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path, max_batch_tokens=8)) as client:
        one, two = (embed(client, text, attention="exact") for text in ("one", ["one two three four", "one two three"]))
        for response, batches in ((one, 1), (two, 2)):
            for layer in response.json()["sparsefinder"]["layers"]:
                expected = {name: batches * value for name, value in asdict(REPAIR).items()}
                assert layer["repair"] == expected | {"most_survivors": REPAIR.most_survivors}
        assert all("repair" not in layer for layer in embed(client).json()["sparsefinder"]["layers"])


def test_exact_is_refused_under_softmax_with_the_reason(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    write_artifact(tmp_path / "first", version="v1", alpha=1.0)
    with serving(settings) as client:
        error = error_of(embed(client, attention="exact"), 422, "attention_not_supported")
        assert error["param"] == "attention"
        assert "entmax (alpha above 1)" in error["message"]
        assert "alpha 1 " in error["message"]
        assert "exact" not in client.get("/info").json()["attention_modes"]
        assert embed(client, attention="auto").status_code == 200


@pytest.mark.parametrize("mode", ["certified", "", "SPARSE"])
def test_an_unknown_mode_names_those_that_exist(client: TestClient, mode: str) -> None:
    error = error_of(embed(client, attention=mode), 422, "invalid_request")
    assert error["param"] == "attention"
    assert all(known in error["message"] for known in MODE_OFFSET)


def test_base64_is_little_endian_float32(client: TestClient) -> None:
    coded = vectors(embed(client, encoding_format="base64"))[0]
    plain = vectors(embed(client, encoding_format="float"))[0]
    assert np.frombuffer(base64.b64decode(coded), dtype="<f4").tolist() == plain


def test_a_big_request_is_split_and_put_together_in_order(tmp_path: Path, loader: FakeLoader) -> None:
    texts = [" ".join(["word"] * (1 + 5 * i % 13)) + f" n{i}" for i in range(23)]
    with serving(make_settings(tmp_path, max_batch_tokens=40), loader) as client:
        loader.calls.clear()
        together = vectors(embed(client, texts))
        sizes = [lengths for _, lengths, _ in loader.calls]
        assert len(sizes) > 3
        assert all(max(lengths) * len(lengths) <= 40 for lengths in sizes)
        assert together == [vectors(embed(client, text))[0] for text in texts]


def test_one_thread_runs_every_forward_pass(client: TestClient, loader: FakeLoader) -> None:
    for _ in range(3):
        embed(client)
    assert {name for _, _, name in loader.calls} == {"sparsefinder-worker_0"}


def test_too_long_is_refused_with_both_lengths(client: TestClient) -> None:
    error = error_of(embed(client, ["short", "trust " * 1000]), 422, "input_too_long")
    assert error["param"] == "input.1"
    assert "1002" in error["message"]
    assert str(MAX_TOKENS) in error["message"]


def test_the_limit_itself_fits_and_one_more_does_not(client: TestClient) -> None:
    assert embed(client, "w " * (MAX_TOKENS - 2)).json()["usage"]["prompt_tokens"] == MAX_TOKENS
    error_of(embed(client, "w " * (MAX_TOKENS - 1)), 422, "input_too_long")


def test_truncate_holds_for_every_item_and_says_so(client: TestClient) -> None:
    response = embed(client, ["short", "hello " * 5000, "hello " * (MAX_TOKENS - 2)], truncate=True)
    body = response.json()
    assert body["sparsefinder"]["truncated"] == [False, True, False]
    assert body["sparsefinder"]["tokens"] == [3, MAX_TOKENS, MAX_TOKENS]
    assert vectors(response)[1] == vectors(response)[2]
    assert "sparsefinder_truncated_items_total 1.0" in client.get("/metrics").text


def test_token_ids_are_cut_too(client: TestClient) -> None:
    assert embed(client, [5] * 40, truncate=True).json()["sparsefinder"]["truncated"] == [True]
    error_of(embed(client, [5] * 40), 422, "input_too_long")


def test_model_and_dimensions(client: TestClient) -> None:
    error_of(embed(client, model="gpt-4"), 404, "model_not_found")
    assert embed(client, dimensions=4).status_code == 200
    assert "4" in error_of(embed(client, dimensions=2), 422, "dimensions_not_supported")["message"]


def test_too_many_items(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path, max_items=3)) as client:
        assert embed(client, ["a"] * 3).status_code == 200
        error_of(embed(client, ["a"] * 4), 422, "batch_too_large")
        assert embed(client, [5] * 4).status_code == 200  # one item of four tokens
