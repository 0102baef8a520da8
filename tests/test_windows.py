"""Models with sliding-window layers, from extraction to attention: windows stay, the other layers are predicted."""

import json
from dataclasses import replace

import pytest
import tiny
import tiny_llama
import torch
from safetensors import safe_open
from transformers import (
    Gemma3TextConfig,
    Gemma3TextModel,
    MistralConfig,
    MistralModel,
    ModernBertConfig,
    ModernBertModel,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5Model,
)
from typer.testing import CliRunner

from app.audit import Sample, measure
from app.model import ModelLoader
from app.servable import Lane
from sparsefinder.artifact import load, save
from sparsefinder.attaching import attach_artifact
from sparsefinder.errors import ArtifactError, DataError, IncompatibleModelError
from sparsefinder.hf import attach
from sparsefinder.patterns.positional import window
from sparsefinder.predictors import Tiles, random_projections
from sparsefinder.predictors.tiles import EVERY_KEY
from sparsefinder.teacher import batch, load_teacher
from training.cli import app
from training.extract import make_manifest, read_layer, read_manifest, shard_name
from training.pattern_text import evaluate_pattern
from training.pipeline import evaluate_artifact

KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
RADII = [3, None, 3, None]
HEADS = 4


def modernbert():
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=HEADS,
        max_position_embeddings=96, layer_types=KINDS, local_attention=6, initializer_range=0.3, pad_token_id=0,
        cls_token_id=2, sep_token_id=3, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    return ModernBertModel(config).eval()


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout if result.exit_code == 0 else result.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "t").mkdir()
    modernbert().save_pretrained(folder / "t")
    tiny.tokenizer(folder / "t").save_pretrained(folder / "t")
    g = torch.Generator().manual_seed(0)
    words = [chr(97 + n % 26) * (1 + n % 3) for n in range(40)]
    lines = [" ".join(words[i] for i in torch.randint(40, (8,), generator=g).tolist()) for _ in range(120)]
    (folder / "text.txt").write_text("\n".join(lines))
    size = ["--tokens", 40, "--instances", 4, "--heldout", 4, "--steps", 4, "--tile-size", 8, "--window", 3]
    text = ["--teacher", folder / "t", "--text", folder / "text.txt", "--also", "hinge:2"]
    code, said = invoke("run", *text, "--out", folder / "run", *size)
    assert code == 0, said
    return folder / "t", folder / "run"


def test_only_layers_that_see_the_whole_text_are_stored(run):
    _, out = run
    for split in ("train", "heldout"):
        folder = out / "shards" / split
        assert (read_manifest(folder)["windows"], read_manifest(folder)["layers"]) == (RADII, 4)
        with safe_open(folder / shard_name(0), "pt") as shard:
            names = set(shard.keys())
        assert {f"{name}.{layer}" for name in ("q", "k", "gold_flat") for layer in (1, 3)} <= names
        assert not {name for name in names if name.endswith((".0", ".2"))}
        assert read_layer(folder, 3).q.shape[1:] == (HEADS, 40, 8)
        with pytest.raises(DataError, match=r"layer 2: expected one of \[1, 3\]"):
            read_layer(folder, 2)


def test_windows_have_no_predictor_and_no_figures(run):
    _, out = run
    artifact = load(out / "artifact")
    assert [type(layer) for layer in artifact.layers] == [type(None), Tiles, type(None), Tiles]
    named = [artifact.projections, artifact.centroids, artifact.thresholds]
    assert {len(group) for part in named for group in part.values()} == {2}
    plan = artifact.card.calibration["plan"]
    for name, layers in plan["layers"].items():
        assert [value is None for value in layers] == [True, False, True, False]
        assert plan["heads"][name][0] == [None] * HEADS
        assert plan["overall"][name] == pytest.approx((layers[1] + layers[3]) / 2)
    assert plan["empty_gold"] == [0, 0, 0, 0]
    assert plan["instances"] == 2


@pytest.mark.parametrize("target", [("--mass", 0.9), ("--density", 0.6)])
def test_budgets_are_allotted_to_the_other_layers(run, target, tmp_path):
    _, out = run
    place = ["--artifact", out / "artifact", "--data", out / "shards", "--out", tmp_path / "a"]
    code, said = invoke("calibrate", *place, *target, "--json", tmp_path / "c.json")
    assert code == 0, said
    assert f"of {2 * HEADS}" in said
    figures, artifact = json.loads((tmp_path / "c.json").read_text()), load(tmp_path / "a")
    assert [layer is None for layer in artifact.layers] == [True, False, True, False]
    assert [len(row) for row in figures["density"]] == [HEADS] * 2
    reports = evaluate_artifact(tmp_path / "a", out / "shards", lambda *_: None)
    overall = reports["plan"].overall
    assert overall["mass"] == pytest.approx(figures["table"]["allotted"]["mass"], abs=1e-4)
    assert overall["computed_density"] == pytest.approx(figures["table"]["allotted"]["density"], abs=1e-4)


def test_a_text_pattern_is_measured_on_the_other_layers(run):
    _, out = run
    found = evaluate_pattern(out / "artifact", out / "shards", "budget(density=0.9) | window(1)", "hinge-r2")
    assert found["plan"].layers["recall"].isnan().tolist() == [True, False, True, False]
    assert 0.7 < found["plan"].overall["recall"] <= 1
    with pytest.raises(DataError, match="layer 1: expected a predictor"):
        evaluate_artifact(_without(run, 1), out / "shards", lambda *_: None)


