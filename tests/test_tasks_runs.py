"""Stored runs: resumed, made again where settings changed, whole or not at all."""

import json

import pytest

from sparsefinder.errors import DataError
from training.tasks.runs import Study, read_run, run_studies


def study(name, settings, calls, figures=None):
    def make(on_step):
        calls.append(name)
        on_step(1, 1)
        return figures or {"value": len(calls)}

    return Study(name, settings, make)


def test_a_stored_run_is_not_run_again_and_a_changed_one_is(tmp_path):
    calls, seen = [], []
    first = run_studies([study("a", {"n": 1}, calls), study("b", {"n": (1, 2)}, calls)], tmp_path)
    again = run_studies(
        [study("a", {"n": 1}, calls), study("b", {"n": (1, 2)}, calls)], tmp_path, lambda *at: seen.append(at)
    )
    assert calls == ["a", "b"]
    assert first == again
    assert not seen
    run_studies([study("a", {"n": 2}, calls)], tmp_path, lambda *at: seen.append(at))
    assert calls == ["a", "b", "a"]
    assert seen == [("a", 1, 1)]
    assert json.loads((tmp_path / "a.json").read_text())["settings"] == {"n": 2}


def test_what_was_interrupted_leaves_nothing(tmp_path):
    def stop(on_step):
        raise KeyboardInterrupt

    calls = []
    with pytest.raises(KeyboardInterrupt):
        run_studies([study("a", {}, calls), Study("b", {}, stop), study("c", {}, calls)], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    run_studies([study("a", {}, calls), study("b", {}, calls), study("c", {}, calls)], tmp_path)
    assert calls == ["a", "b", "c"]


def test_a_damaged_file_is_made_again(tmp_path):
    (tmp_path / "a.json").write_text('{"settings": {')
    assert read_run(tmp_path / "a.json", {}) is None
    calls = []
    run_studies([study("a", {}, calls)], tmp_path)
    assert calls == ["a"]


def test_two_runs_of_one_name_are_refused(tmp_path):
    with pytest.raises(DataError, match="different names"):
        run_studies([study("a", {}, []), study("a", {}, [])], tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        run_studies([study("a", {}, [])], tmp_path / "file")
