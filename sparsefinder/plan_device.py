"""Plans from tile scores on the device that holds them, in plain torch, without waiting for it once per layer.

What tiles there are depends on the masks alone, so it is worked out once per batch (`place_tiles`, on the host). What a
tile reads depends on its scores and never comes back to the host: the lists have room for the most that a rule allows.
The lists are those of `plan_from_tile_scores` on the CPU, key by key.
"""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal, first_real, legal_to
from sparsefinder.plan import Plan, Rule, rule_limits
from sparsefinder.query_tiles import QueryTiles, global_counts, only_positional, query_tiles, window_radius


@dataclass(frozen=True, eq=False)
class PlacedTiles:
    """The tiles of a batch on the device, with what says which keys they read by position.

    on_host, legal: the tiles and the masks on the host. spans: the most keys that position gives a tile, on the host.
    index: which row of the scores is the tile's; alone: it is one global row. first, globals_: of each item, the first
    real key and how many global tokens there are. radius: of the window; 0 = the row itself, −1 = not even that.
    """

    on_host: QueryTiles
    legal: Legal
    spans: np.ndarray
    batch: Int32[Tensor, " T"]
    head: Int32[Tensor, " T"]
    start: Int32[Tensor, " T"]
    rows: Int32[Tensor, " T"]
    index: Int64[Tensor, " T"]
    alone: Bool[Tensor, " T"]
    key_real: Bool[Tensor, "B M"]
    first: Int64[Tensor, " B"]
    globals_: Int64[Tensor, " B"]
    radius: int


@lru_cache(maxsize=4)
def place_tiles(legal: Legal, sizes: tuple[int, ...], extra: Pattern) -> PlacedTiles:
    """The tiles of `sizes[h]` rows, once for all layers that have this `legal` (kept for the last few of them).

    Raises:
        PatternError: a part of `extra` that is neither window nor global tokens, or a layer with a sliding window.
    """
    if not only_positional(extra):
        raise PatternError(f"plan on a device: expected windows and global tokens only, got {extra}")
    host, device = legal_to(legal, "cpu"), legal.key_real.device
    counts = global_counts(extra, host)
    tiles = query_tiles(host, sizes, counts)
    radius = window_radius(extra, legal)
    spans = tiles.rows + 2 * max(radius, 0) + counts[tiles.batch]
    spans = np.minimum(np.where(tiles.alone, host.key_real.shape[1], spans), host.key_real.shape[1])

    def moved(x: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(x).to(dtype).to(device)

    return PlacedTiles(
        on_host=tiles,
        legal=host,
        spans=spans,
        batch=moved(tiles.batch, torch.int32),
        head=moved(tiles.head, torch.int32),
        start=moved(tiles.start, torch.int32),
        rows=moved(tiles.rows, torch.int32),
        index=moved(tiles.index, torch.int64),
        alone=moved(tiles.alone, torch.bool),
        key_real=legal.key_real,
        first=first_real(legal),
        globals_=moved(counts, torch.int64),
        radius=radius,
    )


def plan_on_device(scores: Float[Tensor, "B H T M"], rule: Rule, tiles: PlacedTiles) -> Plan:
    """As `plan_from_tile_scores`, on the device of `scores`, without a look at any number there.

    `keys` and `first_row` have room behind the last list. A NaN among the scores is never chosen, and not reported:
    whatever made it, a NaN in q or k, is refused by `attend`. Memory: some ten bytes for every pair of tile and key.
    """
    batch, heads, _, width = scores.shape
    counts, least = rule_limits(rule, tiles.on_host, tiles.legal, heads)
    counts = np.where(tiles.on_host.alone, 0, np.minimum(counts, width))
    capacity = int(np.minimum(counts + tiles.spans, width).sum())
    low = tiles.start[:, None] + tiles.legal.query_offset
    key = torch.arange(width, dtype=torch.int32, device=scores.device)
    read = _positional(tiles, low, key) | _chosen(scores, tiles, low, key, counts, least)
    offsets = torch.nn.functional.pad(read.sum(-1).cumsum(0), (1, 0))
    at = torch.where(read.flatten(), read.flatten().cumsum(0) - 1, capacity)  # all that is not read: behind the end
    since = (key - low).clamp(min=0) if tiles.legal.causal else torch.zeros_like(read, dtype=torch.int32)
    keys, first_row = (_listed(x.expand(read.shape), at, capacity) for x in (key, since))
    shape = (batch, heads, tiles.legal.query_real.shape[1], width)
    return Plan(shape, tiles.batch, tiles.head, tiles.start, tiles.rows, offsets, keys, first_row)


def placed_on(tiles: PlacedTiles, device: torch.device | str) -> PlacedTiles:
    """The same tiles on another device; what is on the host stays there."""
    parts = {field.name: getattr(tiles, field.name) for field in fields(tiles)}
    moved: dict[str, Any] = {name: x.to(device) for name, x in parts.items() if isinstance(x, Tensor)}
    return replace(tiles, **moved)


def _positional(tiles: PlacedTiles, low: Tensor, key: Tensor) -> Bool[Tensor, "T M"]:
    """Real keys of the window, of the rows themselves and of the global tokens; all keys for a global row."""
    item = tiles.batch.long()
    high, first = low + tiles.rows[:, None], tiles.first[item, None]
    found = (key >= first) & (key < first + tiles.globals_[item, None]) | tiles.alone[:, None]
    if tiles.radius >= 0:
        found |= (key >= low - tiles.radius) & (key < high + tiles.radius)
    if tiles.legal.causal:
        found &= key < high
    return found & tiles.key_real[item]


def _chosen(
    scores: Tensor, tiles: PlacedTiles, low: Tensor, key: Tensor, counts: np.ndarray, least: np.ndarray
) -> Bool[Tensor, "T M"]:
    """The best `counts[t]` keys of every tile among those that reach `least[t]`; of equal scores the earlier key."""
    item, device = tiles.batch.long(), scores.device
    values = scores[item, tiles.head.long(), tiles.index].float()
    number = torch.from_numpy(counts).to(device, non_blocking=True)[:, None]
    able = tiles.key_real[item] & (values >= torch.from_numpy(least).to(device, non_blocking=True)[:, None])
    able &= (values > -torch.inf) & (number > 0)
    if tiles.legal.causal:
        able &= key < low
    most = int(counts.max(initial=0))
    if most in (0, values.shape[1]):
        return able
    values = values.masked_fill(~able, -torch.inf)
    cut = values.topk(most, dim=-1).values.gather(1, (number - 1).clamp(min=0))
    above, equal = values > cut, values == cut
    return able & (above | equal & (equal.cumsum(-1, dtype=torch.int32) <= number - above.sum(-1, keepdim=True)))


def _listed(x: Tensor, at: Tensor, capacity: int) -> Int32[Tensor, " E"]:
    """`x` of the pairs that are read, each at its place in the lists; zeros in the room behind them."""
    lists = torch.zeros(capacity + 1, dtype=torch.int32, device=at.device)
    return lists.scatter_(0, at, x.flatten())[:capacity]
