"""Samples of every content predictor, for laws that all of them keep. Queries and keys are small whole numbers, so that
float32 is exact, ties are many, and a naive definition must break them alike."""

import torch
from torch import Tensor

from sparsefinder.predictors import (
    Lsh,
    Predictor,
    Projections,
    Quantization,
    Smyrf,
    TopKeys,
    lsh_rotations,
    smyrf_directions,
)

HEADS, DIM, RANK = 4, 8, 3


def whole(*shape: int, seed: int, low: int = -3, high: int = 3) -> Tensor:
    """Small whole numbers as floats."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).float()


def maps(form: str = "metric", seed: int = 0) -> Projections:
    parts = [whole(HEADS, RANK, DIM, seed=seed + s, low=-1, high=1) for s in (0, 1)]
    biases = [whole(HEADS, RANK, seed=seed + s, low=-1, high=1) for s in (2, 3)]
    return Projections(*parts, *biases, form)


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
    }
