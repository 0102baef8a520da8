"""When a plan pays: measured times of a layer, dense and over plans, read off at any size and computed density.

Mode `auto` asks twice. Before anything is predicted, with the density that is expected, so that short texts spend
nothing; and once the plan is there, with its own density, when prediction and plan are paid for either way. Answers
depend on the table, the size and the density alone.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

from torch import Tensor

from sparsefinder.patterns.legal import Legal
from sparsefinder.plan import Plan


@dataclass(frozen=True)
class Setting:
    """What times depend on beside size and density. processor: its name; threads: those of torch; versions: of this
    package, torch and numba; predictor: its kind and rank; tile_rows: the mean over heads."""

    processor: str
    threads: int
    versions: str
    heads: int
    kv_heads: int
    head_dim: int
    alpha: int | float
    causal: bool
    predictor: str
    tile_rows: int | float


@dataclass(frozen=True)
class Times:
    """Seconds of one layer on items of `tokens` tokens.

    dense: over all legal pairs. predict: scores and plan. attend[i]: over a plan of computed density `density[i]`,
    which rises, as `attend` does.
    """

    tokens: int
    dense: int | float
    predict: int | float
    density: tuple[float, ...]
    attend: tuple[float, ...]


@dataclass(frozen=True)
class Crossover:
    """Times of one setting: for every number of items in a batch, at rising lengths."""

    setting: Setting
    rows: tuple[tuple[int, tuple[Times, ...]], ...]


@dataclass(frozen=True)
class Size:
    """How large a call is: as if `items` texts of `length` tokens each, with as many legal `pairs` (of one head).

    tokens: their length in a table, which may be one of texts that are causal where these are not, or the reverse.
    """

    items: int | float
    tokens: int | float
    pairs: int
    length: int | float


@dataclass(frozen=True)
class Estimate:
    """Seconds of one call, see `Times`."""

    dense: int | float
    predict: int | float
    attend: int | float


@dataclass(frozen=True)
class ExpectedDensity:
    """The computed density that plans of a layer had on texts of `tokens` tokens."""

    share: int | float
    tokens: int

    def at(self, tokens: int | float) -> float:
        """At another length: what is chosen per row is about as many keys there, so the share goes with 1 / length."""
        return min(1.0, self.share * self.tokens / max(tokens, 1.0))


def size_of(crossover: Crossover, legal: Legal) -> Size:
    """The size of a call in the terms of a table; padding, ragged texts and heads are accounted for by their pairs."""
    keys = legal.key_real.sum(1).tolist()
    alone = legal.cross or legal.query_offset > 0  # else the queries are the keys, and need not be counted
    rows = legal.query_real.sum(1).tolist() if alone else keys
    per_item = [n * m - (n * (n - 1) // 2 if legal.causal else 0) for n, m in zip(rows, keys, strict=True)]
    pairs, items = sum(per_item), sum(count > 0 for count in per_item)
    # A text of n tokens has n² pairs, a causal one about n² / 2.
    tokens, length = (
        math.sqrt((2 if causal else 1) * pairs / max(items, 1)) for causal in (crossover.setting.causal, legal.causal)
    )
    return Size(items, tokens, pairs, length)


def for_heads(size: Size, crossover: Crossover, heads: int) -> Size:
    """The size in a table that was measured with another number of heads: as many more or fewer items."""
    return replace(size, items=size.items * heads / crossover.setting.heads)


def density_of(plan: Plan, size: Size) -> float:
    """Computed density of a plan over all items and heads."""
    computed = int((plan.offsets.diff() * plan.tile_rows).sum()) - int(plan.first_row.sum())
    return computed / max(size.pairs * plan.shape[1], 1)


def worth_predicting(crossover: Crossover, size: Size, expected: int | float) -> bool:
    """Before: are prediction, plan and attention of the expected density faster than the dense path?"""
    seconds = estimate(crossover, size, expected)
    return seconds.predict + seconds.attend < seconds.dense


def worth_attending(crossover: Crossover, size: Size, density: int | float) -> bool:
    """After: is attention over a plan of this density faster than the dense path?"""
    seconds = estimate(crossover, size, density)
    return seconds.attend < seconds.dense


def estimate(crossover: Crossover, size: Size, density: int | float) -> Estimate:
    """Seconds of a call. Between measured sizes powers of the size, below the least the least's, above the largest as
    if all grew with the pairs; between measured densities straight lines, so that more is never faster."""
    rows = crossover.rows
    low, high, weight, factor = _place([items for items, _ in rows], size.items)
    seconds = [_along(times, size.tokens, density) for _, times in (rows[low], rows[high])]
    return Estimate(*(factor * x for x in _mixed(weight, *seconds)))


Seconds = tuple[float, float, float]  # dense, predict, attend


def _along(times: tuple[Times, ...], tokens: int | float, density: int | float) -> Seconds:
    low, high, weight, factor = _place([t.tokens for t in times], tokens)
    ends: list[Seconds] = [(t.dense, t.predict, _attend(t, density)) for t in (times[low], times[high])]
    dense, predict, attend = _mixed(weight, *ends)
    return dense * factor**2, predict * factor**2, attend * factor**2


def _attend(times: Times, density: int | float) -> float:
    x, y = times.density, times.attend
    if density <= x[0] or len(x) == 1:
        return y[0]
    i = min(bisect_right(x, density), len(x) - 1)
    return y[i - 1] + (y[i] - y[i - 1]) * (density - x[i - 1]) / (x[i] - x[i - 1])


def _place(known: list[int], at: int | float) -> tuple[int, int, float, float]:
    """The neighbours of `at` among rising numbers, its weight between them on a logarithmic axis, and how many times
    the last one it is where that is above 1."""
    if at <= known[0]:
        return 0, 0, 0.0, 1.0
    if at >= known[-1]:
        return len(known) - 1, len(known) - 1, 0.0, at / known[-1]
    high = bisect_right(known, at)
    return high - 1, high, math.log(at / known[high - 1]) / math.log(known[high] / known[high - 1]), 1.0


def _mixed(weight: int | float, low: Seconds, high: Seconds) -> Seconds:
    dense, predict, attend = (a ** (1 - weight) * b**weight for a, b in zip(low, high, strict=True))
    return dense, predict, attend


def tile_rows(tile_size: int | Tensor) -> float:
    """Mean rows of a tile over heads."""
    return float(tile_size) if isinstance(tile_size, int) else float(tile_size.float().mean())
