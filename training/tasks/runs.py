"""Runs that are kept: one JSON file each, written whole or not at all, made again only where its settings changed."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsefinder.errors import DataError
from sparsefinder.whole_files import write_text
from training.tasks.together import OnStep

OnProgress = Callable[[str, int, int], None]  # (the run, steps that are done, steps in all)


@dataclass(frozen=True)
class Study:
    """One run: `make(on_step)` gives figures as plain JSON; `settings` decide whether a stored file is still right."""

    name: str
    settings: Mapping[str, Any]
    make: Callable[[OnStep], Mapping[str, Any]]


def run_studies(
    studies: Sequence[Study], folder: Path, on_progress: OnProgress = lambda what, done, total: None
) -> dict[str, dict[str, Any]]:
    """The figures of every study, in order; what the folder holds already is not run again.

    Raises:
        DataError: two studies of one name, or a folder that cannot be written.
    """
    names = [study.name for study in studies]
    if len(set(names)) != len(names):
        raise DataError(f"studies: expected different names, got {sorted(names)}")
    found = {}
    for study in studies:
        path = folder / f"{study.name}.json"
        stored = read_run(path, study.settings)
        found[study.name] = _make(study, path, on_progress) if stored is None else stored
    return found


def read_run(path: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The stored run, or None where there is none of these settings."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = isinstance(stored, dict) and stored.get("settings") == json.loads(json.dumps(settings))
    return stored if same else None


def write_json(path: Path, content: Any) -> None:
    """Indented JSON, whole or not at all. DataError where it cannot be written."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def _make(study: Study, path: Path, on_progress: OnProgress) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    figures = study.make(lambda done, total: on_progress(study.name, done, total))
    spent = {"seconds": round(time.perf_counter() - wall, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    run = {"settings": dict(study.settings), **spent, "figures": dict(figures)}
    write_json(path, run)
    found: dict[str, Any] = json.loads(json.dumps(run))
    return found
