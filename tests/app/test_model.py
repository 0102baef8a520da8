"""The real engine over HTTP, on a random two-layer BERT that is made here: padding, modes, plans, audits, reload."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from app_fakes import embed, error_of, serving
from starlette.testclient import TestClient
from tiny_bert import HEADS, LAYERS, WORDS, make_artifact, make_teacher

from app.audit import Sample
from app.calibration import calibration_of
from app.main import make_engine
from app.model import Content, ModelLoader, ServedModel, choose_device, label
from app.observer import kept_keys
from app.servable import Forward, Lane
from app.settings import load_settings
from app.telemetry import Telemetry
from sparsefinder import hf_attached
from sparsefinder.artifact import load
from sparsefinder.attention.crossover import Crossover, Times
from sparsefinder.entmax import support
from sparsefinder.errors import ConfigError
from sparsefinder.patterns.legal import legal_from_mask
from sparsefinder.patterns.positional import GlobalTokens, window
from sparsefinder.plan import plan_matrix
from sparsefinder.predictors import Tiles, layer_plan, random_projections
from sparsefinder.teacher import batch, load_teacher

SHORT = "w1 w2 w3"  # 5 tokens
LONG = " ".join(WORDS[n * n % 60] for n in range(398))  # 400 tokens


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("real")
    teacher = make_teacher(root / "teacher")
    make_artifact(root / "few", teacher, keys=20)
    make_artifact(root / "all", teacher, keys=512)
    make_artifact(root / "stranger", teacher, keys=20, teacher_fingerprint="f" * 64)
    return root


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[TestClient]:
    settings = load_settings(teacher=str(root / "teacher"), artifact=root / "few", audit_rate=1.0, device="cpu")
    with serving(settings, ModelLoader(settings.teacher, settings.device, "default")) as client:
        yield client


@pytest.fixture(scope="module")
def model(root: Path) -> ServedModel:
    return ServedModel(load_teacher(str(root / "teacher")), Content(root / "few", load(root / "few")), "cpu", "default")


def vectors(client: TestClient, text: Any, **fields: Any) -> np.ndarray[Any, Any]:
    response = embed(client, text, **fields)
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]])


@pytest.mark.parametrize("mode", ["original", "dense", "sparse", "exact"])
def test_a_batch_equals_each_alone(client: TestClient, mode: str) -> None:
    together = embed(client, [SHORT, LONG], attention=mode)
    assert together.json()["sparsefinder"]["tokens"] == [5, 400]
    batch = vectors(client, [SHORT, LONG], attention=mode)
    for row, text in enumerate((SHORT, LONG)):
        np.testing.assert_allclose(batch[row], vectors(client, text, attention=mode)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["original", "dense", "sparse", "exact"])
def test_padding_changes_nothing(model: ServedModel, mode: Any) -> None:
    ids = model.tokenize([SHORT, LONG, SHORT])
    together = model.forward(ids, Lane("embed", mode), ())
    for place in range(3):
        alone = model.forward([ids[place]], Lane("embed", mode), ())
        np.testing.assert_allclose(together.outputs[place], alone.outputs[0], atol=1e-5, rtol=0)
        assert together.legal[place] == len(ids[place]) ** 2
        if mode != "exact":  # the pairs of a proof are known for a batch, not for each item
            assert (together.computed[place] == alone.computed[0]).all()


def test_the_modes_are_three_different_computations(client: TestClient) -> None:
    original, dense, sparse = (vectors(client, LONG, attention=mode)[0] for mode in ("original", "dense", "sparse"))
    assert np.abs(original - dense).max() > 1e-3
    assert np.abs(sparse - dense).max() > 1e-3


def test_original_is_the_untouched_model(client: TestClient, root: Path) -> None:
    teacher = load_teacher(str(root / "teacher"))
    ids = torch.tensor([teacher.tokenizer(LONG)["input_ids"]])
    with torch.inference_mode():
        expected = teacher.model(input_ids=ids).last_hidden_state.mean(1)
    np.testing.assert_allclose(vectors(client, LONG, attention="original"), expected.numpy(), atol=1e-5)


def test_a_plan_with_every_key_gives_the_dense_answer(client: TestClient) -> None:
    dense = vectors(client, LONG, attention="dense")
    assert client.post("/admin/reload", json={"artifact": "all"}).status_code == 200
    answer = embed(client, LONG)
    assert client.post("/admin/reload", json={"artifact": "few"}).status_code == 200
    assert answer.json()["sparsefinder"]["computed_density"] == 1.0
    np.testing.assert_allclose([item["embedding"] for item in answer.json()["data"]], dense, atol=1e-5)


def test_exact_is_dense_whatever_the_plan_left_out(client: TestClient) -> None:
    answer = embed(client, [SHORT, LONG], attention="exact")
    came = np.array([item["embedding"] for item in answer.json()["data"]])
    np.testing.assert_allclose(came, vectors(client, [SHORT, LONG], attention="dense"), atol=1e-5, rtol=0)
    sparse = embed(client, [SHORT, LONG]).json()["sparsefinder"]
    layers = answer.json()["sparsefinder"]["layers"]
    pairs, density = HEADS * (5**2 + 400**2), sparse["layers"][0]["computed_density"]  # later layers read other inputs
    with_proof = density + layers[0]["repair"]["survivors"] / pairs
    assert layers[0]["computed_density"] == pytest.approx(with_proof, abs=HEADS / pairs)
    for layer in layers:
        repair = layer["repair"]
        assert layer["ran"] == {"exact": 1}
        assert repair["rows"] == HEADS * (5 + 400)
        assert 0 < repair["repaired"] <= repair["rows"] - repair["proven"]


def test_auto_is_the_path_that_it_says(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = Times(4, 1e-5, 1e-3, (0.01, 1.0), (1e-3, 1e-3)), Times(512, 1.0, 1e-3, (0.01, 1.0), (1e-3, 2.0))
    table = ((1, (short, long)),)
    monkeypatch.setattr(hf_attached, "shipped_crossover", lambda setting, device: Crossover(setting, table))
    settings = load_settings(teacher=str(root / "teacher"), artifact=root / "few", device="cpu")
    with serving(settings, ModelLoader(settings.teacher, settings.device, "default")) as client:
        for text, path in ((SHORT, "dense"), (LONG, "sparse")):
            answer = embed(client, text, attention="auto").json()
            assert [layer["ran"] for layer in answer["sparsefinder"]["layers"]] == [{path: 1}] * 2
            assert [item["embedding"] for item in answer["data"]] == vectors(client, text, attention=path).tolist()


def test_density_is_what_the_plans_say(client: TestClient, model: ServedModel) -> None:
    answer = embed(client, [SHORT, LONG]).json()["sparsefinder"]
    ids = model.tokenize([SHORT, LONG])
    expected = pairs_by_matrix(model, ids) / (5 * 5 + 400 * 400)
    assert [layer["computed_density"] for layer in answer["layers"]] == pytest.approx(expected.tolist())
    assert 0.01 < answer["computed_density"] < 0.2


def pairs_by_matrix(model: ServedModel, ids: list[list[int]]) -> np.ndarray[Any, Any]:
    """Mean over heads of the pairs of each layer's plan, counted in its matrix."""
    sums = []

    def observe(call: Any) -> None:
        cells = [plan_matrix(call.plan, call.legal, b, h).sum() for b in range(len(ids)) for h in range(HEADS)]
        sums.append(float(sum(cells)) / HEADS)

    run(model, ids, observe)
    return np.array(sums)


