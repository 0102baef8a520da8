"""The oracle backend: dense scores, the plan as a mask, one item and head at a time. Differentiable, slow."""

import torch
from torch import Tensor

from sparsefinder.attention.call import Call, without_padding
from sparsefinder.entmax import entmax
from sparsefinder.plan import Plan, plan_matrix
from sparsefinder.shapes import item_bias


def attend_reference(call: Call, plan: Plan) -> Tensor:
    """`[B, H, N, Dv]` on any device."""
    q, k, v = without_padding(call)
    rows = []
    for b in range(call.dims.batch):
        for h in range(call.dims.heads):
            kv = h // call.dims.group
            scores = (q[b, h] * call.scales[h]) @ k[b, kv].T
            if call.bias is not None:
                scores = scores + item_bias(call.bias, b)[h]
            p = entmax(scores, call.alpha, plan_matrix(plan, call.legal, b, h))
            rows.append(p @ v[b, kv])
    return torch.stack(rows).view(*call.q.shape[:3], call.v.shape[-1])
