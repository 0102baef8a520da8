"""What every backend gets: checked tensors of one attention call."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.errors import ShapeError
from sparsefinder.patterns.legal import Legal
from sparsefinder.plan import Plan
from sparsefinder.shapes import Dims, check_alpha, check_bias, check_finite, check_qkv, check_real, head_scales


@dataclass(frozen=True, eq=False)
class Call:
    """`q, k, v` in float32 or float64; `scales` is the factor of `q·k` per head; α = 1 is softmax.

    Of a call that kept its half precision (see `checked`), `scales` and `bias` are in float32 all the same.

    bias: what is added to the scaled scores, see `attend`; its batch is that of q, or 1 for all items.
    """

    q: Float[Tensor, "B H N D"]
    k: Float[Tensor, "B Hkv M D"]
    v: Float[Tensor, "B Hkv M Dv"]
    legal: Legal
    alpha: float
    scales: Float[Tensor, " H"]
    dims: Dims
    bias: Float[Tensor, "#B H N M"] | None = None


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    legal: Legal,
    alpha: float,
    scale: float | Tensor | None,
    bias: Tensor | None = None,
    *,
    keep_half: bool = False,
) -> Call:
    """A call whose arguments fit each other; half precision becomes float32 unless it is kept, for a kernel that takes
    it and adds up in float32. Errors as in `attend`."""
    dims = check_qkv(q, k, v)
    check_real(legal.query_real, legal.key_real, dims)
    if legal.key_real.device != q.device:
        raise ShapeError(f"legal: expected masks on {q.device} like q, got {legal.key_real.device}")
    for name, x, real in (("q", q, legal.query_real), ("k", k, legal.key_real), ("v", v, legal.key_real)):
        check_finite(name, x, real)
    exact = q.new_empty(0, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    added = None if bias is None else check_bias(bias, dims, exact)
    call = Call(q, k, v, legal, check_alpha(alpha), head_scales(scale, dims, exact), dims, added)
    return call if keep_half else in_single(call)


def in_single(call: Call) -> Call:
    """The same call with half precision as float32."""
    exact = call.scales.dtype
    return replace(call, q=call.q.to(exact), k=call.k.to(exact), v=call.v.to(exact))


def without_padding(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with zeros at padding: a matrix product would turn NaN there into NaN everywhere, even at weight zero."""
    tokens = ((call.q, call.legal.query_real), (call.k, call.legal.key_real), (call.v, call.legal.key_real))
    q, k, v = (x if bool(real.all()) else x.masked_fill(~real[:, None, :, None], 0.0) for x, real in tokens)
    return q, k, v


def check_plan(call: Call, plan: Plan) -> None:
    """ShapeError unless the plan was made for calls of this size."""
    expected = (call.dims.batch, call.dims.heads, call.dims.queries, call.dims.keys)
    if plan.shape != expected:
        raise ShapeError(f"plan: expected shape {expected}, got {plan.shape}")


def stretch(real: Tensor) -> slice:
    """From the first real token of an item to its last."""
    at = real.nonzero()
    return slice(int(at[0]), int(at[-1]) + 1) if at.shape[0] else slice(0, 0)


def asks_gradient(call: Call) -> bool:
    """Is a gradient asked for through any of the tensors?"""
    tensors = (call.q, call.k, call.v, call.scales, call.bias)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
