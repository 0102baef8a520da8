"""How the rows of every item and head are cut into tiles, before it is known what they read."""

from dataclasses import dataclass

import numpy as np

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Pattern, union_leaves
from sparsefinder.patterns.legal import Legal, first_real
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window


@dataclass(frozen=True, eq=False)
class QueryTiles:
    """The tiles of a plan before it has lists, sorted by item, head and first row.

    index: which tile of the item's grid. alone: whether it is one global row.
    """

    batch: np.ndarray
    head: np.ndarray
    start: np.ndarray
    rows: np.ndarray
    index: np.ndarray
    alone: np.ndarray


def global_counts(pattern: Pattern, legal: Legal) -> np.ndarray:
    """How many global tokens the pattern gives each item of the batch."""
    counts = np.zeros(legal.key_real.shape[0], np.int64)
    for leaf in union_leaves(pattern):
        if isinstance(leaf, GlobalTokens):
            counts = np.maximum(counts, [int(leaf.of_item(b, legal.key_real)) for b in range(counts.shape[0])])
    return counts


def query_tiles(legal: Legal, sizes: tuple[int, ...], globals_: np.ndarray) -> QueryTiles:
    """Runs of real rows that lie in one cell of their head's grid; `globals_`: rows of each item that stand alone."""
    if legal.radius is not None:
        raise PatternError(f"plan: expected a layer without a sliding window, got one of radius {legal.radius}")
    first, real = first_real(legal).cpu().numpy(), legal.query_real.cpu().numpy()
    parts = []
    for b in range(real.shape[0]):
        rows = real[b].nonzero()[0]
        position = rows + legal.query_offset - first[b]
        is_global = (position >= 0) & (position < globals_[b])
        grids = {size: _runs(rows, position, is_global, size) for size in set(sizes)}
        for h, size in enumerate(sizes):
            start, count, index, alone = grids[size]
            parts.append((np.full_like(start, b), np.full_like(start, h), start, count, index, alone))
    return QueryTiles(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _runs(rows: np.ndarray, position: np.ndarray, is_global: np.ndarray, size: int) -> tuple[np.ndarray, ...]:
    """Consecutive real rows of one cell of the grid; a global row is a run of its own."""
    cell = np.where(is_global, -1 - position, position // size)
    at = np.ones(rows.shape[0], bool)
    at[1:] = (np.diff(rows) != 1) | (np.diff(cell) != 0)
    begin = at.nonzero()[0]
    count = np.diff(np.append(begin, rows.shape[0]))
    return rows[begin], count, np.maximum(position[begin] // size, 0), is_global[begin]


def only_positional(pattern: Pattern) -> bool:
    """Is it made of windows and global tokens only, which needs no matrix?"""
    return all(isinstance(leaf, Window | GlobalTokens | Nothing) for leaf in union_leaves(pattern))


def window_radius(pattern: Pattern, legal: Legal) -> int:
    """How far windows reach: 0 is a query's own key, which it always reads; −1 not even that (cross-attention)."""
    radii = [leaf.radius for leaf in union_leaves(pattern) if isinstance(leaf, Window)]
    return max([-1 if legal.cross else 0, *radii])
