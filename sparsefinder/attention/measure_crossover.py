"""Where the times of `crossover` come from: measured once on a machine and kept in the user's cache, or shipped."""

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import sparsefinder
from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.attention.crossover import Crossover, Setting, Times, density_of, size_of
from sparsefinder.errors import ConfigError, DataError
from sparsefinder.patterns.legal import Legal, legal_full, legal_to
from sparsefinder.patterns.positional import Window
from sparsefinder.plan import Plan, ShareOfKeys, plan_from_tile_scores, tile_count
from sparsefinder.whole_files import write_text

Predict = Callable[[Float[Tensor, "B H N D"], Float[Tensor, "B Hkv M D"], Legal], Plan]

SHIPPED = Path(__file__).parent / "crossover.json"
# Items of a batch and their lengths. Larger calls grow like the pairs, and would make measuring take minutes.
SIZES = {1: (64, 128, 256, 512, 1024, 2048), 4: (64, 128, 256, 512), 16: (64, 128, 256)}
LARGE = 2**20  # pairs
SHARES = (0.02, 0.1, 0.3, 0.7)
REPEATS = (4, 3)  # of small calls, of which the first compiles, and of large ones
SHARPNESS = 2.0  # of random queries: then entmax keeps a few percent of the keys, as it does in trained models
_LOG = logging.getLogger("sparsefinder.crossover")


def make_setting(
    *, device: torch.device | str, heads: int, kv_heads: int, head_dim: int, alpha: int | float, causal: bool,
    predictor: str, rows: int | float,
) -> Setting:  # fmt: skip
    """The setting of this process on this machine; `rows` of a tile on average, the others as in `Setting`."""
    packages = {"sparsefinder": sparsefinder.__version__, "torch": torch.__version__, "numba": _version("numba")}
    versions = ", ".join(f"{name} {number}" for name, number in packages.items())
    threads = torch.get_num_threads()
    return Setting(
        f"{processor_name(torch.device(device))}, {os.cpu_count()} cores",
        threads,
        versions,
        heads,
        kv_heads,
        head_dim,
        alpha,
        causal,
        predictor,
        rows,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def processor_name(device: torch.device) -> str:
    """What its maker calls the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load_crossover(setting: Setting, predict: Predict, device: torch.device | str = "cpu") -> Crossover:
    """The table of this setting from the user's cache folder; measured (some seconds) and kept there where it is not,
    or where the file is damaged or of another setting. A folder that cannot be written is said in the log."""
    path = cache_file(setting)
    known = read_crossover(path, setting)
    if known is not None:
        return known
    measured = measure_crossover(setting, predict, device)
    try:
        write_text(path, json.dumps(asdict(measured), indent=1))
    except DataError as error:
        _LOG.warning("crossover was measured but cannot be kept: %s", error)
    return measured


def cache_file(setting: Setting) -> Path:
    """Where the table of a setting is kept: `$XDG_CACHE_HOME/sparsefinder/crossover/…`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    digest = hashlib.sha256(json.dumps(asdict(setting), sort_keys=True).encode()).hexdigest()
    return cache / "sparsefinder" / "crossover" / f"{digest[:16]}.json"


def read_crossover(path: Path, setting: Setting) -> Crossover | None:
    """The table in a file; None where there is none, or it is damaged or of another setting."""
    try:
        found = _parsed(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.setting == setting else None


def shipped_crossover(setting: Setting, device: torch.device | str = "cpu") -> Crossover:
    """The shipped table that is nearest to a setting: softmax or entmax first, then head size, then causal or not. Of
    two threads of one machine; ratios of times carry over to others roughly, the times do not.

    Raises:
        ConfigError: another device than the CPU, for which none is shipped.
    """
    if torch.device(device).type != "cpu":
        raise ConfigError(f"crossover: expected a measured one on {device}, shipped ones are of CPUs")
    tables = [_parsed(table) for table in json.loads(SHIPPED.read_text())]

    def distance(table: Crossover) -> tuple[bool, float, bool]:
        other = table.setting
        dims = abs(math.log(other.head_dim / setting.head_dim))
        return (other.alpha == 1) != (setting.alpha == 1), dims, other.causal != setting.causal

    return min(tables, key=distance)


def _parsed(body: dict[str, Any]) -> Crossover:
    """A table from JSON; ValueError, KeyError or TypeError where anything is missing or impossible."""
    rows = tuple(
        (int(items), tuple(Times(**{**t, "density": tuple(t["density"]), "attend": tuple(t["attend"])}) for t in times))
        for items, times in body["rows"]
    )
    for items, times in rows:
        numbers = [x for t in times for x in (t.tokens, t.dense, t.predict, *t.attend)]
        rising = _rising(t.tokens for t in times) and all(
            len(t.density) == len(t.attend) > 0 and _rising(t.density) and sorted(t.attend) == list(t.attend)
            for t in times
        )
        if not (items > 0 and times and rising and all(math.isfinite(x) and x > 0 for x in numbers)):
            raise ValueError("crossover: expected positive times at rising lengths and densities")
    if not rows or not _rising(items for items, _ in rows):
        raise ValueError("crossover: expected rising numbers of items")
    return Crossover(Setting(**body["setting"]), rows)


def _rising(numbers: Iterable[float]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


def measure_crossover(setting: Setting, predict: Predict, device: torch.device | str = "cpu") -> Crossover:
    """Measure the table of a setting on random queries and keys (some seconds).

    predict: what makes a layer's plan, on `[B, heads, N, head_dim]` queries.
    """
    rows = []
    for items, lengths in SIZES.items():
        rows.append((items, tuple(_measured(setting, predict, items, tokens, device) for tokens in lengths)))
    return Crossover(setting, tuple(rows))


@torch.no_grad()
def _measured(setting: Setting, predict: Predict, items: int, tokens: int, device: torch.device | str) -> Times:
    draw = torch.Generator().manual_seed(tokens)
    heads = (setting.heads, setting.kv_heads, setting.kv_heads)
    # Laid out as the layers of transformers do: another layout would be copied first, and that be measured.
    q, k, v = (
        torch.randn(items, tokens, h, setting.head_dim, generator=draw).to(device).transpose(1, 2) for h in heads
    )
    q, legal = q * SHARPNESS, legal_to(legal_full(items, tokens, tokens, setting.causal), device)
    size = size_of(Crossover(setting, ()), legal)
    often = REPEATS[items * tokens**2 >= LARGE]
    common: dict[str, Any] = {"legal": legal, "alpha": setting.alpha}
    dense = _seconds(lambda: attend_dense(q, k, v, **common), device, often)
    predicted = _seconds(lambda: predict(q, k, legal), device, often)
    points: dict[float, float] = {}
    rows = max(1, round(setting.tile_rows))
    scores = torch.randn(items, setting.heads, tile_count(legal, rows), tokens, generator=draw).to(device)
    for share in SHARES:
        plan = plan_from_tile_scores(scores, ShareOfKeys(share), Window(0), legal, rows)
        points[density_of(plan, size)] = _seconds(lambda: attend(q, k, v, plan, **common), device, often)  # noqa: B023
    density = tuple(sorted(points))
    attended = tuple(accumulate((points[d] for d in density), max))  # noise must not make more pairs look cheaper
    return Times(tokens, dense, predicted, density, attended)


def _seconds(work: Callable[[], object], device: torch.device | str, often: int) -> float:
    """The fastest of some runs: what others do on the machine only ever adds."""
    best = math.inf
    for _ in range(often):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return best


def _wait(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
