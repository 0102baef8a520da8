"""Does mode `auto` take the faster path? `--ship` measures the tables that are shipped, otherwise a table is loaded.

    python -m benchmarks.crossover            # measured dense, sparse and auto at many sizes and densities
    python -m benchmarks.crossover --ship     # writes sparsefinder/attention/crossover.json (on two threads)

Every line: the fastest of some interleaved runs of each path, what auto took, and by how much it was slower than the
better one. Plans are made by a predictor with a fixed number of keys, so that densities are known beforehand.
"""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.attention.crossover import (
    Crossover,
    density_of,
    for_heads,
    size_of,
    worth_attending,
    worth_predicting,
)
from sparsefinder.attention.measure_crossover import (
    SHARPNESS,
    SHIPPED,
    load_crossover,
    make_setting,
    measure_crossover,
    shipped_crossover,
)
from sparsefinder.patterns.legal import Legal, legal_full
from sparsefinder.patterns.positional import GlobalTokens, window
from sparsefinder.plan import Plan
from sparsefinder.predictors import Tiles, layer_plan, random_projections

RANK, TILE, SHARES = 8, 32, (0.02, 0.1, 0.2, 0.4, 0.7)
SIZES = ((1, 64), (1, 200), (1, 400), (1, 1100), (1, 3000), (3, 100), (6, 300), (16, 90), (32, 64))
MOST_PAIRS = 3000**2
POSITIONAL = window(9) | GlobalTokens(1)


@dataclass(frozen=True)
class Shape:
    """A kind of layer: of SmolLM2 with softmax or entmax, and of MiniLM."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    alpha: float
    causal: bool


SHAPES = (
    Shape("SmolLM2 softmax", 9, 3, 64, 1.0, True),
    Shape("SmolLM2 entmax", 9, 3, 64, 1.5, True),
    Shape("MiniLM entmax", 12, 12, 32, 1.5, False),
    Shape("MiniLM-like softmax", 12, 12, 32, 1.0, False),
)


def tiles(shape: Shape, keys: int) -> Tiles:
    return Tiles(random_projections(shape.heads, RANK, shape.head_dim, 0, "bilinear"), keys_per_tile=keys)


def table_of(shape: Shape, ship: bool) -> Crossover:
    sizes: dict[str, Any] = {k: v for k, v in asdict(shape).items() if k != "name"}
    setting = make_setting(device="cpu", predictor=f"tiles of rank {RANK}", rows=TILE, **sizes)

    def predict(q: torch.Tensor, k: torch.Tensor, legal: Legal) -> Plan:
        return layer_plan(tiles(shape, max(1, k.shape[2] // 10)), q, k, legal, POSITIONAL, TILE)

    return measure_crossover(setting, predict) if ship else load_crossover(setting, predict)


@torch.no_grad()
def measured(shape: Shape, table: Crossover, items: int, tokens: int, share: float) -> dict[str, Any]:
    """Milliseconds of each path and of auto's own decision, at one size and density."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(items, h, tokens, shape.head_dim) for h in heads)
    q, legal = q * SHARPNESS, legal_full(items, tokens, tokens, shape.causal)
    predictor = tiles(shape, max(1, round(share * tokens)))
    common: dict[str, Any] = {"legal": legal, "alpha": shape.alpha}
    size = for_heads(size_of(table, legal), table, shape.heads)
    plan = layer_plan(predictor, q, k, legal, POSITIONAL, TILE)
    density = density_of(plan, size)

    def sparse() -> Any:
        return attend(q, k, v, layer_plan(predictor, q, k, legal, POSITIONAL, TILE), **common)

    def dense() -> Any:
        return attend_dense(q, k, v, **common)

    def auto() -> Any:
        size = for_heads(size_of(table, legal), table, shape.heads)
        if not worth_predicting(table, size, density):
            return dense()
        made = layer_plan(predictor, q, k, legal, POSITIONAL, TILE)
        return attend(q, k, v, made, **common) if worth_attending(table, size, density_of(made, size)) else dense()

    seconds: dict[str, list[float]] = {"dense": [], "sparse": [], "auto": []}
    often = 3 if items * tokens**2 > 10**6 else 8
    for run in range(often + 1):
        for name, work in (("dense", dense), ("sparse", sparse), ("auto", auto)):
            started = perf_counter()
            work()
            if run:
                seconds[name].append(1000 * (perf_counter() - started))
    least: dict[str, Any] = {name: min(times) for name, times in seconds.items()}
    took = "sparse" if worth_predicting(table, size, density) else "dense"
    regret = least[took] / min(least["dense"], least["sparse"]) - 1
    return least | {"density": density, "took": took, "regret": regret}


def main(ship: bool = False, shipped: bool = False, out: Path | None = None, only: str = "") -> None:
    """--shipped: decide by the shipped tables; --out: lines as JSON; --only: the shapes whose name holds this."""
    console = Console()
    lines: list[dict[str, Any]] = []
    shapes = [shape for shape in SHAPES if only in shape.name]
    if ship:
        torch.set_num_threads(2)
        SHIPPED.write_text(json.dumps([asdict(table_of(shape, ship=True)) for shape in shapes], indent=1) + "\n")
        return
    for shape in shapes:
        table = table_of(shape, ship=False)
        table = shipped_crossover(table.setting) if shipped else table
        shown = Table(title=f"{shape.name}, {torch.get_num_threads()} threads, {table.setting.processor}")
        for heading in ("items", "tokens", "density", "dense ms", "sparse ms", "auto ms", "took", "slower than best"):
            shown.add_column(heading, justify="right")
        for items, tokens in SIZES:
            for share in SHARES if items * tokens**2 <= MOST_PAIRS else ():
                line = measured(shape, table, items, tokens, share)
                lines.append({"shape": shape.name, "items": items, "tokens": tokens} | line)
                times = [f"{line[name]:.2f}" for name in ("dense", "sparse", "auto")]
                cells = [str(items), str(tokens), f"{line['density']:.2f}", *times]
                shown.add_row(*cells, line["took"], f"{line['regret']:.1%}")
        console.print(shown)
    worst = max(lines, key=lambda line: line["regret"])
    console.print(f"worst: {worst}\nover 5 %: {sum(line['regret'] > 0.05 for line in lines)} of {len(lines)}")
    if out is not None:
        about = {"python": platform.python_version(), "torch": torch.__version__}
        out.write_text(json.dumps({"about": about, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
