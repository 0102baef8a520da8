"""Naive definitions of the content predictors for one head: loops over plain numbers, written from the papers.

Nothing of the package is imported. `q` and `k` are lists of vectors of one item's real tokens.
"""

import math
from collections.abc import Sequence

Vector = Sequence[float]
Graph = set[tuple[int, int]]


def dot(x: Vector, y: Vector) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def apply(matrix: Sequence[Vector], bias: Vector, x: Vector) -> list[float]:
    return [dot(row, x) + shift for row, shift in zip(matrix, bias, strict=True)]


def share_a_bucket(query: Sequence[set], key: Sequence[set]) -> Graph:
    return {(i, j) for i, a in enumerate(query) for j, b in enumerate(key) if a & b}


def runs(values: Sequence[float], bins: int) -> list[int]:
    """Sort, cut into runs of ceil(n / bins), say in which run everyone is; of equal values the earlier goes first."""
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    size = math.ceil(len(values) / bins)
    return [order.index(i) // size for i in range(len(values))]


def quantization(q: Sequence[Vector], k: Sequence[Vector], bins: int) -> Graph:
    """Treviso et al. (2022), section 4.3; q and k are projected."""
    graph: Graph = set()
    for d in range(len(q[0])):
        a, b = runs([x[d] for x in q], bins), runs([x[d] for x in k], bins)
        graph |= {(i, j) for i in range(len(q)) for j in range(len(k)) if a[i] == b[j]}
    return graph


def best_keys(score: dict[int, float], count: int) -> list[int]:
    """The keys of the greatest scores, the earlier of equal ones."""
    return sorted(score, key=lambda j: (-score[j], j))[:count]


def top_keys(scores: Sequence[Vector], legal: Graph, count: int) -> Graph:
    return {
        (i, j) for i in range(len(scores)) for j in best_keys({j: scores[i][j] for row, j in legal if row == i}, count)
    }


def angular_hash(x: Vector, rotation: Sequence[Vector]) -> int:
    """Kitaev et al. (2020): argmax of [Rx; −Rx]."""
    turned = [dot(row, x) for row in rotation]
    both = turned + [-v for v in turned]
    return both.index(max(both))


def lsh(q: Sequence[Vector], k: Sequence[Vector], rotations: Sequence[Sequence[Vector]]) -> Graph:
    graph: Graph = set()
    for rotation in rotations:
        a, b = ([angular_hash(x, rotation) for x in side] for side in (q, k))
        graph |= {(i, j) for i in range(len(q)) for j in range(len(k)) if a[i] == b[j]}
    return graph


def smyrf(q: Sequence[Vector], k: Sequence[Vector], directions: Sequence[Vector], buckets: int) -> Graph:
    """Daras et al. (2020), section 3: asymmetric transforms, one projection a round, sorted and cut evenly."""
    most = max(dot(x, x) for x in q) + max(dot(x, x) for x in k)
    far_q = [[*x, 0.0, math.sqrt(max(most - dot(x, x), 0.0))] for x in q]
    far_k = [[*x, math.sqrt(max(most - dot(x, x), 0.0)), 0.0] for x in k]
    graph: Graph = set()
    for direction in directions:
        a, b = (runs([dot(direction, x) for x in side], buckets) for side in (far_q, far_k))
        graph |= {(i, j) for i in range(len(q)) for j in range(len(k)) if a[i] == b[j]}
    return graph
