"""What a stack of layers can pass from token to token (Yun et al., "O(n) Connections are Expressive Enough", 2020).

Their Assumption 1 on a cycle of p patterns over n tokens: (1) every token attends to itself in every layer; (2) the
union of the patterns, as a graph with an edge j → i where i attends to j, has a Hamiltonian path; (3) after some number
of layers every token has reached every other. With it, and a probability map that passes their Assumption 2 (see
`probability_maps.check_margin`), the sparse Transformer is a universal approximator (theorem 1); (3) is necessary.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.hamiltonian import Answer, hamiltonian_path
from sparsefinder.patterns.algebra import Pattern, context_of, materialize
from sparsefinder.patterns.heads import Multihead, Sequential
from sparsefinder.patterns.legal import Legal, legal_full

Hops = int | Literal["never", "unknown"]
GATHERED = 1 << 25  # bytes of one step of the reach recursion


@dataclass(frozen=True)
class Connectivity:
    """The three conditions for one item.

    tokens: n, its real tokens. pairs: connections of each layer of the cycle, summed over the tokens.
    self_edges: condition 1. path, order, reason: condition 2, with an order of the tokens where the answer is yes.
    hops: condition 3, the least number of layers; in a causal layer, until every token has reached all before it.
    """

    tokens: int
    pairs: tuple[int, ...]
    self_edges: bool
    path: Answer
    order: tuple[int, ...] | None
    reason: str
    hops: Hops

    @property
    def period(self) -> int:
        """Patterns of the cycle (p)."""
        return len(self.pairs)

    @property
    def pairs_per_token(self) -> float:
        """Mean number of keys of a token in a layer."""
        return sum(self.pairs) / (self.period * self.tokens)

    @property
    def assumption(self) -> Answer:
        """Does Assumption 1 hold?"""
        if not self.self_edges or self.path == "no" or self.hops == "never":
            return "no"
        return "unknown" if "unknown" in (self.path, self.hops) else "yes"


def analyse(
    pattern: Pattern,
    legal: Legal,
    *,
    b: int = 0,
    layers: int | None = None,
    heads: int | None = None,
    budget: int = 20_000,
    most_hops: int | None = None,
) -> Connectivity:
    """The connectivity of one item under a pattern that may change from layer to layer (`Sequential`).

    Args:
        layers: patterns in the cycle, given to the pattern as `Context.layer`; None = the least common multiple of its
            `Sequential` parts. Say how many where something else depends on the layer (random patterns).
        heads: a layer passes on what any of its heads reads; None = as many as its `Multihead` parts need.
        budget, most_hops: when to answer "unknown" (4 n p hops where None).

    Raises:
        PatternError: no self-attention, or an item without tokens.
    """
    cycle = connections(pattern, legal, b=b, layers=layers, heads=heads)
    real = legal.key_real[b].nonzero().squeeze(-1)
    goal = legal.matrix(b)[real][:, real]
    path = hamiltonian_path(torch.stack(cycle).any(0), budget)
    return Connectivity(
        tokens=goal.shape[0],
        pairs=tuple(int(layer.sum()) for layer in cycle),
        self_edges=all(bool(layer.diagonal().all()) for layer in cycle),
        path=path.answer,
        order=path.order,
        reason=path.reason,
        hops=hops_to_reach(cycle, goal, most_hops),
    )


def connections(
    pattern: Pattern, legal: Legal, *, b: int = 0, layers: int | None = None, heads: int | None = None
) -> list[Bool[Tensor, "n n"]]:
    """Who attends to whom in each layer of the cycle, among the real tokens of one item: `A¹ … Aᵖ` as matrices.

    Arguments and errors as in `analyse`.
    """
    queries, keys = legal.query_real[b], legal.key_real[b]
    if queries.shape != keys.shape or not torch.equal(queries, keys) or legal.query_offset:
        raise PatternError("connectivity: expected self-attention, the same real tokens as queries and keys")
    real = keys.nonzero().squeeze(-1)
    if not real.shape[0]:
        raise PatternError(f"connectivity: expected at least one real token, got none in item {b}")
    period = _period(pattern, Sequential) if layers is None else layers
    width = _period(pattern, Multihead) if heads is None else heads
    if period < 1 or width < 1:
        raise PatternError(f"connectivity: expected at least one layer and head, got {period} and {width}")
    cycle = []
    for layer in range(period):
        ctx = context_of(legal, layer)
        matrix = materialize(pattern, legal, b, 0, ctx)
        for h in range(1, width):
            matrix = matrix | materialize(pattern, legal, b, h, ctx)
        cycle.append(matrix[real][:, real])
    return cycle


def hops_to_reach(
    cycle: Sequence[Bool[Tensor, "n n"]], goal: Bool[Tensor, "n n"] | None = None, most: int | None = None
) -> Hops:
    """The least number of layers after which every token has reached all of `goal` (all tokens where None).

    `S¹_k = A¹_k`, `Sᵗ_k = ∪_{j ∈ A_k^{((t−1) mod p)+1}} Sᵗ⁻¹_j` (Yun et al., 2020, section 3.2), as sets of bits.
    "never" once the sets repeat at the same place of the cycle; "unknown" after `most` layers (None = 4 n p).

    Raises ShapeError unless the cycle holds square matrices of one size.
    """
    sizes = {tuple(layer.shape) for layer in [*cycle, *([] if goal is None else [goal])]}
    if len(sizes) != 1 or len(next(iter(sizes))) != 2 or len(set(next(iter(sizes)))) != 1:
        raise ShapeError(f"cycle: expected square matrices of one size, got {sorted(sizes)}")
    layers = [layer.cpu().numpy() for layer in cycle]
    wanted = np.packbits(np.ones_like(layers[0]) if goal is None else goal.cpu().numpy(), axis=1)
    reached, saved, save_at = np.packbits(layers[0], axis=1), None, 1
    lists = [(np.append(0, layer.sum(1).cumsum()), layer.nonzero()[1]) for layer in layers]
    period = len(layers)
    for t in range(1, 1 + (4 * len(layers[0]) * period if most is None else most)):
        if bool((reached & wanted == wanted).all()):
            return t
        if saved is not None and (t - saved[0]) % period == 0 and np.array_equal(saved[1], reached):
            return "never"
        if t == save_at:  # Brent's way to find a repetition: compare with the sets at the last power of two
            saved, save_at = (t, reached), 2 * save_at
        reached = _step(*lists[t % period], reached)
    return "unknown"


def _step(begin: np.ndarray, keys: np.ndarray, reached: np.ndarray) -> np.ndarray:
    """The union, for every row, of the sets of the keys in its list."""
    result = np.zeros_like(reached)
    rows = np.flatnonzero(np.diff(begin))
    limit = max(GATHERED // max(reached.shape[1], 1), 1)
    low = 0
    while low < len(rows):
        high = max(int(np.searchsorted(begin[rows + 1], begin[rows[low]] + limit, side="right")), low + 1)
        some = rows[low:high]
        part = reached[keys[begin[some[0]] : begin[some[-1] + 1]]]
        result[some] = np.bitwise_or.reduceat(part, begin[some] - begin[some[0]], axis=0)
        low = high
    return result


def connectivity_rows(
    patterns: Mapping[str, Pattern], tokens: int, causal: bool = False, layers: Mapping[str, int] | None = None
) -> dict[str, Connectivity]:
    """`analyse` of every named pattern on `tokens` tokens. `layers`: cycle lengths of those that need one."""
    legal = legal_full(1, tokens, tokens, causal)
    return {name: analyse(pattern, legal, layers=(layers or {}).get(name)) for name, pattern in patterns.items()}


def connectivity_table(rows: Mapping[str, Connectivity]) -> str:
    """One line for every pattern, as a Markdown table."""
    head = ["pattern", "p", "keys per token", "self-edges", "Hamiltonian path", "hops to full reach", "Assumption 1"]
    lines = [head, ["---"] * len(head)]
    for name, row in rows.items():
        path = f"{row.path} ({row.reason})"
        keys, self_edges = f"{row.pairs_per_token:.1f}", "yes" if row.self_edges else "no"
        lines.append([name.replace("|", "\\|"), str(row.period), keys, self_edges, path, str(row.hops), row.assumption])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _period(pattern: Pattern, kind: type[Sequential] | type[Multihead]) -> int:
    """After how many layers (or heads) a pattern begins again."""
    parts = list(_parts(pattern))
    own = len(pattern.patterns) if isinstance(pattern, kind) else 1
    return math.lcm(own, *(_period(part, kind) for part in parts))


def _parts(pattern: Pattern) -> Iterator[Pattern]:
    for field in fields(pattern):  # type: ignore[arg-type]
        value = getattr(pattern, field.name)
        values = value if isinstance(value, tuple) else (value,)
        yield from (part for part in values if isinstance(part, Pattern))
