"""Parts of `benchmarks.attention` on random numbers, so of speed only: given key lists, and padded batches."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.paired import Ways, paired
from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.patterns.legal import Legal, legal_from_mask, legal_full
from sparsefinder.patterns.positional import GlobalTokens, window
from sparsefinder.plan import Plan, computed_pairs
from sparsefinder.predictors import Tiles, layer_plan, random_projections, tile_means, tile_scores
from sparsefinder.predictors.tiles import EVERY_KEY

HEADS, DIM = 12, 64  # of BERT-base and ModernBERT-base
RANK, WINDOW, GLOBALS = 8, 33, 1  # as runs are fitted
DENSITY = 0.1  # of what the batch's longest item reads
FILLED = (1.0, 0.9, 0.75, 0.5)  # of the batch's length that its items fill
SCORED = 4  # last tiles of a text, which a threshold is taken from
ALPHAS = {"softmax": 1.0, "1.5-entmax": 1.5}


@dataclass(frozen=True)
class Case:
    """One size of the random lists."""

    tokens: int
    density: float
    tile_size: int


def random_plan(case: Case, heads: int, seed: int) -> Plan:
    """So many different random keys for every head and tile."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.arange(0, case.tokens, case.tile_size, dtype=torch.int32)
    tiles, count = heads * starts.shape[0], max(1, round(case.density * case.tokens))
    keys = torch.stack([torch.randperm(case.tokens, generator=generator)[:count].sort().values for _ in range(tiles)])
    start = starts.repeat(heads)
    return Plan(
        (1, heads, case.tokens, case.tokens),
        tile_batch=torch.zeros(tiles, dtype=torch.int32),
        tile_head=torch.arange(heads, dtype=torch.int32).repeat_interleave(starts.shape[0]),
        tile_start=start,
        tile_rows=(case.tokens - start).clamp(max=case.tile_size),
        offsets=torch.arange(tiles + 1) * count,
        keys=keys.flatten().int(),
        first_row=torch.zeros(tiles * count, dtype=torch.int32),
    )


def random_lists(case: Case, rounds: int, seed: int) -> dict[str, Any]:
    """Attention over given plans against torch's fused softmax over all pairs."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 1, HEADS, case.tokens, DIM).unbind()
    plan, legal = random_plan(case, HEADS, seed), legal_full(1, case.tokens, case.tokens)
    ways: Ways = {
        "sdpa": functools.partial(scaled_dot_product_attention, q, k, v),
        **{name: functools.partial(attend, q, k, v, plan, legal=legal, alpha=a) for name, a in ALPHAS.items()},
    }
    row = {"tokens": case.tokens, "density": case.density, "tile_size": case.tile_size}
    return row | {"ms": paired(ways, rounds)[0]}


def tiles_of(
    q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv N D"], keys: int, tile_size: int, causal: bool
) -> Tiles:
    """A random tile predictor whose last tiles of the first item read so many keys, in the mean, beside the
    positional ones."""
    maps = random_projections(q.shape[1], RANK, q.shape[3], 0, "bilinear")
    end = q.shape[2] // tile_size
    begin = max(0, end - SCORED - 1)  # one more, whose queries the summary of the next one may need
    means = tile_means(q[:1, :, begin * tile_size : end * tile_size], tile_size, causal)[:, :, -SCORED:]
    which = torch.arange(end - means.shape[2], end)
    scores = tile_scores(maps, None, means, k[:1], tile_size, causal, which)
    pooled = scores[0].flatten(1)
    least = pooled.topk(min(keys * which.shape[0], pooled.shape[1])).values[:, -1]
    return Tiles(maps, threshold=least.clamp(min=EVERY_KEY))


def bidirectional(tokens: int, tile_size: int, rounds: int, seed: int) -> dict[str, Any]:
    """A padded batch through an encoder's layer; the rival gets the mask that transformers hands over."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, len(FILLED), HEADS, tokens, DIM).unbind()
    lengths = torch.tensor([max(1, round(share * tokens)) for share in FILLED])
    mask = torch.arange(tokens) < lengths[:, None]
    legal, positional = legal_from_mask(mask), window(WINDOW) | GlobalTokens(GLOBALS)
    tiles = tiles_of(q, k, round(DENSITY * tokens), tile_size, causal=False)
    predict = functools.partial(layer_plan, tiles, q, k, legal, positional, tile_size)
    plan = predict()
    ways: dict[str, Any] = {
        "plan": predict,
        "sdpa": functools.partial(scaled_dot_product_attention, q, k, v, mask[:, None, None]),
    }
    for name, alpha in ALPHAS.items():
        ways[name] = functools.partial(attend, q, k, v, plan, legal=legal, alpha=alpha)
        ways[f"dense {name}"] = functools.partial(attend_dense, q, k, v, legal, alpha=alpha)
    row = {"tokens": tokens, "lengths": lengths.tolist(), "tile_size": tile_size, "density": density(plan, legal)}
    return row | {"ms": paired(ways, rounds)[0]}


def density(plan: Plan, legal: Legal) -> float:
    """Computed pairs as a share of the legal ones, over all items and heads."""
    return float(computed_pairs(plan).sum()) / (plan.shape[1] * sum(map(legal.count, range(plan.shape[0]))))


def random_rows(
    tokens: list[int], densities: list[float], tile_sizes: list[int], rounds: int, seed: int
) -> Iterator[dict[str, Any]]:
    """All cases of the random lists."""
    for n in tokens:
        for share in densities:
            for tile_size in tile_sizes:
                yield random_lists(Case(n, share, tile_size), rounds, seed)
