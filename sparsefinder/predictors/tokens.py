"""What the content predictors share: the real tokens of one item, bucket sets of a padded batch, and their laws.

Padding is cut away before anything is computed, into tensors of the item's own size, so that a graph cannot depend on
what the item was batched with (see `project_item`).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.content import BucketsMeet, pack_bits
from sparsefinder.patterns.legal import Legal
from sparsefinder.predictors.projections import expand_heads
from sparsefinder.shapes import check_finite, check_qkv, check_real


@dataclass(frozen=True, eq=False)
class Tokens:
    """The real tokens of one item: one key set per query head; `rows` and `columns` are places in the padded batch."""

    q: Float[Tensor, "H n D"]
    k: Float[Tensor, "H m D"]
    rows: Int[Tensor, " n"]
    columns: Int[Tensor, " m"]


Members = tuple[Bool[Tensor, "H n W"], Bool[Tensor, "H m W"]]
Assign = Callable[[int, Int[Tensor, " n"], Int[Tensor, " m"]], Members]


def check_call(
    kind: str, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal, heads: int, dim: int
) -> None:
    """What every content predictor asks of a call.

    Raises:
        ShapeError: q, k, legal and the predictor's own tensors do not fit.
        NonFiniteError: NaN or infinity in a real token, which would be ranked somewhere in silence.
    """
    dims = check_qkv(q, k)
    check_real(legal.query_real, legal.key_real, dims)
    if (dims.heads, dims.dim) != (heads, dim):
        raise ShapeError(f"{kind}: expected q of {heads} heads and {dim} dimensions, got {tuple(q.shape)}")
    check_finite("q", q, legal.query_real)
    check_finite("k", k, legal.key_real)


def ranks_over_sequence(predictor: object) -> bool:
    """Does a predictor (or its class) rank over the whole sequence, and so refuse causal layers?"""
    return bool(getattr(predictor, "whole_sequence", False))


def refuse_causal(kind: str, legal: Legal) -> None:
    """PatternError where causal: the method ranks over the whole sequence, so a set would depend on later tokens."""
    if legal.causal:
        raise PatternError(
            f"{kind}: expected a bidirectional layer (it ranks over the whole sequence), got a causal one"
        )


def item_tokens(
    q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal, b: int, dtype: torch.dtype
) -> Tokens:
    """The real tokens of item `b`, contiguous, in the precision of the predictor."""
    rows, columns = legal.query_real[b].nonzero().flatten(), legal.key_real[b].nonzero().flatten()
    queries = q[b][:, rows].detach().to(dtype).contiguous()
    keys = expand_heads(k[b : b + 1, :, columns].detach().to(dtype), q.shape[1])[0].contiguous()
    return Tokens(queries, keys, rows, columns)


def meet(q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], legal: Legal, assign: Assign) -> BucketsMeet:
    """The pairs that share a bucket. `assign(b, rows, columns)` says which buckets the real tokens of an item are in.

    Held as packed words, `B H (N + M) ceil(W / 64)` of them; W may differ from item to item. Padding and items without
    a query or a key are in no bucket.
    """
    packed: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
    for b in range(q.shape[0]):
        rows, columns = legal.query_real[b].nonzero().flatten(), legal.key_real[b].nonzero().flatten()
        if rows.shape[0] and columns.shape[0]:
            query, key = assign(b, rows, columns)
            packed[b] = rows, columns, pack_bits(query), pack_bits(key)
    words = max((query.shape[-1] for _, _, query, _ in packed.values()), default=1)
    query_words = torch.zeros(*q.shape[:3], words, dtype=torch.int64, device=q.device)
    key_words = torch.zeros(q.shape[0], q.shape[1], k.shape[2], words, dtype=torch.int64, device=k.device)
    for b, (rows, columns, query, key) in packed.items():
        query_words[b, :, rows, : query.shape[-1]] = query
        key_words[b, :, columns, : key.shape[-1]] = key
    return BucketsMeet(query_words, key_words)


def one_hot(ids: Int[Tensor, "*any n"], buckets: int) -> Bool[Tensor, "*any n W"]:
    """The set that holds one bucket of `buckets`."""
    return ids[..., None] == torch.arange(buckets, device=ids.device)


def equal_bins(values: Float[Tensor, "*any n"], bins: int) -> Int64[Tensor, "*any n"]:
    """Bin of every value when they are sorted and cut into `bins` runs of `ceil(n / bins)`; the last may be shorter.

    Of equal values the earlier token comes first, so bins hold their number whatever the ties.
    """
    order = values.argsort(dim=-1, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(-1, order, torch.arange(values.shape[-1], device=values.device).expand_as(order))
    return rank // max(-(-values.shape[-1] // bins), 1)


def best_of(scores: Float[Tensor, "*any n"], count: int) -> Bool[Tensor, "*any n"]:
    """True at the `count` greatest of every row (all where there are fewer); of equal ones the earlier counts."""
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


def warn_if_identical(kind: str, q: Float[Tensor, "H n r"], k: Float[Tensor, "H m r"]) -> None:
    """Warn where all vectors of a head, queries and keys, are one and the same: its buckets then say nothing."""
    if q.shape[1] + k.shape[1] < 3:  # one token: its query and key say nothing yet
        return
    heads = ((q == q[:, :1]).flatten(1).all(1) & (k == q[:, :1]).flatten(1).all(1)).nonzero().flatten().tolist()
    if heads:
        warnings.warn(f"{kind}: all vectors of heads {heads} are identical, so they cannot be told apart", stacklevel=4)


def unpicked_queries(pattern: BucketsMeet, legal: Legal) -> Int64[Tensor, "B H"]:
    """Real queries that are in no bucket (nobody picked them): they predict no pair at all."""
    alone = (pack_bits(pattern.query_bits) == 0).all(-1) & legal.query_real[:, None, :]
    return alone.sum(-1)
