"""Sequences whose outputs are given by a few memories (Wang & E, 2024, sections 4 to 6).

Every function maps a batch of inputs to outputs `y [B, n]`; outputs before the longest memory are NaN, for there is
nothing to read. Adaptive memories come with the positions that are read, which are their gold positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsefinder.errors import ConfigError

Decay = Literal["exponential", "polynomial"]


@dataclass(frozen=True)
class Alphabet:
    """Tokens with a value ±1 and a jump; one-hot vectors are what a model sees (norm 1, as the paper asks).

    values[a], jumps[a]: of token `a`.
    """

    values: tuple[int, ...]
    jumps: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.jumps) or min(self.jumps) < 1 or not set(self.values) <= {-1, 1}:
            raise ConfigError(f"alphabet: expected a value ±1 and a jump ≥ 1 for every token, got {self}")

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.values)


def boolean_alphabet() -> Alphabet:
    """The paper's example: x = ±1, g(1) = 1, g(−1) = 2."""
    return Alphabet((-1, 1), (2, 1))


def jump_alphabet(longest: int) -> Alphabet:
    """Every value with every jump from 1 to `longest`: what is read does not follow from its value."""
    return Alphabet((-1, 1) * longest, tuple(jump for jump in range(1, longest + 1) for _ in range(2)))


def fixed_memories(x: Float[Tensor, "B n"], lags: Sequence[int]) -> Float[Tensor, "B n"]:
    """`y_t = Π_i x_{t − T_i}`: the readout f is a product (section 4)."""
    longest = _longest(lags)
    y = torch.full_like(x, torch.nan)
    n = x.shape[1]
    parts = [x[:, longest - lag : n - lag] for lag in lags]
    y[:, longest:] = torch.stack(parts).prod(0)
    return y


def nested_positions(tokens: Int[Tensor, "B n"], alphabet: Alphabet, depth: int) -> Int[Tensor, "K B n"]:
    """Positions that output t reads: `t_1 = t − g(x_t)`, `t_k = t − g(x_{t_(k−1)})`; −1 before the longest jump.

    depth: the number K of jumps; 1 is the plain adaptive memory, more are nested (section 5, equation 8).
    """
    jumps = torch.tensor(alphabet.jumps)
    at = torch.arange(tokens.shape[1]).expand_as(tokens)
    seen = at
    found = []
    for _ in range(depth):
        seen = (at - jumps[tokens.gather(1, seen)]).clamp(min=0)
        found.append(seen)
    return torch.stack(found).masked_fill(at < max(alphabet.jumps), -1)


def nested_memories(tokens: Int[Tensor, "B n"], alphabet: Alphabet, depth: int) -> Float[Tensor, "B n"]:
    """`y_t = x_t · x_{t_1} · … · x_{t_K}` of the tokens' values (section 5, example I)."""
    values = torch.tensor(alphabet.values).float()[tokens]
    positions = nested_positions(tokens, alphabet, depth)
    read = torch.stack([values.gather(1, p.clamp(min=0)) for p in positions])
    return (values * read.prod(0)).masked_fill(positions[0] < 0, torch.nan)


def adaptive_read(tokens: Int[Tensor, "B n"], alphabet: Alphabet) -> Float[Tensor, "B n"]:
    """`y_t = x_{t − g(x_t)}`: the memory alone, without a readout (section 5, equation 10)."""
    positions = nested_positions(tokens, alphabet, 1)[0]
    values = torch.tensor(alphabet.values).float()[tokens]
    return values.gather(1, positions.clamp(min=0)).masked_fill(positions < 0, torch.nan)


def parallel_memories(tokens: Int[Tensor, "B n"], alphabet: Alphabet, offsets: Sequence[int]) -> Float[Tensor, "B n"]:
    """`y_t = Σ_i x_{t − g(x_t) − o_i} / M`: M memories that follow the token, none nested in another (K = 0)."""
    jumps, values = torch.tensor(alphabet.jumps), torch.tensor(alphabet.values).float()[tokens]
    at = torch.arange(tokens.shape[1]).expand_as(tokens)
    longest = max(alphabet.jumps) + max(offsets)
    read = [values.gather(1, (at - jumps[tokens] - offset).clamp(min=0)) for offset in offsets]
    return torch.stack(read).mean(0).masked_fill(at < longest, torch.nan)


def decaying_kernel(decay: Decay, rate: float, length: int) -> Float[Tensor, " length"]:
    """`ρ(s)` for s = 1 … length, of norm 1: `exp(−rate s)` or `s^(−rate)` (section 6)."""
    s = torch.arange(1, length + 1, dtype=torch.float64)
    rho = torch.exp(-rate * s) if decay == "exponential" else s.pow(-rate)
    unit: Tensor = rho / torch.linalg.vector_norm(rho)
    return unit.float()


def convolved(x: Float[Tensor, "B n"], kernel: Float[Tensor, " length"]) -> Float[Tensor, "B n"]:
    """`y_t = Σ_{s ≥ 1} x_{t−s} ρ(s)`, with what lies before the text taken as zero (essentially sparse, section 6)."""
    n, length = x.shape[1], kernel.shape[0]
    padded = torch.nn.functional.pad(x, (length, 0))
    windows = padded.unfold(1, length, 1)[:, :n]  # row t holds x_{t−length} … x_{t−1}
    return windows @ kernel.flip(0)


def error_share(y: Float[Tensor, "G B n"], target: Float[Tensor, "B n"]) -> Float[Tensor, " G"]:
    """Mean squared error over the target's variance, of every model: 0 is perfect, 1 what the mean alone gets."""
    known = ~target.isnan()
    goal = target[known]
    return (y[:, known] - goal).square().mean(1) / goal.var(correction=0)


def _longest(lags: Sequence[int]) -> int:
    if not lags or min(lags) < 1:
        raise ConfigError(f"lags: expected numbers of at least 1, got {tuple(lags)}")
    return max(lags)
