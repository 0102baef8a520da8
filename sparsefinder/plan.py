"""Plans: for every (item, head, query tile) the sorted, duplicate-free list of keys it reads, for every fast kernel.

Window, global, predicted keys and every query itself are merged here, so that one entmax threshold covers a row and no
pair counts twice. A tile's list may hold more than a row needs: with entmax that changes nothing but the cost.
"""

import functools
import operator
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

from sparsefinder.errors import NonFiniteError, PatternError, ShapeError
from sparsefinder.numba_kernels import kernel_array
from sparsefinder.patterns.algebra import Context, Pattern, context_for, materialize, union_leaves
from sparsefinder.patterns.content import BucketsMeet, pack_bits
from sparsefinder.patterns.legal import Legal, first_real
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window
from sparsefinder.plan_kernels import count_marks, list_marks, mark_buckets, mark_matrix, mark_positions, mark_scores
from sparsefinder.query_tiles import QueryTiles, global_counts, only_positional, query_tiles, window_radius
from sparsefinder.shapes import head_tiles
from sparsefinder.threads import threads_for


@dataclass(frozen=True, eq=False)
class Plan:
    """Lists of keys in CSR form over tiles; tiles are sorted by item, head and first row.

    shape: (B, H, N, M).
    tile_start, tile_rows: the rows `tile_start[t] … tile_start[t] + tile_rows[t] − 1` read the list of tile `t`.
    keys[offsets[t] : offsets[t + 1]]: its keys, ascending; behind the last list there may be room (`plan_device`).
    first_row: the first row of the tile, counted from its start, that may read the key (0 where not causal).
    """

    shape: tuple[int, int, int, int]
    tile_batch: Int32[Tensor, " T"]
    tile_head: Int32[Tensor, " T"]
    tile_start: Int32[Tensor, " T"]
    tile_rows: Int32[Tensor, " T"]
    offsets: Int64[Tensor, " T_and_1"]
    keys: Int32[Tensor, " E"]
    first_row: Int32[Tensor, " E"]

    def __post_init__(self) -> None:
        end = int(self.offsets[-1]) if self.offsets.device.type == "cpu" else 0  # a look elsewhere would wait for it
        if self.offsets.shape[0] != self.tile_start.shape[0] + 1 or end > self.keys.shape[0]:
            raise ShapeError(f"plan: {self.offsets.shape[0]} offsets do not fit {self.tile_start.shape[0]} tiles")


@dataclass(frozen=True)
class KeysPerTile:
    """A tile reads its `count` best keys (one number, or one per head)."""

    count: int | tuple[int, ...]


@dataclass(frozen=True)
class ShareOfKeys:
    """A tile reads the best `ceil(share * visible keys)` keys; in a causal layer those before the tile are visible."""

    share: float


@dataclass(frozen=True)
class ScoreAtLeast:
    """A tile reads the keys whose (normalised) score reaches `threshold` (one number, or one per head)."""

    threshold: float | tuple[float, ...]


Rule = KeysPerTile | ShareOfKeys | ScoreAtLeast


def build_plan(
    pattern: Pattern,
    legal: Legal,
    tile_size: int | Int[Tensor, " H"] = 32,
    ctx: Context | None = None,
    *,
    heads: int | None = None,
) -> Plan:
    """The plan of any pattern: a tile reads every key that one of its rows reads, and every row reads itself
    (not in cross-attention, where no key is its own: a row may be empty there, and its output zero).

    Tiles of `tile_size` rows are counted from each item's first real token; rows of padding belong to none; rows of
    `GlobalTokens` are tiles of one row. In a causal layer a key may be read from the first row on that chose it, so
    that no row's set depends on later tokens.

    heads: needed where neither the pattern nor `tile_size` says how many there are (a window alone).

    Raises:
        PatternError: the number of heads is unknown, or two parts of the pattern disagree on it.
        ShapeError: a tile size outside 1 to 128.
    """
    known = {n for n in (heads, *map(_heads_of, union_leaves(pattern))) if n is not None}
    known |= {tile_size.shape[0]} if isinstance(tile_size, Tensor) else set()
    if len(known) != 1:
        raise PatternError(f"build_plan: expected one number of heads (pass heads=...), got {sorted(known)}")
    count = known.pop()
    tiles = query_tiles(legal, head_tiles(tile_size, count), global_counts(pattern, legal))
    marks = np.zeros((tiles.start.shape[0], legal.key_real.shape[1]), np.uint8)
    with threads_for(marks.size * max(head_tiles(tile_size, count))):
        _mark(marks, tiles, pattern, legal, context_for(legal, ctx))
        return _finish(marks, tiles, legal, count)


