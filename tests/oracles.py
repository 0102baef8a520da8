"""Naive definitions, written from the papers with loops in float64. Nothing here imports the library under test."""

import math

import numpy as np


def entmax(z, alpha):
    """α-entmax of one row of scores; −inf gets nothing, a row of −inf gives zeros."""
    z = np.asarray(z, np.float64)
    if not len(z) or z.max() == -np.inf:
        return np.zeros(len(z))
    if alpha == 1.0:
        e = np.exp(z - z.max())
        return e / e.sum()
    if alpha == 1.5:
        return _entmax15_by_sorting(z)
    if alpha == 2.0:
        return _sparsemax_by_sorting(z)
    return _entmax_by_bisection(z, alpha)


def _entmax15_by_sorting(z):
    """Peters et al. (2019), algorithm 2: the longest prefix of the sorted scores whose τ is below its end."""
    x = (z - z.max()) / 2
    ordered = sorted((v for v in x if v > -np.inf), reverse=True)
    tau = None
    for size in range(1, len(ordered) + 1):
        head = ordered[:size]
        mean = math.fsum(head) / size
        spread = math.fsum((v - mean) ** 2 for v in head)
        if spread > 1:
            break
        candidate = mean - math.sqrt((1 - spread) / size)
        if candidate <= head[-1]:
            tau = candidate
    return np.array([max(v - tau, 0.0) ** 2 for v in x])


def _sparsemax_by_sorting(z):
    """Martins and Astudillo (2016), algorithm 1."""
    x = z - z.max()
    ordered = sorted((v for v in x if v > -np.inf), reverse=True)
    tau = None
    for size in range(1, len(ordered) + 1):
        candidate = (math.fsum(ordered[:size]) - 1) / size
        if ordered[size - 1] > candidate:
            tau = candidate
    return np.array([max(v - tau, 0.0) for v in x])


def _entmax_by_bisection(z, alpha):
    """Bisect on the largest probability: `p_j = [p_max^(α−1) − (α−1)(z_max − z_j)]_+^(1/(α−1))`."""
    gaps = (alpha - 1) * (z.max() - z)
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        p = np.maximum(middle ** (alpha - 1) - gaps, 0) ** (1 / (alpha - 1))
        low, high = (low, middle) if p.sum() > 1 else (middle, high)
    p = np.maximum(high ** (alpha - 1) - gaps, 0) ** (1 / (alpha - 1))
    return p / p.sum()


def first_real(real):
    """Index of the first real token, 0 where there is none."""
    return next((i for i, is_real in enumerate(real) if is_real), 0)


def legal(query_real, key_real, causal=False, offset=0):
    """Pairs that exist, for one item."""
    return _matrix(
        len(query_real),
        len(key_real),
        lambda i, j: query_real[i] and key_real[j] and (not causal or j <= i + offset),
    )


def window(n, m, radius, offset=0):
    return _matrix(n, m, lambda i, j: abs(i + offset - j) <= radius)


def global_tokens(n, m, count, first=0, offset=0):
    """The first `count` tokens after `first` see all and are seen by all."""
    return _matrix(n, m, lambda i, j: first <= i + offset < first + count or first <= j < first + count)


def buckets(query_sets, key_sets):
    """Sets of bucket ids per token."""
    return _matrix(len(query_sets), len(key_sets), lambda i, j: bool(query_sets[i] & key_sets[j]))


def near(q, k, limit):
    """Euclidean distance of at most `limit`."""
    return _matrix(len(q), len(k), lambda i, j: math.dist(q[i], k[j]) <= limit)


def alike(q, k, least):
    """Dot product of at least `least`."""
    return _matrix(len(q), len(k), lambda i, j: math.fsum(a * b for a, b in zip(q[i], k[j], strict=True)) >= least)


def gold(q, k, allowed, alpha, scale):
    """Support of entmax over the allowed keys of every row."""
    graph = np.zeros(allowed.shape, bool)
    for i in range(allowed.shape[0]):
        for j, p in zip(*_row(q, k, allowed, alpha, scale, i), strict=True):
            graph[i, j] = p > 0
    return graph


def mass_set(p, mass):
    """The fewest entries that hold `mass`: the greatest first, of equal ones the earlier; places where p is 0 never."""
    chosen, held = set(), []
    for j in sorted(range(len(p)), key=lambda j: (-p[j], j)):
        if p[j] > 0 and math.fsum(held) < mass:
            chosen.add(j)
            held.append(p[j])
    return chosen


def mass_graph(q, k, allowed, mass, scale):
    """The fewest keys of every row that hold `mass` of its softmax over the allowed keys."""
    graph = np.zeros(allowed.shape, bool)
    for i in range(allowed.shape[0]):
        keys, p = _row(q, k, allowed, 1.0, scale, i)
        for at in mass_set(p, mass):
            graph[i, keys[at]] = True
    return graph


def attention(q, k, v, allowed, alpha, scale):
    """`Σ_j p_ij v_j` over the allowed keys of every row; a row without one is zero."""
    out = np.zeros((allowed.shape[0], v.shape[1]))
    for i in range(allowed.shape[0]):
        for j, p in zip(*_row(q, k, allowed, alpha, scale, i), strict=True):
            out[i] += p * v[j].astype(np.float64)
    return out


def _row(q, k, allowed, alpha, scale, i):
    keys = [j for j in range(allowed.shape[1]) if allowed[i, j]]
    scores = [scale * math.fsum(float(a) * float(b) for a, b in zip(q[i], k[j], strict=True)) for j in keys]
    return keys, entmax(scores, alpha)


def plan(chosen, legal_pairs, query_real, key_real, tile_size, globals_=0, causal=False, offset=0):
    """A plan as `{(first row, rows): {key: first row that may read it}}` and the matrix of pairs that it computes."""
    n, m = chosen.shape
    first, cells = first_real(key_real), {}
    for i in range(n):
        position = i + offset - first
        if query_real[i]:
            name = ("global", i) if 0 <= position < globals_ else ("tile", position // tile_size)
            cells.setdefault(name, []).append(i)
    tiles, matrix = {}, np.zeros((n, m), bool)
    for rows in cells.values():
        keys = {}
        for j in range(m):
            for r, i in enumerate(rows):
                if legal_pairs[i, j] and (chosen[i, j] or j == i + offset):
                    keys[j] = r if causal else 0
                    break
        tiles[rows[0], len(rows)] = keys
        for j, since in keys.items():
            for i in rows[since:]:
                matrix[i, j] = True
    return tiles, matrix


def _matrix(n, m, allows):
    result = np.zeros((n, m), bool)
    for i in range(n):
        for j in range(m):
            result[i, j] = allows(i, j)
    return result
