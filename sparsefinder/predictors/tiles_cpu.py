"""The tile predictor on the CPU: scores of some tiles, or a whole plan from thresholds without keeping a score."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from sparsefinder.errors import NonFiniteError
from sparsefinder.numba_kernels import kernel_array
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal, first_real
from sparsefinder.plan import Plan, empty_lists, plan_of_lists
from sparsefinder.predictors.tile_kernels import WIDE, add_positions, choose_keys, list_bits, project_all, score_tiles
from sparsefinder.predictors.tiles import Tiles, check_call
from sparsefinder.query_tiles import global_counts, query_tiles, window_radius
from sparsefinder.shapes import head_tiles
from sparsefinder.threads import threads_for

STEPS_PER_SCORE = 16  # of `threads_for`


def threshold_plan(
    tiles: Tiles,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    legal: Legal,
    positional: Pattern,
    tile_size: int | Int[Tensor, " H"],
) -> Plan:
    """What `plan_from_tile_scores` makes of the scores, with one bit for every tile and key instead of a number.

    Raises:
        PatternError, ShapeError, NonFiniteError: as in `Tiles.plan`.
    """
    check_call(tiles, q, k, legal)
    heads, offset, causal = q.shape[1], legal.query_offset, legal.causal
    sizes, globals_ = head_tiles(tile_size, heads), global_counts(positional, legal)
    grid = query_tiles(legal, sizes, globals_)
    words = np.zeros((grid.start.shape[0], (k.shape[2] + 63) // 64), np.uint64)
    with threads_for(words.size * 64 * STEPS_PER_SCORE) as parts:
        queries, low, column, bad = kernel_inputs(tiles, q, k, legal, sizes)
        first, last = queries[2]
        least = np.broadcast_to(np.asarray(tiles.threshold, np.float32), heads)[grid.head]
        place = (grid.batch, grid.head, grid.start, grid.index, grid.alone)
        form = (tiles.queries_before, offset, causal, *_form(tiles))
        unsure = choose_keys(*queries, *form, low, column, place, least, words.view(np.uint8), parts)
        if bad.any() or unsure.any():
            raise NonFiniteError("scores: expected finite numbers for every real token, got NaN or infinity")
        radius = window_radius(positional, legal)
        counts = np.empty(words.shape[0], np.int64)
        positions = (_real_bits(legal, words.shape[1]), (first, last), (grid.batch, grid.start, grid.rows, grid.alone))
        add_positions(words, *positions, globals_, radius, offset, causal, counts)
        lists = empty_lists(counts)
        list_bits(words, first, grid.batch, grid.start, offset, causal, *lists)
    return plan_of_lists(grid, lists, legal, heads)


def _real_bits(legal: Legal, words: int) -> np.ndarray:
    """`[B, words]`: one bit for every key, counted from the item's first real one."""
    bits = np.zeros((legal.key_real.shape[0], words * 64), np.uint8)
    for b, begin in enumerate(first_real(legal).tolist()):
        real = kernel_array(legal.key_real[b, begin:])
        bits[b, : real.shape[0]] = real
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint64)


def fill_cpu(
    tiles: Tiles,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    legal: Legal,
    sizes: tuple[int, ...],
    first_tile: Int64[Tensor, "B H"],
    out: Float[Tensor, "B H T M"],
) -> None:
    """Write the scores of the tiles from `first_tile` on (none where it is negative) into `out`, elsewhere left alone.

    The queries begin at key `legal.query_offset`; those that the summaries need must be among them.
    """
    queries, low, column, _ = kernel_inputs(tiles, q, k, legal, sizes)
    place = (legal.query_offset, first_tile.contiguous().numpy())
    score_tiles(*queries, tiles.queries_before, place, legal.causal, *_form(tiles), low, column, out.numpy())


def kernel_inputs(
    tiles: Tiles, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal, sizes: tuple[int, ...]
) -> tuple[tuple[Any, ...], np.ndarray, np.ndarray, np.ndarray]:
    """What the kernels on the CPU read: what belongs to the queries, the projected keys and what is added to each, and
    in which items and heads a projected key is not finite."""
    maps, heads = tiles.projections, tiles.projections.heads
    last = torch.where(legal.key_real, torch.arange(k.shape[2]), -1).amax(-1)
    span = (kernel_array(first_real(legal)), kernel_array(last))
    linear = torch.zeros(heads, 0) if maps.k_linear is None else maps.k_linear
    weight = torch.zeros(heads) if tiles.distance_weight is None else tiles.distance_weight
    far = max(q.shape[2] + legal.query_offset, k.shape[2]) + max(sizes) + WIDE
    low = np.empty((q.shape[0], heads, maps.k_map.shape[1], k.shape[2] + WIDE), np.float32)
    column = np.empty((q.shape[0], heads, k.shape[2] + WIDE), np.float32)
    key_maps = (kernel_array(x) for x in (maps.k_map, maps.k_bias, linear))
    bad = project_all(
        kernel_array(k.float()), kernel_array(legal.key_real), span, *key_maps, *_form(tiles), low, column
    )
    query_maps = (kernel_array(maps.q_map), kernel_array(maps.q_bias))
    rows, real = kernel_array(q.float().transpose(1, 2)), kernel_array(legal.query_real)
    queries = (rows, real, span, np.array(sizes), query_maps, kernel_array(weight), _logs(sizes, far))
    return queries, low, column, bad


def _logs(sizes: tuple[int, ...], far: int) -> np.ndarray:
    """`log(1 + distance)` of a key from each head's tile, `[H, 2 far]`: of keys before it, zeros for its own (the
    first of them in the middle), of keys behind it."""
    distance = np.arange(2 * far, dtype=np.float32) - np.float32(far)
    made = {size: np.log1p(np.maximum(np.maximum(-distance, distance - (size - 1)), 0)) for size in set(sizes)}
    return np.stack([made[size] for size in sizes])


def _form(tiles: Tiles) -> tuple[bool, bool]:
    return tiles.projections.form == "metric", tiles.projections.unit
