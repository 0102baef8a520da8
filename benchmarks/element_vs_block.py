"""Why blocks? Attention over single keys against attention over blocks of keys, at equal numbers of pairs.

    python -m benchmarks.element_vs_block [--quick] [--device cuda] [--json docs/figures/element_vs_block.json]

Every query reads the same number of keys, either its own random ones ("elements") or, together with its tile, random
blocks ("blocks"). Softmax in all rows; building the lists is not timed. The rows:

    full          dense `scaled_dot_product_attention`
    elements      the keys of every query are gathered for it: one small matrix-vector product each
    elements/tile the tile kernel of this project, which reads the union of its rows' keys (and weighs all of them)
    blocks        the keys of every tile are gathered once: one small matrix product for each tile
    blocks/tile   the tile kernel of this project, on the same lists
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsefinder.attention.api import attend
from sparsefinder.patterns.legal import legal_full, legal_to
from sparsefinder.plan import Plan, plan_to
from training.versions import versions

TILE = 32
GATHERED = 1 << 24  # numbers gathered at once, so that they do not fill the memory


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    options = _options(arguments)
    tokens = options.tokens or ([1024] if options.quick else [1024, 4096])
    densities = options.densities or ([0.0625, 0.125] if options.quick else [0.03125, 0.0625, 0.125, 0.25])
    about = _about(options)
    for name, value in about.items():
        print(f"{name}: {value}")
    print(f"\n{'tokens':>7}{'density':>9}  {'row':14}{'ms':>9}{'to full':>9}{'computed':>10}")
    rows = []
    for n in tokens:
        for density in densities:
            for row in measure(n, density, options):
                print(
                    f"{n:7}{row['density']:9.1%}  {row['row']:14}{row['milliseconds']:9.2f}"
                    f"{row['to_full']:9.2f}{row['computed_density']:10.1%}"
                )
                rows.append(row)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"about": about, "rows": rows}, indent=1, ensure_ascii=False)
        options.json.write_text(text + "\n", encoding="utf-8")
        print(f"\nAll figures lie in {options.json}")
    return rows


def measure(tokens: int, density: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows at one length and density; the density is rounded to whole blocks."""
    draw = torch.Generator().manual_seed(options.seed)
    shape = (1, options.heads, tokens, options.dim)
    q, k, v = (torch.randn(shape, generator=draw).to(options.device) for _ in range(3))
    blocks = max(1, round(density * tokens / TILE))
    own = element_lists(options.heads, tokens, blocks * TILE, draw).to(options.device)
    shared = block_lists(options.heads, tokens, blocks, draw).to(options.device)
    legal = legal_to(legal_full(1, tokens, tokens), options.device)
    backend = "cpu" if options.device == "cpu" else "gather"
    runs: dict[str, tuple[Callable[[], Tensor], float]] = {
        "full": (lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v), 1.0),
        "elements": (lambda: by_query(q, k, v, own), blocks * TILE / tokens),
        "blocks": (lambda: by_tile(q, k, v, shared), blocks * TILE / tokens),
    }
    for name, lists in (("elements/tile", union_lists(own)), ("blocks/tile", list(shared.flatten(0, 1)))):
        plan = plan_to(plan_of_lists(lists, options.heads, tokens), options.device)
        computed = sum(len(keys) for keys in lists) * TILE / (options.heads * tokens * tokens)
        runs[name] = (_attending(q, k, v, plan, legal, backend), computed)
    seconds = {name: _time(run, options.repeats, options.device) for name, (run, _) in runs.items()}
    return [
        {
            "row": name,
            "tokens": tokens,
            "density": blocks * TILE / tokens if name != "full" else 1.0,
            "computed_density": computed,
            "milliseconds": 1000 * seconds[name],
            "to_full": seconds["full"] / seconds[name],
        }
        for name, (_, computed) in runs.items()
    ]


