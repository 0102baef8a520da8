"""Artifacts: what is written comes back, equal content has an equal hash, every damage is refused by name."""

import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sparsefinder.artifact as module
import sparsefinder.atomic_folder as folders
from sparsefinder.artifact import CARD, DELTA_FILE, PREDICTOR_FILE, Artifact, Card, load, save
from sparsefinder.errors import ArtifactError
from sparsefinder.predictors import (
    Clusters,
    Distance,
    Predictor,
    RowBudget,
    Tiles,
    WindowOnly,
    random_projections,
)

LAYERS, HEADS, DIM, RANK = 6, 2, 4, 3


def card(**changes: object) -> Card:
    made = Card(
        teacher="minilm",
        teacher_fingerprint="f" * 64,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=1,
        head_dim=DIM,
        alpha=1.5,
        head_scale=tuple((1.0, 0.25) for _ in range(LAYERS)),
        objective="listwise",
        served="listwise-r3",
        window_size=5,
        global_tokens=1,
        tile_size=32,
        calibration={"overall": {"recall": 0.91, "precision": None}},
        training={"command": "sparsefinder-train run", "seed": 0},
        libraries={"torch": torch.__version__},
    )
    return dataclasses.replace(made, **changes)


def layer(index: int) -> Predictor:
    metric, bilinear = (random_projections(HEADS, RANK, DIM, index, form) for form in ("metric", "bilinear"))
    bilinear = dataclasses.replace(bilinear, k_linear=torch.ones(HEADS, DIM), offset=torch.zeros(HEADS))
    kinds: tuple[Callable[[], Predictor], ...] = (
        lambda: Tiles(bilinear, threshold=-5.5, distance_weight=torch.full((HEADS,), -0.5)),
        lambda: Tiles(bilinear, keys_per_tile=12),
        lambda: Distance(metric, torch.ones(HEADS)),
        lambda: Clusters(metric, torch.randn(HEADS, 5, RANK), torch.ones(HEADS, dtype=torch.int64)),
        lambda: RowBudget(metric, 0.1),
        lambda: WindowOnly(3),
    )
    return kinds[index]()


def artifact(**changes: object) -> Artifact:
    torch.manual_seed(0)
    maps = tuple(random_projections(HEADS, RANK, DIM, index) for index in range(LAYERS))
    return Artifact(
        card(**changes),
        tuple(layer(index) for index in range(LAYERS)),
        projections={"hinge-r3": maps},
        centroids={"hinge-r3": tuple(torch.randn(HEADS, 5, RANK) for _ in range(LAYERS))},
        thresholds={"hinge-r3": tuple(torch.rand(HEADS) for _ in range(LAYERS))},
        delta={"encoder.layer.0.query.weight": torch.randn(3, 2)},
    )


