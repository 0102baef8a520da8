"""Times of rivals, taken in turn in one process, so that what else the machine does meets all of them alike."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

from sparsefinder.attention import api
from sparsefinder.attention.measure_crossover import processor_name
from sparsefinder.predictors import Tiles, tiles_cpu
from sparsefinder.predictors.tile_kernels import choose_keys

Ways = Mapping[str, Callable[[], object]]
Times = dict[str, list[float]]
PARTS = ("predict", "plan", "attend", "rest")


def paired(ways: Ways, rounds: int) -> tuple[Times, dict[str, Any]]:
    """Milliseconds of every way in every round, and what each gave in a round before them, which warms up and compiles.

    Medians are taken by who reads: a ratio is the median of the rounds' ratios.
    """
    times: Times = {name: [] for name in ways}
    given = {name: way() for name, way in ways.items()}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            times[name].append(1000 * (time.perf_counter() - started))
    return times, given


def summed(parts: Sequence[Sequence[float]]) -> list[float]:
    """Round by round."""
    return [sum(turn) for turn in zip(*parts, strict=True)]


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median over rounds of how many times as long the first took."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def shares(run: Callable[[], object], rounds: int) -> dict[str, float]:
    """How the time of `run` divides, medians over rounds: `predict` scores tiles and chooses keys, `plan` makes lists
    of them, `attend` is the kernel, `rest` everything else. Predictions other than those of tiles count as `plan`."""
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    run()
    for _ in range(rounds):
        with _watched() as seconds:
            started = time.perf_counter()
            run()
            whole = time.perf_counter() - started
        # Prediction happens inside of what makes the plan.
        predict, plan, attend = seconds["predict"], seconds["plan"] - seconds["predict"], seconds["attend"]
        for part, spent in zip(PARTS, (predict, plan, attend, whole - seconds["plan"] - attend), strict=True):
            found[part].append(spent / whole)
    return {part: statistics.median(spent) for part, spent in found.items()}


@contextmanager
def _watched() -> Iterator[dict[str, float]]:
    """Seconds inside of prediction, of plans with their prediction, and of the kernel, while in the context."""
    seconds = {"predict": 0.0, "plan": 0.0, "attend": 0.0}

    def timed(what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(work)
        def measured(*args: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return work(*args, **named)
            finally:
                seconds[what] += time.perf_counter() - started

        return measured

    with (
        patch.object(tiles_cpu, "kernel_inputs", timed("predict", tiles_cpu.kernel_inputs)),
        patch.object(tiles_cpu, "choose_keys", timed("predict", choose_keys)),
        patch.object(Tiles, "plan", timed("plan", Tiles.plan)),
        patch.dict(api.BACKENDS, cpu=timed("attend", api.BACKENDS["cpu"])),
    ):
        yield seconds


def exponent(sizes: Sequence[float], amounts: Sequence[float]) -> float:
    """`b` of the line `log amount = a + b log size` with the least squares; NaN for a single size."""
    x, y = ([math.log(value) for value in values] for values in (sizes, amounts))
    return statistics.linear_regression(x, y).slope if len(set(x)) > 1 else math.nan


def hardware() -> str:
    """The processor by its name, and the threads of torch."""
    return f"{processor_name(torch.device('cpu'))}, {torch.get_num_threads()} threads"
