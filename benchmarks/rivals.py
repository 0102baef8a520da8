"""Attention of others, as `benchmarks.attention` and `benchmarks.exact` time it."""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from entmax import entmax15
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import BigBirdConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

from sparsefinder.attention.flex import plan_block_mask
from sparsefinder.hf import LayerInput
from sparsefinder.plan import Plan

SORTED = 128  # greatest scores that the package sorts before it looks further
BLOCK = 512  # rows of scores that it gets at once
BIGBIRD_BLOCK = 64
FIXED_BLOCKS = 5  # that every query block of BigBird reads: three of its window, two global ones
Attention = Callable[[], Tensor]


def expanded(call: LayerInput) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H M D"], Float[Tensor, "B H M Dv"]]:
    """Queries times their heads' scale, and keys and values of every query head: what a rival need not pay for."""
    group = call.q.shape[1] // call.k.shape[1]
    q = call.q * call.scale[:, None, None]
    return q, call.k.repeat_interleave(group, 1).contiguous(), call.v.repeat_interleave(group, 1).contiguous()


def fused_softmax(call: LayerInput) -> Attention:
    """torch's scaled dot product attention over all earlier keys, or all keys."""
    causal = call.legal.causal
    return functools.partial(scaled_dot_product_attention, *expanded(call), is_causal=causal, scale=1.0)


def package_entmax(call: LayerInput) -> Float[Tensor, "B H N Dv"]:
    """Causal attention with the 1.5-entmax of its authors' package, partly sorted, in blocks of rows; later keys are
    neither computed nor sorted."""
    group = call.q.shape[1] // call.k.shape[1]
    out = torch.empty(*call.q.shape[:3], call.v.shape[-1])
    for h, low in itertools.product(range(call.q.shape[1]), range(0, call.q.shape[2], BLOCK)):
        rows = slice(low, min(low + BLOCK, call.q.shape[2]))
        k, v = call.k[0, h // group, : rows.stop], call.v[0, h // group, : rows.stop]
        scores = (call.q[0, h, rows] * call.scale[h]) @ k.T
        later = torch.arange(rows.stop) > torch.arange(rows.start, rows.stop)[:, None]
        out[0, h, rows] = entmax15(scores.masked_fill_(later, -torch.inf), -1, min(SORTED, rows.stop)) @ v
    return out


@dataclass(frozen=True)
class Flex:
    """FlexAttention over the blocks of a plan. form: compiled, or eager (all scores) where compiling fails."""

    form: Literal["compiled", "eager"]
    attend: Attention


def flex(call: LayerInput, plan: Plan, *, eager_too: bool) -> Flex | None:
    """FlexAttention with softmax over a plan's pairs, the block mask made beforehand. On a CPU torch compiles it with
    the machine's C++ compiler; None where that does not work and the eager form is not wanted."""
    inputs: tuple[Any, ...] = expanded(call)
    mask = plan_block_mask(plan)
    torch.compiler.reset()  # every length is compiled by itself, and only a few are kept
    try:
        compiled = functools.partial(compiled_flex(), *inputs, block_mask=mask, scale=1.0)
        compiled()
    except RuntimeError:  # no compiler, or a shape that it cannot take
        eager = functools.partial(flex_attention, *inputs, block_mask=mask, scale=1.0)
        return Flex("eager", eager) if eager_too else None
    return Flex("compiled", compiled)


def compiled_flex() -> Callable[..., Any]:
    """FlexAttention as it is meant to be called; it is compiled at its first call."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled


@dataclass(frozen=True)
class BigBird:
    """Block-sparse attention of transformers' BigBird, and the share of all N × N pairs that it computes."""

    density: float
    attend: Attention


def bigbird(call: LayerInput, density: float) -> BigBird | None:
    """The BigBird that comes nearest to a density with blocks of 64; None for texts that are too short for one.

    It reads past and future alike, so at one density twice the pairs of a causal layer. Random weights would change
    nothing: its attention gets the layer's own queries, keys and values.
    """
    batch, heads, tokens, dim = call.q.shape
    blocks = tokens // BIGBIRD_BLOCK
    most = (blocks - FIXED_BLOCKS) // 2 - 1  # of random blocks, as its model demands
    if tokens % BIGBIRD_BLOCK or most < 1:
        return None
    # The first and last blocks read all, the second and last but one a block less than the others.
    by_count = {
        count: (2 * blocks + 2 * (count + FIXED_BLOCKS - 1) + (blocks - 4) * (count + FIXED_BLOCKS)) / blocks**2
        for count in range(1, most + 1)
    }
    count = min(by_count, key=lambda count: abs(by_count[count] - density))
    config = BigBirdConfig(
        hidden_size=heads * dim, num_attention_heads=heads, num_random_blocks=count, block_size=BIGBIRD_BLOCK,
        max_position_embeddings=tokens,
    )  # fmt: skip
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(
        torch.ones(batch, tokens), BIGBIRD_BLOCK
    )
    q, k, v = expanded(call)
    module = BigBirdBlockSparseAttention(config).eval()  # type: ignore[no-untyped-call]
    attend = functools.partial(
        module.bigbird_block_sparse_attention, q * math.sqrt(dim), k, v, band, rows, columns, blocked, blocked, heads,
        count, dim, BIGBIRD_BLOCK, BIGBIRD_BLOCK, batch, tokens, tokens, None, None, None,
    )  # fmt: skip
    return BigBird(by_count[count], lambda: attend()[0])
