"""`sparsefinder-train` as its users meet it: a run on a random two-layer BERT, its errors, and the same hash twice."""

import json
import random
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from typer.testing import CliRunner

from sparsefinder.artifact import load, save
from sparsefinder.predictors import Clusters, Distance, RowBudget, Score, Tiles
from training import pipeline
from training.cli import app
from training.config import KINDS, ExtractConfig, FitConfig, minilm
from training.extract import read_manifest
from training.fit import calibration_items, measuring_items

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--tokens", "24", "--instances", "6", "--heldout", "4"]
QUICK = ["--steps", "4", "--tile-size", "8", "--tiles", "2", "--window", "3"]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def error_of(result):
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    return line


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return tiny.save_teacher(tmp_path_factory.mktemp("teacher") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng = random.Random(0)
    words = ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(2, 6))) for _ in range(80)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(" ".join(rng.choice(words) for _ in range(8)) for _ in range(120)))
    return path


@pytest.fixture(scope="module")
def done(teacher, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    extra = ["--also", "hinge:2", "--also", "logistic:2", "--also", "bilinear:2"]
    result = invoke(
        "run", "--teacher", teacher, "--text", text, "--out", out, *SMALL, *QUICK, "--recall", "0.9", *extra
    )
    assert result.exit_code == 0, result.output
    return out, result


def test_a_run_writes_an_artifact_and_says_where(done, teacher):
    out, result = done
    artifact = load(out / "artifact")
    assert f"Artifact {artifact.card.version} lies in {out / 'artifact'}" in result.stdout.replace("\n", "")
    card = artifact.card
    assert (card.layers, card.heads, card.head_dim, card.served) == (2, 4, 8, "listwise-r4 tiles")
    assert card.calibration["plan"]["set"] == "plan"
    assert len(card.calibration["plan"]["heads"]["recall"]) == 2
    assert card.calibration["curve"]["listwise-r4"]["sparsity"][0] == 0.5
    assert card.training["fit"]["text_sha256"]
    assert [card.training["fit"]["config"][name] for name in ("steps", "tile_size", "tiles")] == [4, 8, 2]
    assert set(artifact.projections) == {"listwise-r4", "hinge-r2", "logistic-r2", "bilinear-r2"}
    assert {"hinge-r2-b8", "logistic-r2-b16"} <= set(artifact.centroids)
    assert {"listwise-r4", "listwise-r4-distance", "hinge-r2", "bilinear-r2"} <= set(artifact.thresholds)
    assert all(isinstance(layer, Tiles) for layer in artifact.layers)
    assert 0.8 < card.calibration["plan"]["overall"]["recall"] <= 1


def test_the_same_seed_gives_the_same_hash_and_another_seed_another(done, teacher, tmp_path):
    out, _ = done
    hashes = []
    for seed, folder in ((0, "a"), (0, "b"), (1, "c")):
        options = ["--data", out / "shards", "--out", tmp_path / folder, *QUICK, "--objective", "hinge", "--seed", seed]
        assert invoke("fit", *options, "--rank", 2).exit_code == 0
        hashes.append(load(tmp_path / folder).card.hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_any_pattern_written_as_text_can_be_evaluated(done, tmp_path):
    """A text that says what the artifact serves gives the served figures; another one gives its own definition's."""
    out, _ = done
    place = ["--artifact", out / "artifact", "--data", out / "shards"]

    def figures(*more):
        result = invoke("evaluate", *place, "--json", tmp_path / "f.json", *more)
        assert result.exit_code == 0, result.output
        return json.loads((tmp_path / "f.json").read_text())

    served = figures()["plan"]["overall"]
    again = figures("--pattern", "tiles | window(3) | global(1)")["plan"]["overall"]
    assert again == pytest.approx(served, abs=1e-12)
    both = figures("--pattern", "window(1) | clusters8(top=8)", "--maps", "hinge-r2")
    assert both["pattern"]["overall"]["recall"] == 1.0
    assert both["pattern"]["overall"]["sparsity"] == 0.0
    few = figures("--pattern", "budget(density=0.25)", "--maps", "bilinear-r2")
    assert few["pattern"]["overall"]["sparsity"] == pytest.approx(0.75)
    assert few["plan"]["overall"]["recall"] >= few["pattern"]["overall"]["recall"]
    assert "expected one of" in error_of(invoke("evaluate", *place, "--pattern", "window(1)", "--maps", "other"))
    assert "pattern" in error_of(invoke("evaluate", *place, "--pattern", "import os"))
    assert "clusters8" in error_of(invoke("evaluate", *place, "--pattern", "clusters9(top=1)", "--maps", "hinge-r2"))


@pytest.mark.parametrize(
    ("objective", "predictor", "kind"),
    [("hinge", "clusters", Clusters), ("logistic", "distance", Distance), ("hinge", "budget", RowBudget),
     ("bilinear", "score", Score)],
)  # fmt: skip
def test_every_kind_of_predictor_can_be_served_and_evaluated(done, tmp_path, objective, predictor, kind):
    out, _ = done
    options = ["--objective", objective, "--predictor", predictor, "--clusters", 4, "--sparsity", 0.5, "--rank", 2]
    result = invoke("fit", "--data", out / "shards", "--out", tmp_path / "a", *QUICK, *options)
    assert result.exit_code == 0, result.output
    assert "set pattern" in result.stdout
    artifact = load(tmp_path / "a")
    assert all(isinstance(layer, kind) for layer in artifact.layers)
    figures = tmp_path / "figures" / "all.json"
    result = invoke("evaluate", "--artifact", tmp_path / "a", "--data", out / "shards", "--json", figures)
    assert result.exit_code == 0, result.output
    assert str(figures) in result.stdout.replace("\n", "")
    again = json.loads(figures.read_text())
    assert again["plan"] == artifact.card.calibration["plan"]
    assert again["pattern"]["overall"]["recall"] <= again["plan"]["overall"]["recall"]


def test_extract_goes_on_and_refuses_another_configuration(teacher, text, tmp_path):
    options = ["--teacher", teacher, "--text", text, "--out", tmp_path / "shards", *SMALL]
    first = invoke("extract", *options)
    assert first.exit_code == 0, first.output
    assert "6 training and 4 held-out instances of 24 tokens lie in" in first.stdout.replace("\n", " ")
    assert invoke("extract", *options).exit_code == 0
    assert "seed differ" in error_of(invoke("extract", *options, "--seed", 5))


@pytest.mark.parametrize("command", ["extract", "run"])
def test_fewer_instances_than_asked_are_said(command, teacher, text, tmp_path):
    options = [command, "--teacher", teacher, "--text", text, "--out", tmp_path / "x", "--tokens", 64, "--instances", 6]
    result = invoke(*options, "--heldout", 80, *(QUICK if command == "run" else []))
    assert result.exit_code == 0, result.output
    shards = tmp_path / "x" / ("shards" if command == "run" else "")
    came = {split: read_manifest(shards / split)["instances"] for split in ("train", "heldout")}
    assert came["train"] == 6
    assert 0 < came["heldout"] < 80
    said = f"heldout: {came['heldout']} of 80 instances of 64 tokens, the text has no more (a tenth of it is held out)"
    assert said in result.stderr.splitlines()
    assert "train: " not in result.stderr


def test_an_instance_shorter_than_asked_is_said(teacher, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a cat. a dog.\na bee.\n")
    options = ["--tokens", 64, "--instances", 1, "--heldout", 1]
    result = invoke("extract", "--teacher", teacher, "--text", path, "--out", tmp_path / "x", *options)
    assert re.search(
        r"^train: 1 of 1 instances of \d+ tokens, not 64, the text has no more$", result.stderr, re.MULTILINE
    )


@pytest.mark.parametrize("command", ["extract", "run"])
def test_mistakes_in_text_and_folder_are_said_before_a_teacher_is_opened(command, text, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "open_teacher", lambda _: pytest.fail("the teacher was opened"))
    bad = tmp_path / "bad.txt"
    options = [command, "--teacher", "minilm", "--artifact", "none", "--tokens", 64]

    def said(content):
        bad.write_bytes(content)
        return error_of(invoke(*options, "--text", bad, "--out", tmp_path / "x"))

    assert "No such file" in error_of(invoke(*options, "--text", tmp_path / "none.txt", "--out", tmp_path / "x"))
    assert "expected UTF-8 text, byte 0 is not" in said(b"\xff\xfe\x00")
    assert "expected UTF-8 text, byte 3 is not" in said("é\n".encode() + bytes(100))
    assert "the file is empty" in said(b" \n")
    assert "an instance of 64 tokens to train on and one held out, got 1 characters, with nothing held out" in said(
        b"a"
    )
    again = b"The very same line of text, longer than fifty characters, again and again.\n" * 99
    assert "7425 characters, with nothing to train on that is not in the held-out tenth as well" in said(again)
    for out in (bad, bad / "inside"):
        line = error_of(invoke(*options, "--text", text, "--out", out))
        assert f"expected a folder that can be written, {bad} is a file" in line
    assert not (tmp_path / "x").exists()


def test_ctrl_c_while_modules_are_imported_is_quiet():
    """Even where an import swallows the exception, as torch does while it loads numpy."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["sparsefinder-train"].partition(":")
    code = f"""
import contextlib, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would hand on that it is ignored
class Interrupted:
    def find_spec(self, name, *_):
        if name == "training.cli":
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupted())
from {module} import {name}
{name}()
"""
    left = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (left.returncode, left.stdout, left.stderr) == (130, "", "")


def test_ctrl_c_is_one_line_and_130(teacher, text, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "extract", interrupted)
    result = invoke("extract", "--teacher", teacher, "--text", text, "--out", tmp_path, *SMALL)
    assert result.exit_code == 130
    assert result.stderr.strip().splitlines()[-1].startswith("error: interrupted")


def test_shards_of_another_teacher_delta_are_refused(done, tmp_path):
    out, _ = done
    artifact = load(out / "artifact")
    name = "encoder.layer.0.attention.self.query.bias.full"
    save(tmp_path / "other", replace(artifact, delta={name: torch.ones(32).half()}))
    shards = ["--data", out / "shards"]
    assert "teacher delta" in error_of(
        invoke("fit", *shards, "--artifact", tmp_path / "other", "--out", tmp_path / "x")
    )
    assert "teacher delta" in error_of(invoke("evaluate", *shards, "--artifact", tmp_path / "other"))


@pytest.mark.unchecked
def test_mistakes_are_one_line(done, teacher, text, tmp_path):
    out, _ = done
    base = ["run", "--teacher", teacher, "--out", tmp_path / "x", *SMALL, *QUICK]
    assert "No such file" in error_of(invoke(*base, "--text", tmp_path / "none.txt"))
    assert "expected one of hinge" in error_of(invoke(*base, "--text", text, "--objective", "magic"))
    assert "listwise maps go with tiles" in error_of(invoke(*base, "--text", text, "--predictor", "distance"))
    both = ["--recall", "0.9", "--sparsity", "0.9"]
    assert "exactly one of recall and sparsity" in error_of(invoke(*base, "--text", text, *both))
    assert "between 0 and 1" in error_of(invoke(*base, "--text", text, "--recall", "1.5"))
    assert "hinge:4" in error_of(invoke(*base, "--text", text, "--also", "hinge"))
    assert "got 'nowhere'" in error_of(invoke("run", "--teacher", "nowhere", "--text", text, "--out", tmp_path / "x"))
    assert "extract` first" in error_of(invoke("fit", "--data", tmp_path / "none"))
    assert "card.json" in error_of(invoke("evaluate", "--artifact", tmp_path, "--data", out / "shards"))
    assert "window" in error_of(invoke(*base, "--text", text, "--window", "4"))
    assert not (tmp_path / "x" / "artifact").exists()


def test_three_sentences_are_too_little_for_64_clusters(teacher, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a cat. a dog.\na bee.\n")
    options = ["--objective", "hinge", "--predictor", "clusters", "--clusters", 64]
    result = invoke(
        "run", "--teacher", teacher, "--text", path, "--out", tmp_path / "x", "--tokens", 64, *QUICK, *options
    )
    assert "64 clusters" in error_of(result)


def test_calibration_and_measurement_take_different_instances():
    assert not set(calibration_items(32)) & set(measuring_items(32))
    assert measuring_items(1) == [0]
    assert len(calibration_items(100)) == 8


def test_whole_configurations():
    config = minilm()
    assert (config.fit.objective, config.fit.rank) == ("listwise", 8)
    everything = {(objective, rank) for objective in KINDS for rank in (4, 8)}
    assert {*config.fit.also, ("listwise", 8)} == everything
    assert ExtractConfig().tokens == 256
    assert FitConfig(recall=0.9, sparsity=None).served_kind == "tiles"


def test_learning_in_torch_needs_no_global_seed(done, tmp_path):
    out, _ = done
    hashes = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        options = ["--data", out / "shards", "--out", tmp_path / str(seed), *QUICK]
        assert invoke("fit", *options, "--recall", "0.9").exit_code == 0
        hashes.append(load(tmp_path / str(seed)).card.hash)
    assert hashes[0] == hashes[1]
