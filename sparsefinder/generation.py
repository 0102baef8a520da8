"""Generation with a key-value cache: a prefill through the plan, then one token at a time from the open tile's list.

A causal plan fixes the list of a tile when the tile opens, and adds what its rows choose as they come; no list knows of
a later token. So decoding needs the open tile's list and the last few queries, and gives the plan of the full pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from sparsefinder.errors import DataError, NonFiniteError, PatternError
from sparsefinder.patterns.algebra import Pattern, context_of
from sparsefinder.patterns.heads import at_layer
from sparsefinder.patterns.legal import Legal, first_real
from sparsefinder.plan import Plan, build_plan
from sparsefinder.predictors import Predictor, Tiles, layer_plan, ranks_over_sequence
from sparsefinder.predictors.tiles_cpu import fill_cpu
from sparsefinder.predictors.tokens import best_of
from sparsefinder.query_tiles import global_counts
from sparsefinder.shapes import head_tiles

LAST_KEYS = 32  # that must be the ones of the step before, so that another text in the cache is noticed


@dataclass(frozen=True, eq=False)
class OpenTiles:
    """What a layer remembers between two tokens.

    listed: the keys that the open tile of every head reads by now.
    q, k: the last queries and keys (the next tile's summary needs some queries, the keys tell one text from another).
    """

    listed: Bool[Tensor, "B H M"]
    q: Float[Tensor, "B H R D"]
    k: Float[Tensor, "B Hkv C D"]


class Generation:
    """The plans of one text, or batch of left-padded texts, that grows token by token; layers are told apart.

    Raises:
        PatternError: a predictor ranks over the whole sequence.
    """

    def __init__(self, predictors: Sequence[Predictor | None], positional: Pattern, tile_size: int | Tensor = 32):
        for predictor in predictors:
            if predictor is not None and ranks_over_sequence(predictor):
                raise PatternError(
                    f"generation: expected predictors that a new token can ask alone, got {predictor.kind}, "
                    "which ranks over the whole sequence"
                )
        self.predictors = tuple(predictors)
        self.positional = positional
        self.tile_size = tile_size
        self.open: dict[int, OpenTiles] = {}

    def plans(
        self, layer: int, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal
    ) -> Iterator[tuple[slice, Legal, Plan]]:
        """The plan of one attention call: in one part where it is a prefill, else row by row.

        Every part is (which of the queries, their legal pairs over the keys so far, their plan).

        Raises:
            DataError: padding on the right, or keys that do not continue those of the call before.
            PatternError: a layer that is not causal.
        """
        predictor, positional = self.predictors[layer], at_layer(self.positional, layer)
        if predictor is None:
            raise PatternError(f"generation: expected a predictor for layer {layer}, got none")
        _check(legal)
        before = predictor.queries_before if isinstance(predictor, Tiles) else 0
        if not legal.query_offset:
            plan = layer_plan(predictor, q, k, legal, positional, self.tile_size, layer)
            self.open[layer] = OpenTiles(_last_lists(plan), q[:, :, -before - 1 :], k[:, :, -LAST_KEYS:])
            yield slice(0, q.shape[2]), legal, plan
            return
        for row in range(q.shape[2]):
            keys = legal.query_offset + row + 1
            part = Legal(legal.query_real[:, row : row + 1], legal.key_real[:, :keys], True, keys - 1)
            state = self._continued(layer, q[:, :, row : row + 1], k[:, :, :keys], before)
            listed = self._next(predictor, positional, layer, state, k[:, :, :keys], part)
            self.open[layer] = OpenTiles(listed, state.q, k[:, :, max(0, keys - LAST_KEYS) : keys])
            yield slice(row, row + 1), part, _row_plan(listed)

    def _continued(self, layer: int, q: Tensor, k: Tensor, before: int) -> OpenTiles:
        """The state of the token before, with the new query; DataError where the new key does not follow its keys."""
        state = self.open.get(layer)
        known = 0 if state is None else state.listed.shape[2]
        if state is None or known != k.shape[2] - 1 or state.q.shape[:2] != q.shape[:2]:
            raise DataError(f"generation: expected the token after {known}, got number {k.shape[2]} (or another batch)")
        if not torch.equal(state.k, k[:, :, known - state.k.shape[2] : known]):
            raise DataError(
                "generation: expected the cache of the token before, got other keys (beam search, another text?)"
            )
        return OpenTiles(state.listed, torch.cat([state.q, q], 2)[:, :, -before - 1 :], state.k)

    def _next(
        self, predictor: Predictor, positional: Pattern, layer: int, state: OpenTiles, k: Tensor, legal: Legal
    ) -> Bool[Tensor, "B H M"]:
        """The keys of the newest row: what it chooses itself, and what its tile reads by now unless it opens one."""
        heads = state.q.shape[1]
        sizes = torch.tensor(head_tiles(self.tile_size, heads), device=k.device)
        position = (legal.query_offset - first_real(legal))[:, None]
        alone = torch.from_numpy(global_counts(positional, legal)).to(k.device)[:, None]
        opens = (position % sizes == 0) | (position <= alone)  # a global row is a tile of its own
        if isinstance(predictor, Tiles):
            plan = build_plan(positional, legal, self.tile_size, context_of(legal, layer), heads=heads)
            starts = (position % sizes == 0) & (position >= alone)
            chosen = _last_lists(plan) | _opened(
                predictor, state.q, k, legal, torch.where(starts, position // sizes, -1), sizes
            )
        else:
            chosen = _last_lists(layer_plan(predictor, state.q[:, :, -1:], k, legal, positional, self.tile_size, layer))
        return chosen | (torch.nn.functional.pad(state.listed, (0, 1)) & ~opens[..., None])


def _check(legal: Legal) -> None:
    if not legal.causal:
        raise PatternError("generation: expected a causal layer, got a bidirectional one")
    since = torch.arange(legal.key_real.shape[1], device=legal.key_real.device) >= first_real(legal)[:, None]
    if not bool((legal.key_real == since).all()):
        raise DataError("generation: expected padding on the left only, got some after a real token or a text of none")


def _last_lists(plan: Plan) -> Bool[Tensor, "B H M"]:
    """The keys that the last row of every item and head reads: those of the tile that ends there."""
    batch, heads, rows, keys = plan.shape
    last = (plan.tile_start + plan.tile_rows == rows).repeat_interleave(plan.offsets.diff()).nonzero().squeeze(-1)
    owner = (plan.tile_batch.long() * heads + plan.tile_head).repeat_interleave(plan.offsets.diff())
    listed = torch.zeros(batch * heads, keys, dtype=torch.bool, device=plan.keys.device)
    listed[owner[last], plan.keys[last].long()] = True
    return listed.view(batch, heads, keys)


def _row_plan(listed: Bool[Tensor, "B H M"]) -> Plan:
    """The plan of one row per item and head."""
    batch, heads, keys = listed.shape
    owner, key = listed.view(-1, keys).nonzero(as_tuple=True)
    counts = torch.bincount(owner, minlength=batch * heads)
    tile = torch.arange(batch * heads, dtype=torch.int32, device=listed.device)
    zero, one = torch.zeros_like(tile), torch.ones_like(tile)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    key = key.to(torch.int32)
    return Plan((batch, heads, 1, keys), tile // heads, tile % heads, zero, one, offsets, key, torch.zeros_like(key))


def _opened(
    tiles: Tiles, q: Tensor, k: Tensor, legal: Legal, opening: Int64[Tensor, "B H"], sizes: Tensor
) -> Bool[Tensor, "B H M"]:
    """The keys that a tile chooses as it opens with the newest row; none where `opening` (which tile) is negative."""
    chosen = torch.zeros(*opening.shape, k.shape[2], dtype=torch.bool)
    if not bool((opening >= 0).any()):
        return chosen.to(k.device)
    scores = torch.full((*opening.shape, 1, k.shape[2]), -torch.inf)
    begin = legal.query_offset + 1 - q.shape[2]
    real = legal.key_real.cpu()
    recent = Legal(real[:, begin:], real, True, begin)
    fill_cpu(tiles, q.cpu(), k.cpu(), recent, tuple(sizes.tolist()), opening.cpu(), scores)
    candidates = scores[:, :, 0, :-1]  # the newest token is read anyway
    if bool(candidates.isnan().any()):
        raise NonFiniteError("scores: expected numbers or −inf for every real key, got NaN")
    if tiles.threshold is None:
        best = best_of(candidates, tiles.keys_per_tile or 0)
    else:
        least = torch.as_tensor(tiles.threshold, dtype=torch.float32).cpu().expand(q.shape[1])
        best = candidates >= least[:, None]
    chosen[:, :, :-1] = best & (candidates > -torch.inf)
    return chosen.to(k.device)
