"""Attention over a plan, and over all legal keys: checks and dispatch. Backends never import each other."""

from collections.abc import Callable
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from sparsefinder.attention.call import Call, asks_gradient, check_plan, checked, in_single
from sparsefinder.attention.cpu import attend_cpu
from sparsefinder.attention.dense import attend_all
from sparsefinder.attention.dense_cpu import attend_entmax, can_be_tiled
from sparsefinder.attention.flex import attend_flex
from sparsefinder.attention.gather import attend_gather
from sparsefinder.attention.gpu import attend_gpu, why_not_gpu
from sparsefinder.attention.reference import attend_reference
from sparsefinder.attention.softmax import attend_softmax, can_be_fused
from sparsefinder.errors import BackendError, ShapeError
from sparsefinder.patterns.legal import Legal
from sparsefinder.plan import Plan

Backend = Literal["auto", "reference", "cpu", "gather", "gpu", "flex"]

BACKENDS: dict[str, Callable[[Call, Plan], Tensor]] = {
    "reference": attend_reference,
    "cpu": attend_cpu,
    "gather": attend_gather,
    "gpu": attend_gpu,
    "flex": attend_flex,
}
TAKE_HALF = ("gpu", "flex")  # half precision as it comes; the others get float32


def attend(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M Dv"],
    plan: Plan,
    *,
    legal: Legal,
    alpha: float = 1.5,
    scale: float | Tensor | None = None,
    bias: Float[Tensor, "#B H N M"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "B H N Dv"]:
    """`Σ_j p_ij v_j` with `p_i` the α-entmax of `scale[h] q_i·k_j + bias` over the keys that the plan lists for row i.

    Equal to `attend_dense` in every row whose list holds the support (sparse consistency). Rows without keys, padding
    rows among them, are zeros; what padding holds, NaN included, changes nothing. Half precision is computed in
    float32 and returned as it came (on `gpu` the products are of half numbers, and weights are rounded to them).

    Args:
        scale: a number, or one per head; None is `D ** -0.5`.
        bias: added to the score of every pair of a head (the relative positions of T5), finite; for each item or for
            all. None = nothing.
        backend: `reference` (dense, the oracle), `cpu` (numba, no gradient), `gpu` (Triton, no gradient, no bias,
            float32 at most), `flex` (FlexAttention: softmax only, no bias, a baseline), `gather` (plain torch, any
            device), or `auto`: `cpu` for CPU tensors and `gpu` for CUDA tensors, `gather` where a gradient is asked for
            or the kernel cannot take the call.

    Raises:
        BackendError: an unknown backend, or one that cannot run on these tensors; nothing falls back in silence.
        ShapeError, AlphaError: arguments that do not fit.
        NonFiniteError: NaN or infinity in a real token of q, k or v.
    """
    call = checked(q, k, v, legal, alpha, scale, bias, keep_half=True)
    check_plan(call, plan)
    if plan.keys.device != q.device:
        raise ShapeError(f"plan: expected a plan on {q.device} like q, got {plan.keys.device}")
    chosen = _choose(backend, call)
    return BACKENDS[chosen](call if chosen in TAKE_HALF else in_single(call), plan).to(q.dtype)


def attend_dense(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M Dv"],
    legal: Legal,
    *,
    alpha: float = 1.5,
    scale: float | Tensor | None = None,
    bias: Float[Tensor, "#B H N M"] | None = None,
) -> Float[Tensor, "B H N Dv"]:
    """The same over all legal keys. Differentiable; without gradient only a few rows' scores exist at a time, and
    softmax is torch's fused attention wherever that needs no matrix of biases or windows.

    Arguments, rows of zeros and errors as in `attend`.
    """
    call = checked(q, k, v, legal, alpha, scale, bias)
    attend_by = attend_softmax if can_be_fused(call) else attend_entmax if can_be_tiled(call) else attend_all
    return attend_by(call).to(q.dtype)


def _choose(backend: str, call: Call) -> str:
    gradient = asks_gradient(call)
    on_cpu = call.q.device.type == "cpu"
    if backend == "auto":
        if gradient:
            return "gather"
        return "cpu" if on_cpu else "gather" if why_not_gpu(call) else "gpu"
    if backend not in BACKENDS:
        raise BackendError(f"backend: expected auto or one of {', '.join(sorted(BACKENDS))}, got {backend}")
    if backend == "cpu" and not on_cpu:
        raise BackendError(f"backend cpu: expected tensors on the CPU, got {call.q.device}")
    if backend in ("cpu", "gpu") and gradient:
        raise BackendError(
            f"backend {backend}: expected no gradient to be asked for, use reference or gather (or no_grad)"
        )
    return backend
