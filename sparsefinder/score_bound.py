"""An upper bound on every score that costs fewer products than the score: low rank, plus what the rest can add at most.

With centred queries x and keys y the score is `q·k = q·m + q̄·y + x·y`, and in coordinates `a = Wqᵀx`, `b = Wkᵀy` with
`Wq Wkᵀ = I` the last term is `Σ_{d ≤ r} a_d b_d` plus the product of what is left, at most `‖a_⊥‖ ‖b_⊥‖` (Cauchy and
Schwarz). The coordinates are balanced: a and b have the same diagonal second moments, greatest first, so that neither
side has a long rest. (An orthonormal basis for both sides leaves a third more pairs, see docs/decisions.md.)
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.attention.call import Call, without_padding

SAMPLE = 512  # tokens of which the coordinates are computed: they decide how tight the bound is, not whether it holds
RIDGE = 1e-3  # of the mean second moment: keeps the coordinates well-conditioned where tokens span few dimensions
RANK = 40  # see docs/decisions.md
SAVED = 4  # a low rank must save this many times the products that its coordinates cost: survivors take the rest


@dataclass(frozen=True, eq=False)
class ScoreBound:
    """`scale q_i·k_j ≤ start_i + rank_q_i · rank_k_j + rest_q_i rest_k_j + shift_j` for all real tokens of a head.

    It holds for the exact score and for the one that any summation order gives in this dtype, with the sum on the right
    computed in this dtype, too; a bias is to be added on both sides. shift is −inf at keys that are padding.

    rank: r, a multiple of 4.
    query: `[B, H, N, r]`, rank_q. rest: rest_q. start: as above.
    key: rows `0 … r − 1` are rank_k, row r is rest_k, row r + 1 is shift.
    """

    rank: int
    query: Float[Tensor, "B H N r"]
    rest: Float[Tensor, "B H N"]
    start: Float[Tensor, "B H N"]
    key: Float[Tensor, "B H r_and_2 M"]


def dropped_bound(call: Call, rank: int) -> ScoreBound:
    """The bound for one attention call, in its dtype; nothing of size N × M is made.

    Coordinates come from second moments of this call's own tokens, per query head (a kv head's queries differ more than
    its keys). They may look at every token, the future included: they decide what is looked at, not what is found.

    All rounding is paid for by `start`. With c = (D + 16) ε a sum of at most D + 5 products is off by less than c times
    the sum of their absolute values, whatever its order; `Wq Wkᵀ − I` is measured. Rests are norms of vectors, not
    roots of differences of squares, which cancel.

    Args:
        rank: r ≥ 1, rounded up to a multiple of 4. From D on the bound is the score itself, up to rounding, and no
            coordinates are computed.
    """
    q, k, _ = without_padding(call)
    q, dim = q * call.scales[:, None, None], call.dims.dim
    bias = 0.0 if call.bias is None else call.bias.abs().amax((-1, -2))[..., None]
    start = _unit(call) * (_norm(q) * _longest(k).repeat_interleave(call.dims.group, 1) + bias)
    hidden = ~call.legal.key_real[:, None]
    if rank >= dim:
        key = k.repeat_interleave(call.dims.group, 1)
        rest, shift = q.new_zeros(q.shape[:3]), k.new_zeros(key.shape[:3])
        return _packed(q, rest, start, key, shift, shift.masked_fill(hidden, -torch.inf))
    x, y, q_mean, k_mean = _centred(call, q, k)
    maps = _balanced(x, y)
    a, b = x @ maps[0], y @ maps[1]
    start = start + (q @ k_mean.mT).squeeze(-1) + _slack(call, x, y, (q_mean, k_mean), maps, (a, b))
    shift = (y @ q_mean.mT).squeeze(-1).masked_fill(hidden, -torch.inf)
    rank = min(-(-rank // 4) * 4, dim)
    return _packed(a[..., :rank], _norm(a[..., rank:]), start, b[..., :rank], _norm(b[..., rank:]), shift)


def cheapest_rank(call: Call) -> int:
    """`RANK` where that saves more than the coordinates cost (longer texts, larger heads), else D."""
    dims = call.dims
    pairs = sum(call.legal.count(b) for b in range(dims.batch)) / dims.batch
    cost = dims.dim**2 * (dims.queries + dims.keys)
    return RANK if pairs * (dims.dim - RANK) > SAVED * cost else dims.dim


def _packed(query: Tensor, rest: Tensor, start: Tensor, key: Tensor, key_rest: Tensor, shift: Tensor) -> ScoreBound:
    """The bound of these parts, key columns last; a rank that is no multiple of 4 is filled up with zeros."""
    fill = -query.shape[-1] % 4
    query, key = (torch.nn.functional.pad(part, (0, fill)) if fill else part for part in (query, key))
    columns = torch.cat([key.mT, key_rest[..., None, :], shift[..., None, :]], 2)
    return ScoreBound(query.shape[-1], query.contiguous(), rest.contiguous(), start, columns)


def _unit(call: Call) -> float:
    return float((call.dims.dim + 16) * torch.finfo(call.q.dtype).eps)


def _longest(x: Tensor) -> Tensor:
    return _norm(x).amax(-1, keepdim=True)


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm


def _centred(call: Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Centred queries and keys (zeros at padding) and both means `[B, H, 1, D]`, all of them per query head."""
    q_real, k_real = (real[:, None, :, None] for real in (call.legal.query_real, call.legal.key_real))
    q_mean = q.sum(2, keepdim=True) / q_real.sum(2, keepdim=True).clamp(min=1)
    k_mean = k.sum(2, keepdim=True) / k_real.sum(2, keepdim=True).clamp(min=1)
    x, y = (z if bool(real.all()) else z * real for z, real in ((q - q_mean, q_real), (k - k_mean, k_real)))
    group = call.dims.group
    return x, y.repeat_interleave(group, 1), q_mean, k_mean.repeat_interleave(group, 1)


