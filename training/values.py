"""What a layer does with its attention: values, and how far an error of one head's output moves the layer's output.

A head's output `o` reaches the residual stream as `Wo_h o`. Of that matrix only lengths count here, so a square root of
`Wo_hᵀ Wo_h` is kept in its place, and the layer's output as one number per instance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.hf import LayerCall

OUTPUT_NAMES = ("o_proj", "out_proj", "out_lin", "dense", "Wo", "o")
VALUE_TENSORS = ("v", "root", "power")


@dataclass(frozen=True, eq=False)
class LayerValues:
    """Values of one layer of a split.

    root: `‖root[h] x‖ = ‖Wo_h x‖`, the identity where no output matrix was found. power: `Σ_tokens ‖Σ_h Wo_h o_h‖²` of
    each instance (without an output matrix `Σ ‖o_h‖²`).
    """

    v: Float[Tensor, "I Hkv N Dv"]
    root: Float[Tensor, "H r Dv"]
    power: Float[Tensor, " I"]


def output_weight(model: Any, module: torch.nn.Module, width: int) -> Float[Tensor, "d w"] | None:
    """The matrix that joins the heads of an attention module, None where there is none of that width.

    It is an attribute of the module, or (BERT) of the block `output` beside it.
    """
    names = {child: name for name, child in model.named_modules()}
    parent = model.get_submodule(names[module].rpartition(".")[0]) if module in names else module
    for place in (module, getattr(parent, "output", None)):
        for name in OUTPUT_NAMES:
            found = getattr(place, name, None)
            if isinstance(found, torch.nn.Linear) and found.in_features == width:
                return found.weight.detach()
    return None


def value_tensors(call: LayerCall, weight: Float[Tensor, "d w"] | None) -> dict[str, Tensor]:
    """`v.<layer>`, `root.<layer>` and `power.<layer>` of one call, for a shard."""
    _, heads, _, size = call.output.shape
    output = call.output.detach().float() * call.legal.query_real[:, None, :, None]
    if weight is None:
        root, power = torch.eye(size).expand(heads, size, size), output.square().sum((1, 2, 3))
    else:
        parts = weight.float().view(-1, heads, size).transpose(0, 1)
        root = torch.linalg.qr(parts, mode="r").R
        power = (output.transpose(1, 2).flatten(2) @ weight.float().T).square().sum((1, 2))
    found = {"v": call.v.detach().float(), "root": root, "power": power}
    return {f"{name}.{call.layer}": tensor.cpu().contiguous().clone() for name, tensor in found.items()}


def join_values(parts: Sequence[Mapping[str, Tensor]], layer: int) -> LayerValues:
    """One layer of several shards as one."""
    v, power = (torch.cat([part[f"{name}.{layer}"] for part in parts]) for name in ("v", "power"))
    return LayerValues(v, parts[0][f"root.{layer}"], power)
