"""Is there an order of all tokens in which each one reads the one before it? (Yun et al., 2020, Assumption 1.2)

Finding a Hamiltonian path is hard in general. So: orders that work for the known families first, then reasons why none
can exist, then a bounded search. "unknown" is an answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, maximum_bipartite_matching
from torch import Tensor

from sparsefinder.errors import ShapeError

Answer = Literal["yes", "no", "unknown"]
MOST_HUBS = 32
MOST_GROUPS = 128
PATCH_TRIES = 4


@dataclass(frozen=True)
class PathAnswer:
    """answer: whether such an order exists. order: one, where yes. reason: how it was found, or why there is none."""

    answer: Answer
    order: tuple[int, ...] | None
    reason: str


def hamiltonian_path(reads: Bool[Tensor, "n n"], budget: int = 20_000) -> PathAnswer:
    """Looks for an order γ with `reads[γ(i+1), γ(i)]` for all i, for at most `budget` steps of search.

    reads[i, j]: token i attends to token j, so what j knows can pass to i: the edge j → i. "yes" comes with an order
    that was checked; "no" with a proof; "unknown" says that the search ended before either.

    Raises ShapeError unless `reads` is square and not empty.
    """
    if reads.ndim != 2 or reads.shape[0] != reads.shape[1] or reads.shape[0] == 0:
        raise ShapeError(f"reads: expected a square matrix of at least one token, got {tuple(reads.shape)}")
    follows = reads.cpu().numpy().T.copy()  # follows[j, i]: i may come after j
    np.fill_diagonal(follows, False)
    for name, order in _known_orders(follows):
        if _is_path(follows, order):
            return PathAnswer("yes", tuple(order.tolist()), name)
    obstacle = _obstacle(follows)
    if obstacle is not None:
        return PathAnswer("no", None, obstacle)
    patched = _patched(follows)
    if patched is not None:
        return PathAnswer("yes", patched, "cycles of a matching, joined")
    found, complete = _search(follows, budget)
    if found is not None:
        return PathAnswer("yes", found, "search")
    return PathAnswer("no", None, "search of all orders") if complete else PathAnswer("unknown", None, "search ended")


def _is_path(follows: np.ndarray, order: np.ndarray) -> bool:
    return len(order) == len(follows) and bool(follows[order[:-1], order[1:]].all())


def _known_orders(follows: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """As they stand (window, strided, fixed, star), backwards, or in groups that hubs join (dilated, blocks + global).

    A hub is a token that reads all and is read by all: it may stand between any two others.
    """
    place = np.arange(len(follows))
    yield "identity", place
    yield "reversed", place[::-1]
    others = len(follows) - 1
    is_hub = (follows.sum(0) == others) & (follows.sum(1) == others)
    for size in range(2, min(len(follows) // 2, MOST_GROUPS) + 1):
        for name, label in (("classes modulo", place % size), ("runs of", place // size)):
            order = _joined(follows, label, is_hub)
            if order is not None:
                yield f"{name} {size}", order


def _joined(follows: np.ndarray, label: np.ndarray, is_hub: np.ndarray) -> np.ndarray | None:
    """Group after group, in each its tokens in order, with a hub between groups that have no edge; None without one."""
    spare, order = np.flatnonzero(is_hub).tolist(), np.empty(0, np.int64)
    for value in range(int(label.max()) + 1):
        group = np.flatnonzero((label == value) & ~is_hub)
        if len(order) and len(group) and not follows[order[-1], group[0]]:
            if not spare:
                return None
            order = np.append(order, spare.pop())
        order = np.concatenate([order, group])
    return np.concatenate([order, np.asarray(spare, np.int64)])


def _obstacle(follows: np.ndarray) -> str | None:
    """A reason why no order can exist; None where none of these is found."""
    for axis, words in ((0, "read no other token"), (1, "are read by no other token")):
        lonely = np.flatnonzero(~follows.any(axis))
        if len(lonely) > 1:
            return f"{len(lonely)} tokens {words}"
    graph = csr_array(follows)
    if not _groups_line_up(graph):
        return "groups of tokens that cannot pass anything to each other"
    steps = int((maximum_bipartite_matching(graph, perm_type="column") >= 0).sum())
    if steps < len(follows) - 1:
        return f"at most {steps} of {len(follows) - 1} steps can be made without meeting a token twice"
    return _cut(follows)


def _groups_line_up(graph: csr_array) -> bool:
    """Do the strongly connected groups form a line? (Then they can be sorted in one way only.)"""
    count, group = connected_components(graph, connection="strong")
    source, target = graph.nonzero()
    between = np.zeros((count, count), bool)
    between[group[source], group[target]] = True
    np.fill_diagonal(between, False)
    left = np.ones(count, bool)
    for _ in range(count):
        ready = np.flatnonzero(left & ~between[left].any(0))
        if len(ready) != 1:
            return False
        left[ready] = False
    return True


def _cut(follows: np.ndarray) -> str | None:
    """A path without s of its tokens is at most s + 1 pieces: take away the s busiest and count what it falls into."""
    busy = np.argsort(-(follows.sum(0) + follows.sum(1)), kind="stable")
    for removed in range(1, min(MOST_HUBS, len(follows) - 2) + 1):
        rest = np.sort(busy[removed:])
        parts = connected_components(csr_array(follows[np.ix_(rest, rest)]), connection="weak")[0]
        if parts > removed + 1:
            return f"without its {removed} busiest tokens the rest is {parts} parts"
    return None


def _patched(follows: np.ndarray) -> tuple[int, ...] | None:
    """Successors by maximum matching give cycles and at most one path; join them where edges allow (Karp, 1979)."""
    draw = np.random.default_rng(0)
    for _ in range(PATCH_TRIES):
        names = draw.permutation(len(follows))
        shuffled = follows[np.ix_(names, names)]
        after = maximum_bipartite_matching(csr_array(shuffled), perm_type="column")
        path = _join_cycles(shuffled, _chains(after))
        if path is not None and _is_path(follows, names[path]):
            return tuple(names[path].tolist())
    return None


def _chains(after: np.ndarray) -> list[list[int]]:
    """The chains of a successor table (−1 = none): the open one, or else the longest, first; the others are cycles."""
    heads = sorted(set(range(len(after))) - set(after.tolist()))
    chains, seen = [], np.zeros(len(after), bool)
    for start in [*heads, *range(len(after))]:
        chain = []
        at = start
        while at >= 0 and not seen[at]:
            seen[at] = True
            chain.append(at)
            at = int(after[at])
        if chain:
            chains.append(chain)
    return chains if heads else sorted(chains, key=len, reverse=True)


def _join_cycles(follows: np.ndarray, chains: list[list[int]]) -> np.ndarray | None:
    path, cycles = np.asarray(chains[0]), [np.asarray(chain) for chain in chains[1:]]
    while cycles:
        for at, cycle in enumerate(cycles):
            longer = _insert(follows, path, cycle)
            if longer is not None:
                path = longer
                del cycles[at]
                break
        else:
            return None
    return path


def _insert(follows: np.ndarray, path: np.ndarray, cycle: np.ndarray) -> np.ndarray | None:
    """The cycle, cut open, after the end of the path, before its start, or between two of its tokens."""
    first = np.flatnonzero(follows[path[-1], cycle])
    if len(first):
        return np.concatenate([path, np.roll(cycle, -first[0])])
    last = np.flatnonzero(follows[cycle, path[0]])
    if len(last):
        return np.concatenate([np.roll(cycle, -last[0] - 1), path])
    # fits[t, s]: path[t] → cycle[s] … cycle[s − 1] → path[t + 1].
    fits = follows[np.ix_(path[:-1], cycle)] & follows[np.ix_(np.roll(cycle, 1), path[1:])].T
    if not fits.any():
        return None
    t, s = np.argwhere(fits)[0]
    return np.concatenate([path[: t + 1], np.roll(cycle, -s), path[t + 1 :]])


def _search(follows: np.ndarray, budget: int) -> tuple[tuple[int, ...] | None, bool]:
    """Depth first from every start, the budget shared. Also says whether every order was looked at."""
    after = [_word(row) for row in follows]
    before = [_word(column) for column in follows.T]
    starts = sorted(range(len(after)), key=lambda v: (before[v].bit_count(), v))
    if not before[starts[0]]:
        starts = starts[:1]  # nobody can come before it, so it comes first
    complete = True
    for start in starts:
        found, ended = _search_from(start, after, before, max(budget // len(starts), 1))
        if found is not None:
            return found, True
        complete = complete and ended
    return None, complete


def _search_from(start: int, after: list[int], before: list[int], budget: int) -> tuple[tuple[int, ...] | None, bool]:
    path, free = [start], ((1 << len(after)) - 1) ^ (1 << start)
    choices = [_choices(start, free, after, before)]
    while path:
        if not free:
            return tuple(path), True
        if not choices[-1]:
            choices.pop()
            free |= 1 << path.pop()
            continue
        if budget == 0:
            return None, False
        budget -= 1
        token = choices[-1].pop()
        path.append(token)
        free ^= 1 << token
        choices.append(_choices(token, free, after, before))
    return None, True


def _choices(last: int, free: int, after: list[int], before: list[int]) -> list[int]:
    """The tokens that may come next, the most urgent at the end (Warnsdorff's rule: those with the fewest ways left).

    A token that only `last` can still precede must come now; two of them are a dead end.
    """
    options = _members(after[last] & free)
    forced = [token for token in options if not before[token] & free]
    if forced:
        return forced if len(forced) == 1 else []
    ways = {token: (before[token] & free).bit_count() + (after[token] & free).bit_count() for token in options}
    return sorted(options, key=lambda token: (-ways[token], -token))


def _word(row: np.ndarray) -> int:
    """A set of tokens as one whole number, bit by token."""
    return int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little")


def _members(word: int) -> list[int]:
    found = []
    while word:
        lowest = word & -word
        found.append(lowest.bit_length() - 1)
        word ^= lowest
    return found
