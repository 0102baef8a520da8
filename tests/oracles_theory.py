"""Naive definitions for connectivity, cost and probability maps. Nothing here imports the library under test."""

import itertools
import math
import random


def softmax(z):
    """One row of floats; −inf gets nothing, a row of −inf gives zeros."""
    top = max(z)
    if top == -math.inf:
        return [0.0] * len(z)
    e = [math.exp(v - top) for v in z]
    return [v / math.fsum(e) for v in e]


def topk_softmax(z, top):
    """Keep an entry if fewer than `top` others come before it: larger ones, or equal ones to its left."""
    kept = []
    for j, v in enumerate(z):
        ahead = sum(1 for i, other in enumerate(z) if other > v or (other == v and i < j))
        kept.append(v if ahead < top else -math.inf)
    return softmax(kept)


def simplex_projection(z):
    """The nearest point of the simplex, by trying every support: the one whose KKT conditions hold."""
    places = [j for j, v in enumerate(z) if v > -math.inf]
    for size in range(1, len(places) + 1):
        for chosen in itertools.combinations(places, size):
            tau = (math.fsum(z[j] for j in chosen) - 1) / size
            inside = all(z[j] > tau for j in chosen)
            outside = all(z[j] <= tau + 1e-15 for j in places if j not in chosen)
            if inside and outside:
                return [z[j] - tau if j in chosen else 0.0 for j in range(len(z))]
    return [0.0] * len(z)


def hardmax(z):
    if max(z) == -math.inf:
        return [0.0] * len(z)
    return [1.0 if j == z.index(max(z)) else 0.0 for j in range(len(z))]


def reach(cycle, most):
    """Yun et al. (2020), section 3.2, word for word: cycle[l][k] is the set A_k of layer l; the sets S after each t."""
    sets = [set(keys) for keys in cycle[0]]
    yield sets
    for t in range(2, most + 1):
        layer = cycle[(t - 1) % len(cycle)]
        sets = [set().union(*(sets[j] for j in layer[k])) for k in range(len(sets))]
        yield sets


def hops(cycle, goal, most):
    """The first t at which every set holds its goal, or None within `most` layers."""
    for t, sets in enumerate(reach(cycle, most), start=1):
        if all(want <= have for want, have in zip(goal, sets, strict=True)):
            return t
    return None


def hamiltonian_orders(union):
    """All orders in which everybody reads the one before; union[k] is the set of all that k attends to."""
    return [
        order
        for order in itertools.permutations(range(len(union)))
        if all(before in union[after] for before, after in itertools.pairwise(order))
    ]


def bucket_sizes(shares, tokens, throws, seed):
    """Tokens thrown into buckets: mean size of a bucket, and mean size of the bucket of a token."""
    draw = random.Random(seed)
    seen = 0.0
    for _ in range(throws):
        counts = [0] * len(shares)
        for bucket in draw.choices(range(len(shares)), shares, k=tokens):
            counts[bucket] += 1
        seen += sum(count * count for count in counts) / tokens
    return tokens / len(shares), seen / throws


def lsh(cosine, buckets, rounds, draws, seed):
    """Two vectors in the plane, hashed by argmax[Rx; −Rx]: share of collisions, and of pairs that all rounds miss."""
    draw = random.Random(seed)
    sine = math.sqrt(1 - cosine * cosine)
    met = missed = 0
    for _ in range(draws):
        hits = 0
        for _ in range(rounds):
            rows = [(draw.gauss(0, 1), draw.gauss(0, 1)) for _ in range(buckets // 2)]
            one = [a for a, _ in rows] + [-a for a, _ in rows]
            two = [cosine * a + sine * b for a, b in rows] + [-cosine * a - sine * b for a, b in rows]
            hits += one.index(max(one)) == two.index(max(two))
        met += hits
        missed += hits == 0
    return met / (draws * rounds), missed / draws
