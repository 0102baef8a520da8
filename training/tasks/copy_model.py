"""The transformer of the copying task: attention layers that take a pattern and a probability map, then one FFN.

That is one block of Yun et al. (2020, equation 2, section 5), with 1 to 4 attention layers, for G models at once.
"""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sparsefinder.errors import ShapeError
from sparsefinder.patterns.algebra import Pattern, context_of, materialize
from sparsefinder.patterns.heads import at_layer
from sparsefinder.patterns.legal import legal_full
from training.tasks.together import linear, weight

ProbabilityMap = Callable[[Tensor, Tensor], Tensor]  # (scores, True = may get weight) -> probabilities
Pairs = Callable[[int, Tensor, Tensor], Tensor]  # (layer, q, k `[G, B, H, n, d]`) -> bool, as wide as `[G, B, H, n, n]`


class CopyModel(nn.Module):
    """`forward(ids, pairs, apply)` gives logits; what each layer may read is the caller's business."""

    def __init__(
        self, models: int, layers: int, heads: int, width: int, tokens: int, vocabulary: int, seed: int = 0
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.models, self.layers, self.heads, self.tokens = models, layers, heads, tokens
        self.symbols = weight(models, vocabulary, width, draw, math.sqrt(vocabulary))
        self.qkv = nn.ParameterList(weight(models, width, 3 * width, draw) for _ in range(layers))
        self.out = nn.ParameterList(weight(models, width, width, draw, 0.5) for _ in range(layers))
        self.up, self.down = weight(models, width, 2 * width, draw), weight(models, 2 * width, width, draw, 0.5)
        self.up_bias = nn.Parameter(torch.zeros(models, 2 * width))
        self.readout = weight(models, width, vocabulary, draw)
        self.positions = 2 * sinusoids(tokens, width)

    def forward(self, ids: Int[Tensor, "B n"], pairs: Pairs, apply: ProbabilityMap) -> Float[Tensor, "G B n V"]:
        """Logits of every model for the same ids."""
        x = self.symbols[:, ids] + self.positions
        for layer in range(self.layers):
            x = x + self._attention(x, layer, pairs, apply)
        x = x + linear(torch.relu(linear(_norm(x), self.up, self.up_bias)), self.down)
        return linear(_norm(x), self.readout)

    def _attention(self, x: Tensor, layer: int, pairs: Pairs, apply: ProbabilityMap) -> Tensor:
        columns = linear(_norm(x), self.qkv[layer]).view(*x.shape[:-1], 3, self.heads, -1)
        q, k, v = columns.permute(3, 0, 1, 4, 2, 5).unbind(0)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mixed = apply(scores, pairs(layer, q, k)) @ v
        return linear(mixed.transpose(2, 3).flatten(-2), self.out[layer])


def sinusoids(tokens: int, width: int) -> Float[Tensor, "n D"]:
    """Sines and cosines of the position (Vaswani et al., 2017, section 3.5), so that a shift is a linear map."""
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angle = torch.arange(tokens)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


def pattern_masks(patterns: Sequence[Pattern], layers: int, heads: int, tokens: int) -> Bool[Tensor, "G L H n n"]:
    """What each model's layers and heads may read, for patterns that do not look at q and k."""
    legal = legal_full(1, tokens, tokens)

    def matrix(pattern: Pattern, layer: int, h: int) -> Tensor:
        return materialize(at_layer(pattern, layer), legal, 0, h, context_of(legal, layer))

    rows = [[[matrix(p, layer, h) for h in range(heads)] for layer in range(layers)] for p in patterns]
    return torch.stack([torch.stack([torch.stack(of_layer) for of_layer in of_model]) for of_model in rows])


def by_masks(masks: Bool[Tensor, "G L H n n"]) -> Pairs:
    """Pairs that are the same for every text.

    Raises:
        ShapeError: masks without the five axes.
    """
    if masks.ndim != 5:
        raise ShapeError(f"masks: expected [G, L, H, n, n], got {tuple(masks.shape)}")
    return lambda layer, q, k: masks[:, None, layer]


def _norm(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:])  # its gain is part of the map that follows
