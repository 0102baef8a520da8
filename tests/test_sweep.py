"""The sweep: its points against the metrics of real predictors, its files, its command."""

import dataclasses
import functools
import json
import math
import random

import numpy as np
import pytest
import tiny
import tiny_bert
import torch
from typer.testing import CliRunner

from sparsefinder.artifact import load, save
from sparsefinder.hf import attach
from sparsefinder.metrics import counts, summarize
from sparsefinder.patterns.algebra import context_of
from sparsefinder.patterns.legal import legal_from_mask
from sparsefinder.plan import build_plan
from sparsefinder.predictors import Tiles, random_projections
from sparsefinder.teacher import load_teacher
from training import sweep_measure
from training.cli import app
from training.config import SweepConfig
from training.extract import extract_batch, join_layer
from training.sweep_families import FAMILIES, all_families
from training.sweep_files import read_sweep
from training.sweep_measure import MEASURES, OF_HALVES, TILE, measure_family
from training.sweep_quality import choose_points, locate, union_of
from training.sweep_setup import Setup
from training.sweep_sheets import layer_work

GRID = SweepConfig(
    tokens=24, instances=3, train_instances=3, buckets=(2, 4), counts=(2, 3), windows=(0, 1, 5, 9),
    thresholds=(1.0, 2.0), densities=(0.05, 0.2, 0.5), tile_sizes=(4,), fit_steps=3,
    quality_points=3, quality_instances=2,
)  # fmt: skip
LENGTHS = [24, 24, 17]


def make_artifact(folder, teacher):
    """Random maps under the names that a fit gives, and one listwise set with a weight of distance."""
    tiny_bert.make_artifact(folder, teacher, 4)
    artifact = load(folder)
    layers, heads, dim = tiny_bert.LAYERS, tiny_bert.HEADS, tiny_bert.DIM // tiny_bert.HEADS
    forms = {"hinge": "metric", "logistic": "metric", "bilinear": "bilinear", "listwise": "bilinear"}
    maps = {
        f"{name}-r3": tuple(random_projections(heads, 3, dim, 10 * layer + at, form) for layer in range(layers))
        for at, (name, form) in enumerate(forms.items())
    }
    weights = {"listwise-r3-distance": tuple(torch.tensor([-0.3, 0.1]) for _ in range(layers))}
    save(folder, dataclasses.replace(artifact, projections=maps, thresholds=weights))
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    teacher = tiny_bert.make_teacher(folder / "teacher")
    return teacher, make_artifact(folder / "artifact", teacher)


@pytest.fixture(scope="module")
def measured(places):
    """Works of two layers over instances of two lengths, and the families over them."""
    teacher = load_teacher(str(places[0]))
    attached = attach(teacher.model, alpha=1.5, head_scale=torch.tensor([[1.0, 0.7], [1.3, 1.0]]))
    parts = [extract_batch(teacher, attached, tiny.token_ids(LENGTHS, seed=seed), 24) for seed in range(2)]
    held, train = ([join_layer(part, layer, 1.5) for layer in range(2)] for part in (parts[:1], parts[1:]))
    works = [layer_work(layer, data) for layer, data in enumerate(held)]
    return works, all_families(Setup(load(places[1]), GRID, lambda layer: train[layer]))


@functools.cache
def figures(family, works):
    """On all instances, whatever part of them the family asks for."""
    return measure_family(dataclasses.replace(family, every=1), works, GRID.windows)


def real_figures(family, point, works):
    """The same point through the predictor itself and `sparsefinder.metrics`, set and plan."""
    sheet, setting = locate(family, point)
    sets, plans = [], []
    for work in works:
        data = work.data
        legal = legal_from_mask(data.mask)
        predictor, positional = sheet.prepare(work).predictor(setting), union_of(point)
        more = {"alpha": data.alpha, "scale": data.scale, "layer": work.layer}
        if isinstance(predictor, Tiles):
            plan = predictor.plan(data.q, data.k, legal, positional, sheet.tile)
            sets.append(counts(data.q, data.k, plan, legal, **more))
            plans.append(sets[-1])
            continue
        pattern = predictor.pattern(data.q, data.k, legal) | positional
        plan = build_plan(pattern, legal, TILE, context_of(legal, work.layer), heads=work.heads)
        sets.append(counts(data.q, data.k, pattern, legal, **more))
        plans.append(counts(data.q, data.k, plan, legal, **more))
    found = summarize(sets).overall
    return found | {"computed_density": summarize(plans).overall["computed_density"]}


