"""Gold graphs, stored as sorted edges: the support of the teacher's entmax, `{(i, j): p_ij > 0}`; of a softmax teacher
the fewest keys of every row that hold a given share of its attention."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from sparsefinder.entmax import entmax
from sparsefinder.errors import ConfigError, ShapeError
from sparsefinder.patterns.legal import Legal
from sparsefinder.shapes import (
    Dims,
    check_alpha,
    check_bias,
    check_finite,
    check_qkv,
    check_real,
    head_scales,
    item_bias,
)


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges of every item and head. Those of `(b, h)` are `flat[offsets[b * H + h] : offsets[b * H + h + 1]]`.

    flat: `i * M + j`, ascending inside each (item, head).
    shape: (B, H, N, M).
    """

    offsets: Int64[Tensor, " heads_and_1"]
    flat: Int64[Tensor, " E"]
    shape: tuple[int, int, int, int]

    def __post_init__(self) -> None:
        if self.offsets.shape[0] != self.shape[0] * self.shape[1] + 1 or int(self.offsets[-1]) != self.flat.shape[0]:
            raise ShapeError(f"edges: offsets {tuple(self.offsets.shape)} do not fit shape {self.shape}")


def head_edges(edges: Edges, b: int, h: int) -> Int64[Tensor, " e"]:
    """The sorted edges `i * M + j` of one item and head."""
    at = b * edges.shape[1] + h
    return edges.flat[int(edges.offsets[at]) : int(edges.offsets[at + 1])]


def edges_matrix(edges: Edges, b: int, h: int) -> Bool[Tensor, "N M"]:
    """The gold graph of one item and head as a matrix."""
    n, m = edges.shape[2:]
    matrix = torch.zeros(n * m, dtype=torch.bool, device=edges.flat.device)
    matrix[head_edges(edges, b, h)] = True
    return matrix.view(n, m)


def edge_counts(edges: Edges) -> Int64[Tensor, "B H"]:
    """Number of gold pairs of every item and head."""
    return edges.offsets.diff().view(edges.shape[0], edges.shape[1])


def gold_edges(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    legal: Legal,
    alpha: float = 1.5,
    scale: float | Tensor | None = None,
    gold_mass: float | None = None,
    bias: Float[Tensor, "#B H N M"] | None = None,
) -> Edges:
    """The gold graph of α-entmax of `scale[h] q_i·k_j + bias` over the legal pairs: `gold_pairs` of every head.

    Only real tokens enter the scores, so padding changes no edge. Never more than one head's scores at a time.

    Raises:
        ShapeError, AlphaError, ConfigError: arguments that do not fit.
        NonFiniteError: NaN or infinity in a real token.
    """
    check_alpha(alpha)
    check_gold_mass(gold_mass)
    dims, scales, added = checked_scores(q, k, legal, scale, bias)
    found: list[Tensor] = []
    for b in range(dims.batch):
        rows, columns = legal.query_real[b].nonzero().squeeze(-1), legal.key_real[b].nonzero().squeeze(-1)
        visible = legal.visible(rows[:, None], columns[None, :])
        for h in range(dims.heads):
            queries, keys = q[b, h, rows], k[b, h // dims.group, columns]
            more = None if added is None else item_bias(added, b)[h, rows][:, columns]
            p = head_probabilities(queries, keys, scales[h], more, visible, alpha)
            i, j = gold_pairs(p, alpha, gold_mass).nonzero(as_tuple=True)
            found.append(rows[i] * dims.keys + columns[j])
    counts = torch.tensor([0] + [edges.shape[0] for edges in found], device=q.device)
    return Edges(counts.cumsum(0), torch.cat(found), (dims.batch, dims.heads, dims.queries, dims.keys))


def checked_scores(
    q: Tensor, k: Tensor, legal: Legal, scale: float | Tensor | None, bias: Tensor | None
) -> tuple[Dims, Float[Tensor, " H"], Float[Tensor, "#B H N M"] | None]:
    """Sizes, factors of the heads and bias of scores that a graph is made of. Errors as in `gold_edges`."""
    dims = check_qkv(q, k)
    check_real(legal.query_real, legal.key_real, dims)
    check_finite("q", q, legal.query_real)
    check_finite("k", k, legal.key_real)
    scales = head_scales(scale, dims, q.float())
    return dims, scales, None if bias is None else check_bias(bias, dims, q)


def mass_edges(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    legal: Legal,
    mass: float,
    scale: float | Tensor | None = None,
) -> Edges:
    """The gold graph of a softmax teacher: the fewest keys of every row that hold `mass` of its attention.

    Errors as in `gold_edges`.
    """
    return gold_edges(q, k, legal, 1.0, scale, mass)


def gold_pairs(p: Float[Tensor, "n m"], alpha: float, gold_mass: float | None = None) -> Bool[Tensor, "n m"]:
    """Which of a head's attention probabilities are gold.

    Where α > 1 the support, `p > 0`. For softmax the smallest set of keys of the row that together hold at least
    `gold_mass`, greatest probabilities first, of equal ones the earlier key; all of them where it is None.
    """
    if alpha > 1 or gold_mass is None:
        return p > 0
    if p.device.type != "cpu":
        ordered, order = p.double().sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        return torch.zeros_like(p, dtype=torch.bool).scatter_(-1, order, (before < gold_mass) & (ordered > 0))
    from sparsefinder.rows import STEPS_PER_SCORE, mass_rows  # numba is needed on the CPU only
    from sparsefinder.threads import threads_for

    gold = torch.empty(p.shape, dtype=torch.bool)
    with threads_for(p.numel() * STEPS_PER_SCORE):
        mass_rows(p.detach().contiguous().numpy(), gold_mass, gold.numpy())
    return gold


def check_gold_mass(gold_mass: float | None) -> None:
    """ConfigError unless it is None or a fraction below 1 (the last of it hides in rounding)."""
    if gold_mass is not None and not 0.0 < gold_mass < 1.0:
        raise ConfigError(f"gold_mass: expected a fraction between 0 and 1, got {gold_mass}")


def head_probabilities(
    q: Float[Tensor, "n D"],
    k: Float[Tensor, "m D"],
    scale: Float[Tensor, ""],
    bias: Float[Tensor, "n m"] | None,
    visible: Bool[Tensor, "n m"] | None,
    alpha: float,
) -> Float[Tensor, "n m"]:
    """A head's attention among its real tokens, in float32 or float64; None = no bias, and every key is visible."""
    if 0 in (q.shape[0], k.shape[0]):
        return torch.zeros(q.shape[0], k.shape[0], device=q.device)
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (q.detach().to(exact) * scale.to(exact)) @ k.detach().to(exact).T
    return entmax(scores if bias is None else scores + bias.detach().to(exact), alpha, visible)
