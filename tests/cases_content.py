"""Samples of every content predictor, for laws that all of them keep. Queries and keys are small whole numbers, so that
float32 is exact, ties are many, and a naive definition must break them alike."""

import torch
from torch import Tensor

from sparsefinder.patterns.algebra import Pattern, materialize
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors import (
    ChunkClusters,
    Clustered,
    Gate,
    InvertedClusters,
    InvertedLists,
    Lsh,
    Predictor,
    Projections,
    Quantization,
    RoutedChunks,
    Routing,
    Smyrf,
    TopKeys,
    clustered_hashes,
    lsh_rotations,
    smyrf_directions,
)

HEADS, DIM, RANK = 4, 8, 3


def whole(*shape: int, seed: int, low: int = -3, high: int = 3) -> Tensor:
    """Small whole numbers as floats."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).float()


def unit(*shape: int, seed: int) -> Tensor:
    """Directions."""
    return torch.nn.functional.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def maps(form: str = "metric", seed: int = 0) -> Projections:
    parts = [whole(HEADS, RANK, DIM, seed=seed + s, low=-1, high=1) for s in (0, 1)]
    biases = [whole(HEADS, RANK, seed=seed + s, low=-1, high=1) for s in (2, 3)]
    return Projections(*parts, *biases, form)


def gate_maps(seed: int = 0) -> Projections:
    """Bilinear maps of `[mean; max]` with a linear term of the keys."""
    g = torch.Generator().manual_seed(seed)
    parts = [torch.randn(HEADS, RANK, 2 * DIM, generator=g) / 4 for _ in range(2)]
    linear = torch.randn(HEADS, 2 * DIM, generator=g) / 4
    return Projections(*parts, *[torch.zeros(HEADS, RANK)] * 2, "bilinear", k_linear=linear)


def graph(pattern: Pattern, legal: Legal, h: int, b: int = 0) -> set[tuple[int, int]]:
    """The pairs of one item and head."""
    return {(int(i), int(j)) for i, j in materialize(pattern, legal, b, h).nonzero()}


def sequences(batch: int, tokens: int, seed: int = 0, kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    return whole(batch, HEADS, tokens, DIM, seed=seed), whole(batch, kv_heads, tokens, DIM, seed=seed + 1)


def content_predictors(seed: int = 0) -> dict[str, Predictor]:
    """One of every kind, and of every form that behaves differently."""
    return {
        "quantization": Quantization(maps(seed=seed), 5),
        "quantization wide": Quantization(maps(seed=seed), 40),
        "topk near": TopKeys(maps(seed=seed), 3),
        "topk high": TopKeys(maps("bilinear", seed=seed), 4),
        "lsh": Lsh(lsh_rotations(HEADS, DIM, 6, 3, seed)),
        "lsh shared": Lsh(lsh_rotations(HEADS, DIM, 4, 20, seed), shared=True),
        "smyrf": Smyrf(smyrf_directions(HEADS, DIM, 2, seed), 4),
        "routing": Routing(unit(HEADS, 7, DIM, seed=seed)),
        "routing narrow": Routing(unit(HEADS, 70, DIM, seed=seed), 2),
        "clustered": Clustered(clustered_hashes(HEADS, DIM, 11, seed), 6, 3),
        "inverted": InvertedLists(whole(HEADS, 9, DIM, seed=seed), torch.full((HEADS,), 0.3), -1.5),
        "inverted root": InvertedLists(
            whole(HEADS, 9, DIM, seed=seed), torch.full((HEADS,), 0.3), -1.5, whole(HEADS, DIM, DIM, seed=seed + 4)
        ),
        "inverted metric": InvertedClusters(maps(seed=seed), whole(HEADS, 6, RANK, seed=seed), -2.0),
        "chunks": ChunkClusters(maps(seed=seed), whole(HEADS, 6, RANK, seed=seed), 2, 3),
        "routed tokens": RoutedChunks(maps(seed=seed), whole(HEADS, 6, RANK, seed=seed)),
        "routed chunks": RoutedChunks(maps(seed=seed), whole(HEADS, 6, RANK, seed=seed), 2, 3),
        "gate top": Gate(gate_maps(seed), 3, top=2),
        "gate share": Gate(gate_maps(seed), 1, threshold=-2.6),
    }
