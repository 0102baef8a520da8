"""Artifacts: what is written comes back, equal content has an equal hash, and a crash leaves a whole one."""

import dataclasses
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases_artifact import DIM, HEADS, RANK, artifact, card, listing

import sparsefinder.artifact as module
import sparsefinder.atomic_folder as folders
from sparsefinder.artifact import CARD, DELTA_FILE, PREDICTOR_FILE, Artifact, load, save
from sparsefinder.errors import ArtifactError
from sparsefinder.predictors import (
    Distance,
    WindowOnly,
    random_projections,
)


def tensors_of(found: Artifact) -> dict[str, torch.Tensor]:
    return {**module._pack(found), **{f"delta.{name}": tensor for name, tensor in found.delta.items()}}


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
