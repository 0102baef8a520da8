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


def unit_ball(x: Vector) -> list[float]:
    """Roy et al. (2021): layer norm without scale and bias, on the unit ball."""
    mean = math.fsum(x) / len(x)
    length = math.sqrt(math.fsum((v - mean) ** 2 for v in x))
    return [(v - mean) / length if length else 0.0 for v in x]


def routing(q: Sequence[Vector], k: Sequence[Vector], centroids: Sequence[Vector], window: int | None) -> Graph:
    """Roy et al. (2021), algorithm 1: every centroid takes its top-w queries and its top-w keys."""
    graph: Graph = set()
    for c in centroids:
        sides = []
        for side in (q, k):
            near = {i: dot(c, unit_ball(x)) for i, x in enumerate(side)}
            sides.append(best_keys(near, math.ceil(len(side) / len(centroids)) if window is None else window))
        graph |= {(i, j) for i in sides[0] for j in sides[1]}
    return graph


def moved_centroids(points: Sequence[Vector], centroids: Sequence[Vector], decay: float) -> list[list[float]]:
    """One online step over points of the unit ball."""
    balls = [unit_ball(x) for x in points]
    owner = [max(range(len(centroids)), key=lambda c: (dot(centroids[c], x), -c)) for x in balls]
    moved = []
    for c, centroid in enumerate(centroids):
        own = [x for x, o in zip(balls, owner, strict=True) if o == c]
        if not own:
            moved.append(list(centroid))
            continue
        mean = [math.fsum(column) / len(own) for column in zip(*own, strict=True)]
        new = [decay * old + (1 - decay) * m for old, m in zip(centroid, mean, strict=True)]
        length = math.sqrt(dot(new, new))
        moved.append([v / length for v in new])
    return moved


def hamming_clusters(codes: Sequence[Sequence[bool]], clusters: int, iterations: int) -> list[int]:
    """Lloyd on bit strings."""
    n = len(codes)
    centroids = [list(codes[c * n // clusters]) for c in range(clusters)]
    owner: list[int] = []
    for _ in range(iterations):
        gaps = [[sum(a != b for a, b in zip(x, c, strict=True)) for c in centroids] for x in codes]
        owner = [row.index(min(row)) for row in gaps]
        for c in range(clusters):
            own = [x for x, o in zip(codes, owner, strict=True) if o == c]
            if own:
                centroids[c] = [2 * sum(column) >= len(own) for column in zip(*own, strict=True)]
    return owner


def clustered(q: Sequence[Vector], k: Sequence[Vector], owner: Sequence[int], keys: int) -> Graph:
    """Vyas et al. (2020): the top-k keys of the mean query of the cluster."""
    graph: Graph = set()
    for c in set(owner):
        own = [i for i, o in enumerate(owner) if o == c]
        mean = [math.fsum(q[i][d] for i in own) / len(own) for d in range(len(q[0]))]
        best = best_keys({j: dot(mean, y) for j, y in enumerate(k)}, keys)
        graph |= {(i, j) for i in own for j in best}
    return graph


def nearest(x: Vector, centroids: Sequence[Vector]) -> int:
    return min(
        range(len(centroids)), key=lambda c: (sum((a - b) ** 2 for a, b in zip(x, centroids[c], strict=True)), c)
    )


def probing(scores: Sequence[Vector], owner: Sequence[int], causal: bool, threshold: float) -> Graph:
    """A query reads the clusters whose share of `exp(score) · size` is at least exp(threshold)."""
    graph: Graph = set()
    for i, row in enumerate(scores):
        visible = [j for j in range(len(owner)) if j <= i or not causal]
        weight = {c: sum(owner[j] == c for j in visible) * math.exp(row[c]) for c in range(len(row))}
        total = math.fsum(weight.values())
        graph |= {(i, j) for j in visible if weight[owner[j]] / total >= math.exp(threshold)}
    return graph


def blocks(count: int, size: int) -> list[list[int]]:
    """Tokens of every chunk."""
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def mean(points: Sequence[Vector]) -> list[float]:
    return [math.fsum(column) / len(points) for column in zip(*points, strict=True)]


def spread(pairs: Graph, rows: Sequence[Sequence[int]], columns: Sequence[Sequence[int]]) -> Graph:
    """All token pairs of the given pairs of chunks."""
    return {(i, j) for t, s in pairs for i in rows[t] for j in columns[s]}


def nearest_few(x: Vector, centroids: Sequence[Vector], count: int) -> set[int]:
    order = sorted(range(len(centroids)), key=lambda c: (math.dist(x, centroids[c]), c))
    return set(order[:count])


def routed(q: Sequence[Vector], k: Sequence[Vector], centroids: Sequence[Vector], window: int | None) -> Graph:
    """Every centroid takes the chunks (or tokens) that are nearest to it; q and k are projected."""
    graph: Graph = set()
    for c in centroids:
        sides = []
        for side in (q, k):
            near = {i: -math.dist(c, x) for i, x in enumerate(side)}
            sides.append(best_keys(near, math.ceil(len(side) / len(centroids)) if window is None else window))
        graph |= {(i, j) for i in sides[0] for j in sides[1]}
    return graph


def mean_and_max(points: Sequence[Vector]) -> list[float]:
    return [*mean(points), *(max(column) for column in zip(*points, strict=True))]


def gate(scores: Sequence[Vector], top: int | None, threshold: float | None) -> Graph:
    """Blocks of every row with a great enough share of `exp(score)`, or the `top` greatest."""
    graph: Graph = set()
    for t, row in enumerate(scores):
        total = math.fsum(math.exp(v) for v in row)
        shares = {s: math.exp(v) / total for s, v in enumerate(row)}
        kept = best_keys(shares, top) if top is not None else [s for s in shares if shares[s] >= math.exp(threshold)]
        graph |= {(t, s) for s in kept}
    return graph
