"""Head configurations: which layer or head uses which of several patterns (Yun et al., 2020, section 5).

The third configuration of the paper, Union, is `|`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Context, Pattern, rebuild


@dataclass(frozen=True)
class Sequential(Pattern):
    """Layers alternate: layer `l` uses pattern `l % p`. The layer is the context's; `at_layer` puts it in."""

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        _require_patterns("sequential", self.patterns)

    def of_layer(self, layer: int) -> Pattern:
        """The pattern of one layer."""
        return self.patterns[layer % len(self.patterns)]

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.of_layer(ctx.layer).allows(ctx, b, h, i, j)


@dataclass(frozen=True)
class Multihead(Pattern):
    """Heads are divided: head `h` uses pattern `h % p`."""

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        _require_patterns("multihead", self.patterns)

    def of_head(self, h: int) -> Pattern:
        """The pattern of one head."""
        return self.patterns[h % len(self.patterns)]

    def allows(self, ctx: Context, b: int | Tensor, h: int | Tensor, i: Tensor, j: Tensor) -> Tensor:
        if isinstance(h, int):
            return self.of_head(h).allows(ctx, b, h, i, j)
        result = self.patterns[0].allows(ctx, b, h, i, j)
        for p, pattern in enumerate(self.patterns[1:], start=1):
            result = torch.where(h % len(self.patterns) == p, pattern.allows(ctx, b, h, i, j), result)
        return result


def at_layer(pattern: Pattern, layer: int) -> Pattern:
    """The pattern of one layer: every `Sequential` in it is replaced by its pattern of that layer.

    What is left needs no layer, and a plan sees the windows and global tokens that it knows fast ways for. (Random
    patterns draw by `Context.layer`, which this does not set.)
    """
    if isinstance(pattern, Sequential):
        return at_layer(pattern.of_layer(layer), layer)
    return rebuild(pattern, _at(layer))


def _at(layer: int) -> Callable[[Pattern], Pattern]:
    return lambda part: at_layer(part, layer)


def _require_patterns(name: str, patterns: object) -> None:
    if not isinstance(patterns, tuple) or not patterns or not all(isinstance(part, Pattern) for part in patterns):
        raise PatternError(f"{name}: expected one or more patterns, got {patterns!r}")