def run(model: ServedModel, ids: list[list[int]], observe: Any) -> None:
    tokens, mask = batch(model._twin, ids)
    with torch.inference_mode(), model._attached.using("sparse", observe=observe):
        model._twin.model(input_ids=tokens, attention_mask=mask.long())


def test_audited_rows_are_rows_of_the_plan_and_of_the_gold_graph(model: ServedModel) -> None:
    ids = model.tokenize([SHORT, LONG])
    rows = (0, 15, 16, 17, 255, 399)
    done: Forward = model.forward(ids, Lane("embed", "sparse"), [Sample(1, rows)])
    calls: list[Any] = []
    run(model, ids, calls.append)
    assert [len(layers) for layers in done.audits] == [LAYERS]
    for layer, call in zip(done.audits[0], calls, strict=True):
        for h in range(HEADS):
            assert torch.equal(layer.kept[h], plan_matrix(call.plan, call.legal, 1, h)[list(rows)])
        scores = call.scale[:, None, None] * (call.q[1] @ call.k[1].transpose(-1, -2))
        gold = support(scores, 1.5, call.legal.matrix(1))[:, list(rows)]
        ours = support(layer.scale[:, None, None] * (layer.q @ layer.k.transpose(-1, -2)), layer.alpha, layer.legal)
        assert (gold != ours).sum() <= 1  # a flipped edge at most: another GEMM
        assert bool(layer.kept.any())
        assert not bool(layer.kept.all())