def element_lists(heads: int, tokens: int, count: int, draw: torch.Generator) -> Tensor:
    """`count` different random keys for every query: `[H, N, count]`, ascending."""
    drawn = [torch.rand(tokens, tokens, generator=draw).topk(count, sorted=False).indices for _ in range(heads)]
    return torch.stack(drawn).sort(-1).values


def block_lists(heads: int, tokens: int, blocks: int, draw: torch.Generator) -> Tensor:
    """The keys of `blocks` different random blocks for every tile: `[H, T, 32 blocks]`, ascending."""
    tiles = tokens // TILE
    chosen = torch.rand(heads, tiles, tiles, generator=draw).topk(blocks, sorted=False).indices.sort(-1).values
    return (chosen[..., None] * TILE + torch.arange(TILE)).flatten(2)


def union_lists(own: Tensor) -> list[Tensor]:
    """For every head and tile the keys that any of its queries reads."""
    return [tile.unique() for tile in own.reshape(-1, TILE * own.shape[2])]


def plan_of_lists(lists: list[Tensor], heads: int, tokens: int) -> Plan:
    """The plan with these keys for the tiles of all heads, head after head."""
    tiles = tokens // TILE
    at = torch.arange(heads * tiles, dtype=torch.int32)
    lengths = torch.tensor([0, *(len(keys) for keys in lists)])
    keys = torch.cat(lists).int().cpu()
    rows = torch.full_like(at, TILE)
    place = (torch.zeros_like(at), at // tiles, at % tiles * TILE, rows)
    return Plan((1, heads, tokens, tokens), *place, lengths.cumsum(0), keys, torch.zeros_like(keys))


def by_query(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
    """Softmax attention of every query over its own list of keys `[H, N, c]`."""
    out = torch.empty_like(q)
    step = max(1, GATHERED // (keys.shape[2] * q.shape[3]))
    for h in range(q.shape[1]):
        for low in range(0, q.shape[2], step):
            mine, rows = keys[h, low : low + step], q[0, h, low : low + step]
            weights = torch.softmax((k[0, h][mine] @ rows[..., None]).squeeze(-1) * q.shape[3] ** -0.5, -1)
            out[0, h, low : low + step] = (weights[:, None] @ v[0, h][mine]).squeeze(1)
    return out


def by_tile(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
    """Softmax attention of every tile of queries over its list of keys `[H, T, c]`."""
    out = torch.empty_like(q)
    for h in range(q.shape[1]):
        tiles = q[0, h].reshape(-1, TILE, q.shape[3])
        weights = torch.softmax(tiles @ k[0, h][keys[h]].transpose(1, 2) * q.shape[3] ** -0.5, -1)
        out[0, h] = (weights @ v[0, h][keys[h]]).flatten(0, 1)
    return out


def _attending(q: Tensor, k: Tensor, v: Tensor, plan: Plan, legal: Any, backend: str) -> Callable[[], Tensor]:
    return lambda: attend(q, k, v, plan, legal=legal, alpha=1.0, backend=backend)


def _time(run: Callable[[], Tensor], repeats: int, device: str) -> float:
    """Median seconds, after one run that nobody times."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1024 tokens, two densities")
    parser.add_argument("--tokens", type=int, nargs="+", help=f"lengths, multiples of {TILE}")
    parser.add_argument("--densities", type=float, nargs="+", help="shares of all pairs")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(arguments)
    if any(n % TILE for n in options.tokens or []):
        parser.error(f"--tokens: expected multiples of {TILE}, got {options.tokens}")
    return options


def _about(options: argparse.Namespace) -> dict[str, Any]:
    on_gpu = options.device != "cpu"
    where = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "hardware": where,
        "shapes": f"{options.heads} heads of dimension {options.dim}, tiles and blocks of {TILE}, float32",
        "versions": versions("torch", "numba"),
        "timing": f"median of {options.repeats} after a warm-up, lists given; load {os.getloadavg()[0]:.1f} before",
    }


if __name__ == "__main__":
    main()