def _without(run, layer):
    """The artifact without the predictor of one layer, and without the named sets (which would be one too many)."""
    artifact = load(run[1] / "artifact")
    layers = tuple(None if at == layer else predictor for at, predictor in enumerate(artifact.layers))
    path = run[1].parent / "without"
    save(path, replace(artifact, layers=layers, projections={}, centroids={}, thresholds={}))
    return path


@torch.no_grad()
def test_attached_with_every_key_the_model_gives_what_dense_gives(run):
    folder, out = run
    artifact = load(out / "artifact")
    every = tuple(layer and replace(layer, threshold=EVERY_KEY) for layer in artifact.layers)
    teacher = load_teacher(str(folder))
    attached = attach_artifact(teacher, replace(artifact, layers=every))
    tokens, mask = batch(teacher, tiny.token_ids([33, 12]))
    calls = {"dense": [], "sparse": []}
    hidden = {}
    for mode, seen in calls.items():
        with attached.using(mode, observe=seen.append):
            hidden[mode] = teacher.model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(hidden["sparse"][mask], hidden["dense"][mask], atol=1e-5, rtol=1e-5)
    assert [call.plan is None for call in calls["sparse"]] == [True, False, True, False]
    assert [call.legal.radius for call in calls["sparse"]] == RADII
    fitted = attach_artifact(load_teacher(str(folder)), artifact)
    with fitted.using("sparse"):
        few = fitted.model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
    assert (few - hidden["dense"])[mask].abs().max() > 1e-3
    with pytest.raises(ArtifactError, match="layer 3: expected a predictor"):
        attach_artifact(load_teacher(str(folder)), load(_without(run, 3)))


def test_the_service_counts_windows_as_what_they_are(run):
    folder, out = run
    loader = ModelLoader(str(folder), "cpu", "default")
    model = loader.build(loader.read(out / "artifact"))
    ids = tiny.token_ids([20, 9])
    windows = [sum(min(n, i + 4) - max(0, i - 3) for i in range(n)) for n in (20, 9)]
    for mode in ("sparse", "dense"):
        found = model.forward(ids, Lane("embed", mode), [Sample(0, (2, 5))] if mode == "sparse" else [])
        assert found.legal.tolist() == [20 * 20, 9 * 9]
        for item, pairs in enumerate(windows):
            computed = found.computed[item]
            assert computed[0].tolist() == computed[2].tolist() == [pairs] * HEADS
            assert bool((computed[1] == found.legal[item]).all()) == (mode == "dense")
        rows = [[measure(layer)[:, 0].tolist() for layer in audit] for audit in found.audits]
        assert rows == ([] if mode == "dense" else [[[0.0] * HEADS, [2.0] * HEADS] * 2])


def test_an_artifact_without_any_predictor_or_with_too_many_maps_is_refused(run, tmp_path):
    artifact = load(run[1] / "artifact")
    with pytest.raises(ArtifactError, match="expected predictors for 4 layers, got 0"):
        save(tmp_path / "a", replace(artifact, layers=(None,) * 4))
    one = (*artifact.layers[:3], None)
    with pytest.raises(ArtifactError, match="expected a plain name and 1 layers, got 2"):
        save(tmp_path / "a", replace(artifact, layers=one))


SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 96, "initializer_range": 0.3,
    "pad_token_id": 0, "sliding_window": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def causal(name):
    torch.manual_seed(0)
    if name == "Gemma3":
        return Gemma3TextModel(Gemma3TextConfig(**SIZES, layer_types=KINDS)).eval()
    return Qwen3Model(Qwen3Config(**SIZES, layer_types=KINDS, use_sliding_window=True)).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", ["Gemma3", "Qwen3"])
def test_causal_models_with_both_kinds_of_layers(name):
    model = causal(name)
    maps = [random_projections(HEADS, 4, 8, seed, "bilinear") for seed in range(4)]
    layers = [Tiles(m, threshold=EVERY_KEY) if r is None else None for m, r in zip(maps, RADII, strict=True)]
    attached = attach(model, predictors=layers, positional=window(3), tile_size=8)
    assert [caller.radius for caller in attached.callers] == RADII
    ids, mask = tiny_llama.padded([tiny_llama.token_ids(30), tiny_llama.token_ids(11, seed=1)], "left")
    given = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": tiny_llama.positions(mask)}
    hidden = {}
    for mode in ("dense", "sparse"):
        with attached.using(mode):
            hidden[mode] = model(**given).last_hidden_state
    torch.testing.assert_close(hidden["sparse"][mask], hidden["dense"][mask], atol=1e-4, rtol=1e-4)
    with attached.generation():
        first = model(**{key: value[:, :21] for key, value in given.items()}, use_cache=True)
        places = given["position_ids"][:, 21:]
        cache = {"attention_mask": mask.long(), "past_key_values": first.past_key_values}
        rest = model(input_ids=ids[:, 21:], position_ids=places, **cache)
    whole = torch.cat([first.last_hidden_state, rest.last_hidden_state], 1)
    torch.testing.assert_close(whole[mask], hidden["sparse"][mask], atol=1e-4, rtol=1e-4)


def test_models_that_leave_nothing_to_predict_or_cannot_be_extracted_are_refused():
    teacher = tiny_llama.teacher()
    windows = MistralModel(MistralConfig(**SIZES)).eval()
    seq2seq = T5Model(T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)).eval()
    for model, match in ((windows, "sliding windows only"), (seq2seq, "encoder or a decoder, got T5Model")):
        with pytest.raises(IncompatibleModelError, match=match):
            make_manifest(replace(teacher, model=model), attach(model), [[1]], split="train", shard_size=1)
