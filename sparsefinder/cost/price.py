"""Operations and memory traffic of attention over a footprint, and of the prediction that comes before it."""

from dataclasses import dataclass

from sparsefinder.cost.footprint import Footprint
from sparsefinder.errors import PatternError

LIST_BYTES = 8  # of a listed key: its index and the first row that may read it, both int32


@dataclass(frozen=True)
class Price:
    """Of one layer, all heads.

    flops: 2 for a multiply-add, of both products; the probability map is left out (tens of operations per score, the
        same for all patterns). bytes: what a kernel moves that keeps a tile's scores on chip: queries in, outputs out,
        the listed keys and values of every tile, and the lists.
    """

    flops: int
    bytes: int

    def __add__(self, other: "Price") -> "Price":
        return Price(self.flops + other.flops, self.bytes + other.bytes)


def attention_price(
    size: Footprint,
    dim: int,
    *,
    value_dim: int | None = None,
    heads: int = 1,
    number_bytes: int = 2,
    lists: bool = True,
) -> Price:
    """The price of attention itself: `computed · 2 (D + Dv)` operations.

    Args:
        number_bytes: of one number (2 for half precision). lists: False for full attention, which needs none.

    Raises PatternError for numbers below 1.
    """
    values = dim if value_dim is None else value_dim
    _require(dim=dim, value_dim=values, heads=heads, number_bytes=number_bytes)
    width = (dim + values) * number_bytes
    moved = (size.queries + size.listed) * width + (size.listed * LIST_BYTES if lists else 0)
    return Price(heads * size.computed * 2 * (dim + values), heads * moved)


def prediction_price(
    tokens: int, dim: int, rank: int, against: int, *, shared_by: int = 1, heads: int = 1, number_bytes: int = 2
) -> Price:
    """Projecting queries and keys to `rank` numbers and comparing each query with `against` things.

    Token-level distance: against = tokens. Tiles of 32 queries against keys: against = tokens, shared_by = 32. Clusters
    and inverted lists: against = clusters (keys are compared with them too, which is counted).

    Raises PatternError for numbers below 1.
    """
    _require(tokens=tokens, dim=dim, rank=rank, against=against, shared_by=shared_by, number_bytes=number_bytes)
    projecting = 2 * 2 * tokens * dim * rank
    sides = 1 if against == tokens else 2
    comparing = sides * 2 * (tokens // shared_by) * against * rank
    moved = 2 * tokens * (dim + rank) * number_bytes
    return Price(heads * (projecting + comparing), heads * moved)


def _require(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise PatternError(f"{name}: expected at least 1, got {value}")
