"""How fine tiles must be for a causal predictor: attention kept at equal density, by tile size and rank.

    python -m benchmarks.tile_size --data runs/smollm2 [--layers 8 20] [--tiles 32 16 8] [--ranks 8] [--json FILE]

A causal tile's keys are chosen when it opens, from queries before it, so its last rows are served by what was known
many tokens ago. Maps are trained on the training shards of a run, as `fit` does, and measured on held-out ones; every
head is cut at the same density (computed pairs / legal pairs), a tile's own rows, window and first tokens included.
"""

import argparse
import itertools
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sparsefinder.predictors import Tiles
from training.config import smollm2
from training.extract import read_layer, read_manifest
from training.fit import measuring_items, positional_of
from training.points import layer_points
from training.progress_bar import progress
from training.tasks.runs import write_json
from training.threads import single_thread
from training.train_maps import train_layer
from training.versions import versions

DENSITIES = (0.07, 0.1, 0.15, 0.25)
ROWS = 256  # of each held-out instance
SHARE = 4  # of an instance's tiles a step of training looks at one in so many


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _options(arguments)
    result: dict[str, Any] = {"about": _about(options), "rows": []}
    print(f"{'layer':>5} {'tile':>5} {'rank':>5}  mass at density {'  '.join(map(str, DENSITIES))}  (least head)")
    cases = list(itertools.product(options.layers, options.tiles, options.ranks))
    with progress() as on_progress, single_thread():
        for done, (layer, tile, rank) in enumerate(cases):
            on_progress(f"layer {layer}, tiles of {tile}, rank {rank}", done, len(cases))
            mass = measure(options.data / "shards", layer, tile, rank)
            row = {"layer": layer, "tile_size": tile, "rank": rank, "density": DENSITIES}
            result["rows"].append(row | {"mass": mass.mean(1).tolist(), "least_head": mass.min(1).tolist()})
            cells = "  ".join(f"{a:.4f} ({b:.3f})" for a, b in zip(mass.mean(1), mass.min(1), strict=True))
            print(f"{layer:5} {tile:5} {rank:5}  {cells}", flush=True)
    if options.json:
        write_json(options.json, result)
        print(f"\nAll figures lie in {options.json}")
    return result


def measure(shards: Path, layer: int, tile: int, rank: int) -> np.ndarray:
    """Attention mass `[densities, heads]` that maps of one layer keep on held-out text."""
    train, heldout = shards / "train", shards / "heldout"
    tiles = read_manifest(train)["tokens"] // tile
    config = replace(smollm2().fit, rank=rank, tile_size=tile, tiles=max(1, tiles // SHARE))
    trained = train_layer(read_layer(train, layer), config, "listwise", rank, layer)
    served = Tiles(trained.projections, threshold=0.0, distance_weight=trained.distance_weight)
    items = measuring_items(read_manifest(heldout)["instances"], 2)
    found = layer_points(served, read_layer(heldout, layer), items, positional_of(config), tile, rows=ROWS)
    heads = zip(found.density, found.mass, strict=True)
    return np.array([np.interp(DENSITIES, density, mass) for density, mass in heads]).T


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of a run of a causal teacher")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 20])
    parser.add_argument("--tiles", type=int, nargs="+", default=[32, 16, 8], help="rows of a tile")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--quick", action="store_true", help="the first layer, tiles of 32 and 8")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.tiles = options.layers[:1], [32, 8]
    return options


def _about(options: argparse.Namespace) -> dict[str, Any]:
    manifest = read_manifest(options.data / "shards" / "heldout")
    return {
        "command": shlex.join(["python", "-m", "benchmarks.tile_size", *sys.argv[1:]]),
        "teacher": manifest["teacher"],
        "tokens": manifest["tokens"],
        "hardware": f"{platform.machine()}, one thread",
        "versions": versions("torch", "numba"),
    }


if __name__ == "__main__":
    main()
