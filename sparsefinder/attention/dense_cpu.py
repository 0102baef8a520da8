"""Entmax over all legal keys on the CPU, by the blocks of `cpu.py`: scores of a few rows at a time, few values read."""

import numpy as np
from numba import prange
from torch import Tensor

from sparsefinder.attention.call import Call, asks_gradient
from sparsefinder.attention.cpu import (
    add_bias,
    attend_tile,
    bias_and_floor,
    laid_out,
    load_queries,
    score_tile,
    working_arrays,
)
from sparsefinder.numba_kernels import kernel_array, parallel_kernel
from sparsefinder.threads import threads_for
from sparsefinder.vector_code import LANES

ROWS = 16  # their scores over 8192 keys take half a megabyte, a common second cache


def can_be_tiled(call: Call) -> bool:
    """Entmax without gradient or sliding window, on the CPU."""
    return call.q.device.type == "cpu" and call.alpha > 1 and call.legal.radius is None and not asks_gradient(call)


def attend_entmax(call: Call) -> Tensor:
    """`[B, H, N, Dv]`; rows without keys are zeros. For calls that `can_be_tiled`."""
    legal, dims = call.legal, call.dims
    q, k, v, out = laid_out(call)
    scales, (bias, floor) = kernel_array(call.scales), bias_and_floor(call)
    real, key_real = kernel_array(legal.query_real), kernel_array(legal.key_real)
    listed = np.zeros((dims.batch, dims.keys + LANES), np.int32)
    for b in range(dims.batch):
        keys = key_real[b].nonzero()[0]
        listed[b, : keys.shape[0]] = keys
        listed[b, keys.shape[0] :] = keys[-1] if keys.shape[0] else 0
    seen = np.pad(key_real.cumsum(1), [(0, 0), (1, 0)])
    offset = legal.query_offset if legal.causal else -1
    with threads_for(dims.batch * dims.heads * dims.queries * dims.keys * dims.dim // 8) as parts:
        attend_rows(q, k, v, out.numpy(), scales, bias, real, listed, seen, offset, float(call.alpha), floor, parts)
    return out.transpose(1, 2)


@parallel_kernel
def attend_rows(  # type: ignore[no-untyped-def]
    q, k, v, out, scales, bias, real, listed, seen, offset, alpha, step_floor, parts
):
    """All rows, `ROWS` at a time. listed: real keys of each item, then some that fill up. seen: real keys before each
    key. offset: at which key the first query sits where causal, else −1."""
    biased = bias.shape[2] > 1 or bias.shape[3] > 1
    rows, heads, keys = q.shape[1], q.shape[2], k.shape[2]
    group, tiles = heads // k.shape[1], (rows + ROWS - 1) // ROWS
    for p in prange(parts):
        scores, work = working_arrays(ROWS, keys, v.shape[3], q)
        scaled, ends = np.zeros((q.shape[3], ROWS), q.dtype), np.empty(ROWS, np.int64)
        for i in range(p, q.shape[0] * heads * tiles, parts):
            b, h, low = i // (heads * tiles), i // tiles % heads, i % tiles * ROWS
            n = min(ROWS, rows - low)
            for r in range(n):
                ends[r] = seen[b, min(keys, low + r + offset + 1) if offset >= 0 else keys]
            if ends[n - 1]:
                load_queries(q[b], low, n, h, scales[h], scaled)
                score_tile(scaled, k[b, h // group], listed[b], ends, n, scores)
                if biased:
                    add_bias(bias[b if bias.shape[0] > 1 else 0, h, low : low + n], listed[b, : ends[n - 1]], scores)
                attend_tile(scores, ends, n, v[b, h // group], listed[b], alpha, step_floor, work, out[b], low, h)
                for r in range(n):
                    if not real[b, low + r]:
                        out[b, low + r, h, :] = 0
