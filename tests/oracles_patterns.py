"""Naive definitions of positional patterns, one pair at a time on whole numbers. Nothing imports the library.

Every function answers "may the query at position q attend to the key at position k?", both counted from the item's
first real token, in an item of `n` tokens, for head `h` of layer `layer`.
"""

import numpy as np


def matrix(rule, queries, keys, first=0, offset=0, last=None, h=0, layer=0):
    """All pairs of a rule `rule(q, k, n, h, layer)`: `first` and `last` are the item's first and last real key."""
    n = (keys - 1 if last is None else last) - first + 1
    pairs = [[bool(rule(i + offset - first, j - first, n, h, layer)) for j in range(keys)] for i in range(queries)]
    return np.array(pairs, bool).reshape(queries, keys)


def last_real(real):
    """Index of the last real token, the last index where there is none."""
    return max((i for i, is_real in enumerate(real) if is_real), default=len(real) - 1)


def nothing():
    return lambda q, k, n, h, layer: False


def past():
    return lambda q, k, n, h, layer: k <= q


def window(radius):
    return lambda q, k, n, h, layer: k in range(q - radius, q + radius + 1)


def dilated(radius, step):
    """Beltagy et al.: the window with gaps."""
    return lambda q, k, n, h, layer: k in [q + t * step for t in range(-radius, radius + 1)]


def global_positions(positions):
    def rule(q, k, n, h, layer):
        known = {p if p >= 0 else n + p for p in positions}
        return q in known or k in known

    return rule


def global_tokens(count):
    return global_positions(range(count))


def strided(stride):
    """Yun et al.: {…, k − 2w, k − w, k, k + w, k + 2w, …}."""
    return lambda q, k, n, h, layer: k in range(q, -100, -stride) or k in range(q, 100, stride)


def segment(stride):
    """Yun et al., fixed, first step: the tokens of the same segment."""
    parts = _segments(stride)
    return lambda q, k, n, h, layer: any(q in part and k in part for part in parts)


def fixed(stride, summary):
    """Yun et al., fixed, second step: the token itself and the last tokens of all segments."""
    last = {k for part in _segments(stride) for k in part[-summary:]}
    return lambda q, k, n, h, layer: q == k or k in last


def block_band(block, radius):
    at = {x: s for s, part in enumerate(_segments(block)) for x in part}

    def rule(q, k, n, h, layer):
        return at[k] in range(at[q] - radius, at[q] + radius + 1)

    return rule


def child_strided(stride):
    """Child et al., section 4.3: A¹ = {t, …, i} with t = max(0, i − l), and A² = {j ≤ i : (i − j) mod l = 0}."""
    first = lambda q, k, n, h, layer: max(0, q - stride) <= k <= q  # noqa: E731
    second = lambda q, k, n, h, layer: k <= q and (q - k) % stride == 0  # noqa: E731
    return first, second


def child_fixed(stride, summary):
    """Child et al., section 4.3: A¹ = {j ≤ i : ⌊j/l⌋ = ⌊i/l⌋} and A² = {j ≤ i : j mod l ∈ {t, …, l}}, t = l − c."""
    first = lambda q, k, n, h, layer: k <= q and int(k / stride) == int(q / stride)  # noqa: E731
    second = lambda q, k, n, h, layer: k <= q and k % stride in range(stride - summary, stride + 1)  # noqa: E731
    return first, second


def random_blocks(block, count, seed, causal):
    """The documented draw, in Python's whole numbers."""

    def rule(q, k, n, h, layer):
        row = q // block
        choices = row + 1 if causal else -(-n // block)
        return k // block in _floyd(choices, count, lambda c: _stirred(seed, layer, h, c, row))

    return rule


def _floyd(choices, count, number):
    """Bentley and Floyd (1987), algorithm F2, with `number(c)` as source of randomness."""
    chosen = set()
    for c in range(count):
        top = choices - count + c
        if top >= 0:
            one = number(c) % (top + 1)
            chosen.add(top if one in chosen else one)
    return chosen


def _stirred(*values):
    state = 0
    for value in values:
        state = ((state ^ (value % 2**32)) + 0x9E3779B9) % 2**32
        state = (state ^ state >> 16) * 0x7FEB352D % 2**32
        state = (state ^ state >> 15) * 0x846CA68B % 2**32
        state ^= state >> 16
    return state


def sequential(*rules):
    return lambda q, k, n, h, layer: rules[layer % len(rules)](q, k, n, h, layer)


def multihead(*rules):
    return lambda q, k, n, h, layer: rules[h % len(rules)](q, k, n, h, layer)


def either(*rules):
    return lambda *pair: any(rule(*pair) for rule in rules)


def both(*rules):
    return lambda *pair: all(rule(*pair) for rule in rules)


def neither(rule):
    return lambda *pair: not rule(*pair)


def _segments(size):
    """Runs of `size` positions, far enough to either side of 0 for any test."""
    return [range(start, start + size) for start in range(-size * (100 // size + 1), 100, size)]
