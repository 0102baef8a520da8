"""Random batches as hypothesis strategies: ragged, padded on either side, grouped heads, causal or not."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from sparsefinder.patterns.algebra import Pattern
from sparsefinder.patterns.content import BucketsMeet
from sparsefinder.patterns.legal import Legal, legal_from_mask
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window


@dataclass(frozen=True)
class Batch:
    """One attention call with a pattern of every kind, and the parts that the oracles need."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    legal: Legal
    bits: BucketsMeet
    radius: int
    globals_: int

    @property
    def pattern(self) -> Pattern:
        return self.bits | (Nothing() if self.radius < 0 else Window(self.radius)) | GlobalTokens(self.globals_)

    @property
    def heads(self) -> int:
        return self.q.shape[1]


def make(lengths, pad_left, causal, seed, *, heads=2, kv_heads=1, dim=8, radius=1, globals_=1, width=None):
    """A batch of texts of these lengths; padding holds NaN, which nobody may look at."""
    draw = torch.Generator().manual_seed(seed)
    n = max(lengths) if width is None else width
    mask = torch.zeros(len(lengths), n, dtype=torch.bool)
    for b, length in enumerate(lengths):
        mask[b, n - length if pad_left else 0 : n if pad_left else length] = True

    def tokens(count, size):
        x = torch.randn(len(lengths), count, n, size, generator=draw)
        return x.masked_fill(~mask[:, None, :, None], torch.nan)

    # Outputs stay below one, so that an absolute tolerance of 1e-6 means what it says in float32.
    q, k, v = tokens(heads, dim) * 2, tokens(kv_heads, dim) * 2, tokens(kv_heads, dim) * 0.3
    sets = [torch.rand(len(lengths), heads, n, 12, generator=draw) < 0.1 for _ in range(2)]
    return Batch(q, k, v, legal_from_mask(mask, causal), BucketsMeet(*sets), radius, globals_)


@st.composite
def batches(draw, longest=40, causal=None):
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=2))
    heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
    return make(
        lengths,
        draw(st.booleans()),
        draw(st.booleans()) if causal is None else causal,
        draw(st.integers(0, 1000)),
        heads=heads[0],
        kv_heads=heads[1],
        radius=draw(st.integers(-1, 3)),
        globals_=draw(st.integers(0, 3)),
    )


def bucket_sets(bits: torch.Tensor) -> list[set[int]]:
    """The buckets of every token, for the oracle."""
    return [set(row.nonzero()[0].tolist()) for row in bits.numpy()]


def item(batch: Batch, b: int, h: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of one item and head with padding as zeros, for the oracle."""
    kv = h // (batch.q.shape[1] // batch.k.shape[1])
    return tuple(torch.nan_to_num(x).numpy() for x in (batch.q[b, h], batch.k[b, kv], batch.v[b, kv]))
