"""Would tiles of similar queries, in place of neighbours, compute less? Their density at full recall, by order.

    python -m benchmarks.query_order --data runs/minilm [--tiles 16 32] [--instances 8] [--json FILE]

A tile computes every key that one of its rows needs. Its rows are neighbours in the text, or similar ones: rows are
halved at the median along their main direction until a tile is full, by projected queries (what a predictor could sort
by) or by the rows of the gold graph itself (a bound on what an order can bring). What a row needs is its gold keys,
alone or with the window and global tokens that every plan of the run holds. Bidirectional teachers only: in a causal
layer a tile of rows that are far apart would choose keys by queries that come later.
"""

import argparse
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsefinder.artifact import load
from sparsefinder.edges import edges_matrix
from sparsefinder.errors import ConfigError
from sparsefinder.plan import build_plan, plan_matrix
from sparsefinder.predictors.projections import project_queries
from training.extract import LayerData, read_layer, read_manifest
from training.fit import positional_of
from training.points import cuttable
from training.progress_bar import progress
from training.scores import legal_of
from training.tasks.runs import write_json
from training.versions import versions

ROUNDS = 20  # of the power method
ORDERS = ("text", "projected queries", "gold rows")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _options(arguments)
    result: dict[str, Any] = {"about": _about(options), "rows": []}
    print(f"{'tile':>5} {'needs':>24} {'pairs':>8}  density of tiles: {', '.join(ORDERS)}")
    with progress() as on_progress:
        for tile in options.tiles:
            found = measure(options.data, tile, options.instances, lambda done, n: on_progress("layers", done, n))
            for needs, densities in found.items():
                pairs, *by_order = densities.tolist()
                result["rows"].append({"tile_size": tile, "needs": needs, "pairs": pairs, "density": by_order})
                print(f"{tile:5} {needs:>24} {pairs:8.4f}  {'  '.join(f'{d:.4f}' for d in by_order)}", flush=True)
    if options.json:
        write_json(options.json, result)
        print(f"\nAll figures lie in {options.json}")
    return result


def measure(
    folder: Path, tile: int, instances: int, on_step: Callable[[int, int], None]
) -> dict[str, Float[Tensor, " 4"]]:
    """Mean densities over layers, heads and instances: of the needed pairs, and of their tiles in every order.

    Raises:
        ConfigError: a causal teacher.
    """
    artifact, heldout = load(folder / "artifact"), folder / "shards" / "heldout"
    manifest, found = read_manifest(heldout), dict[str, list[Tensor]]()
    for layer in range(artifact.card.layers):
        data, maps = read_layer(heldout, layer), cuttable(artifact.layers[layer]).projections
        if data.causal:
            raise ConfigError("query_order: expected a bidirectional teacher, got a causal one")
        for b in range(min(instances, manifest["instances"])):
            n, legal = int(data.mask[b].sum()), legal_of(data, b)
            queries = project_queries(maps, data.q[b : b + 1, :, :n])[0]
            always = plan_matrix(build_plan(positional_of(artifact.card), legal, 1, heads=1), legal, 0, 0)[:n, :n]
            for head in range(artifact.card.heads):
                for needs, densities in _densities(data, b, head, queries[head], always, tile).items():
                    found.setdefault(needs, []).append(densities)
        on_step(layer + 1, artifact.card.layers)
    return {needs: torch.stack(densities).mean(0) for needs, densities in found.items()}


def _densities(
    data: LayerData, b: int, head: int, queries: Float[Tensor, "n r"], always: Bool[Tensor, "n n"], tile: int
) -> dict[str, Float[Tensor, " 4"]]:
    n = queries.shape[0]
    gold = edges_matrix(data.edges, b, head)[:n, :n]
    orders = (torch.arange(n), similar_order(queries, tile), similar_order(gold.float(), tile))
    cases = {"gold": gold, "gold, window, globals": gold | always}
    return {
        name: torch.stack([need.float().mean(), *(tile_density(need[order], tile) for order in orders)])
        for name, need in cases.items()
    }


def similar_order(rows: Float[Tensor, "n d"], tile: int) -> Int[Tensor, " n"]:
    """Rows in tiles of similar ones: halved at a multiple of `tile` along their main direction, again and again."""
    parts, done = [torch.arange(rows.shape[0])], list[Tensor]()
    while parts:
        part = parts.pop()
        if part.shape[0] <= tile:
            done.append(part.sort().values)
            continue
        centred = rows[part] - rows[part].mean(0)
        direction = main_direction(centred)
        tiles = -(-part.shape[0] // tile)
        at = tiles // 2 * tile
        order = part[(centred @ direction).argsort(stable=True)]
        parts += [order[at:], order[:at]]
    return torch.cat(done)


def main_direction(centred: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """About the first singular vector: some rounds of the power method from the longest row."""
    direction = centred[centred.norm(dim=1).argmax()]
    for _ in range(ROUNDS):
        direction = torch.nn.functional.normalize(centred.T @ (centred @ direction), dim=0)
    return direction


def tile_density(needed: Bool[Tensor, "n n"], tile: int) -> Float[Tensor, ""]:
    """Computed pairs over all pairs, where each `tile` rows compute every key that one of them needs."""
    pairs = sum(part.any(0).sum() * part.shape[0] for part in torch.split(needed, tile))
    return torch.as_tensor(pairs) / needed.numel()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of a run of a bidirectional teacher")
    parser.add_argument("--tiles", type=int, nargs="+", default=[16, 32], help="rows of a tile")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="one instance, tiles of 16")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tiles, options.instances = [16], 1
    return options


def _about(options: argparse.Namespace) -> dict[str, Any]:
    manifest = read_manifest(options.data / "shards" / "heldout")
    return {
        "command": shlex.join(["python", "-m", "benchmarks.query_order", *sys.argv[1:]]),
        "teacher": manifest["teacher"],
        "tokens": manifest["tokens"],
        "hardware": platform.machine(),
        "versions": versions("torch", "numba"),
    }


if __name__ == "__main__":
    main()
