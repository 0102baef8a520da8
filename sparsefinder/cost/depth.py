"""How many layers the construction of Yun et al. (2020) needs: existence proofs are deep."""

from dataclasses import dataclass

from sparsefinder.connectivity import Connectivity
from sparsefinder.errors import PatternError


@dataclass(frozen=True)
class Depth:
    """Transformer blocks for quantization, contextual mapping (the only ones that attend) and value mapping."""

    quantization: int
    context: int
    value: int

    @property
    def total(self) -> int:
        """All blocks."""
        return self.quantization + self.context + self.value


def construction_depth(dim: int, tokens: int, levels: int, period: int, hops: int) -> Depth:
    """Blocks of a sparse Transformer (Yun et al., 2020, section 4.1): `dn/δ`, `p(n − 1)/δᵈ + s` and `n/δᵈⁿ`.

    Args:
        dim: d, numbers of a token. tokens: n. levels: 1/δ, grid points per unit of a number.
        period: p, patterns of the cycle. hops: s, layers to full reach.

    Raises PatternError for numbers below 1.
    """
    _require(dim=dim, tokens=tokens, levels=levels, period=period, hops=hops)
    return Depth(dim * tokens * levels, period * (tokens - 1) * levels**dim + hops, tokens * levels ** (dim * tokens))


def dense_depth(dim: int, tokens: int, levels: int) -> Depth:
    """Blocks of the dense counterpart, as the same section cites them: `dn/δ`, `n/δᵈ + 1` and `n/δᵈⁿ`."""
    _require(dim=dim, tokens=tokens, levels=levels)
    return Depth(dim * tokens * levels, tokens * levels**dim + 1, tokens * levels ** (dim * tokens))


def depth_of(row: Connectivity, dim: int, levels: int) -> Depth | None:
    """The depth for an analysed pattern; None where Assumption 1 does not hold or is not known to."""
    if row.assumption != "yes" or not isinstance(row.hops, int):
        return None
    return construction_depth(dim, row.tokens, levels, row.period, row.hops)


def _require(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise PatternError(f"{name}: expected at least 1, got {value}")
