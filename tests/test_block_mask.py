"""Block masks: what FlexAttention computes from them, and which blocks it may skip or need not check."""

import numpy as np
import pytest
import torch
from cases_core import item, make
from test_algebra_laws import dense
from torch.nn.attention import flex_attention as flex

from sparsefinder.edges import gold_edges
from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.patterns.algebra import Context, materialize
from sparsefinder.patterns.compositions import bigbird, sparse_transformer
from sparsefinder.patterns.content import InEdges, ScoreAbove
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Past, Strided, Window
from sparsefinder.patterns.random_keys import RandomKeys
from sparsefinder.patterns.views import block_mask


def softmax_attention(q, k, v, allowed, scale):
    """In float64, a row without a key is zero."""
    out = np.zeros((q.shape[0], v.shape[1]))
    for i in range(q.shape[0]):
        keys = allowed[i].nonzero()[0]
        if len(keys):
            weights = np.exp(scale * (k[keys].astype(np.float64) @ q[i]))
            out[i] = weights / weights.sum() @ v[keys]
    return out


@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_computes_the_pattern(causal, monkeypatch):
    """Grouped heads, ragged blocks, left padding; positional and content patterns. Eager: tracing takes minutes."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    batch = make([21, 12], True, causal, 0, heads=4, kv_heads=2, dim=16)
    q, k, v = (torch.nan_to_num(x) for x in (batch.q, batch.k, batch.v))
    near = ScoreAbove(q[..., :2], k[:, [0, 0, 1, 1], :, :2], torch.full((4,), 0.5), "euclidean")
    gold = InEdges(gold_edges(q, k, batch.legal, scale=0.3))
    pattern = Window(1) | GlobalTokens((1, 2)) & ~Strided(3) | RandomKeys(2, causal=causal) & Past() | near & batch.bits
    for tried in (pattern, gold | bigbird(4, 1, causal=causal), sparse_transformer("fixed", 4, heads="multihead")):
        mask = block_mask(tried, batch.legal, 4, 8)
        out = flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, scale=0.3)
        for b in range(2):
            for h in range(4):
                allowed = materialize(tried, batch.legal, b, h).numpy()
                assert np.array_equal(dense(mask, b, h), allowed)
                expected = softmax_attention(*item(batch, b, h), allowed, 0.3)
                assert np.abs(out[b, h].numpy() - expected).max() < 1e-6


@pytest.mark.slow
def test_the_predicate_can_be_traced():
    """Without the switch above dynamo reads the predicate: no part of it may depend on the data."""
    batch = make([20, 12], False, True, 1, heads=2, kv_heads=1)
    q, k, v = (torch.nan_to_num(x) for x in (batch.q, batch.k, batch.v))
    pattern = Window(2) | GlobalTokens((1, 2)) | RandomKeys(2, causal=True)
    mask = block_mask(pattern, batch.legal, 2, 16)
    out = flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, scale=0.3)
    for b in range(2):
        expected = softmax_attention(*item(batch, b, 1), materialize(pattern, batch.legal, b, 1).numpy(), 0.3)
        assert np.abs(out[b, 1].numpy() - expected).max() < 1e-6


def test_blocks_are_skipped_and_left_unchecked():
    """A causal window of radius 8 over 64 tokens in blocks of 8: the diagonal is cut by causality, the rest by the
    window; with radius 15 the block before the diagonal is full."""
    legal = legal_full(1, 64, 64, causal=True)
    mask = block_mask(Window(15), legal, 1, 8)
    assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 1, 1, 1, 1, 1, 1, 1]
    assert mask.kv_num_blocks[0, 0].tolist() == [1, 1, 2, 2, 2, 2, 2, 2]
    assert mask.full_kv_indices[0, 0, 3, 0] == 2
    assert mask.kv_indices[0, 0, 3, :2].tolist() == [1, 3]
    assert block_mask(Nothing(), legal, 1, 8).kv_num_blocks.sum() == 0
    everything = block_mask(~Nothing(), legal_full(1, 64, 64), 1, 8)
    assert everything.full_kv_num_blocks.tolist() == [[[8] * 8]]


def test_ragged_ends_are_always_checked():
    mask = block_mask(~Nothing(), legal_full(1, 20, 26), 1, (8, 4))
    assert mask.full_kv_num_blocks[0, 0].tolist() == [6, 6, 0]
    assert mask.kv_num_blocks[0, 0].tolist() == [1, 1, 7]
    assert mask.seq_lengths == (20, 26)
    assert dense(mask, 0, 0).all()


def test_layers_differ():
    legal, pattern = legal_full(1, 16, 16), sparse_transformer("strided", 4)
    for layer in (0, 1):
        ctx = Context(16, 16, layer=layer)
        found = dense(block_mask(pattern, legal, 1, 4, ctx), 0, 0)
        assert np.array_equal(found, materialize(pattern, legal, 0, 0, ctx).numpy())


def test_bad_input_is_refused():
    with pytest.raises(ShapeError, match="at least one row"):
        block_mask(Window(1), legal_full(1, 4, 4), 1, 0)
    with pytest.raises(PatternError, match="context"):
        block_mask(Window(1), legal_full(1, 4, 4), 1, 2, Context(5, 4))
