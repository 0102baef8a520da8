"""Predictors: frozen parameters of one layer that say, from q and k, which pairs attention will need.

Token-level predictors give a pattern, `Tiles` gives a plan; `layer_plan` and `layer_pattern` unify them.
"""

from jaxtyping import Float
from torch import Tensor

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.legal import Legal
from sparsefinder.plan import Plan, build_plan
from sparsefinder.predictors.budget import RowBudget
from sparsefinder.predictors.clustering import Clusters, mixed_share
from sparsefinder.predictors.controls import WindowOnly
from sparsefinder.predictors.distance import Distance
from sparsefinder.predictors.projections import (
    Projections,
    project,
    random_projections,
    true_score_projections,
)
from sparsefinder.predictors.score import Score
from sparsefinder.predictors.tiles import Tiles, log_distance, tile_means, tile_scores

Predictor = Distance | Score | Clusters | RowBudget | Tiles | WindowOnly

PREDICTORS: dict[str, type[Predictor]] = {
    "distance": Distance,
    "score": Score,
    "clusters": Clusters,
    "budget": RowBudget,
    "tiles": Tiles,
    "window": WindowOnly,
}

__all__ = [
    "PREDICTORS",
    "Clusters",
    "Distance",
    "Predictor",
    "Projections",
    "RowBudget",
    "Score",
    "Tiles",
    "WindowOnly",
    "layer_pattern",
    "layer_plan",
    "log_distance",
    "mixed_share",
    "project",
    "random_projections",
    "tile_means",
    "tile_scores",
    "true_score_projections",
]


def layer_plan(
    predictor: Predictor,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    legal: Legal,
    positional: Pattern,
    tile_size: int = 32,
) -> Plan:
    """The plan of predicted ∪ positional pairs, whatever kind the predictor is. Errors as in the predictors."""
    if isinstance(predictor, Tiles):
        return predictor.plan(q, k, legal, positional, tile_size)
    return build_plan(predictor.pattern(q, k, legal) | positional, legal, tile_size)


def layer_pattern(
    predictor: Predictor, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal, positional: Pattern
) -> Pattern:
    """The pattern predicted ∪ positional, before any plan widens it to tiles.

    Raises:
        PatternError: a tile predictor, which has no pattern but its plan.
    """
    if isinstance(predictor, Tiles):
        raise PatternError("tiles: expected a token-level predictor, this one gives plans (measure its plan)")
    return predictor.pattern(q, k, legal) | positional
