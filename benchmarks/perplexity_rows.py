"""The rows of `benchmarks.perplexity`: who chooses the keys, and how a choice is brought to a computed density."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.edges import head_probabilities
from sparsefinder.hf import LayerInput
from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.compositions import bigbird, longformer
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.positional import GlobalTokens, window
from sparsefinder.plan import Plan, ScoreAtLeast, build_plan, computed_pairs, plan_from_tile_scores
from sparsefinder.predictors import Predictor, layer_plan
from sparsefinder.predictors.lsh import Lsh, lsh_rotations
from training.calibrate import choose, thresholds_at, with_thresholds
from training.config import Target
from training.points import Points, cuttable

SINKS = 4  # first tokens that every query reads
BLOCK = 32
STEPS = np.arange(-24.0, 0.01, 0.1)  # log of the attention that a tile gives to a key, in the mean over its rows
PlanFor = Callable[[LayerInput], Plan]


@dataclass(frozen=True)
class Row:
    """A line of the table: how the plan of a layer is made (None = all legal keys), and the density aimed at."""

    name: str
    aim: float | None
    plan_for: PlanFor | None


def predicted(
    layers: Sequence[Predictor], points: Sequence[Points], positional: Pattern, tile_size: int, aims: Sequence[float]
) -> Iterator[Row]:
    """The artifact's maps, a density allotted to heads where it buys most."""
    for aim in aims:
        _, cuts = choose(points, Target("density", aim))
        cut = [
            with_thresholds(cuttable(layer), thresholds_at(part, at))
            for layer, part, at in zip(layers, points, cuts, strict=True)
        ]

        def plan(call: LayerInput, cut: Sequence[Predictor] = cut) -> Plan:
            return layer_plan(cut[call.layer], call.q, call.k, call.legal, positional, tile_size, call.layer)

        yield Row("predicted", aim, plan)


@dataclass(eq=False)
class PooledMass:
    """The oracle: keys by the attention that a tile really gives them, one threshold for all heads and layers.

    No choice of as many (tile, key) pairs keeps more attention. Its thresholds come from passes that `see` watched.
    """

    positional: Pattern
    tile_size: int
    pairs: Float[np.ndarray, " S"] = field(default_factory=lambda: np.zeros(STEPS.size + 1))
    forced: float = 0.0
    legal: float = 0.0

    def see(self, call: LayerInput) -> None:
        """Count the pairs of a layer, beside those that are read in any case, by their pooled attention."""
        scores = self._scores(call)
        none = plan_from_tile_scores(
            torch.full_like(scores, -torch.inf), ScoreAtLeast(0.0), self.positional, call.legal, self.tile_size
        )
        owner = torch.repeat_interleave(none.offsets.diff())
        tile = none.tile_start[owner] // self.tile_size
        scores[none.tile_batch[owner].long(), none.tile_head[owner].long(), tile.long(), none.keys.long()] = -torch.inf
        found = scores[scores > -torch.inf].numpy()
        self.pairs += np.bincount(np.searchsorted(STEPS, found, side="right"), minlength=STEPS.size + 1)
        self.forced += float(computed_pairs(none).sum())
        self.legal += call.q.shape[0] * call.q.shape[1] * call.q.shape[2] * (call.q.shape[2] + 1) / 2

    def plan(self, call: LayerInput, aim: float) -> Plan:
        """The plan of a layer at a computed density."""
        above = self.pairs[::-1].cumsum()[::-1][1:] * self.tile_size
        density = (self.forced + above) / self.legal
        least = float(np.interp(-aim, -density, STEPS))
        return plan_from_tile_scores(
            self._scores(call), ScoreAtLeast(least), self.positional, call.legal, self.tile_size
        )

    def _scores(self, call: LayerInput) -> Float[Tensor, "B H T M"]:
        batch, heads, n, _ = call.q.shape
        tiles, group = -(-n // self.tile_size), heads // call.k.shape[1]
        out = torch.full((batch, heads, tiles, n), -torch.inf)
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        before = torch.arange(n)[None] < (torch.arange(tiles) * self.tile_size)[:, None]
        for b in range(batch):
            for h in range(heads):
                p = head_probabilities(call.q[b, h], call.k[b, h // group], call.scale[h], None, causal, call.alpha)
                pooled = torch.stack([part.mean(0) for part in torch.split(p, self.tile_size)])
                out[b, h] = torch.where(before & (pooled > 0), pooled.clamp(min=1e-30).log(), -torch.inf)
        return out


def positional_rows(tokens: int, heads: int, head_dim: int, tile_size: int, aims: Sequence[float]) -> Iterator[Row]:
    """Patterns that know no content, and hashing, each of the size whose plan comes nearest to a density."""
    window_sizes = [2 * radius + 1 for radius in range(8, tokens, max(8, tokens // 64))]
    families: dict[str, list[Pattern]] = {
        "window + sinks": [window(size) | GlobalTokens(SINKS) for size in window_sizes],
        "Longformer, dilated": [longformer(size, SINKS, dilation=2) for size in window_sizes],
        "BigBird": [
            bigbird(BLOCK, random_blocks=count, window_blocks=2 * (count // 2) + 1, causal=True)
            for count in range(1, tokens // BLOCK // 2)
        ],
    }
    for name, patterns in families.items():
        for aim in aims:
            yield Row(name, aim, _fixed(_nearest(patterns, tokens, heads, tile_size, aim), heads, tile_size))
    for aim in aims:
        hashed = Lsh(lsh_rotations(heads, head_dim, 2 * max(1, round(0.5 / aim)), rounds=1, seed=0))
        own = window(BLOCK + 1) | GlobalTokens(SINKS)

        def plan(call: LayerInput, hashed: Lsh = hashed, own: Pattern = own) -> Plan:
            return layer_plan(hashed, call.q, call.k, call.legal, own, tile_size, call.layer)

        yield Row("LSH, keys apart", aim, plan)


def _nearest(patterns: Sequence[Pattern], tokens: int, heads: int, tile_size: int, aim: float) -> Pattern:
    """By bisection: plans grow with the size of a pattern."""
    legal = legal_full(1, tokens, tokens, causal=True)
    low, high = 0, len(patterns) - 1
    while low < high:
        middle = (low + high) // 2
        pairs = int(computed_pairs(build_plan(patterns[middle], legal, tile_size, heads=1)).sum())
        low, high = (middle + 1, high) if pairs < aim * tokens * (tokens + 1) / 2 else (low, middle)
    return patterns[low]


def _fixed(pattern: Pattern, heads: int, tile_size: int) -> PlanFor:
    """The same plan in every layer and for every text of a length: made once."""
    known: dict[tuple[int, ...], Plan] = {}

    def plan(call: LayerInput) -> Plan:
        key = tuple(call.q.shape[:3])
        if key not in known:
            known[key] = build_plan(pattern, call.legal, tile_size, heads=heads)
        return known[key]

    return plan