def listing(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def tensors_of(found: Artifact) -> dict[str, torch.Tensor]:
    return {**module._pack(found), **{f"delta.{name}": tensor for name, tensor in found.delta.items()}}


def reseal(path: Path) -> None:
    """Make every hash right again, as somebody would who damages on purpose: what is left must be refused by itself."""
    body = json.loads((path / CARD).read_text())
    body["files"] = {name: folders_hash(path / name) for name in (PREDICTOR_FILE, DELTA_FILE) if (path / name).exists()}
    body["hash"] = module.json_digest({key: value for key, value in body.items() if key not in module.NOT_HASHED})
    body["card_hash"] = module.json_digest({key: value for key, value in body.items() if key != "card_hash"})
    (path / CARD).write_text(json.dumps(body))


def folders_hash(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


def edit_card(path: Path, change: Callable[[dict], object]) -> None:
    body = json.loads((path / CARD).read_text())
    change(body)
    (path / CARD).write_text(json.dumps(body))


def edit_tensors(path: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(path / PREDICTOR_FILE)
    change(tensors)
    save_file(tensors, path / PREDICTOR_FILE)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    wrote = artifact()
    saved = save(tmp_path / "a", wrote)
    found = load(tmp_path / "a")
    assert found.card == saved
    assert dataclasses.replace(saved, hash="") == wrote.card
    assert found.card.version == saved.hash[:12]
    assert len(saved.hash) == 64
    ours, theirs = tensors_of(wrote), tensors_of(found)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [type(p) for p in found.layers] == [type(p) for p in wrote.layers]
    assert [p.settings() for p in found.layers] == [p.settings() for p in wrote.layers]
    assert listing(tmp_path) == ["a"]
    assert listing(tmp_path / "a") == [CARD, DELTA_FILE, PREDICTOR_FILE]


def test_without_alternatives_and_delta(tmp_path: Path) -> None:
    save(tmp_path / "a", Artifact(card(), artifact().layers))
    assert listing(tmp_path / "a") == [CARD, PREDICTOR_FILE]
    assert load(tmp_path / "a").delta == {}


def test_equal_content_has_an_equal_hash(tmp_path: Path) -> None:
    first = save(tmp_path / "a", artifact())
    same = save(tmp_path / "b", artifact(training={"when": "another day"}, libraries={}, calibration={}))
    assert first.hash == same.hash
    assert save(tmp_path / "c", load(tmp_path / "a")).hash == first.hash
    for change in ({"alpha": 1.4}, {"window_size": 7}, {"teacher_fingerprint": "e" * 64}, {"tile_size": 16}):
        assert save(tmp_path / "d", artifact(**change)).hash != first.hash
    other = dataclasses.replace(artifact(), delta={"encoder.layer.0.query.weight": torch.zeros(3, 2)})
    assert save(tmp_path / "d", other).hash != first.hash
    layers = (WindowOnly(4), *artifact().layers[1:])
    assert save(tmp_path / "d", dataclasses.replace(artifact(), layers=layers)).hash != first.hash


def drop(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def flip(name: str, place: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[int(place * (len(content) - 1))] ^= 0x10
        (path / name).write_bytes(bytes(content))

    return change


def cut(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-20])


def link(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        outside = path.parent / f"outside-{name}"
        shutil.move(path / name, outside)
        (path / name).symlink_to(outside)

    return change


def fifo(path: Path) -> None:
    (path / PREDICTOR_FILE).unlink()
    os.mkfifo(path / PREDICTOR_FILE)


def resealed(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def both(path: Path) -> None:
        change(path)
        reseal(path)

    return both


def card_change(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return resealed(lambda path: edit_card(path, change))


def tensor_change(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return resealed(lambda path: edit_tensors(path, change))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no card": (drop(CARD), "card.json: missing"),
    "no predictors": (drop(PREDICTOR_FILE), "predictors.safetensors: missing"),
    "no delta": (drop(DELTA_FILE), "delta.safetensors: missing"),
    "truncated predictors": (cut(PREDICTOR_FILE), "predictors.safetensors: its sha256 does not match"),
    "truncated delta": (cut(DELTA_FILE), "delta.safetensors: its sha256 does not match"),
    "truncated card": (cut(CARD), "card.json: expected JSON"),
    "empty card": (lambda path: (path / CARD).write_text(""), "card.json: expected JSON"),
    "a list as card": (lambda path: (path / CARD).write_text("[]"), "expected schema_version 1, got 'list'"),
    "binary card": (lambda path: (path / CARD).write_bytes(b"\xff\xfe"), "card.json: expected JSON"),
    "deep card": (lambda path: (path / CARD).write_text("[" * 100_000), "card.json: expected JSON"),
    "flipped tensor byte": (flip(PREDICTOR_FILE, 1.0), "predictors.safetensors: its sha256 does not match"),
    "flipped header byte": (flip(PREDICTOR_FILE, 0.0), "predictors.safetensors: its sha256 does not match"),
    "flipped delta byte": (flip(DELTA_FILE, 0.9), "delta.safetensors: its sha256 does not match"),
    "edited calibration": (
        lambda path: edit_card(path, lambda body: body["calibration"]["overall"].update(recall=0.99)),
        "does not match its card_hash",
    ),
    "edited and half resealed": (
        lambda path: edit_card(
            path,
            lambda body: body.update(
                alpha=1.7,
                card_hash=module.json_digest({k: v for k, v in (body | {"alpha": 1.7}).items() if k != "card_hash"}),
            ),
        ),
        "does not match its hash",
    ),
    "other schema": (card_change(lambda body: body.update(schema_version=2)), "expected schema_version 1, got 2"),
    "no schema": (card_change(lambda body: body.pop("schema_version")), "expected schema_version 1, got None"),
    "missing field": (card_change(lambda body: body.pop("alpha")), "card.json: missing field alpha"),
    "unknown field": (card_change(lambda body: body.update(extra=1)), "card.json: unknown field extra"),
    "missing layer": (card_change(lambda body: body["predictors"].pop()), "predictors: expected 6 layers, got 5"),
    "missing scale row": (card_change(lambda body: body["head_scale"].pop()), "head_scale: expected 6 rows of 2"),
    "text for a number": (card_change(lambda body: body.update(layers="6")), "expected whole numbers"),
    "text for alpha": (card_change(lambda body: body.update(alpha="x")), "card.json: could not convert"),
    "unknown kind": (
        card_change(lambda body: body["predictors"][2].update(kind="os.system")),
        "layer 2: expected a kind of distance, .* got 'os.system'",
    ),
    "missing setting": (
        card_change(lambda body: body["predictors"][4]["settings"].pop("density")),
        "layers.4.density: missing",
    ),
    "wrong form": (
        card_change(lambda body: body["predictors"][2]["settings"].update(form="bilinear")),
        "layers.2: distance: expected projections of the form metric",
    ),
    "missing tensor": (tensor_change(lambda t: t.pop("layers.3.centroids")), "layers.3.centroids: missing"),
    "missing map": (tensor_change(lambda t: t.pop("layers.0.q_map")), "layers.0.q_map: missing"),
    "missing alternative": (
        tensor_change(lambda t: t.pop("projections.hinge-r3.5.k_bias")),
        "hinge-r3.5.k_bias: missing",
    ),
    "missing centroids": (tensor_change(lambda t: t.pop("centroids.hinge-r3.1")), "centroids.hinge-r3.1: missing"),
    "unknown tensor": (
        tensor_change(lambda t: t.update({"layers.0.surprise": torch.ones(1)})),
        "nothing in the card asks for the tensor layers.0.surprise",
    ),
    "wrong shape": (tensor_change(lambda t: t.update({"layers.2.threshold": torch.ones(5)})), "layers.2: threshold"),
    "other head_dim": (card_change(lambda body: body.update(head_dim=8)), r"layer 0: expected maps of .* \(2, 8\)"),
    "NaN": (tensor_change(lambda t: t["layers.2.threshold"].fill_(torch.nan)), "layers.2.threshold: expected finite"),
    "infinity": (
        tensor_change(lambda t: t["projections.hinge-r3.0.q_map"].fill_(torch.inf)),
        "0.q_map: expected finite",
    ),
    "even window": (card_change(lambda body: body.update(window_size=4)), "window_size: expected 0 or an odd number"),
    "file outside": (
        lambda path: (
            edit_card(path, lambda body: body["files"].update({"../../etc/passwd": "0" * 64})),
            edit_card(
                path,
                lambda body: body.update(
                    card_hash=module.json_digest({k: v for k, v in body.items() if k != "card_hash"})
                ),
            ),
        ),
        "files: expected predictors.safetensors and perhaps delta.safetensors",
    ),
    "linked predictors": (link(PREDICTOR_FILE), "predictors.safetensors: expected a regular file, got a link"),
    "linked card": (link(CARD), "card.json: expected a regular file, got a link"),
    "pipe": (fifo, "predictors.safetensors: expected a regular file"),
    "folder": (
        lambda path: ((path / DELTA_FILE).unlink(), (path / DELTA_FILE).mkdir()),
        "delta.safetensors: expected a regular",
    ),
    "pickle": (lambda path: torch.save({"a": torch.ones(1)}, path / PREDICTOR_FILE), "its sha256 does not match"),
    "resealed pickle": (
        resealed(lambda path: torch.save({"a": torch.ones(1)}, path / PREDICTOR_FILE)),
        "predictors.safetensors: expected safetensors",
    ),
    "no folder": (shutil.rmtree, "expected an artifact folder"),
    "a file": (lambda path: (shutil.rmtree(path), path.write_text("x")), "expected an artifact folder"),
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_damage_is_refused_by_name(tmp_path: Path, name: str) -> None:
    change, message = DAMAGE[name]
    save(tmp_path / "a", artifact())
    change(tmp_path / "a")
    with pytest.raises(ArtifactError, match=message) as error:
        load(tmp_path / "a")
    assert str(tmp_path / "a") in str(error.value)
    assert "\n" not in str(error.value)


def test_every_flipped_byte_of_the_tensors_is_found(tmp_path: Path) -> None:
    save(tmp_path / "a", artifact())
    file = tmp_path / "a" / PREDICTOR_FILE
    content = file.read_bytes()
    for place in range(0, len(content), 97):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ArtifactError, match="sha256"):
            load(tmp_path / "a")


def test_incomplete_content_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    good = artifact()
    nan = Distance(random_projections(HEADS, RANK, DIM, 0), torch.full((HEADS,), torch.nan))
    two_layers = {"hinge-r3": good.projections["hinge-r3"][:2]}
    broken = {
        "expected predictors for 6 layers, got 5": {"layers": good.layers[:5]},
        "projections hinge-r3: .* 6 layers, got 2": {"projections": two_layers},
        "plain name": {"centroids": {"../x": good.centroids["hinge-r3"]}},
        "layers.2.threshold: expected finite": {"layers": (*good.layers[:2], nan, *good.layers[3:])},
        "query.weight: expected finite": {"delta": {"query.weight": torch.tensor([torch.inf])}},
        "finite numbers": {"card": card(calibration={"recall": float("nan")})},
        "plain JSON": {"card": card(training={"out": {1, 2}})},
    }
    for message, wrong in broken.items():
        with pytest.raises(ArtifactError, match=message):
            save(tmp_path / "a", dataclasses.replace(good, **wrong))
        assert listing(tmp_path) == []


def test_other_peoples_folders_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ArtifactError, match="expected nothing or an artifact to replace"):
        save(tmp_path / "mine", artifact())
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="expected nothing or an artifact to replace"):
        save(tmp_path / "file", artifact())


@pytest.mark.parametrize("exchange", [True, False])
def test_a_crash_at_any_moment_leaves_a_whole_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    path = tmp_path / "a"
    old = save(path, artifact()).version
    if not exchange:
        monkeypatch.setattr(folders, "_exchange", lambda a, b: False)
    real = {"_write": folders._write, "_flush": folders._flush, "rename": Path.rename}
    versions = set()
    for stop in range(8):
        count = [0]

        def step(name: str, count: list[int] = count, stop: int = stop) -> Callable[..., object]:
            def wrapped(*args: object, **options: object) -> object:
                count[0] += 1
                if count[0] > stop:
                    raise KeyboardInterrupt  # as good as a crash: nothing after it runs in this call
                return real[name](*args, **options)

            return wrapped

        with monkeypatch.context() as patch:
            patch.setattr(folders, "_write", step("_write"))
            patch.setattr(folders, "_flush", step("_flush"))
            patch.setattr(Path, "rename", step("rename"))
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a crashed process does not tidy up
            try:
                new = save(path, artifact(alpha=1.4)).version
            except KeyboardInterrupt:
                new = ""
        versions.add(load(path).card.version)
        assert versions <= {old, new or load(path).card.version}
        if new:
            break
    assert old in versions
    assert load(path).card.alpha == 1.4


@pytest.mark.parametrize("exchange", [True, False])
def test_readers_see_the_old_or_the_new_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    path = tmp_path / "a"
    if not exchange:
        monkeypatch.setattr(folders, "_exchange", lambda a, b: False)
    known = {save(path, artifact(alpha=alpha)).version for alpha in (1.4, 1.5)}
    stop = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for turn in range(12):
                save(path, artifact(alpha=(1.4, 1.5)[turn % 2]))
        except BaseException as error:  # noqa: BLE001
            failures.append(error)
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not stop.is_set():
        seen.add(load(path).card.version)
    writer.join()
    assert failures == []
    assert seen <= known
    assert listing(tmp_path) == ["a"]


def test_a_link_to_an_artifact_may_be_loaded_and_saved_through(tmp_path: Path) -> None:
    save(tmp_path / "v1", artifact())
    (tmp_path / "current").symlink_to("v1")
    assert load(tmp_path / "current").card.alpha == 1.5
    save(tmp_path / "current", artifact(alpha=1.4))
    assert load(tmp_path / "v1").card.alpha == 1.4
    assert (tmp_path / "current").is_symlink()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="cannot be written"):
        save(tmp_path / "file" / "a", artifact())
