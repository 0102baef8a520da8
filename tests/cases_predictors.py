"""Maps, sequences and one predictor of every kind, with what tests ask of patterns and plans."""

import numpy as np
import oracles_predict as oracle
import torch
from torch import Tensor

from sparsefinder.patterns.algebra import Pattern, materialize
from sparsefinder.patterns.legal import Legal
from sparsefinder.plan import Plan
from sparsefinder.predictors import (
    Clusters,
    Distance,
    Predictor,
    Projections,
    RowBudget,
    Score,
    Tiles,
    WindowOnly,
    true_score_projections,
)

HEADS, DIM, RANK = 4, 8, 3


def maps(form: str = "metric", *, seed: int = 0, unit: bool = False) -> Projections:
    g = torch.Generator().manual_seed(seed)
    low, wide = (HEADS, RANK), (HEADS, RANK, DIM)
    parts = [torch.randn(*shape, generator=g) / 2 for shape in (wide, wide, low, low)]
    if form == "metric":
        return Projections(*parts, form="metric", unit=unit)
    linear = [torch.randn(HEADS, DIM, generator=g) / 4 for _ in range(2)]
    return Projections(
        *parts, form="bilinear", unit=unit, q_linear=linear[0], k_linear=linear[1], offset=torch.ones(HEADS)
    )


def sequences(batch: int, tokens: int, seed: int = 0, kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, HEADS, tokens, DIM, generator=g), torch.randn(batch, kv_heads, tokens, DIM, generator=g)


def every_predictor(seed: int = 0) -> dict[str, Predictor]:
    metric, bilinear = maps(seed=seed), maps("bilinear", seed=seed)
    centroids = torch.randn(HEADS, 70, RANK, generator=torch.Generator().manual_seed(seed))
    weight = torch.tensor([-0.5, 0.0, 0.25, -1.0])
    return {
        "distance": Distance(metric, torch.tensor([0.5, 1.0, 1.5, 2.0])),
        "score": Score(bilinear, torch.tensor([0.0, 1.0, 2.0, 3.0])),
        "clusters": Clusters(metric, centroids, torch.tensor([1, 2, 5, 9])),
        "budget near": RowBudget(metric, 0.2),
        "budget high": RowBudget(bilinear, 0.07),
        "budget unit": RowBudget(maps(unit=True, seed=seed), 0.3),
        "oracle": RowBudget(true_score_projections(HEADS, DIM, torch.ones(HEADS)), 0.1),
        "tiles": Tiles(bilinear, threshold=-4.0, distance_weight=weight),
        "tiles best": Tiles(metric, keys_per_tile=5),
        "tiles unit": Tiles(maps("bilinear", unit=True, seed=seed), keys_per_tile=3, distance_weight=weight),
        "window": WindowOnly(2),
    }


def graph(pattern: Pattern, legal: Legal, b: int, h: int) -> oracle.Graph:
    return {(int(i), int(j)) for i, j in materialize(pattern, legal, b, h).nonzero()}


def lists(plan: Plan, b: int, shift: int = 0) -> list[tuple[int, int, int, list[int], list[int]]]:
    """The tiles of one item, positions counted from `shift`."""
    out = []
    for t in (plan.tile_batch == b).nonzero().flatten().tolist():
        part = slice(int(plan.offsets[t]), int(plan.offsets[t + 1]))
        place = int(plan.tile_head[t]), int(plan.tile_start[t]) - shift, int(plan.tile_rows[t])
        out.append((*place, (plan.keys[part] - shift).tolist(), plan.first_row[part].tolist()))
    return out


def head_arrays(projections: Projections, q: Tensor, k: Tensor, h: int) -> tuple[np.ndarray, np.ndarray]:
    """q' and k' of one head of item 0 by the naive loop, float64."""
    group = q.shape[1] // k.shape[1]
    parts = (projections.q_map, projections.q_bias, q[0, h]), (projections.k_map, projections.k_bias, k[0, h // group])
    low_q, low_k = (
        oracle.linear(w[h].double().numpy(), b[h].double().numpy(), x.double().numpy()) for w, b, x in parts
    )
    return low_q, low_k


def bilinear_scores(projections: Projections, q: Tensor, k: Tensor, h: int) -> np.ndarray:
    low_q, low_k = head_arrays(projections, q, k, h)
    u, w = projections.q_linear[h].double().numpy(), projections.k_linear[h].double().numpy()
    x, y = q[0, h].double().numpy(), k[0, h // (q.shape[1] // k.shape[1])].double().numpy()
    return low_q @ low_k.T + (x @ u)[:, None] + (y @ w)[None, :] + float(projections.offset[h])
