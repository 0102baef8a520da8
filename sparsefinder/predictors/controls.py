"""Controls that every table shows: a window alone; the random and true-score maps are in `projections.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal
from sparsefinder.patterns.positional import Nothing, Window
from sparsefinder.predictors.projections import Settings


@dataclass(frozen=True, eq=False)
class WindowOnly:
    """`abs(i − j) <= radius`; a radius of −1 predicts nothing, so that the positional pattern stands alone.

    Raises:
        PatternError: a radius below −1.
    """

    kind: ClassVar[str] = "window"
    radius: int = -1

    def __post_init__(self) -> None:
        if self.radius < -1:
            raise PatternError(f"radius: expected at least -1 (-1 = nothing), got {self.radius}")

    def pattern(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal) -> Pattern:
        """The window; q and k are not looked at."""
        return Nothing() if self.radius < 0 else Window(self.radius)

    def to_tensors(self) -> dict[str, Tensor]:
        """No tensor: nothing is learned."""
        return {}

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """What is not a tensor."""
        return {"radius": self.radius}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Settings) -> "WindowOnly":
        """The inverse of `settings`; KeyError names what is missing."""
        return cls(int(settings["radius"]))  # type: ignore[arg-type]
