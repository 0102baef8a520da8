"""Which sparse pattern keeps what a teacher attends to, at which price: every family over the grid, as one JSON.

A run extracts what is missing, measures every family that has no file yet, and really replaces the attention at a few
settings. Everything is seeded, so the same configuration gives the same file.
"""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsefinder.artifact import load
from sparsefinder.errors import ConfigError
from sparsefinder.heap import share_one_heap
from training.config import ExtractConfig, SweepConfig, as_dict
from training.corpus import chunk_tokens
from training.extract import read_manifest
from training.pipeline import Opened, extract_splits, open_teacher, spread, texts_of
from training.sweep_families import FAMILIES, all_families
from training.sweep_files import SWEEP, claim, read_json, write_json
from training.sweep_fronts import thinned
from training.sweep_measure import HALVES, MEASURES, TILE, measure_family
from training.sweep_quality import choose_points, quality_of, yardstick
from training.sweep_setup import Setup
from training.sweep_sheets import Family, LayerWork
from training.sweep_workers import (
    family_file,
    measure_missing,
    read_works,
    training_layers,
    windows_of,
    worker_count,
)
from training.threads import single_thread
from training.versions import versions

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class Measured:
    """What a finished sweep was run on, for those who draw it."""

    opened: Opened
    setup: Setup
    shards: Path
    chunks: list[list[int]]


def run_sweep(
    config: SweepConfig, source: ExtractConfig, out: Path, only: tuple[str, ...], on_progress: OnProgress
) -> dict[str, Any]:
    """Write `out/sweep.json` and return it; `only` names rows of `FAMILIES`, none = all.

    Raises:
        ConfigError: an unknown row, or a folder that holds the sweep of another configuration.
        DataError: too little text, a causal teacher, a folder that cannot be written.
        ArtifactError, IncompatibleModelError: an artifact that cannot be used.
    """
    share_one_heap()
    unknown = sorted(set(only) - set(FAMILIES))
    if unknown:
        raise ConfigError(f"only: expected rows among {', '.join(FAMILIES)}, got {', '.join(unknown)}")
    ready = open_sweep(config, source, out, on_progress)
    rows = only or tuple(FAMILIES)
    families = all_families(ready.setup, rows)
    works = read_works(ready.shards, lambda done, total: on_progress("read graphs", done, total))
    results = _measured(config, source, rows, families, works, out, on_progress)
    quality = _qualities(config, ready, families, works, results, out, on_progress)
    result = {
        "about": _about(config, source, ready, works),
        "config": as_dict(config),
        "measures": list(MEASURES),
        "halves": list(HALVES),
        "families": [_in_short(family) for family in results],
        "quality": quality,
    }
    write_json(out / SWEEP, result)
    return result


def open_sweep(config: SweepConfig, source: ExtractConfig, out: Path, on_progress: OnProgress) -> Measured:
    """The teacher, the maps and the graphs of a sweep's folder; what is missing there is extracted."""
    artifact = load(source.artifact)
    claim(out, {"sweep": as_dict(config), "source": as_dict(source), "artifact": artifact.card.hash})
    shards, known = out / "shards", out / "chunks.json"
    texts = None
    if not known.is_file():  # else everything is extracted, and reading the text again takes longer than a report
        on_progress("read text", 0, 1)
        texts = texts_of(source)
    opened = open_teacher(source)
    if texts is not None:
        extract_splits(source, texts, opened, shards, on_progress)
        chunks = chunk_tokens(opened.teacher, texts["heldout"], source.tokens)
        write_json(known, spread(chunks, source.heldout_instances, source.seed))

    return Measured(opened, Setup(artifact, config, training_layers(shards)), shards, read_json(known))


def _measured(
    config: SweepConfig,
    source: ExtractConfig,
    rows: tuple[str, ...],
    families: Sequence[Family],
    works: Sequence[LayerWork],
    out: Path,
    on_progress: OnProgress,
) -> list[dict[str, Any]]:
    """Every family, from its file where there is one."""
    missing = [at for at, family in enumerate(families) if not family_file(out, family).is_file()]
    workers, done = worker_count(config), len(families) - len(missing)
    if workers > 1 and len(missing) > 1:
        on_progress("measure", done, len(families))
        for at in measure_missing(config, source, out, rows, missing, workers):
            done += 1
            on_progress(f"measured {families[at].key}", done, len(families))
    else:
        for at in missing:
            on_progress(f"measure {families[at].key}", at, len(families))
            with single_thread():
                found = measure_family(families[at], works, windows_of(config, works))
            write_json(family_file(out, families[at]), found)
    return [read_json(family_file(out, family)) for family in families]


def _qualities(
    config: SweepConfig,
    ready: Measured,
    families: Sequence[Family],
    works: Sequence[LayerWork],
    results: Sequence[dict[str, Any]],
    out: Path,
    on_progress: OnProgress,
) -> list[dict[str, Any]]:
    """The attention really replaced, on held-out instances that no setting was chosen on."""
    points = choose_points(results, config.quality_points)
    chunks = (ready.chunks[1::2] or ready.chunks)[: config.quality_instances]
    found, known = [], None
    for number, (at, point) in enumerate(points):
        family = families[at]
        names = {name: value for name, value in point.items() if name not in (*MEASURES, *HALVES, "layers")}
        settings = {"family": family.name, "objective": family.objective, "rank": family.rank, "role": family.role}
        settings |= names | {name: point[name] for name in ("sparsity", "recall", "mass")}
        path = out / "quality" / ("-".join([family.key, *(f"{k}{v}" for k, v in names.items())]) + ".json")
        if not path.is_file():
            on_progress("replace attention", number, len(points))
            known = known or yardstick(ready.opened, chunks)
            write_json(path, settings | quality_of(family, point, works, ready.opened, chunks, known))
        found.append(read_json(path))
    return found


def _in_short(result: dict[str, Any]) -> dict[str, Any]:
    points = result["points"]
    head = {name: value for name, value in result.items() if name != "points"}
    return head | {"measured_points": len(points), "points": thinned(points)}


def _about(config: SweepConfig, source: ExtractConfig, ready: Measured, works: Sequence[LayerWork]) -> dict[str, Any]:
    """What the figures depend on; no time of day, so that the same sweep gives the same file."""
    card, manifest = ready.setup.artifact.card, read_manifest(ready.shards / "heldout")
    pairs = sum(n * n for n in works[0].lengths)
    gold = [sum(item.flat.shape[0] for item in work.gold) / (work.heads * pairs) for work in works]
    return {
        "artifact": card.version,
        "teacher": card.teacher,
        "text": ", ".join(Path(name).name for name in source.text) or "held-out default",
        "text_sha256": manifest["text_sha256"],
        "instances": len(works[0].lengths),
        "tokens": max(works[0].lengths),
        "layers": card.layers,
        "heads": card.heads,
        "head_dim": card.head_dim,
        "gold_density": round(sum(gold) / len(gold), 5),
        "gold_density_of_layers": [round(x, 5) for x in gold],
        "tile": TILE,
        "quality_instances": min(config.quality_instances, max(len(works[0].lengths) // 2, 1)),
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": versions("torch", "transformers", "numba", "entmax"),
    }
