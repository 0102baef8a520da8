"""What the projections are trained to do: hinge (the paper), logistic and listwise losses, one value per head.

All heads of a layer are computed at once; the losses are per head, so their sum trains every head as if alone.
Shapes: `B` instances, `H` heads, `R` sampled query rows (or `T` tiles), `M` keys, `r` rank.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsefinder.errors import ConfigError

HingeForm = Literal["pair", "sum"]


def squared_distances(q: Float[Tensor, "*B R r"], k: Float[Tensor, "*B M r"]) -> Float[Tensor, "*B R M"]:
    """`‖q'_i − k'_j‖²` of all pairs by one GEMM: good for a loss; predictors sum the differences instead."""
    cross = q @ k.transpose(-1, -2)
    return (q.square().sum(-1)[..., :, None] + k.square().sum(-1)[..., None, :] - 2 * cross).clamp(min=0)


def sample_negatives(
    gold: Bool[Tensor, "B H R M"], legal: Bool[Tensor, "B R M"], generator: torch.Generator
) -> tuple[Int[Tensor, " E"], Int[Tensor, "B H R"]]:
    """Negatives of every row, uniform without replacement over its legal non-gold keys, as many as gold keys or fewer.

    Returns:
        (flat indices into `[B, H, R, M]`, those of a row together and in random order; their number in each row).

    One permutation of the keys, turned by a random amount in every row, orders the candidates: uniform for each row,
    and far cheaper than sorting random numbers. A key outside `legal` (padding, the future) is never drawn.
    """
    batch, heads, rows, keys = gold.shape
    order = torch.randperm(keys, generator=generator)
    turn = torch.randint(keys, (rows, 1), generator=generator)
    column = order[(torch.arange(keys) + turn) % keys].to(gold.device)
    free = (legal[:, None] & ~gold).gather(-1, column.expand(batch, heads, rows, keys))
    wanted = (gold & legal[:, None]).sum(-1, keepdim=True)
    chosen = free & (free.cumsum(-1) <= wanted)
    row, place = chosen.view(-1, keys).nonzero(as_tuple=True)
    return row * keys + column[row % rows, place], chosen.sum(-1)


def hinge(
    distances: Float[Tensor, "B H R M"],
    gold: Bool[Tensor, "B H R M"],
    legal: Bool[Tensor, "B R M"],
    generator: torch.Generator,
    margin: float = 1.0,
    form: HingeForm = "pair",
) -> Float[Tensor, " H"]:
    """`[ω + ‖q'−k'_P‖² − ‖q'−k'_N‖²]_+` (Treviso et al., 2022, eq. 7), mean per head.

    pair: one hinge for each gold pair and one negative of the same row (used again where there are fewer negatives).
    sum: one hinge for each row, on the sums over its gold and its negative pairs, divided by the number of gold pairs
        so that ω keeps its meaning. The authors' code does this; it pulls all gold pairs of a violating row.
    Rows without gold pairs or without negatives do not count.
    """
    batch, heads, rows, keys = gold.shape
    real = gold & legal[:, None]
    negative, counts = sample_negatives(gold, legal, generator)
    flat, count = distances.reshape(-1), counts.flatten()
    row, column = real.view(-1, keys).nonzero(as_tuple=True)
    if form == "pair":
        start = count.cumsum(0) - count
        positives = real.sum(-1).flatten()
        rank = torch.arange(row.shape[0]) - (positives.cumsum(0) - positives)[row]
        usable = count[row] > 0
        row, column, rank = row[usable], column[usable], rank[usable]
        partner = negative[start[row] + rank % count[row]]
        loss = (margin + flat[row * keys + column] - flat[partner]).clamp(min=0)
        return _mean_per_head(loss, row // rows % heads, heads)
    if form != "sum":
        raise ConfigError(f"hinge: expected the form pair or sum, got {form!r}")
    rows_total = batch * heads * rows
    near = torch.zeros(rows_total).index_add(0, row, flat[row * keys + column])
    far = torch.zeros(rows_total).index_add(0, negative // keys, flat[negative])
    number = real.sum(-1).flatten()
    usable = ((number > 0) & (count > 0)).nonzero().squeeze(-1)
    loss = (margin + near[usable] / number[usable] - far[usable] / count[usable]).clamp(min=0)
    return _mean_per_head(loss, usable // rows % heads, heads)


def logistic(
    scores: Float[Tensor, "B H R M"],
    gold: Bool[Tensor, "B H R M"],
    legal: Bool[Tensor, "B R M"],
    positive_power: float = 0.5,
) -> Float[Tensor, " H"]:
    """Weighted binary cross-entropy of `σ(score)` against the gold graph over the legal pairs, per head.

    Gold pairs weigh `(legal non-gold / gold)^positive_power`: 0 = as they come, 1 = as much as all the others together.
    Scores: `q'ᵀk' + uᵀq + wᵀk + b` (bilinear) or `b − ‖q'−k'‖²` (metric).
    """
    legal_pairs = legal[:, None].expand_as(gold)
    positives = (gold & legal_pairs).sum((0, 2, 3)).clamp(min=1)
    negatives = legal_pairs.sum((0, 2, 3)) - positives
    weight = (negatives / positives).clamp(min=1e-3) ** positive_power
    softplus = torch.nn.functional.softplus
    losses = torch.where(gold, weight[None, :, None, None] * softplus(-scores), softplus(scores))
    total = losses.masked_fill(~legal_pairs, 0.0).sum((0, 2, 3))
    return total / (weight * positives + negatives)


def listwise(log_share: Float[Tensor, "B H T M"], target: Float[Tensor, "B H T M"]) -> Float[Tensor, " H"]:
    """Kullback–Leibler divergence from the tile's share of the teacher's mass^½ to the predicted share, mean per head.

    log_share: scores minus their logsumexp over the visible keys (`predictors.tile_scores`), −inf where not visible.
    target: non-negative; rows that sum to zero do not count. Mass on keys that are not visible is left out, and the
        rest counts as the whole.
    """
    seen = log_share > -torch.inf
    mass = target * seen
    total = mass.sum(-1, keepdim=True)
    share = mass / total.clamp(min=1e-12)
    entropy = torch.special.entr(share).sum(-1)
    cross = -(share * log_share.masked_fill(~seen, 0.0)).sum(-1)
    counted = (total.squeeze(-1) > 0).to(share)
    total_loss: Tensor = ((cross - entropy) * counted).sum((0, 2))
    return total_loss / counted.sum((0, 2)).clamp(min=1)


def tile_targets(mass: Float[Tensor, "*B N M"], tile_size: int, power: float = 0.5) -> Float[Tensor, "*B T M"]:
    """Teacher's mass^power, summed over the rows of each tile; the last tile may be shorter."""
    parts = torch.split(mass.pow(power), tile_size, dim=-2)
    return torch.stack([part.sum(-2) for part in parts], -2)


def _mean_per_head(loss: Tensor, head: Tensor, heads: int) -> Tensor:
    total = torch.zeros(heads, dtype=loss.dtype).index_add(0, head, loss)
    return total / torch.bincount(head, minlength=heads).clamp(min=1)
