"""Patterns are immutable relations "query i may attend to key j", composed with `|`, `&` and `~`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sparsefinder.errors import PatternError
from sparsefinder.patterns.legal import Legal, first_real, last_real


@dataclass(frozen=True, eq=False)
class Context:
    """What a pattern may know besides the indices: sizes, where the queries sit among the keys, the layer.

    first_real: index of each item's first real key (None = 0). Positions are counted from there, so that left padding
    shifts no window and no global token.
    last_real: index of each item's last real key (None = the last key).
    causal: the layer may not know how many tokens follow, so no pattern may ask for the number of tokens.
    """

    queries: int
    keys: int
    query_offset: int = 0
    layer: int = 0
    first_real: Int[Tensor, " B"] | None = None
    last_real: Int[Tensor, " B"] | None = None
    causal: bool = False

    def query_position(self, b: int | Tensor, i: Tensor) -> Tensor:
        """Position of query `i` on the key axis, 0 at the item's first real token."""
        return i + self.query_offset - self._first(b)

    def key_position(self, b: int | Tensor, j: Tensor) -> Tensor:
        """Position of key `j`, 0 at the item's first real token."""
        return j - self._first(b)

    def tokens(self, b: int | Tensor) -> int | Tensor:
        """Tokens of item `b`, from its first real one to its last.

        Raises PatternError in a causal layer: the set of a row would depend on whether tokens follow.
        """
        if self.causal:
            raise PatternError("pattern: expected one that a causal layer can read, got one that counts from the end")
        return (self.keys - 1 if self.last_real is None else self.last_real[b]) - self._first(b) + 1

    def _first(self, b: int | Tensor) -> int | Tensor:
        return 0 if self.first_real is None else self.first_real[b]


def context_of(legal: Legal, layer: int = 0) -> Context:
    """The context that belongs to these legal pairs."""
    sizes = legal.query_real.shape[1], legal.key_real.shape[1]
    return Context(*sizes, legal.query_offset, layer, first_real(legal), last_real(legal), legal.causal)


def context_for(legal: Legal, ctx: Context | None) -> Context:
    """`ctx`, completed with the real tokens where it does not say; or the context of `legal` where it is None.

    Raises PatternError where the context's sizes are not those of `legal`.
    """
    if ctx is None:
        return context_of(legal)
    n, m = legal.query_real.shape[1], legal.key_real.shape[1]
    if (ctx.queries, ctx.keys) != (n, m):
        raise PatternError(f"context: expected {n} queries and {m} keys like legal, got {ctx.queries} and {ctx.keys}")
    first = first_real(legal) if ctx.first_real is None else ctx.first_real
    last = last_real(legal) if ctx.last_real is None else ctx.last_real
    return replace(ctx, first_real=first, last_real=last, causal=ctx.causal or legal.causal)


class Pattern(ABC):
    """True = may attend. Padding and causality are never part of a pattern (`~` would flip them): see `Legal`."""

    @abstractmethod
    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The definition: bool, on index tensors that broadcast against each other."""

    def __or__(self, other: "Pattern") -> "Pattern":
        return Union(self, other)

    def __and__(self, other: "Pattern") -> "Pattern":
        return Intersection(self, other)

    def __invert__(self) -> "Pattern":
        return Complement(self)


@dataclass(frozen=True)
class Union(Pattern):
    """Pairs that either pattern allows."""

    left: Pattern
    right: Pattern

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.left.allows(ctx, b, h, i, j) | self.right.allows(ctx, b, h, i, j)


@dataclass(frozen=True)
class Intersection(Pattern):
    """Pairs that both patterns allow."""

    left: Pattern
    right: Pattern

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.left.allows(ctx, b, h, i, j) & self.right.allows(ctx, b, h, i, j)


@dataclass(frozen=True)
class Complement(Pattern):
    """Pairs that the pattern does not allow."""

    inner: Pattern

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ~self.inner.allows(ctx, b, h, i, j)


def rebuild(pattern: Pattern, change: Callable[[Pattern], Pattern]) -> Pattern:
    """The same pattern with every part that it is composed of (not itself) replaced by `change(part)`."""
    changed: dict[str, object] = {}
    for field in fields(pattern):  # type: ignore[arg-type]
        value = getattr(pattern, field.name)
        if isinstance(value, Pattern):
            changed[field.name] = change(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Pattern):
            changed[field.name] = tuple(change(part) for part in value)
    return replace(pattern, **changed) if changed else pattern  # type: ignore[type-var]


def union_leaves(pattern: Pattern) -> Iterator[Pattern]:
    """The members of a nested union, left to right; a pattern that is no union is its only member."""
    if isinstance(pattern, Union):
        yield from union_leaves(pattern.left)
        yield from union_leaves(pattern.right)
    else:
        yield pattern


def by_block(met: Callable[[Tensor, Tensor], Tensor], block: int, query: Tensor, key: Tensor) -> Tensor:
    """`met` of the blocks that positions lie in; on a grid of them one pair of blocks stands for all its pairs."""
    query, key = query // block, key // block
    if block == 1 or query.dim() != 2 or query.shape[1] != 1 or key.shape[:1] != (1,):
        return met(query, key)
    (rows, row_at), (keys, key_at) = (torch.unique(x.flatten(), return_inverse=True) for x in (query, key))
    return met(rows[:, None], keys[None, :])[row_at][:, key_at]


def materialize(pattern: Pattern, legal: Legal, b: int, h: int, ctx: Context | None = None) -> Bool[Tensor, "N M"]:
    """All pairs of one item and head that are allowed and legal (one head at a time: never `[B, H, N, M]`).

    Raises PatternError where the context's sizes are not those of `legal`.
    """
    ctx, device = context_for(legal, ctx), legal.key_real.device
    n, m = ctx.queries, ctx.keys
    i, j = torch.arange(n, device=device)[:, None], torch.arange(m, device=device)[None, :]
    return pattern.allows(ctx, b, h, i, j) & legal.matrix(b)
