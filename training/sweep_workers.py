"""Families measured beside each other: one process for each core, because Python's lock lets threads use little of two.

A worker reads the graphs once, then takes one family after the other and leaves each in a file of its own.
"""

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numba
import torch

from sparsefinder.artifact import load
from sparsefinder.errors import DataError
from sparsefinder.heap import share_one_heap
from training.config import ExtractConfig, SweepConfig
from training.extract import LayerData, read_layer, read_manifest
from training.sweep_families import all_families
from training.sweep_files import write_json
from training.sweep_measure import measure_family
from training.sweep_setup import Setup
from training.sweep_sheets import Family, LayerWork, layer_work

WORTH = 1 << 19  # pairs of a head over all instances, below which starting processes takes longer than it saves


@dataclass(frozen=True, eq=False)
class _Job:
    """What a worker keeps between two families."""

    families: Sequence[Family]
    works: Sequence[LayerWork]
    windows: Sequence[int]
    out: Path


_JOB: list[_Job] = []  # of this process


def family_file(out: Path, family: Family) -> Path:
    """Where the points of a family lie."""
    return out / "families" / f"{family.key}.json"


def read_works(shards: Path, on_layer: Callable[[int, int], None] = lambda done, total: None) -> list[LayerWork]:
    """The held-out graphs of every layer.

    Raises:
        DataError: shards that are missing, or of a causal layer.
    """
    manifest = read_manifest(shards / "heldout")
    works = []
    for layer in range(manifest["layers"]):
        on_layer(layer, manifest["layers"])
        data = read_layer(shards / "heldout", layer, manifest)
        if data.causal:
            raise DataError("sweep: expected the attention of an encoder, got a causal layer")
        works.append(layer_work(layer, data))
    return works


def training_layers(shards: Path) -> Callable[[int], LayerData]:
    """Training graphs by layer, each read once."""
    return functools.cache(lambda layer: read_layer(shards / "train", layer))


def windows_of(config: SweepConfig, works: Sequence[LayerWork]) -> list[int]:
    """The sizes of the grid that a text of this length can have."""
    return [size for size in config.windows if size < max(works[0].lengths)]


def worker_count(config: SweepConfig) -> int:
    """Processes that are worth their start."""
    return (os.cpu_count() or 1) if config.instances * config.tokens**2 >= WORTH else 1


def measure_missing(
    config: SweepConfig, source: ExtractConfig, out: Path, rows: tuple[str, ...], missing: Sequence[int], workers: int
) -> Iterator[int]:
    """Write the files of the families at these places, in whatever order they are done; workers end with the caller."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads, and could hang
    with context.Pool(min(workers, len(missing)), _start, (config, source, out, rows)) as pool:
        yield from pool.imap_unordered(_measure, missing)


def _start(config: SweepConfig, source: ExtractConfig, out: Path, rows: tuple[str, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    torch.set_num_threads(1)
    numba.set_num_threads(1)  # waiting for a second thread took a quarter of the time
    share_one_heap()
    works = read_works(out / "shards")
    setup = Setup(load(source.artifact), config, training_layers(out / "shards"))
    _JOB.append(_Job(all_families(setup, rows), works, windows_of(config, works), out))


def _measure(at: int) -> int:
    job = _JOB[0]
    family = job.families[at]
    write_json(family_file(job.out, family), measure_family(family, job.works, job.windows))
    return at