def _balanced(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """`Wq, Wk [B, H, D, D]` with `Wq Wkᵀ = I` that give x and y equal second moments, diagonal and falling."""
    low = torch.linalg.cholesky(_moments(x))
    square, turn = torch.linalg.eigh(low.mT @ _moments(y) @ low)
    root = square.clamp(min=RIDGE**2).sqrt().sqrt()[..., None, :].flip(-1)
    turn = turn.flip(-1)
    w_q = torch.linalg.solve_triangular(low.mT, turn * root, upper=True)
    return w_q.to(x.dtype).contiguous(), (low @ (turn / root)).to(x.dtype).contiguous()


def _moments(tokens: Tensor) -> Tensor:
    """Second moments in float64, of mean one on the diagonal, and a ridge."""
    some = tokens[:, :, :: -(-tokens.shape[2] // SAMPLE)]
    some = some / some.abs().amax((-1, -2), keepdim=True).clamp(min=torch.finfo(some.dtype).tiny)
    moments = (some.mT @ some).double()
    mean = moments.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(moments.shape[-1], dtype=torch.float64, device=tokens.device)
    usable = (mean > 0) & mean.isfinite()  # no tokens, or products that overflow: any coordinates will do
    return torch.where(usable, moments / mean, eye) + RIDGE * eye


def _slack(
    call: Call,
    x: Tensor,
    y: Tensor,
    means: tuple[Tensor, Tensor],
    maps: tuple[Tensor, Tensor],
    coordinates: tuple[Tensor, Tensor],
) -> Float[Tensor, "B H N"]:
    """What rounding may take from the bound, per row, for the worst key."""
    (q_mean, k_mean), (w_q, w_k), (a, b) = means, maps, coordinates
    eye = torch.eye(call.dims.dim, dtype=torch.float64, device=x.device)
    error = torch.linalg.matrix_norm(w_q.double() @ w_k.double().mT - eye).to(x.dtype)[..., None]
    q_size, k_size = (torch.linalg.matrix_norm(w)[..., None] for w in maps)
    longest_y, longest_b, x_norm = _longest(y), _longest(b), _norm(x)
    rows = (x_norm + _norm(q_mean)) * (_norm(k_mean) + longest_y) + x_norm * q_size * longest_b
    rows = rows + _norm(a) * (k_size * longest_y + longest_b)
    slack: Tensor = _unit(call) * rows + 2 * error * x_norm * longest_y
    return slack
