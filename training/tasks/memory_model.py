"""The transformer of Wang & E (2024, section 2) with T5-type relative bias, for G models at once.

    x⁰ = W_E x + b;   x ← x + Σ_h W_O^h Σ_{s<t} a^h_{ts} W_V^h x_s;   x ← x + FFN(x)   (last layer: y = FFN(x))

with weights `a_{ts} = exp(score_{ts})`, divided by their sum where `normalised`. The bias is `R_{ts} = p_h φ(t − s)`,
φ = −log or −identity, p_h ≥ 0 trainable. `product` says how tokens enter the score besides:

none   `R_{ts}`                          (dot-product-free)
dot    `q_t · k_s + R_{ts}`              (the usual)
gate   `u_h · x_t + R_{ts}`              (one vector a head; a normalisation cancels it)
slope  `exp(u_h · x_t) R_{ts}`           (one vector a head: the token sets how steep the bias is)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sparsefinder.errors import ConfigError
from training.tasks.together import linear, weight

Bias = Literal["log", "lin"]
Product = Literal["none", "dot", "gate", "slope"]

STEEPEST = 4.0  # bound of `u_h · x_t`, so that no step of training makes a score infinite
LARGEST = 20.0  # bound of a score whose exponential is not normalised


@dataclass(frozen=True)
class Setting:
    """One model among the G, and how many of the heads it may use (None = all).

    All models that are trained together share `product` and `normalised`, so that none pays for another's parts.
    """

    product: Product = "dot"
    bias: Bias = "log"
    normalised: bool = True
    heads: int | None = None

    def __post_init__(self) -> None:
        if self.product not in get_args(Product) or self.bias not in get_args(Bias):
            raise ConfigError(f"setting: expected a known product and bias, got {self.product!r} and {self.bias!r}")


@dataclass(frozen=True)
class Size:
    """What all G models share. `readout`: hidden units of the FFNs; 0 = no FFN at all, a linear readout."""

    layers: int = 1
    heads: int = 8
    inputs: int = 1
    width: int = 32
    head_width: int = 8
    readout: int = 64


class MemoryModel(nn.Module):
    """`forward(x [B, n, inputs])` gives `y [G, B, n]`. Raises ConfigError where the settings differ in their form."""

    def __init__(self, settings: Sequence[Setting], size: Size, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        g, d, inner = len(settings), size.width, size.heads * size.head_width
        self.size, self.settings = size, tuple(settings)
        self.embed, self.embed_bias = weight(g, size.inputs, d, draw), nn.Parameter(torch.zeros(g, d))
        self.query, self.key, self.value = (_stack(size.layers, g, d, inner, draw) for _ in range(3))
        self.out = _stack(size.layers, g, inner, d, draw)
        self.follow = _stack(size.layers, g, d, size.heads, draw, 0.1)
        start = torch.stack([_spread(s.heads or size.heads, size.heads) for s in settings])
        self.log_rate = nn.ParameterList(nn.Parameter(start.clone()) for _ in range(size.layers))
        if size.readout:
            ends = [d] * (size.layers - 1) + [1]
            self.up = _stack(size.layers, g, d, size.readout, draw)
            self.up_bias = nn.ParameterList(nn.Parameter(torch.zeros(g, size.readout)) for _ in ends)
            self.down = nn.ParameterList(weight(g, size.readout, end, draw, 0.5) for end in ends)
        self.last = weight(g, d, 1, draw)
        self.last_bias = nn.Parameter(torch.zeros(g, 1))
        self._register_settings(size)

    def _register_settings(self, size: Size) -> None:
        forms = {(s.product, s.normalised) for s in self.settings}
        if len(forms) != 1:
            raise ConfigError(f"settings: expected one product and normalisation for all, got {sorted(forms)}")
        self.product, self.normalised = forms.pop()
        self.is_log = torch.tensor([s.bias == "log" for s in self.settings])[:, None, None, None, None]
        used = torch.tensor([size.heads if s.heads is None else s.heads for s in self.settings])
        self.head_used = (torch.arange(size.heads)[None] < used[:, None]).float()[:, None, :, None, None]

    def forward(self, x: Float[Tensor, "B n inputs"]) -> Float[Tensor, "G B n"]:
        """The output of every model for the same inputs."""
        h = linear(x.expand(len(self.settings), *x.shape), self.embed, self.embed_bias)
        for layer in range(self.size.layers):
            h = h + self._attention(h, layer)
            if self.size.readout:
                hidden = torch.relu(linear(h, self.up[layer], self.up_bias[layer]))
                step = linear(hidden, self.down[layer])
                if layer == self.size.layers - 1:
                    return (step + self.last_bias[:, None, None]).squeeze(-1)
                h = h + step
        return linear(h, self.last, self.last_bias).squeeze(-1)

    def attention_weights(self, h: Float[Tensor, "G B n D"], layer: int) -> Float[Tensor, "G _ H n n"]:
        """`a_{ts}`, zero unless s < t; the axis of texts is 1 where no model looks at the tokens."""
        n = h.shape[2]
        distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        reach = distance.clamp(min=1).float()
        bias = torch.where(self.is_log, -reach.log(), -reach) * self.log_rate[layer].exp()[:, None, :, None, None]
        scores = bias
        if self.product in ("gate", "slope"):
            follow = linear(h, self.follow[layer]).transpose(2, 3)[..., None]  # [G, B, H, n, 1]
            bounded = STEEPEST * torch.tanh(follow / STEEPEST)
            scores = bias + bounded if self.product == "gate" else bias * bounded.exp()
        if self.product == "dot":
            q, k = (self._split(linear(h, w[layer])) for w in (self.query, self.key))
            scores = torch.matmul(q, k.transpose(-1, -2) * self.size.head_width**-0.5) + bias
        scores = scores.masked_fill(distance <= 0, -torch.inf)
        if not self.normalised:
            free: Tensor = scores.clamp(max=LARGEST).exp()
            return free
        shares = torch.softmax(scores.masked_fill(distance[:, :1] == 0, 0.0), -1)  # the first row has no past at all
        return shares * (distance > 0)

    def _attention(self, h: Tensor, layer: int) -> Tensor:
        v = self._split(linear(h, self.value[layer]))
        mixed = self.attention_weights(h, layer) @ v * self.head_used
        return linear(mixed.transpose(2, 3).flatten(-2), self.out[layer])

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.size.heads, self.size.head_width).transpose(2, 3)


def _spread(used: int, heads: int) -> Float[Tensor, " H"]:
    """Logarithms of the first rates: evenly from e^−1.5 to e^1.5 over the heads that are used."""
    rates = torch.linspace(-1.5, 1.5, used) if used > 1 else torch.zeros(1)
    return torch.nn.functional.pad(rates, (0, heads - used))


def _stack(
    layers: int, models: int, inputs: int, outputs: int, draw: torch.Generator, gain: float = 1.0
) -> nn.ParameterList:
    return nn.ParameterList(weight(models, inputs, outputs, draw, gain) for _ in range(layers))
