"""Sums over the pairs of every row, by the level from which on a pair is kept: all cuts of a head in one pass."""

import numpy as np
from numba import prange

from sparsefinder.numba_kernels import parallel_kernel


@parallel_kernel
def level_sums(p, gold, level, end, v, softmax, pairs, golds, mass, error):  # type: ignore[no-untyped-def]
    """Cumulative sums of every row r over levels 0 … g, for every g below the number of levels.

    p, gold, level: `[R, m]`; a key with a level beyond the last is never kept. end: how many keys row r may see.
    pairs, golds, mass: `[R, G]`, what is kept.
    error `[R, G]`: `‖o − o_g‖²`, where `o` is the row's output and `o_g` that of a softmax over what is kept, only
    where `softmax`.
    """
    levels, size = pairs.shape[1], v.shape[1]
    for r in prange(p.shape[0]):
        part = np.zeros((levels + 1, size), np.float32)
        for j in range(end[r]):
            g = min(np.int64(level[r, j]), levels)
            weight = p[r, j]
            if g < levels:
                pairs[r, g] += 1
                golds[r, g] += gold[r, j]
                mass[r, g] += np.float64(weight)
            if softmax and weight > 0:
                for c in range(size):
                    part[g, c] += weight * v[j, c]
        for g in range(1, levels):
            pairs[r, g] += pairs[r, g - 1]
            golds[r, g] += golds[r, g - 1]
            mass[r, g] += mass[r, g - 1]
        if softmax:
            whole = np.zeros(size, np.float32)
            for g in range(levels + 1):
                for c in range(size):
                    whole[c] += part[g, c]
            kept = np.zeros(size, np.float32)
            for g in range(levels):
                share = np.float32(1 / mass[r, g]) if mass[r, g] > 0 else np.float32(0)
                total = np.float32(0)
                for c in range(size):
                    kept[c] += part[g, c]
                    total += (kept[c] * share - whole[c]) ** 2
                error[r, g] = np.float64(total)
