"""The gpu backend: one launch of a Triton kernel over the tiles of a plan. Triton is imported when first needed."""

from importlib.util import find_spec

import torch
from torch import Tensor

from sparsefinder.attention.call import Call
from sparsefinder.errors import BackendError
from sparsefinder.plan import Plan

WIDEST = 256  # head dimension: two such blocks and an output fill the registers of a program
MOST_NUMBERS = 2**31 - 1  # places within a head are 32-bit numbers
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LEAST_ROWS, MOST_ROWS = 16, 64  # of one program: the least that tensor cores multiply, the most that fits in registers
PROGRAMS_PER_PROCESSOR = 4
INTERPRETED_PROGRAMS = 3  # so that one program takes several tiles there too
INTERPRETED_BLOCK = 32


def why_not_gpu(call: Call) -> str | None:
    """Why the gpu backend cannot run on this call, as `expected …, got …`; None where it can."""
    if find_spec("triton") is None:
        return "expected the package triton, got none installed"
    from sparsefinder.attention.gpu_kernels import INTERPRETED

    if call.q.device.type != "cuda" and not INTERPRETED:
        return f"expected tensors on a CUDA device (or TRITON_INTERPRET=1), got {call.q.device}"
    if call.q.dtype not in DTYPES:
        return f"expected float16, bfloat16 or float32, got {call.q.dtype}"
    widest = max(call.q.shape[-1], call.v.shape[-1])
    if widest > WIDEST:
        return f"expected head dimensions of at most {WIDEST}, got {widest}"
    if call.dims.keys * widest > MOST_NUMBERS:
        return f"expected at most {MOST_NUMBERS} numbers in the keys of a head, got {call.dims.keys * widest}"
    if call.bias is not None:
        return "expected no bias, got one"
    return None


def attend_gpu(call: Call, plan: Plan) -> Tensor:
    """`[B, H, N, Dv]` in the dtype of q, which may be half precision; rows without keys are zeros.

    Products are of the numbers as they come (float32 without the cut to TF32), sums are in float32.

    Raises:
        BackendError: triton is missing, tensors not on a CUDA device, or a dtype, dimension or bias it cannot take.
    """
    reason = why_not_gpu(call)
    if reason is not None:
        raise BackendError(f"backend gpu: {reason}")
    out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1])
    if not plan.tile_rows.shape[0]:
        return out
    with torch.cuda.device_of(call.q):  # type: ignore[no-untyped-call]
        _launch(call, plan, out)
    return out


def _launch(call: Call, plan: Plan, out: Tensor) -> None:
    from sparsefinder.attention import gpu_kernels as kernels

    lengths = plan.offsets.diff()
    tallest, largest = torch.stack((plan.tile_rows.max(), (lengths * plan.tile_rows).max())).tolist()
    rows = min(max(_power_of_two(tallest), LEAST_ROWS), MOST_ROWS)
    parts = -(-tallest // rows)
    work = parts * lengths.shape[0]
    if kernels.INTERPRETED:
        programs, most = INTERPRETED_PROGRAMS, {"BLOCK": INTERPRETED_BLOCK}
        kernel = kernels.attend_tiles
    else:
        processors = torch.cuda.get_device_properties(call.q.device).multi_processor_count
        programs, most = processors * PROGRAMS_PER_PROCESSOR, {}
        kernel = kernels.tuned_attend_tiles
    programs = min(work, programs)
    kind = {1.0: kernels.SOFTMAX, 1.5: kernels.ENTMAX15}.get(call.alpha, kernels.ENTMAX).value
    slot = 0 if kind == kernels.SOFTMAX.value else largest
    scratch = torch.empty(max(1, programs * slot), dtype=torch.float32, device=call.q.device)
    dims = call.dims
    kernel[(programs,)](
        call.q.detach().contiguous(),
        call.k.detach().contiguous(),
        call.v.detach().contiguous(),
        out,
        call.scales.detach().contiguous(),
        plan.tile_batch,
        plan.tile_head,
        plan.tile_start,
        plan.tile_rows,
        plan.offsets,
        plan.keys,
        plan.first_row,
        scratch,
        slot,
        parts,
        work,
        dims.heads,
        dims.group,
        dims.queries,
        dims.keys,
        call.alpha,
        torch.finfo(torch.float32).eps / 2,
        KIND=kind,
        ROWS=rows,
        DIM=dims.dim,
        DIM_V=call.v.shape[-1],
        DIM_PAD=max(16, _power_of_two(dims.dim)),
        DIM_V_PAD=max(16, _power_of_two(call.v.shape[-1])),
        PRECISION="ieee" if call.q.dtype == torch.float32 else "tf32",
        **most,
    )


def _power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()
