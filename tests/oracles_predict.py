"""Naive definitions of predictors, tile lists and metrics, as double loops over numbers, from papers and glossary.

Nothing of the package is imported: these are the second opinion.
"""

import math
from fractions import Fraction

import numpy as np

Graph = set[tuple[int, int]]


def legal_pairs(real: list[bool], causal: bool) -> Graph:
    """Pairs of two real tokens, the key not after the query where causal."""
    n = len(real)
    return {(i, j) for i in range(n) for j in range(n) if real[i] and real[j] and (j <= i or not causal)}


def linear(weight: np.ndarray, bias: np.ndarray, x: np.ndarray) -> np.ndarray:
    """`W x + b` of every row of x."""
    return np.array([[sum(w * v for w, v in zip(row, point, strict=True)) for row in weight] for point in x]) + bias


def distance_graph(q: np.ndarray, k: np.ndarray, limit: float, legal: Graph) -> Graph:
    """‖q'_i − k'_j‖₂ ≤ t."""
    return {(i, j) for i, j in legal if math.dist(q[i], k[j]) <= limit}


def score_graph(scores: np.ndarray, limit: float, legal: Graph) -> Graph:
    """score ≥ threshold."""
    return {(i, j) for i, j in legal if scores[i, j] >= limit}


def nearest(point: np.ndarray, centroids: np.ndarray, k: int) -> set[int]:
    """The k nearest centroids, the first of equally near ones."""
    order = sorted(range(len(centroids)), key=lambda c: (math.dist(point, centroids[c]), c))
    return set(order[:k])


def cluster_graph(q: np.ndarray, k: np.ndarray, centroids: np.ndarray, top: int, legal: Graph) -> Graph:
    """The sets of nearest centroids intersect."""
    return {(i, j) for i, j in legal if nearest(q[i], centroids, top) & nearest(k[j], centroids, top)}


def mixed_share(q: np.ndarray, k: np.ndarray, centroids: np.ndarray, top: int) -> float:
    """Clusters with queries and keys / clusters with either."""
    with_q = set().union(*(nearest(x, centroids, top) for x in q))
    with_k = set().union(*(nearest(x, centroids, top) for x in k))
    return len(with_q & with_k) / len(with_q | with_k)


def budget(density: str, legal_keys: int) -> int:
    """max(1, ceil(density · legal keys)) in exact arithmetic, 0 for a row without keys."""
    return min(legal_keys, max(1, math.ceil(Fraction(density) * legal_keys)))


def budget_graph(scores: np.ndarray, density: str, legal: Graph) -> Graph:
    """The best keys of every row, the earlier of equal ones."""
    graph: Graph = set()
    for i in {i for i, _ in legal}:
        keys = sorted((j for row, j in legal if row == i), key=lambda j: (-scores[i, j], j))
        graph |= {(i, j) for j in keys[: budget(density, len(keys))]}
    return graph


def tile_log_shares(
    q: np.ndarray,
    k: np.ndarray,
    maps: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    *,
    size: int,
    causal: bool,
    before: int,
    weight: float,
    k_linear: np.ndarray,
    metric: bool,
) -> dict[tuple[int, int], float]:
    """score − logsumexp of (tile, key) for the keys a tile may see; q, k of real tokens only, one head."""
    q_map, k_map, q_bias, k_bias = maps
    shares: dict[tuple[int, int], float] = {}
    for t, start in enumerate(range(0, len(q), size)):
        rows = range(max(0, start - before), start + 1) if causal else range(start, min(len(q), start + size))
        mean = sum(q[i] for i in rows) / len(rows)
        s = q_map @ mean + q_bias
        scores = {}
        for j in range(start + 1 if causal else len(k)):
            p = k_map @ k[j] + k_bias
            gap = max(0, start - j, j - (start + size - 1))
            own = -(math.dist(s, p) ** 2) if metric else float(s @ p) + float(k_linear @ k[j])
            scores[j] = own + weight * math.log(1 + gap)
        total = math.log(sum(math.exp(v - max(scores.values())) for v in scores.values())) + max(scores.values())
        shares |= {(t, j): v - total for j, v in scores.items()}
    return shares


def entmax15(scores: np.ndarray) -> np.ndarray:
    """α = 1.5 by sorting (Peters et al., 2019, algorithm 2), float64."""
    x = (scores - scores.max()) / 2
    z = np.sort(x)[::-1]
    count = np.arange(1, len(z) + 1)
    mean, square = np.cumsum(z) / count, np.cumsum(z * z) / count
    delta = np.clip((1 - count * (square - mean**2)) / count, 0, None)
    tau = mean - np.sqrt(delta)
    last = int((tau <= z).sum()) - 1
    return np.clip(x - tau[last], 0, None) ** 2


def head_numbers(
    q: np.ndarray, k: np.ndarray, scale: float, legal: Graph, kept: Graph, computed: int, gold_mass: float | None = None
) -> dict[str, float | None]:
    """Every measure of one instance and head by its definition; None where it is not defined.

    gold_mass: the teacher is softmax, and gold are the fewest keys of a row that hold so much of it.
    """
    gold: Graph = set()
    mass, rows, exact = 0.0, sorted({i for i, _ in legal}), 0
    for i in rows:
        keys = sorted(j for row, j in legal if row == i)
        scores = np.array([scale * float(q[i] @ k[j]) for j in keys])
        p = entmax15(scores) if gold_mass is None else np.exp(scores - scores.max())
        p = p if gold_mass is None else p / p.sum()
        row_gold = {(i, j) for j, v in zip(keys, p, strict=True) if v > 0}
        if gold_mass is not None:
            order = sorted(range(len(keys)), key=lambda at: (-p[at], at))
            held = [math.fsum(p[at] for at in order[:size]) for size in range(len(order))]
            row_gold = {(i, keys[at]) for at, before in zip(order, held, strict=True) if before < gold_mass}
        gold |= row_gold
        exact += row_gold <= kept
        mass += sum(v for j, v in zip(keys, p, strict=True) if (i, j) in kept)
    kept = kept & legal
    return {
        "sparsity": 1 - len(kept) / len(legal) if legal else None,
        "recall": len(kept & gold) / len(gold) if gold else None,
        "precision": len(kept & gold) / len(kept) if kept else None,
        "exact_rows": exact / len(rows) if rows else None,
        "mass": mass / len(rows) if rows else None,
        "computed_density": computed / len(legal) if legal else None,
    }


def mean(values: list[float | None]) -> float | None:
    """Of those that are defined."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
