"""Proof that attention over a plan is attention over all keys, row by row, and repair of the rows where it is not.

Over the listed keys S a row has a threshold τ_S ≤ τ, that over all its legal keys, because the sum over more keys
reaches one earlier. So the row is exactly the dense one if and only if no dropped legal key has `(α − 1) score > τ_S`
(sparse consistency of α-entmax, Peters et al., 2019; docs/decisions.md). Dropped scores are bounded first
(`dropped_bound`), and only those of pairs that survive the bound are computed. One round repairs a row: τ only rises
when keys are added, so every key that has weight in the end exceeds τ_S now, and all of those are added.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from sparsefinder.attention.call import Call, asks_gradient, check_plan, checked, without_padding
from sparsefinder.attention.cpu import attend_cpu, bias_and_floor
from sparsefinder.certificate_kernels import prove_tiles
from sparsefinder.errors import AlphaError, BackendError, PatternError
from sparsefinder.numba_kernels import kernel_array
from sparsefinder.patterns.legal import Legal
from sparsefinder.plan import Plan
from sparsefinder.score_bound import cheapest_rank, dropped_bound
from sparsefinder.threads import threads_for


@dataclass(frozen=True, eq=False)
class Certificate:
    """What the bound says of every row; rows of padding have nothing to prove and count as proven.

    proven: no dropped key can have weight, so attention over the plan is exact in this row.
    survivors: how many dropped keys the bound does not exclude.
    """

    proven: Bool[Tensor, "B H N"]
    survivors: Int64[Tensor, "B H N"]


@dataclass(frozen=True)
class Repair:
    """What `attend_exact` had to do; rows are (item, head, real query).

    rows: all of them. proven: those that the bound proved at once. repaired: those that got keys.
    survivors: pairs whose true score was computed. most_survivors: of one row. added: pairs that were added.
    """

    rows: int
    proven: int
    repaired: int
    survivors: int
    most_survivors: int
    added: int

    @property
    def mean_survivors(self) -> float:
        """Survivors per row; 0 where there is no row."""
        return self.survivors / self.rows if self.rows else 0.0


def certify(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    plan: Plan,
    *,
    legal: Legal,
    alpha: float = 1.5,
    scale: float | Tensor | None = None,
    bias: Float[Tensor, "#B H N M"] | None = None,
    rank: int | None = None,
) -> Certificate:
    """Which rows of attention over `plan` are proven to be those over all legal keys, without their scores.

    A row that is not proven may still be exact: the bound is above the score. Arguments as in `attend`.

    Args:
        rank: of the bound, see `dropped_bound`: a higher one costs more per pair and leaves fewer survivors. None =
            what is cheapest for these sizes.

    Raises:
        AlphaError: α = 1, or not a number above it.
        BackendError: tensors that are not on the CPU.
        PatternError: a layer with a sliding window, of which there are no plans.
        ShapeError, NonFiniteError: as in `attend`.
    """
    call = _checked(q, k, k, plan, legal, alpha, scale, bias)
    survivors, _ = _run(call, plan, rank, None)
    return Certificate(survivors == 0, survivors)


def attend_exact(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M Dv"],
    plan: Plan,
    *,
    legal: Legal,
    alpha: float = 1.5,
    scale: float | Tensor | None = None,
    bias: Float[Tensor, "#B H N M"] | None = None,
    rank: int | None = None,
) -> tuple[Float[Tensor, "B H N Dv"], Repair]:
    """`attend_dense`, whatever the plan says: attention over the plan, proof, and repair of the rows that need it.

    The better the plan, the cheaper. In a causal layer no bit of a row depends on later tokens. Equal to 1e-5 in
    float32 for α ≤ 2; above, entmax turns an error ε of a score into one of `ε^{1/(α−1)}` of a weight, here as there.

    Arguments and errors as in `certify`; no gradient (BackendError).
    """
    call = _checked(q, k, v, plan, legal, alpha, scale, bias)
    out = attend_cpu(call, plan).contiguous()
    survivors, added = _run(call, plan, rank, out)
    real = legal.query_real[:, None].expand_as(survivors)
    repair = Repair(
        rows=int(real.sum()),
        proven=int((real & (survivors == 0)).sum()),
        repaired=int((added > 0).sum()),
        survivors=int(survivors.sum()),
        most_survivors=int(survivors.max()),
        added=int(added.sum()),
    )
    return out.to(q.dtype), repair


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    legal: Legal,
    alpha: float,
    scale: float | Tensor | None,
    bias: Tensor | None,
) -> Call:
    call = checked(q, k, v, legal, alpha, scale, bias)
    if call.alpha == 1:
        raise AlphaError("alpha: expected more than 1, got 1 (softmax: every key has weight, so no plan is exact)")
    check_plan(call, plan)
    if legal.radius is not None:
        raise PatternError(f"legal: expected a layer without a sliding window, got one of radius {legal.radius}")
    if q.device.type != "cpu" or plan.keys.device.type != "cpu":
        raise BackendError(f"exact: expected tensors on the CPU, got {q.device} and a plan on {plan.keys.device}")
    if asks_gradient(call):
        raise BackendError("exact: expected no gradient to be asked for, use attend_dense (or no_grad)")
    return call


def _run(
    call: Call, plan: Plan, rank: int | None, out: Float[Tensor, "B H N Dv"] | None
) -> tuple[Int64[Tensor, "B H N"], Int64[Tensor, "B H N"]]:
    """Survivors and added keys of every row; with `out`, the output over the plan, rows are repaired in it."""
    found = [torch.zeros(call.q.shape[:3], dtype=torch.int64) for _ in range(2)]
    if not plan.tile_rows.shape[0]:
        return found[0], found[1]
    bound = dropped_bound(call, cheapest_rank(call) if rank is None else rank)
    q, k, v = without_padding(call)
    seen = torch.nn.functional.pad(call.legal.key_real.long().cumsum(-1), (1, 0))
    longest, highest = int(plan.offsets.diff().max()), int(plan.tile_rows.max())
    bias, floor = bias_and_floor(call)
    writes = q.new_zeros(*q.shape[:3], 0) if out is None else out
    work = call.dims.heads * sum(call.legal.count(b) for b in range(call.dims.batch)) * (bound.rank + 8) // 8
    with threads_for(work) as parts:
        prove_tiles(
            (kernel_array(q * call.scales[:, None, None]), kernel_array(k), kernel_array(v)),
            bias,
            kernel_array(writes),
            tuple(kernel_array(x) for x in (bound.query, bound.rest, bound.start, bound.key)),
            kernel_array(seen),
            tuple(kernel_array(x) for x in (plan.tile_batch, plan.tile_head, plan.tile_start, plan.tile_rows)),
            tuple(kernel_array(x) for x in (plan.offsets, plan.keys, plan.first_row)),
            (longest, highest, parts, call.legal.query_offset if call.legal.causal else -1),
            call.alpha,
            floor,
            tuple(x.numpy() for x in found),
        )
    return found[0], found[1]
