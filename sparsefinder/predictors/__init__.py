"""Predictors: frozen parameters of one layer that say, from q and k, which pairs attention will need.

Token-level predictors give a pattern, `Tiles` gives a plan; `layer_plan` and `layer_pattern` unify them.
"""

import itertools

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsefinder.edges import Edges
from sparsefinder.patterns.algebra import Pattern, context_of
from sparsefinder.patterns.content import InEdges
from sparsefinder.patterns.heads import at_layer
from sparsefinder.patterns.legal import Legal
from sparsefinder.patterns.positional import Nothing
from sparsefinder.plan import Plan, build_plan, plan_matrix
from sparsefinder.predictors.budget import RowBudget
from sparsefinder.predictors.chunks import ChunkClusters, RoutedChunks, chunk_means
from sparsefinder.predictors.clustered import Clustered, clustered_hashes
from sparsefinder.predictors.clustering import Clusters, mixed_share
from sparsefinder.predictors.controls import WindowOnly
from sparsefinder.predictors.distance import Distance
from sparsefinder.predictors.gate import Gate, block_features, gate_scores
from sparsefinder.predictors.inverted import InvertedClusters, InvertedLists
from sparsefinder.predictors.lsh import Lsh, Smyrf, lsh_rotations, smyrf_directions
from sparsefinder.predictors.projections import (
    Projections,
    project,
    random_projections,
    true_score_projections,
)
from sparsefinder.predictors.quantization import Quantization
from sparsefinder.predictors.routing import Routing, ema_update
from sparsefinder.predictors.score import Score
from sparsefinder.predictors.svd import svd_projections
from sparsefinder.predictors.tiles import Tiles, log_distance, tile_means, tile_scores
from sparsefinder.predictors.tokens import ranks_over_sequence, unpicked_queries
from sparsefinder.predictors.topk import TopKeys

Predictor = (
    Distance
    | Score
    | Clusters
    | RowBudget
    | Tiles
    | WindowOnly
    | Quantization
    | TopKeys
    | Lsh
    | Smyrf
    | Routing
    | Clustered
    | InvertedLists
    | InvertedClusters
    | ChunkClusters
    | RoutedChunks
    | Gate
)

PREDICTORS: dict[str, type[Predictor]] = {
    "distance": Distance,
    "score": Score,
    "clusters": Clusters,
    "budget": RowBudget,
    "tiles": Tiles,
    "window": WindowOnly,
    "quantization": Quantization,
    "topk": TopKeys,
    "lsh": Lsh,
    "smyrf": Smyrf,
    "routing": Routing,
    "clustered": Clustered,
    "inverted": InvertedLists,
    "inverted_metric": InvertedClusters,
    "chunks": ChunkClusters,
    "routed_chunks": RoutedChunks,
    "gate": Gate,
}

__all__ = [
    "PREDICTORS",
    "ChunkClusters",
    "Clustered",
    "Clusters",
    "Distance",
    "Gate",
    "InvertedClusters",
    "InvertedLists",
    "Lsh",
    "Predictor",
    "Projections",
    "Quantization",
    "RoutedChunks",
    "Routing",
    "RowBudget",
    "Score",
    "Smyrf",
    "Tiles",
    "TopKeys",
    "WindowOnly",
    "block_features",
    "chunk_means",
    "clustered_hashes",
    "ema_update",
    "gate_scores",
    "layer_pattern",
    "layer_plan",
    "log_distance",
    "lsh_rotations",
    "mixed_share",
    "predictor_to",
    "project",
    "random_projections",
    "ranks_over_sequence",
    "smyrf_directions",
    "svd_projections",
    "tile_means",
    "tile_scores",
    "true_score_projections",
    "unpicked_queries",
]


def layer_plan(
    predictor: Predictor,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    legal: Legal,
    positional: Pattern,
    tile_size: int | Int[Tensor, " H"] = 32,
    layer: int = 0,
) -> Plan:
    """The plan of predicted ∪ positional pairs, whatever kind the predictor is. Errors as in the predictors.

    layer: of the model, for positional patterns that differ from layer to layer.
    """
    ctx, positional = context_of(legal, layer), at_layer(positional, layer)
    if isinstance(predictor, Tiles):
        return predictor.plan(q, k, legal, positional, tile_size, ctx)
    return build_plan(predictor.pattern(q, k, legal) | positional, legal, tile_size, ctx, heads=q.shape[1])


def layer_pattern(
    predictor: Predictor,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    legal: Legal,
    positional: Pattern,
    tile_size: int = 32,
) -> Pattern:
    """The pattern predicted ∪ positional, before a plan widens it to tiles. Errors as in the predictors.

    A tile predictor chooses for whole tiles, so its pattern is every row of a tile × the tile's chosen keys (and, as in
    its plan, every query itself); only for it does `tile_size` matter.
    """
    if not isinstance(predictor, Tiles):
        return predictor.pattern(q, k, legal) | positional
    chosen = predictor.plan(q, k, legal, Nothing(), tile_size)
    return InEdges(_plan_edges(chosen, legal)) | positional


def _plan_edges(plan: Plan, legal: Legal) -> Edges:
    batch, heads, _, _ = plan.shape
    pairs = itertools.product(range(batch), range(heads))
    found = [plan_matrix(plan, legal, b, h).flatten().nonzero().flatten() for b, h in pairs]
    counts = torch.tensor([0] + [edges.shape[0] for edges in found], device=plan.keys.device)
    return Edges(counts.cumsum(0), torch.cat(found), plan.shape)


def predictor_to(predictor: Predictor, device: torch.device | str) -> Predictor:
    """The same predictor with its tensors on another device."""
    tensors = {name: tensor.to(device) for name, tensor in predictor.to_tensors().items()}
    return predictor.from_tensors(tensors, predictor.settings())
