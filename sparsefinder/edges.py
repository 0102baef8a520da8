"""Gold graphs: the support of the teacher's entmax, `{(i, j): p_ij > 0}`, stored as sorted edges."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from sparsefinder.entmax import support
from sparsefinder.errors import ShapeError
from sparsefinder.patterns.legal import Legal
from sparsefinder.shapes import check_alpha, check_finite, check_qkv, check_real, head_scales


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
) -> Edges:
    """Support of α-entmax of `scale[h] q_i·k_j` over the legal pairs (the papers' gold graph; for α = 1 all of them).

    Only real tokens enter the scores, so padding changes no edge. Never more than one head's scores at a time.

    Raises:
        ShapeError, AlphaError: arguments that do not fit.
        NonFiniteError: NaN or infinity in a real token.
    """
    dims = check_qkv(q, k)
    check_real(legal.query_real, legal.key_real, dims)
    check_finite("q", q, legal.query_real)
    check_finite("k", k, legal.key_real)
    check_alpha(alpha)
    scales = head_scales(scale, dims, q.float())
    found: list[Tensor] = []
    for b in range(dims.batch):
        rows, columns = legal.query_real[b].nonzero().squeeze(-1), legal.key_real[b].nonzero().squeeze(-1)
        mask = columns[None, :] <= rows[:, None] + legal.query_offset if legal.causal else None
        for h in range(dims.heads):
            queries, keys = q[b, h, rows], k[b, h // dims.group, columns]
            found.append(_head_support(queries, keys, mask, alpha, scales[h], rows, columns, dims.keys))
    counts = torch.tensor([0] + [edges.shape[0] for edges in found], device=q.device)
    return Edges(counts.cumsum(0), torch.cat(found), (dims.batch, dims.heads, dims.queries, dims.keys))


def _head_support(
    q: Tensor, k: Tensor, mask: Tensor | None, alpha: float, scale: Tensor, rows: Tensor, columns: Tensor, width: int
) -> Tensor:
    if 0 in (q.shape[0], k.shape[0]):
        return torch.zeros(0, dtype=torch.int64, device=q.device)
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (q.detach().to(exact) * scale.to(exact)) @ k.detach().to(exact).T
    i, j = support(scores, alpha, mask).nonzero(as_tuple=True)
    return rows[i] * width + columns[j]
