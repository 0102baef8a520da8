"""Damaged artifacts: every damage is refused by name, also where somebody made the hashes right again."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases_artifact import artifact
from safetensors.torch import load_file, save_file

import sparsefinder.artifact as module
from sparsefinder.artifact import CARD, DELTA_FILE, PREDICTOR_FILE, load, save
from sparsefinder.errors import ArtifactError


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
