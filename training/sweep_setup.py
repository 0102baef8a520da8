"""What the families of a sweep are made from."""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from sparsefinder.artifact import Artifact
from sparsefinder.predictors import Projections, random_projections
from training.config import SweepConfig
from training.extract import LayerData

METRIC = ("hinge", "hinge-sum", "logistic")
BOTH_LOSSES = ("hinge", "logistic")  # where every number of buckets costs a pass over all instances


@dataclass(frozen=True, eq=False)
class Setup:
    """The artifact's maps, the grid, and training graphs (by layer) for centroids and gates."""

    artifact: Artifact
    config: SweepConfig
    train: Callable[[int], LayerData]

    def maps(self, objectives: Sequence[str]) -> Iterator[tuple[str, int, tuple[Projections, ...]]]:
        """(objective, rank, maps of the layers) of those that the artifact holds."""
        for objective in objectives:
            for rank in self.ranks():
                found = self.artifact.projections.get(f"{objective}-r{rank}")
                if found is not None:
                    yield objective, rank, tuple(found)

    def ranks(self) -> list[int]:
        """The ranks of the artifact's maps."""
        found = {re.fullmatch(r".+-r(\d+)", name) for name in self.artifact.projections}
        return sorted({int(match[1]) for match in found if match})

    def controls(self) -> Iterator[tuple[int, tuple[Projections, ...]]]:
        """(rank, untrained random maps of the layers)."""
        card = self.artifact.card
        for rank in self.ranks():
            seeds = (self.config.seed + layer for layer in range(card.layers))
            yield rank, tuple(random_projections(card.heads, rank, card.head_dim, seed) for seed in seeds)


class LazyMaps(Sequence[Projections]):
    """Maps of the layers that are made when they are first asked for."""

    def __init__(self, make: Callable[[int], Projections], layers: int):
        self._make = functools.cache(make)
        self._layers = layers

    def __len__(self) -> int:
        return self._layers

    @overload
    def __getitem__(self, at: int) -> Projections: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Projections]: ...
    def __getitem__(self, at: int | slice) -> Projections | Sequence[Projections]:
        if isinstance(at, slice):
            return [self._make(n) for n in range(*at.indices(self._layers))]
        if not 0 <= at < self._layers:
            raise IndexError(at)
        return self._make(at)
