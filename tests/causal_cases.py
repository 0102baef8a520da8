"""Tiny causal models with every predictor that a causal layer can ask, and what their layers were seen to do."""

from typing import Any

import tiny_llama
import torch
from torch import Tensor
from transformers import DynamicCache

from sparsefinder.hf import Attached, LayerCall, attach
from sparsefinder.patterns.positional import GlobalTokens, window
from sparsefinder.predictors import (
    Clusters,
    Distance,
    InvertedClusters,
    InvertedLists,
    Predictor,
    RowBudget,
    Score,
    Tiles,
    WindowOnly,
    random_projections,
)

HEADS, DIM = tiny_llama.HEADS, tiny_llama.DIM
MIXED = torch.tensor([8, 16, 5, 32])  # tile sizes of the heads


def predictors(kind: str, layers: int = tiny_llama.LAYERS) -> list[Predictor]:
    return [_predictor(kind, seed) for seed in range(layers)]


def _predictor(kind: str, seed: int) -> Predictor:
    metric = random_projections(HEADS, 4, DIM, seed, "metric")
    bilinear = random_projections(HEADS, 4, DIM, seed, "bilinear")
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Predictor] = {
        "tiles": Tiles(bilinear, threshold=-3.0, distance_weight=torch.full((HEADS,), -0.1)),
        "tiles by count": Tiles(metric, keys_per_tile=3),
        "window": WindowOnly(),
        "distance": Distance(metric, torch.full((HEADS,), 2.0)),
        "score": Score(bilinear, torch.full((HEADS,), 1.5)),
        "clusters": Clusters(
            metric, torch.randn(HEADS, 6, 4, generator=generator), torch.ones(HEADS, dtype=torch.long)
        ),
        "budget": RowBudget(bilinear, 0.1),
        "inverted": InvertedLists(torch.randn(HEADS, 6, DIM, generator=generator), torch.ones(HEADS), -1.0),
        "inverted metric": InvertedClusters(metric, torch.randn(HEADS, 6, 4, generator=generator), -1.0),
    }
    return made[kind]


KINDS = (
    "tiles", "tiles by count", "window", "distance", "score", "clusters", "budget", "inverted", "inverted metric",
)  # fmt: skip


def seen_calls(attached: Attached, mode: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, list[LayerCall]]:
    seen: list[LayerCall] = []
    with torch.no_grad(), attached.using(mode, observe=seen.append):
        hidden = attached.model(input_ids=ids, attention_mask=mask.long(), position_ids=tiny_llama.positions(mask))
    return hidden.last_hidden_state, seen


def attached_llama(kind: str, tile: int | Tensor, alpha: float = 1.5, **sizes: int) -> Attached:
    model = tiny_llama.causal_lm(**sizes)
    layers = model.config.num_hidden_layers
    extra = window(5) | GlobalTokens(2)
    return attach(model, alpha=alpha, predictors=predictors(kind, layers), positional=extra, tile_size=tile)


def grown_calls(
    attached: Attached, ids: Tensor, mask: Tensor, prompt: int, step: int = 1
) -> tuple[Tensor, list[LayerCall]]:
    """Hidden states of a prefill of `prompt` tokens and then `step` at a time, and every part of every layer."""
    seen: list[LayerCall] = []
    places, cache = tiny_llama.positions(mask), DynamicCache(config=attached.model.config)
    hidden, start = [], 0
    with torch.no_grad(), attached.generation(observe=seen.append):
        for end in range(prompt, ids.shape[1] + 1, step):
            came = attached.model(
                input_ids=ids[:, start:end], attention_mask=mask[:, :end].long(),
                position_ids=places[:, start:end], past_key_values=cache, use_cache=True,
            )  # fmt: skip
            hidden.append(came.last_hidden_state)
            start = end
    return torch.cat(hidden, 1), seen
