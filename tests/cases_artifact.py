"""An artifact with one layer of every kind."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from sparsefinder.artifact import Artifact, Card
from sparsefinder.predictors import (
    Clusters,
    Distance,
    Predictor,
    RowBudget,
    Tiles,
    WindowOnly,
    random_projections,
)

LAYERS, HEADS, DIM, RANK = 6, 2, 4, 3


def card(**changes: object) -> Card:
    made = Card(
        teacher="minilm",
        teacher_fingerprint="f" * 64,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=1,
        head_dim=DIM,
        alpha=1.5,
        head_scale=tuple((1.0, 0.25) for _ in range(LAYERS)),
        objective="listwise",
        served="listwise-r3",
        window_size=5,
        global_tokens=1,
        tile_size=32,
        calibration={"overall": {"recall": 0.91, "precision": None}},
        training={"command": "sparsefinder-train run", "seed": 0},
        libraries={"torch": torch.__version__},
    )
    return dataclasses.replace(made, **changes)


def layer(index: int) -> Predictor:
    metric, bilinear = (random_projections(HEADS, RANK, DIM, index, form) for form in ("metric", "bilinear"))
    bilinear = dataclasses.replace(bilinear, k_linear=torch.ones(HEADS, DIM), offset=torch.zeros(HEADS))
    kinds: tuple[Callable[[], Predictor], ...] = (
        lambda: Tiles(bilinear, threshold=-5.5, distance_weight=torch.full((HEADS,), -0.5)),
        lambda: Tiles(bilinear, keys_per_tile=12),
        lambda: Distance(metric, torch.ones(HEADS)),
        lambda: Clusters(metric, torch.randn(HEADS, 5, RANK), torch.ones(HEADS, dtype=torch.int64)),
        lambda: RowBudget(metric, 0.1),
        lambda: WindowOnly(3),
    )
    return kinds[index]()


def artifact(**changes: object) -> Artifact:
    torch.manual_seed(0)
    maps = tuple(random_projections(HEADS, RANK, DIM, index) for index in range(LAYERS))
    return Artifact(
        card(**changes),
        tuple(layer(index) for index in range(LAYERS)),
        projections={"hinge-r3": maps},
        centroids={"hinge-r3": tuple(torch.randn(HEADS, 5, RANK) for _ in range(LAYERS))},
        thresholds={"hinge-r3": tuple(torch.rand(HEADS) for _ in range(LAYERS))},
        delta={"encoder.layer.0.query.weight": torch.randn(3, 2)},
    )


def listing(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())