def plan_from_tile_scores(
    scores: Float[Tensor, "B H T M"],
    rule: Rule,
    extra: Pattern,
    legal: Legal,
    tile_size: int | Int[Tensor, " H"] = 32,
    ctx: Context | None = None,
) -> Plan:
    """The plan of the best-scored keys of every tile ∪ `extra` ∪ every query itself, with nothing of size N × M.
    On a GPU, with windows and global tokens as `extra`, it is made there (`plan_on_device`), NaN is then not reported.

    Args:
        scores: row `t` belongs to the queries at positions `t * tile_size …`, counted from the item's first real
            token (`tile_count` says how many); columns are keys as they come, padding included. −inf = never.
        rule: how many keys, or which scores. In a causal layer only keys before the tile are chosen, and the tile's own
            keys are always read.
        extra: usually `Window | GlobalTokens`.

    Raises:
        ShapeError: too few tiles, or sizes that do not fit `legal`.
        NonFiniteError: NaN among the scores of real keys.
    """
    batch, heads, rows, keys = scores.shape
    sizes = head_tiles(tile_size, heads)
    if (batch, keys) != tuple(legal.key_real.shape) or rows < tile_count(legal, min(sizes)):
        expected = (legal.key_real.shape[0], heads, tile_count(legal, min(sizes)), legal.key_real.shape[1])
        raise ShapeError(f"scores: expected {expected}, got {tuple(scores.shape)}")
    if scores.is_cuda and only_positional(extra):
        from sparsefinder.plan_device import place_tiles, plan_on_device  # it imports this module

        return plan_on_device(scores, rule, place_tiles(legal, sizes, extra))
    tiles = query_tiles(legal, sizes, global_counts(extra, legal))
    marks = np.zeros((tiles.start.shape[0], keys), np.uint8)
    counts, least = rule_limits(rule, tiles, legal, heads)
    numbers, real, offset = kernel_array(scores.float()), kernel_array(legal.key_real), legal.query_offset
    place = (tiles.batch, tiles.head, tiles.start, tiles.index, tiles.alone)
    with threads_for(marks.size * 8):
        _mark(marks, tiles, extra, legal, context_for(legal, ctx))
        if mark_scores(marks, *place, numbers, real, counts, least, offset, legal.causal).any():
            raise NonFiniteError("scores: expected numbers or −inf for every real key, got NaN")
        return _finish(marks, tiles, legal, heads)


def tile_count(legal: Legal, tile_size: int) -> int:
    """Tiles of the longest item, counted from its first real token to its last."""
    positions = torch.arange(legal.query_real.shape[1], device=legal.query_real.device) + legal.query_offset
    return int((torch.where(legal.query_real, positions, -1).amax(-1) - first_real(legal)).max()) // tile_size + 1


def plan_matrix(plan: Plan, legal: Legal, b: int, h: int) -> Bool[Tensor, "N M"]:
    """Every legal pair that the plan computes for one item and head (the `plan` row of a report, as a matrix)."""
    matrix = torch.zeros(plan.shape[2:], dtype=torch.bool, device=plan.keys.device)
    mine = ((plan.tile_batch == b) & (plan.tile_head == h)).nonzero().squeeze(-1)
    for t in mine.tolist():
        part = slice(int(plan.offsets[t]), int(plan.offsets[t + 1]))
        rows = torch.arange(int(plan.tile_rows[t]), device=matrix.device)
        matrix[(rows + plan.tile_start[t])[:, None], plan.keys[part]] = plan.first_row[part] <= rows[:, None]
    return matrix & legal.matrix(b)


def computed_pairs(plan: Plan) -> Int64[Tensor, "B H"]:
    """Pairs that a kernel computes for every item and head: each key counts for the rows from `first_row` on."""
    lengths = plan.offsets.diff()
    pairs = (plan.tile_rows.repeat_interleave(lengths) - plan.first_row[: int(plan.offsets[-1])]).long()
    owner = plan.tile_batch.long() * plan.shape[1] + plan.tile_head
    total = torch.zeros(plan.shape[0] * plan.shape[1], dtype=torch.int64, device=pairs.device)
    return total.index_add_(0, owner.repeat_interleave(lengths), pairs).view(plan.shape[:2])


def plan_to(plan: Plan, device: torch.device | str) -> Plan:
    """The same plan on another device."""
    names = [field.name for field in fields(plan) if field.name != "shape"]
    return Plan(plan.shape, **{name: getattr(plan, name).to(device) for name in names})


