"""The rows of `benchmarks.perplexity`: who chooses the keys, and how a choice is brought to a computed density."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

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
from sparsefinder.predictors import Predictor, Routing, layer_plan
from sparsefinder.predictors.lsh import Lsh, lsh_rotations
from training.calibrate import choose, thresholds_at, with_thresholds
from training.config import Target
from training.points import Points, cuttable

SINKS = 4  # first tokens that every query reads
BLOCK = 32
SAMPLED = 10  # every so many layers, for the sizes of hashing and routing
BUCKETS = tuple(2 * half for half in (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1))
CENTROIDS = 64  # of Routing
PICKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens of a centroid
STEPS = np.arange(-24.0, 0.01, 0.1)  # log of the attention that a tile gives to a key, in the mean over its rows
ALLOTTED = tuple(np.geomspace(0.01, 0.6, 64).tolist())
Size = TypeVar("Size")
PlanFor = Callable[[LayerInput], Plan]


@dataclass(frozen=True)
class Row:
    """A line of the table: how the plan of a layer is made (None = all legal keys), and the density aimed at."""

    name: str
    aim: float | None
    plan_for: PlanFor | None


def predicted(
    layers: Sequence[Predictor | None],
    points: Sequence[Points],
    seen: Sequence[LayerInput],
    positional: Pattern,
    tile_size: int,
    aims: Sequence[float],
) -> Iterator[Row]:
    """The artifact's maps, a density allotted to heads where it buys most.

    At another length than that of the held-out graphs the same thresholds keep another share of the pairs, so the
    density to allot there is the one whose plans have the density that is aimed at on the first text, `seen`.
    """

    def plan(call: LayerInput, served: Sequence[Predictor]) -> Plan:
        return layer_plan(served[call.layer], call.q, call.k, call.legal, positional, tile_size, call.layer)

    def density(allotted: float) -> float:
        served = allotted_to(layers, points, allotted)
        return _density([plan(call, served) for call in seen])

    for aim in aims:
        served = allotted_to(layers, points, _sized(ALLOTTED, density, aim))
        yield Row("predicted", aim, functools.partial(plan, served=served))


def allotted_to(layers: Sequence[Predictor | None], points: Sequence[Points], density: float) -> list[Predictor]:
    """The predictors with thresholds for each head that keep this density of the graphs behind the points."""
    _, cuts = choose(points, Target("density", density))
    return [
        with_thresholds(cuttable(layer), thresholds_at(part, at))
        for layer, part, at in zip(layers, points, cuts, strict=True)
    ]


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
        self.legal += causal_pairs(*call.q.shape[:3])

    def rows(self, aims: Sequence[float]) -> Iterator[Row]:
        """One for every density, once the passes have been seen."""
        for aim in aims:
            yield Row("oracle: pooled attention", aim, functools.partial(self.plan, aim=aim))

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


def content_rows(
    seen: Sequence[LayerInput],
    routing: Sequence[Routing],
    positional: Pattern,
    tile_size: int,
    aims: Sequence[float],
    every: int = SAMPLED,
) -> Iterator[Row]:
    """Hashing and routing, beside the positional pattern, with as many buckets or picks as give a density.

    The sizes are chosen on every so many layers of the first text, `seen`, for all layers together. Routing's centroids
    rank the whole text, later tokens too, which is to its advantage.
    """

    def hashed(call: LayerInput, size: int) -> Plan:
        _, heads, _, dim = call.q.shape
        predictor = Lsh(lsh_rotations(heads, dim, size, rounds=1, seed=0))
        return layer_plan(predictor, call.q, call.k, call.legal, positional, tile_size, call.layer)

    def routed(call: LayerInput, size: int) -> Plan:
        everyone, predictor = replace(call.legal, causal=False), replace(routing[call.layer], window=size)
        pattern = predictor.pattern(call.q, call.k, everyone) | positional
        return build_plan(pattern, call.legal, tile_size, heads=call.q.shape[1])

    few = [call for call in seen if call.layer % every == every // 2]
    for name, plan_of, sizes in (("Reformer, keys apart", hashed, BUCKETS), ("Routing", routed, PICKS)):
        density = functools.partial(_density_of, plan_of, few)
        for aim in aims:
            yield Row(name, aim, functools.partial(plan_of, size=_sized(sizes, density, aim)))


def _density_of(plan_of: Callable[[LayerInput, int], Plan], calls: Sequence[LayerInput], size: int) -> float:
    return _density([plan_of(call, size) for call in calls])


def causal_pairs(batch: int, heads: int, tokens: int) -> int:
    """Legal pairs of a causal layer without padding."""
    return batch * heads * tokens * (tokens + 1) // 2


def _density(plans: Sequence[Plan]) -> float:
    """Computed pairs of plans of causal layers of one length, as a share of the legal ones."""
    return sum(float(computed_pairs(plan).sum()) for plan in plans) / sum(
        causal_pairs(*plan.shape[:3]) for plan in plans
    )


def positional_rows(tokens: int, heads: int, tile_size: int, aims: Sequence[float]) -> Iterator[Row]:
    """Patterns that know no content, each of the size whose plan comes nearest to a density."""
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
            yield Row(name, aim, _fixed(_nearest(patterns, tokens, tile_size, aim), heads, tile_size))


def _nearest(patterns: Sequence[Pattern], tokens: int, tile_size: int, aim: float) -> Pattern:
    """The first that is dense enough."""
    legal = legal_full(1, tokens, tokens, causal=True)

    def density(pattern: Pattern) -> float:
        return float(computed_pairs(build_plan(pattern, legal, tile_size, heads=1)).sum()) / causal_pairs(1, 1, tokens)

    return _sized(patterns, density, aim)


def _sized(sizes: Sequence[Size], density: Callable[[Size], float], aim: float) -> Size:
    """The first size that is dense enough, the last one where none is; by bisection, since plans grow with a size."""
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if density(sizes[middle]) >= aim else (middle + 1, high)
    return sizes[low]


def _fixed(pattern: Pattern, heads: int, tile_size: int) -> PlanFor:
    """The same plan in every layer and for every text of a length: made once."""
    known: dict[tuple[int, ...], Plan] = {}

    def plan(call: LayerInput) -> Plan:
        key = tuple(call.q.shape[:3])
        if key not in known:
            known[key] = build_plan(pattern, call.legal, tile_size, heads=heads)
        return known[key]

    return plan
