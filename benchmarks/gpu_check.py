"""Is the gpu backend right on this GPU, and how fast? Random key lists, attention alone, medians of CUDA events.

    benchmarks/gpu_check.sh [--json FILE] [--rehearsal]

First every kind of call is compared with the dense definition on the same GPU. Then come lengths, batches and
densities, the shapes with a goal first, until the budget of seconds is spent:

    flash             dense `scaled_dot_product_attention`, held to FlashAttention
    flex              FlexAttention, compiled, on the blocks that the plan touches
    adasplash 1       dense entmax of the package `adasplash`, both directions, as ours
    adasplash 2       its newer kernel, which is causal: half of the pairs
    softmax, entmax   ours: the key lists given (`attend_gpu`)
    entmax, checked   ours with the checks of its arguments (`attend`), which wait for the GPU
    plan              the lists from tile scores on the device: the best keys, or all above a threshold
"""

import argparse
import importlib.metadata
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_check_cases import check_everything
from sparsefinder.attention.api import attend
from sparsefinder.attention.call import checked
from sparsefinder.attention.flex import plan_block_mask
from sparsefinder.attention.gpu import attend_gpu
from sparsefinder.patterns.legal import legal_full, legal_to
from sparsefinder.patterns.positional import Nothing
from sparsefinder.plan import KeysPerTile, Plan, Rule, ScoreAtLeast
from sparsefinder.plan_device import place_tiles, plan_on_device

GOALS = (("flash", 16384, 1.5), ("adasplash 1", 8192, 3.0))  # entmax at this length, batch 1 and 5 % is faster by this
GOAL_DENSITY = 0.05


