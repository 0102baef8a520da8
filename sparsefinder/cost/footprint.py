"""What a pattern makes a kernel do: pairs, keys listed for its tiles, pairs computed; all without an N × M matrix."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsefinder.cost.closed_form import all_pairs, closed_form_pairs
from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.algebra import Context, Pattern, context_of, union_leaves
from sparsefinder.patterns.bounds import bounds
from sparsefinder.patterns.heads import at_layer
from sparsefinder.patterns.legal import Legal, first_real, legal_full
from sparsefinder.patterns.positional import GlobalTokens

EXACT_TOKENS = 4096
SAMPLED_TILES = 64
MOST_PAIRS = 1 << 26  # looked at one by one where bounds do not settle a tile, before a sample is taken instead
LOOKED_AT = 1 << 22  # of them at once


@dataclass(frozen=True)
class Footprint:
    """One item, head and layer.

    queries: real rows. legal: pairs that exist. pairs: those that the pattern allows. listed: keys, summed over tiles,
    that a kernel loads. computed: pairs that it computes, since all rows of a tile share a list. error: relative
    standard error of `pairs`, `listed` and `computed` (the largest); 0 where all tiles were counted, or a sample of
    them showed no difference.
    """

    queries: int
    legal: int
    pairs: int
    listed: int
    computed: int
    error: float = 0.0

    @property
    def density(self) -> float:
        """Pairs of the pattern / legal pairs."""
        return self.pairs / max(self.legal, 1)

    @property
    def computed_density(self) -> float:
        """Pairs computed / legal pairs."""
        return self.computed / max(self.legal, 1)


def footprint(
    pattern: Pattern,
    legal: Legal,
    tile_size: int = 32,
    *,
    b: int = 0,
    h: int = 0,
    layer: int = 0,
    sample: int | None = None,
    seed: int = 0,
) -> Footprint:
    """Counts tile by tile, as `build_plan` cuts them: a matrix of `tile_size` rows is all that ever exists.

    Every query counts as reading itself in `listed` and `computed` (the plan sees to it), but not in `pairs`.

    Args:
        sample: look at so many tiles only, evenly spread, and scale up; rows of global tokens (tiles of their own) and
            the tiles at both ends are always looked at. None: all tiles.

    Raises ShapeError for a tile size or sample below 1 and PatternError for an item without tokens.
    """
    if tile_size < 1 or (sample is not None and sample < 1):
        raise ShapeError(f"footprint: expected tile_size and sample of at least 1, got {tile_size} and {sample}")
    ctx, fitted = context_of(legal, layer), at_layer(pattern, layer)
    tiles, always = _tiles(fitted, legal, tile_size, b)
    if not tiles:
        raise PatternError(f"footprint: expected at least one real query, got none in item {b}")
    some = _spread(len(tiles) - len(always), sample, seed)
    others = [t for t in range(len(tiles)) if t not in always]
    fixed = torch.tensor([_count(fitted, legal, ctx, b, h, tiles[t]) for t in sorted(always)]).view(-1, 3).sum(0)
    drawn = torch.tensor([_count(fitted, legal, ctx, b, h, tiles[others[t]]) for t in some]).view(-1, 3)
    total, error = fixed.double(), torch.zeros(3, dtype=torch.float64)
    if some:
        total = total + drawn.double().mean(0) * len(others)
        if 1 < len(some) < len(others):
            left = 1 - len(some) / len(others)
            error = drawn.double().std(0) * len(others) * math.sqrt(left / len(some)) / total.clamp(min=1)
    pairs, listed, computed = (round(x) for x in total.tolist())
    queries = int(legal.query_real[b].sum())
    return Footprint(queries, legal.count(b), pairs, listed, computed, float(error.max()))


def footprint_at(
    pattern: Pattern,
    tokens: int,
    tile_size: int = 32,
    *,
    causal: bool = False,
    layer: int = 0,
    sample: int = SAMPLED_TILES,
    seed: int = 0,
) -> Footprint:
    """The footprint on a text of any length: counted up to 4096 tokens, above that from `sample` tiles.

    Pairs are exact at any length where there is a formula (`closed_form_pairs`) or where bounds settle most tiles
    (`count_by_bounds`). Errors as in `footprint`.
    """
    legal = legal_full(1, tokens, tokens, causal)
    tiles = None if tokens <= EXACT_TOKENS else sample
    found = footprint(pattern, legal, tile_size, layer=layer, sample=tiles, seed=seed)
    exact = closed_form_pairs(at_layer(pattern, layer), tokens, causal)
    if exact is None and tiles is not None:
        exact = count_by_bounds(pattern, legal, layer=layer)
    if exact is None:
        return found
    return replace(found, pairs=exact)


def count_by_bounds(
    pattern: Pattern, legal: Legal, tile: int = 128, *, b: int = 0, h: int = 0, layer: int = 0, most: int = MOST_PAIRS
) -> int | None:
    """Pairs of one item and head: tiles that the bounds call empty or full are not looked into.

    None where more than `most` pairs would have to be looked at one by one. Errors as in `bounds`.
    """
    ctx = context_of(legal, layer)
    some, every = bounds(pattern, legal, tile, tile, b, h, ctx)
    mixed = (some & ~every).nonzero()
    if mixed.shape[0] * tile * tile > most:
        return None
    rows, columns = (_sizes(count, tile, some.device) for count in (ctx.queries, ctx.keys))
    total = int((every * rows[:, None] * columns).sum())
    step = torch.arange(tile, device=some.device)
    at_once = max(LOOKED_AT // (tile * tile), 1)
    for low in range(0, mixed.shape[0], at_once):
        part = mixed[low : low + at_once]
        i, j = part[:, :1] * tile + step, part[:, 1:] * tile + step
        inside = (i < ctx.queries)[:, :, None] & (j < ctx.keys)[:, None]
        i, j = i.clamp(max=ctx.queries - 1)[:, :, None], j.clamp(max=ctx.keys - 1)[:, None]
        total += int((pattern.allows(ctx, b, h, i, j) & legal.allows(b, i, j) & inside).sum())
    return total


def _sizes(count: int, tile: int, device: torch.device) -> Tensor:
    """Rows of every tile; the last is shorter."""
    start = torch.arange(0, count, tile, device=device)
    return (count - start).clamp(max=tile)


def full_footprint(tokens: int, tile_size: int = 32, causal: bool = False) -> Footprint:
    """Full attention: every tile loads all keys that its last row sees, and computes nothing beyond the legal pairs."""
    if tokens < 1 or tile_size < 1:
        raise ShapeError(f"footprint: expected tokens and tile_size of at least 1, got {tokens} and {tile_size}")
    whole, rest = divmod(tokens, tile_size)
    pairs = all_pairs(tokens, causal)
    if causal:
        listed = tile_size * whole * (whole + 1) // 2 + (tokens if rest else 0)
    else:
        listed = tokens * (whole + (rest > 0))
    return Footprint(tokens, pairs, pairs, listed, pairs)


def _tiles(pattern: Pattern, legal: Legal, tile_size: int, b: int) -> tuple[list[Tensor], set[int]]:
    """Rows of each tile, as `build_plan` cuts them, and which of them are no sample of the others."""
    rows = legal.query_real[b].nonzero().squeeze(-1)
    if not rows.shape[0]:
        return [], set()
    position = rows + legal.query_offset - first_real(legal)[b]
    leaves = [leaf for leaf in union_leaves(pattern) if isinstance(leaf, GlobalTokens)]
    count = max((int(leaf.of_item(b, rows)) for leaf in leaves), default=0)
    alone = (position >= 0) & (position < count)
    cell = torch.where(alone, -1 - position, position // tile_size)
    cut = (rows.diff() != 1) | (cell.diff() != 0)
    tiles = list(rows.tensor_split((cut.nonzero().squeeze(-1) + 1).cpu()))
    single = [int(part.sum()) > 0 for part in alone.tensor_split((cut.nonzero().squeeze(-1) + 1).cpu())]
    regular = [t for t, one in enumerate(single) if not one]
    return tiles, {t for t, one in enumerate(single) if one} | set(regular[:1]) | set(regular[-1:])


def _spread(count: int, sample: int | None, seed: int) -> list[int]:
    """`sample` of `count` places, at even steps from a random start."""
    if sample is None or sample >= count:
        return list(range(count))
    start = float(torch.rand((), generator=torch.Generator().manual_seed(seed)))
    return [int((k + start) * count / sample) for k in range(sample)]


def _count(pattern: Pattern, legal: Legal, ctx: Context, b: int, h: int, rows: Tensor) -> tuple[int, int, int]:
    i, j = rows[:, None], torch.arange(ctx.keys, device=rows.device)[None, :]
    may = legal.allows(b, i, j)
    allowed = pattern.allows(ctx, b, h, i, j) & may
    read = allowed | ((j == i + legal.query_offset) & may)
    keys = read.any(0)
    # In a causal layer a key counts from the first row on that chose it.
    since = read[:, keys].to(torch.uint8).argmax(0) if legal.causal else torch.zeros((), dtype=torch.int64)
    listed = int(keys.sum())
    return int(allowed.sum()), listed, int((len(rows) - since).expand(listed).sum())