def test_kept_keys_of_a_causal_plan_with_left_padding() -> None:
    torch.manual_seed(1)
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[1, :9] = False
    legal = legal_from_mask(mask, causal=True)
    q, k = torch.randn(2, HEADS, 37, 16), torch.randn(2, HEADS, 37, 16)
    tiles = Tiles(random_projections(HEADS, 4, 16, seed=0, form="bilinear"), keys_per_tile=5)
    plan = layer_plan(tiles, q, k, legal, window(3) | GlobalTokens(1), 8)
    rows = torch.arange(9, 37)
    for h in range(HEADS):
        assert torch.equal(kept_keys(plan, 1, rows)[h], plan_matrix(plan, legal, 1, h)[rows])


def test_live_recall_of_real_requests(client: TestClient) -> None:
    embed(client, LONG)
    until = time.monotonic() + 10
    while not (live := client.get("/v1/sparsity").json()["live"])["requests"]:
        assert time.monotonic() < until
    assert 0 < live["overall"]["recall"] <= 1
    assert 0 < live["overall"]["sparsity"] < 1
    assert live["overall"]["mass"] <= 1 + 1e-6
    assert len(live["layers"]) == LAYERS
    assert len(live["layers"][0]["heads"]) == HEADS
    embed(client, LONG, attention="dense")


def test_blank_long_and_foreign_texts(client: TestClient) -> None:
    error_of(embed(client, ["w1", "\u200d"]), 422, "empty_input")  # BERT reads no token there
    assert embed(client, "🙂").status_code == 200  # an unknown token is a token
    error = error_of(embed(client, "trust " * 1000), 422, "input_too_long")
    assert "512" in error["message"]
    assert "1002" in error["message"]
    cut = embed(client, ["w1 " * 1000, "w1 " * 510], truncate=True).json()
    assert cut["sparsefinder"]["truncated"] == [True, False]
    assert cut["sparsefinder"]["tokens"] == [512, 512]
    first, second = (item["embedding"] for item in cut["data"])
    np.testing.assert_allclose(first, second, atol=1e-5)


def test_an_artifact_of_another_teacher_is_refused(client: TestClient, root: Path) -> None:
    error_of(client.post("/admin/reload", json={"artifact": "stranger"}), 409, "artifact_unusable")
    damaged = root / "damaged"
    damaged.mkdir(exist_ok=True)
    for name in ("card.json", "predictors.safetensors"):
        damaged.joinpath(name).write_bytes((root / "few" / name).read_bytes())
    tensors = bytearray((damaged / "predictors.safetensors").read_bytes())
    tensors[-1] ^= 1
    (damaged / "predictors.safetensors").write_bytes(bytes(tensors))
    error_of(client.post("/admin/reload", json={"artifact": "damaged"}), 409, "artifact_unusable")
    error_of(client.post("/admin/reload", json={"artifact": "teacher"}), 409, "artifact_unusable")
    assert embed(client, SHORT).status_code == 200


def test_the_same_request_twice_is_bit_equal(client: TestClient) -> None:
    assert embed(client, LONG).json()["data"] == embed(client, LONG).json()["data"]


def test_calibration_is_laid_out_like_live() -> None:
    report = {"set": "plan", "instances": 3, "overall": {"recall": 0.5}, "empty_gold": [0, 0]}
    report |= {"layers": {"recall": [0.4, 0.6]}, "heads": {"recall": [[0.3, 0.5], [0.6, 0.6]]}}
    shown = calibration_of({"plan": report, "pattern": report | {"set": "pattern"}, "tokens": 256})
    assert shown is not None
    heads = [{"head": 0, "recall": 0.3}, {"head": 1, "recall": 0.5}]
    assert shown["layers"][0] == {"layer": 0, "recall": 0.4, "heads": heads}
    assert (shown["set"], shown["overall"]) == ("plan", {"recall": 0.5})
    assert shown["pattern"]["set"] == "pattern"
    assert shown["about"] == {"tokens": 256}
    assert calibration_of({}) is None


def test_settings_make_the_real_engine_with_its_own_threads(root: Path) -> None:
    settings = load_settings(teacher=str(root / "teacher"), artifact=root / "few", threads=1, crossover="default")
    engine = make_engine(settings, Telemetry())
    assert isinstance(engine.loader, ModelLoader)
    assert engine._worker.submit(torch.get_num_threads).result() == 1
    assert engine._worker.submit(numba.get_num_threads).result() == 1


def test_an_artifact_is_called_by_its_folder_or_its_run(tmp_path: Path) -> None:
    assert label(tmp_path / "runs" / "emma" / "artifact") == "emma"
    assert label(tmp_path / "minilm-entmax") == "minilm-entmax"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert choose_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="device: expected cpu or auto"):
        choose_device("cuda")
