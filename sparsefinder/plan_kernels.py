"""Kernels that mark which keys a tile reads, and turn the marks into sorted lists.

A mark is one byte per (tile, key): 0 = not read, otherwise 1 + the first row of the tile that may read the key.
"""

import numpy as np
from numba import prange

from sparsefinder.numba_kernels import inline_kernel, parallel_kernel


@inline_kernel
def put(marks, j, first):  # type: ignore[no-untyped-def]
    """Key `j` may be read from row `first` on, or from an earlier one where that was said already."""
    if marks[j] == 0 or marks[j] > first + 1:
        marks[j] = first + 1


@parallel_kernel
def mark_positions(  # type: ignore[no-untyped-def]
    marks, batch, start, rows, alone, key_real, first, globals_, radius, offset, causal
):
    """Window (radius 0: every row's own key, −1: none), global keys, and all keys for tiles that are one global row."""
    keys = key_real.shape[1]
    for t in prange(start.shape[0]):
        b = batch[t]
        low = start[t] + offset  # where the tile's first row sits among the keys
        high = low + rows[t]
        end = min(keys, high) if causal else keys
        for j in range(max(0, low - radius), min(end, high + radius) if radius >= 0 else 0):
            if key_real[b, j]:
                put(marks[t], j, max(0, j - low) if causal else 0)
        last = end if alone[t] else min(end, first[b] + globals_[b])
        for j in range(0 if alone[t] else first[b], last):
            if key_real[b, j]:
                put(marks[t], j, max(0, j - low) if causal else 0)


@inline_kernel
def mark_best(marks, row, real, found, count, least):  # type: ignore[no-untyped-def]
    """The `count` greatest of `found` (the scores in `row` that count), earlier keys first among equal ones."""
    cut = row.dtype.type(-np.inf)
    ties = 0
    if found.shape[0] > count:
        place = found.shape[0] - count
        cut = np.partition(found, place)[place]
        ties = count
        for c in range(found.shape[0]):
            ties -= found[c] > cut
    for j in range(row.shape[0]):
        if real[j] and row[j] >= least and row[j] >= cut and row[j] > -np.inf:
            if row[j] > cut:
                put(marks, j, 0)
            elif ties > 0:
                put(marks, j, 0)
                ties -= 1


@parallel_kernel
def mark_scores(  # type: ignore[no-untyped-def]
    marks, batch, head, start, index, alone, scores, key_real, counts, least, offset, causal
):
    """The `counts[t]` best keys of every tile among those that reach `least[t]`; of equal scores the earlier key wins.

    In a causal layer only keys before the tile are candidates: the list is fixed when the tile opens.
    """
    bad = np.zeros(start.shape[0], np.uint8)
    for t in prange(start.shape[0]):
        if not alone[t] and counts[t] > 0:
            end = min(key_real.shape[1], start[t] + offset) if causal else key_real.shape[1]
            row, real = scores[batch[t], head[t], index[t], :end], key_real[batch[t]]
            found = np.empty(end, row.dtype)
            n = 0
            for j in range(end):
                if real[j] and row[j] >= least[t] and row[j] > -np.inf:
                    found[n] = row[j]
                    n += 1
                bad[t] |= real[j] and row[j] != row[j]
            mark_best(marks[t], row, real, found[:n], counts[t], least[t])
    return bad


@parallel_kernel
def mark_matrix(marks, start, rows, matrix, causal):  # type: ignore[no-untyped-def]
    """One item and head given as a matrix of legal pairs: a tile reads what any of its rows reads."""
    for t in prange(start.shape[0]):
        for r in range(rows[t]):
            first = r + 1 if causal else 1
            for j in range(matrix.shape[1]):
                if matrix[start[t] + r, j] and (marks[t, j] == 0 or marks[t, j] > first):
                    marks[t, j] = first


@parallel_kernel
def mark_buckets(marks, batch, head, start, rows, query, key, key_real, offset, causal):  # type: ignore[no-untyped-def]
    """Bit sets that meet: first the tile's union against the key, then row by row where the first row matters."""
    keys, words = key.shape[2], key.shape[3]
    for t in prange(start.shape[0]):
        b, h = batch[t], head[t]
        together = np.zeros(words, np.int64)
        for r in range(rows[t]):
            for w in range(words):
                together[w] |= query[b, h, start[t] + r, w]
        low = start[t] + offset
        for j in range(min(keys, low + rows[t]) if causal else keys):
            met = False
            for w in range(words):
                met = met or (together[w] & key[b, h, j, w]) != 0
            if met and key_real[b, j]:
                if causal:
                    for r in range(max(0, j - low), rows[t]):
                        common = False
                        for w in range(words):
                            common = common or (query[b, h, start[t] + r, w] & key[b, h, j, w]) != 0
                        if common:
                            put(marks[t], j, r)
                            break
                else:
                    put(marks[t], j, 0)


@parallel_kernel
def count_marks(marks, counts):  # type: ignore[no-untyped-def]
    """Keys of every tile."""
    for t in prange(marks.shape[0]):
        n = 0
        for j in range(marks.shape[1]):
            n += marks[t, j] != 0
        counts[t] = n


@parallel_kernel
def list_marks(marks, offsets, keys, first_row):  # type: ignore[no-untyped-def]
    """The marked keys of every tile, ascending."""
    for t in prange(marks.shape[0]):
        e = offsets[t]
        for j in range(marks.shape[1]):
            if marks[t, j] != 0:
                keys[e] = j
                first_row[e] = marks[t, j] - 1
                e += 1