@pytest.mark.slow
def test_every_point_is_what_the_real_predictor_gives(measured):
    works, families = measured
    assert {family.name for family in families} >= {
        "window",
        "distance",
        "clusters",
        "tiles",
        "quantization",
        "reformer",
    }
    for family in families:
        points = figures(family, tuple(works))["points"]
        some = points[:: max(1, len(points) // 3)]
        for point in some:
            for name, expected in real_figures(family, point, works).items():
                # Bilinear scores are summed in another order here: two pairs may fall on the other side of a cut.
                dot = family.objective == "bilinear" or family.role == "oracle" or family.name.startswith("svd")
                near = 2 / (17 * 2 * 2 * 3) if dot else 0
                came = point[name]
                if came is None:
                    assert math.isnan(expected), (family.key, point, name)
                else:
                    assert came == pytest.approx(expected, abs=1e-5 + near), (family.key, point, name)


def test_halves_and_layers_average_to_the_whole(measured):
    works, families = measured
    for point in figures(families[0], tuple(works))["points"]:
        for name in MEASURES:
            if None not in point["layers"][name]:
                assert np.mean(point["layers"][name]) == pytest.approx(point[name], abs=2e-5)
        for name in OF_HALVES:
            mean = (2 * point["chosen"][name] + point["measured"][name]) / 3
            assert mean == pytest.approx(point[name], abs=2e-5)


def test_what_is_kept_grows_with_windows_and_global_tokens(measured):
    works, families = measured
    for family in families:
        points = figures(family, tuple(works))["points"]
        by = {(*_own(p), p["window"], p["global"]): p for p in points}
        assert len(by) == len(points)
        for p in points:
            bigger = by.get((*_own(p), 9, p["global"]))
            assert bigger["sparsity"] <= p["sparsity"] + 1e-9
            assert bigger["recall"] >= p["recall"] - 1e-9
            assert bigger["mass"] >= p["mass"] - 2e-5


def _own(point):
    other = (*MEASURES, "layers", "chosen", "measured", "window", "global")
    return tuple((name, value) for name, value in point.items() if name not in other)


def test_quality_is_measured_where_rows_are_best(measured):
    works, families = measured
    results = [figures(family, tuple(works)) for family in families]
    chosen = choose_points(results, 5)
    assert len(chosen) == 5
    assert len({id(point) for _, point in chosen}) == 5
    at, point = chosen[0]
    assert point in results[at]["points"]
    same = [r for r in results if (r["family"], r["role"]) == (results[at]["family"], results[at]["role"])]
    able = [p["recall"] for r in same for p in r["points"] if p["sparsity"] >= 0.9]
    assert point["sparsity"] >= 0.9
    assert point["recall"] == max(able)


# ---- the command


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(" ".join(rng.choice(tiny_bert.WORDS) for _ in range(12)) for _ in range(120)))
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def sweep(places, text, out, *more):
    teacher, artifact = places
    options = ["--teacher", teacher, "--artifact", artifact, "--text", text, "--quick", "--tokens", 20]
    return invoke("sweep", *options, "--instances", 3, "--quality-points", 2, "--out", out, *more)


ROWS = [option for row in ("window", "distance", "tiles", "clusters") for option in ("--only", row)]


@pytest.fixture(scope="module")
def done(places, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "sweep"
    result = sweep(places, text, out, *ROWS)
    assert result.exit_code == 0, result.output
    assert str(out / "sweep.json") in result.stdout.replace("\n", "")
    return out


@pytest.mark.slow
def test_processes_beside_each_other_measure_what_one_does(done, places, text, tmp_path, monkeypatch):
    monkeypatch.setattr("training.sweep.worker_count", lambda config: 2)
    result = sweep(places, text, tmp_path / "sweep", *ROWS)
    assert result.exit_code == 0, result.output
    for name in ("sweep.json", *(f"families/{path.name}" for path in (done / "families").iterdir())):
        assert (tmp_path / "sweep" / name).read_bytes() == (done / name).read_bytes(), name


def test_the_command_writes_one_json_of_points(done):
    result = read_sweep(done)
    assert result["about"]["instances"] == 3
    assert {family["family"] for family in result["families"]} == {"window", "distance", "tiles", "clusters"}
    sets = {family["family"]: family["set"] for family in result["families"]}
    assert sets["tiles"] == "plan"
    assert sets["distance"] == "pattern"
    assert len(result["quality"]) == 2
    for point in result["quality"]:
        assert 0 < point["cosine_dense"] <= 1
        assert -1 <= point["cosine_original"] <= 1
    assert result["families"][0]["measured_points"] >= len(result["families"][0]["points"])


def test_it_goes_on_and_the_same_twice_gives_the_same_file(done, places, text, monkeypatch):
    before = (done / "sweep.json").read_bytes()
    (done / "families" / "tiles.listwise.r3.json").unlink()
    (done / "sweep.json").unlink()
    again = []
    real = sweep_measure.measure_family
    monkeypatch.setattr(
        "training.sweep.measure_family", lambda family, *rest: again.append(family.key) or real(family, *rest)
    )
    result = sweep(places, text, done, *ROWS)
    assert result.exit_code == 0, result.output
    assert again == ["tiles.listwise.r3"]
    assert (done / "sweep.json").read_bytes() == before


def test_mistakes_are_one_line(done, places, text, tmp_path):
    for result, words in (
        (sweep(places, text, done, *ROWS, "--seed", 5), "another configuration"),
        (sweep(places, text, tmp_path / "a", "--only", "magic"), "expected rows among window"),
        (sweep(places, text, tmp_path / "b", "--config", "none"), "expected one of paper-mlm"),
        (invoke("report", "--sweep", tmp_path / "none"), "`sparsefinder-train sweep` first"),
    ):
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output
        assert words in result.stderr.replace("\n", " ")


def test_ctrl_c_is_one_line_and_130(places, text, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("training.sweep.measure_family", interrupted)
    result = sweep(places, text, tmp_path / "x", *ROWS)
    assert result.exit_code == 130
    assert result.stderr.strip().splitlines()[-1].startswith("error: interrupted")
    assert not (tmp_path / "x" / "sweep.json").exists()


def test_every_row_has_families(measured):
    _, families = measured
    assert len({family.key for family in families}) == len(families)
    assert next(iter(FAMILIES)) == "window"
    assert json.dumps([family.key for family in families])
