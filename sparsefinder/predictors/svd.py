"""Truncated SVD of the score form: the best maps of a rank for `q · k` itself, without any training."""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from sparsefinder.errors import PatternError
from sparsefinder.predictors.projections import Projections


def svd_projections(
    q_moment: Float[Tensor, "H D D"],
    k_covariance: Float[Tensor, "H D D"],
    k_mean: Float[Tensor, "H D"],
    rank: int,
    scale: float | Float[Tensor, " H"] = 1.0,
) -> Projections:
    """Bilinear projections whose score is the best rank-`rank` estimate of `scale[h] q · k`, in mean squared error.

    `q · k = q · (k − m) + q · m`: the second term is exact and free (a linear term of q), and the first is cut to the
    greatest singular values of `C_q^{1/2} C_k^{1/2}`. A rank of `head_dim` gives the true scores. For `Score`,
    `RowBudget` and `TopKeys`.

    Args:
        q_moment: `E[q qᵀ]` of every head.
        k_covariance: `E[(k − m)(k − m)ᵀ]` of every *query* head's keys; k_mean: their mean m.

    Raises:
        PatternError: a rank below 1.
    """
    if rank < 1:
        raise PatternError(f"rank: expected at least 1, got {rank}")
    heads = q_moment.shape[0]
    q_map, k_map = score_maps(q_moment, k_covariance, rank)
    factor = torch.as_tensor(scale, dtype=torch.float64, device=q_moment.device).expand(heads)
    q_map, mean = q_map * factor[:, None, None], k_mean.double()
    k_bias = -(k_map @ mean[..., None]).squeeze(-1)
    parts = (q_map, k_map, torch.zeros_like(k_bias), k_bias, factor[:, None] * mean, torch.zeros_like(mean))
    q_map, k_map, q_bias, k_bias, q_linear, k_linear = (x.float().contiguous() for x in parts)
    return Projections(q_map, k_map, q_bias, k_bias, "bilinear", False, q_linear, k_linear, k_linear[:, 0].clone())


def score_maps(
    q_moment: Float[Tensor, "H D D"], k_moment: Float[Tensor, "H D D"], rank: int
) -> tuple[Float64[Tensor, "H r D"], Float64[Tensor, "H r D"]]:
    """`A, B` with the least `E[(Aq · Bk − q · k)²]` for independent q and k of these second moments.

    The singular values are shared evenly between the two sides. A rank above D gives zero rows.
    """
    half_q, inverse_q = moment_roots(q_moment)
    half_k, inverse_k = moment_roots(k_moment)
    u, s, vh = torch.linalg.svd(half_q @ half_k)
    count = min(rank, s.shape[1])
    root = s[:, :count].sqrt()
    q_map = (u[:, :, :count] * root[:, None, :]).transpose(1, 2) @ inverse_q
    k_map = root[:, :, None] * vh[:, :count] @ inverse_k
    extra = (0, 0, 0, rank - count)
    return torch.nn.functional.pad(q_map, extra), torch.nn.functional.pad(k_map, extra)


def moment_roots(
    moments: Float[Tensor, "H D D"],
) -> tuple[Float64[Tensor, "H D D"], Float64[Tensor, "H D D"]]:
    """Square root and its inverse, in float64; directions without variance are left alone."""
    values, vectors = torch.linalg.eigh(moments.double())
    values = values.clamp(min=1e-6 * values.amax(-1, keepdim=True).clamp(min=1e-12))
    return (
        (vectors * values.sqrt()[:, None]) @ vectors.transpose(1, 2),
        (vectors * values.rsqrt()[:, None]) @ vectors.transpose(1, 2),
    )
