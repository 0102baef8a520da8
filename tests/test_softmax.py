"""Dense softmax by torch's fused attention equals the definition, and is not used where it cannot be."""

import numpy as np
import oracles
import pytest
import torch
from cases_core import batches, item, make
from hypothesis import given, settings
from torch.nn.functional import scaled_dot_product_attention

from sparsefinder.attention.api import attend_dense
from sparsefinder.attention.call import checked
from sparsefinder.attention.dense import attend_all
from sparsefinder.attention.softmax import attend_softmax, can_be_fused
from sparsefinder.patterns.legal import Legal, legal_full


@given(batches(longest=30))
@settings(max_examples=20)
def test_the_definition(batch):
    q, k, v = (x.double() for x in (batch.q, batch.k, batch.v))
    out = attend_softmax(checked(q, k, v, batch.legal, 1.0, 0.3))
    for b in range(q.shape[0]):
        for h in range(batch.heads):
            parts = item(batch, b, h)
            expected = oracles.attention(*parts, batch.legal.matrix(b).numpy(), 1.0, 0.3)
            np.testing.assert_allclose(out[b, h].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_holes_in_the_padding_and_rows_behind_a_cache(causal):
    torch.manual_seed(0)
    real = torch.rand(2, 40) < 0.7
    real[1, :3] = False  # a causal row whose keys are all padding
    for legal in (Legal(real, real, causal), Legal(real[:, 35:], real, causal, query_offset=35)):
        rows = legal.query_real.shape[1]
        q, k, v = torch.randn(2, 6, rows, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 5)
        call = checked(q, k, v, legal, 1.0, None)
        torch.testing.assert_close(attend_softmax(call), attend_all(call), atol=1e-6, rtol=0)


def test_only_plain_calls_are_fused():
    batch = make([20], pad_left=False, causal=False, seed=0)
    q, k, v = batch.q, batch.k, batch.v
    near = Legal(batch.legal.query_real, batch.legal.key_real, radius=3)
    bias = torch.zeros(1, 2, 20, 20)
    assert can_be_fused(checked(q, k, v, batch.legal, 1.0, None))
    assert not can_be_fused(checked(q, k, v, batch.legal, 1.5, None))
    assert not can_be_fused(checked(q, k, v, near, 1.0, None))
    assert not can_be_fused(checked(q, k, v, batch.legal, 1.0, None, bias))
    assert not can_be_fused(checked(q.clone().requires_grad_(), k, v, batch.legal, 1.0, None))


def test_dense_softmax_is_torchs_own_bit_for_bit():
    q, k, v = (torch.randn(1, 4, 300, 16) for _ in range(3))
    for causal in (False, True):
        expected = scaled_dot_product_attention(q * 0.25, k, v, is_causal=causal, scale=1.0)
        found = attend_dense(q, k, v, legal_full(1, 300, 300, causal), alpha=1.0, scale=0.25)
        assert torch.equal(found, expected)