@dataclass(frozen=True)
class Sizes:
    """What is timed. longest_dense: rows that compute all pairs with entmax stop there; they would take the budget."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    heads: int = 12
    dim: int = 64
    tile: int = 64
    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    batches: tuple[int, ...] = (1, 8)
    densities: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2)
    longest_dense: int = 16384
    runs: int = 15


REHEARSAL = Sizes("cpu", torch.bfloat16, 1, 16, 16, (32,), (1,), (GOAL_DENSITY, 0.2), 32, 1)


@dataclass
class Report:
    """Rows so far; written to `path` after each, so that a run that is ended has lost nothing."""

    path: Path | None
    until: float
    content: dict[str, Any] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        self.content.setdefault("rows", []).append(row)
        took = f"{row['milliseconds']:10.3f}" if row["milliseconds"] is not None else f"{'–':>10}"
        ratio = f"{row['to_flash']:9.2f}" if row.get("to_flash") else f"{'–':>9}"
        density = f"{row['density']:8.0%}" if row["density"] else f"{'dense':>8}"
        print(f"{row['tokens']:7}{row['batch']:6}{density}  {row['row']:18}{took}{ratio}  {row.get('note', '')}")
        self.write()

    def write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.content, indent=1, ensure_ascii=False)
            self.path.write_text(text + "\n", encoding="utf-8")

    def spent(self) -> bool:
        return time.monotonic() > self.until


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _options(arguments)
    sizes = REHEARSAL if options.rehearsal else Sizes()
    report = Report(options.json, time.monotonic() + options.budget)
    report.content |= {"about": _about(sizes), "sizes": {**asdict(sizes), "dtype": str(sizes.dtype)}}
    for name, value in report.content["about"].items():
        print(f"{name}: {value}")
    report.content["checks"] = check_everything(sizes.device, report.spent)
    wrong = [row["call"] for row in report.content["checks"] if not row["right"]]
    print(f"\n{'tokens':>7}{'batch':>6}{'density':>8}  {'row':18}{'ms':>10}{'to flash':>9}")
    try:
        for shape in _shapes(sizes):
            if report.spent():
                report.content["stopped"] = "budget spent: the rows that are missing were not measured"
                break
            _measure(*shape, sizes, report)
    except KeyboardInterrupt:
        report.content["stopped"] = "ended from outside: the rows that are missing were not measured"
    print(report.content.get("stopped", "all rows measured"))
    report.content["goals"] = _goals(report.content.get("rows", []))
    report.write()
    if wrong:
        sys.exit(f"gpu_check: wrong outputs: {', '.join(wrong)}")
    return report.content


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Right and fast? One GPU, a few minutes.")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds after which no new row is begun")
    parser.add_argument("--json", type=Path, help="write all figures into this file")
    parser.add_argument("--rehearsal", action="store_true", help="tiny sizes in Triton's interpreter, on the CPU")
    return parser.parse_args(arguments)


def _about(sizes: Sizes) -> dict[str, str]:
    on_gpu = sizes.device == "cuda"
    found = {"hardware": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, Triton's interpreter"}
    for package in ("torch", "triton", "adasplash"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found |= {"cuda": str(torch.version.cuda), "python": platform.python_version()}
    shape = f"{sizes.heads} heads × {sizes.dim}, tiles of {sizes.tile}, {str(sizes.dtype).removeprefix('torch.')}"
    return found | {"shape": shape}


def _shapes(sizes: Sizes) -> Iterator[tuple[int, int, tuple[float, ...]]]:
    """(tokens, batch, densities): those with a goal first, then from short to long."""
    first = [n for _, n, _ in GOALS if n in sizes.tokens]
    yield from ((n, 1, (GOAL_DENSITY,)) for n in first)
    for batch in sizes.batches:
        for n in sizes.tokens:
            done = (GOAL_DENSITY,) if batch == 1 and n in first else ()
            yield n, batch, tuple(x for x in sizes.densities if x not in done)


def _measure(n: int, batch: int, densities: tuple[float, ...], sizes: Sizes, report: Report) -> None:
    """All rows of one length and batch; what does not fit in memory, or cannot run, says so in its row."""
    rows = report.content.get("rows", [])
    flash = next((r["milliseconds"] for r in rows if (r["row"], r["tokens"], r["batch"]) == ("flash", n, batch)), None)

    def row(name: str, density: float | None, prepare: Callable[[], Callable[[], Any]]) -> float | None:
        if report.spent():
            return None
        took, note = _timed(prepare, sizes)
        to_flash = flash / took if flash and took else None
        report.add(
            {"tokens": n, "batch": batch, "density": density, "row": name, "milliseconds": took, "to_flash": to_flash}
            | ({"note": note} if note else {})
        )
        return took

    draw = torch.Generator(sizes.device).manual_seed(n + batch)
    shape = (batch, sizes.heads, n, sizes.dim)
    q, k, v = (torch.randn(shape, generator=draw, device=sizes.device, dtype=sizes.dtype) for _ in range(3))
    if flash is None:
        flash = row("flash", None, lambda: _flash(q, k, v))
        if n <= sizes.longest_dense and batch == sizes.batches[0]:
            row("adasplash 1", None, lambda: _adasplash(q, k, v, causal=False))
            row("adasplash 2", None, lambda: _adasplash(q, k, v, causal=True))
    legal = legal_to(legal_full(batch, n, n), sizes.device)
    for density in densities:
        plan = random_plan(batch, n, density, sizes, draw)
        for name, alpha in (("softmax", 1.0), ("entmax", 1.5)):
            call = checked(q, k, v, legal, alpha, None, keep_half=True)
            row(name, density, lambda call=call, plan=plan: lambda: attend_gpu(call, plan))  # type: ignore[misc]
        row("entmax, checked", density, lambda plan=plan: lambda: attend(q, k, v, plan, legal=legal, backend="gpu"))  # type: ignore[misc]
        count = max(1, round(density * n))
        for name, rule in (("best", KeysPerTile(count)), ("threshold", ScoreAtLeast(1 - density))):
            row(f"plan, {name}", density, lambda rule=rule: _planning(batch, n, rule, sizes, draw))  # type: ignore[misc]
        if density == GOAL_DENSITY and n <= sizes.longest_dense and batch == sizes.batches[0]:
            row("flex", density, lambda plan=plan: _flex(q, k, v, plan))  # type: ignore[misc]


def random_plan(batch: int, n: int, density: float, sizes: Sizes, draw: torch.Generator) -> Plan:
    """`density * n` keys drawn for every tile and head; all items of the batch read the same ones."""
    tiles, count = -(-n // sizes.tile), max(1, round(density * n))
    drawn = torch.rand(sizes.heads, tiles, n, generator=draw, device=sizes.device).topk(count).indices.sort().values
    keys = drawn.to(torch.int32).flatten().repeat(batch)
    t = torch.arange(batch * sizes.heads * tiles, dtype=torch.int32, device=sizes.device)
    place = (t // (sizes.heads * tiles), t // tiles % sizes.heads, t % tiles * sizes.tile)
    rows = (n - place[2]).clamp(max=sizes.tile)
    offsets = torch.arange(t.shape[0] + 1, device=sizes.device) * count
    return Plan((batch, sizes.heads, n, n), *place, rows, offsets, keys, torch.zeros_like(keys))


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    if not q.is_cuda:
        raise RuntimeError("absent in a rehearsal: needs a GPU")

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v)

    return run


def _adasplash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Callable[[], Any]:
    if not q.is_cuda:
        raise RuntimeError("absent in a rehearsal: needs a GPU")
    try:
        from adasplash import adasplash_v1, adasplash_v2
    except ImportError as error:
        raise RuntimeError("absent: the package adasplash is not installed") from error
    return lambda: adasplash_v2(q, k, v) if causal else adasplash_v1(q, k, v, alpha=1.5, is_causal=False)


def _flex(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Callable[[], Any]:
    if not q.is_cuda:
        raise RuntimeError("absent in a rehearsal: needs a GPU")
    mask, compiled = plan_block_mask(plan), torch.compile(flex_attention)
    return lambda: compiled(q, k, v, block_mask=mask)


def _planning(batch: int, n: int, rule: Rule, sizes: Sizes, draw: torch.Generator) -> Callable[[], Any]:
    tiles = place_tiles(legal_to(legal_full(batch, n, n), sizes.device), (sizes.tile,) * sizes.heads, Nothing())
    shape = (batch, sizes.heads, -(-n // sizes.tile), n)
    scores = torch.rand(shape, generator=draw, device=sizes.device)
    return lambda: plan_on_device(scores, rule, tiles)


def _timed(prepare: Callable[[], Callable[[], Any]], sizes: Sizes) -> tuple[float | None, str | None]:
    """(median milliseconds, None), or None and why there are none. Warm-up runs compile and tune."""
    try:
        run = prepare()
        if sizes.device != "cuda":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3, None
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        event = partial(torch.cuda.Event, enable_timing=True)
        events = [[event(), event()] for _ in range(sizes.runs)]
        for start_event, end_event in events:
            start_event.record()
            run()
            end_event.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in events), None
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None, "does not fit in memory"
    except Exception as error:  # noqa: BLE001  (another library's kernel: its row says what it said, the others go on)
        return None, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:160]


def _goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    took = {(r["row"], r["tokens"], r["density"]): r["milliseconds"] for r in rows if r["batch"] == 1}
    goals = []
    for name, n, least in GOALS:
        other, ours = took.get((name, n, None)), took.get(("entmax", n, GOAL_DENSITY))
        ratio = other / ours if other and ours else math.nan
        said = f"{ratio:.2f}×" if ratio == ratio else "not measured"
        print(f"goal: entmax at {n} tokens, {GOAL_DENSITY:.0%}, ≥ {least}× {name}: {said}")
        goals.append({"against": name, "tokens": n, "goal": least, "ratio": ratio if ratio == ratio else None})
    return goals


if __name__ == "__main__":
    main()