def _heads_of(pattern: Pattern) -> int | None:
    """How many heads a pattern's tensors have; None where it holds none."""
    found: set[int] = set()
    for field in fields(pattern):  # type: ignore[arg-type]
        value = getattr(pattern, field.name)
        inner = _heads_of(value) if isinstance(value, Pattern) else None
        shape: tuple[int, ...] = getattr(value, "shape", ())
        found |= {inner} if inner is not None else {int(shape[1])} if len(shape) == 4 else set()
    if len(found) > 1:
        raise PatternError(f"pattern: expected one number of heads, got {sorted(found)}")
    return found.pop() if found else None


def _mark(marks: np.ndarray, tiles: QueryTiles, pattern: Pattern, legal: Legal, ctx: Context) -> None:
    real, offset, causal = kernel_array(legal.key_real), legal.query_offset, legal.causal
    first, radius, others = first_real(legal).cpu().numpy(), window_radius(pattern, legal), []
    for leaf in union_leaves(pattern):
        if isinstance(leaf, BucketsMeet):
            words = kernel_array(pack_bits(leaf.query_bits)), kernel_array(pack_bits(leaf.key_bits))
            mark_buckets(marks, tiles.batch, tiles.head, tiles.start, tiles.rows, *words, real, offset, causal)
        elif not isinstance(leaf, Nothing | GlobalTokens | Window):
            others.append(leaf)
    place = (tiles.batch, tiles.start, tiles.rows, tiles.alone)
    mark_positions(marks, *place, real, first, global_counts(pattern, legal), radius, offset, causal)
    if others:
        _mark_any(marks, tiles, functools.reduce(operator.or_, others), legal, ctx)


def _mark_any(marks: np.ndarray, tiles: QueryTiles, pattern: Pattern, legal: Legal, ctx: Context) -> None:
    """Any pattern, by its matrix, one item and head at a time."""
    begin = [0, *(np.flatnonzero(np.diff(tiles.batch) | np.diff(tiles.head)) + 1).tolist(), tiles.batch.shape[0]]
    for low, high in pairwise(begin):
        matrix = materialize(pattern, legal, int(tiles.batch[low]), int(tiles.head[low]), ctx)
        mark_matrix(marks[low:high], tiles.start[low:high], tiles.rows[low:high], kernel_array(matrix), legal.causal)


def rule_limits(rule: Rule, tiles: QueryTiles, legal: Legal, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of keys and the least score of every tile."""
    count = np.full(tiles.start.shape[0], legal.key_real.shape[1], np.int64)
    least = np.full(tiles.start.shape[0], -np.inf, np.float32)
    if isinstance(rule, ScoreAtLeast):
        return count, np.broadcast_to(np.asarray(rule.threshold, np.float32), heads)[tiles.head]
    if isinstance(rule, KeysPerTile):
        return np.broadcast_to(np.asarray(rule.count, np.int64), heads)[tiles.head], least
    seen = legal.key_real.cpu().numpy().cumsum(1)
    visible = seen[tiles.batch, -1]
    if legal.causal:
        before = np.minimum(tiles.start + legal.query_offset, seen.shape[1]) - 1
        visible = np.where(before >= 0, seen[tiles.batch, np.maximum(before, 0)], 0)
    return np.ceil(rule.share * visible).astype(np.int64), least


def _finish(marks: np.ndarray, tiles: QueryTiles, legal: Legal, heads: int) -> Plan:
    counts = np.empty(marks.shape[0], np.int64)
    count_marks(marks, counts)
    offsets, keys, first_row = empty_lists(counts)
    list_marks(marks, offsets, keys, first_row)
    plan = plan_of_lists(tiles, (offsets, keys, first_row), legal, heads)
    return plan if legal.key_real.device.type == "cpu" else plan_to(plan, legal.key_real.device)


def empty_lists(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Room for lists of these lengths: where each begins, keys and first rows."""
    offsets = np.zeros(counts.shape[0] + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets, np.empty(int(offsets[-1]), np.int32), np.empty(int(offsets[-1]), np.int32)


def plan_of_lists(tiles: QueryTiles, lists: tuple[np.ndarray, ...], legal: Legal, heads: int) -> Plan:
    """The plan on the CPU. lists: offsets, keys and first rows."""
    owners = [torch.from_numpy(x.astype(np.int32)) for x in (tiles.batch, tiles.head, tiles.start, tiles.rows)]
    shape = (legal.query_real.shape[0], heads, legal.query_real.shape[1], legal.key_real.shape[1])
    return Plan(shape, *owners, *(torch.from_numpy(x) for x in lists))
