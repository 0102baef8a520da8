"""Checks of shapes, dtypes, devices and finiteness that every public function shares.

The arguments here are plain tensors on purpose: these functions are what turns a wrong shape into a typed error.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.errors import AlphaError, NonFiniteError, ShapeError


@dataclass(frozen=True)
class Dims:
    """Sizes of one attention call: `q [batch, heads, queries, dim]`, `k [batch, kv_heads, keys, dim]`."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int

    @property
    def group(self) -> int:
        """Query heads per key/value head; head `h` reads kv head `h // group`."""
        return self.heads // self.kv_heads


def group_size(heads: int, kv_heads: int) -> int:
    """Query heads per kv head of grouped-query attention. ShapeError where they do not divide."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ShapeError(f"expected query heads as a multiple of kv heads, got {heads} and {kv_heads}")
    return heads // kv_heads


def check_qkv(q: Tensor, k: Tensor, v: Tensor | None = None) -> Dims:
    """The sizes of `q [B, H, N, D]`, `k [B, Hkv, M, D]`, `v [B, Hkv, M, Dv]`.

    Raises:
        ShapeError: a rank, a size, a dtype or a device that does not fit the others.
    """
    for name, x in (("q", q), ("k", k)) if v is None else (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape:
            raise ShapeError(f"{name}: expected 4 non-empty axes [batch, heads, tokens, dim], got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ShapeError(f"{name}: expected floating point numbers, got {x.dtype}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ShapeError(f"{name}: expected {q.dtype} on {q.device} like q, got {x.dtype} on {x.device}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ShapeError(f"k: expected the batch and dim of q {tuple(q.shape)}, got {tuple(k.shape)}")
    if v is not None and v.shape[:3] != k.shape[:3]:
        raise ShapeError(f"v: expected batch, heads and tokens of k {tuple(k.shape)}, got {tuple(v.shape)}")
    group_size(q.shape[1], k.shape[1])
    return Dims(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])


def check_real(query_real: Tensor, key_real: Tensor, dims: Dims) -> None:
    """ShapeError unless the padding masks (True = real token) have the sizes of this call."""
    for name, real, tokens in (("query_real", query_real, dims.queries), ("key_real", key_real, dims.keys)):
        if tuple(real.shape) != (dims.batch, tokens) or real.dtype != torch.bool:
            expected = f"bool {(dims.batch, tokens)}"
            raise ShapeError(f"legal.{name}: expected {expected}, got {real.dtype} {tuple(real.shape)}")


def check_finite(name: str, x: Tensor, real: Tensor) -> None:
    """NonFiniteError if a real token of `x [B, H, N, D]` holds NaN or infinity; padding (`real [B, N]` False) may.

    One sum decides the common case: it is finite unless something in `x` is not, or the sum overflows.
    """
    if math.isfinite(float(x.detach().sum(dtype=torch.float32 if x.element_size() < 4 else x.dtype))):
        return
    bad = ~torch.isfinite(x.detach()).all(-1) & real[:, None, :]
    if bool(bad.any()):
        b, h, i = (int(n) for n in bad.nonzero()[0])
        raise NonFiniteError(f"{name}: expected finite numbers, got NaN or infinity at item {b}, head {h}, token {i}")


def check_alpha(alpha: float) -> float:
    """α as a float; AlphaError unless it is finite and at least 1."""
    if not (math.isfinite(alpha) and alpha >= 1.0):
        raise AlphaError(f"alpha: expected a finite number of at least 1, got {alpha}")
    return float(alpha)


def head_scales(scale: float | Tensor | None, dims: Dims, like: Tensor) -> Float[Tensor, " H"]:
    """The factor of `q·k` for every query head, in the dtype and on the device of `like`; None means `dim ** -0.5`.

    Raises:
        ShapeError: a tensor that has not one entry per head.
        NonFiniteError: a factor that is NaN or infinite.
    """
    value = dims.dim**-0.5 if scale is None else scale
    if isinstance(value, Tensor) and value.ndim and tuple(value.shape) != (dims.heads,):
        raise ShapeError(f"scale: expected a number or one per head [{dims.heads}], got {tuple(value.shape)}")
    scales = torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(dims.heads)
    if not bool(torch.isfinite(scales).all()):
        raise NonFiniteError("scale: expected finite factors, got NaN or infinity")
    return scales


def check_bias(bias: Tensor, dims: Dims, like: Tensor) -> Float[Tensor, "#B H N M"]:
    """An additive bias in the dtype of `like`, one for every pair of a head: T5's is learned per distance.

    Raises:
        ShapeError: a shape other than `[batch or 1, heads, queries, keys]`, or another device.
        NonFiniteError: NaN or infinity (what may not be read belongs into `legal`).
    """
    expected = (dims.heads, dims.queries, dims.keys)
    if bias.ndim != 4 or bias.shape[0] not in (1, dims.batch) or tuple(bias.shape[1:]) != expected:
        raise ShapeError(f"bias: expected {(dims.batch, *expected)}, the first of them or 1, got {tuple(bias.shape)}")
    if bias.device != like.device:
        raise ShapeError(f"bias: expected a tensor on {like.device} like q, got {bias.device}")
    if not math.isfinite(float(bias.detach().sum(dtype=torch.float64))):
        raise NonFiniteError("bias: expected finite numbers, got NaN or infinity")
    return bias.to(like.dtype)


def item_bias(bias: Float[Tensor, "#B H N M"], b: int) -> Float[Tensor, "H N M"]:
    """The bias of one item, which all may share."""
    return bias[b if bias.shape[0] > 1 else 0]


def head_tiles(tile_size: int | Tensor, heads: int) -> tuple[int, ...]:
    """Rows of a tile for every head. ShapeError unless each is between 1 and 128 (kernels know 16, 32 and 64)."""
    sizes = (tile_size,) * heads if isinstance(tile_size, int) else tuple(int(s) for s in tile_size.tolist())
    if len(sizes) != heads or not all(1 <= size <= 128 for size in sizes):
        raise ShapeError(f"tile_size: expected {heads} sizes between 1 and 128, got {sizes}")
    return sizes
