"""Gold graphs against the definition, and what padding and other items may not change."""

import numpy as np
import oracles
import pytest
import torch
from cases_core import batches, item, make
from hypothesis import given, settings

from sparsefinder.edges import Edges, edge_counts, edges_matrix, gold_edges, head_edges
from sparsefinder.errors import AlphaError, NonFiniteError, ShapeError
from sparsefinder.patterns.algebra import materialize
from sparsefinder.patterns.content import InEdges
from sparsefinder.patterns.legal import legal_from_mask


@given(batches(longest=14))
@settings(max_examples=20)
def test_equals_the_definition(batch):
    scale = torch.linspace(0.2, 0.5, batch.heads)
    edges = gold_edges(batch.q, batch.k, batch.legal, 1.5, scale)
    for b in range(batch.q.shape[0]):
        for h in range(batch.heads):
            legal = batch.legal.matrix(b).numpy()
            q, k, _ = item(batch, b, h)
            expected = oracles.gold(q, k, legal, 1.5, float(scale[h]))
            found = edges_matrix(edges, b, h)
            assert np.array_equal(found.numpy(), expected)
            assert (head_edges(edges, b, h).diff() > 0).all()
            assert int(edge_counts(edges)[b, h]) == expected.sum()
            assert torch.equal(materialize(InEdges(edges), batch.legal, b, h), found)


def test_softmax_gives_all_legal_pairs():
    batch = make([4, 7], pad_left=True, causal=True, seed=3)
    edges = gold_edges(batch.q, batch.k, batch.legal, 1.0)
    assert all(torch.equal(edges_matrix(edges, b, 1), batch.legal.matrix(b)) for b in range(2))


def test_padding_and_neighbours_change_no_edge():
    """Case 6: [5, 64] in one batch against each alone, and 20 tokens padded to 32."""
    batch = make([5, 64], pad_left=False, causal=False, seed=4, heads=3, kv_heads=3)
    together = gold_edges(batch.q, batch.k, batch.legal)
    for b, n in enumerate((5, 64)):
        q, k, mask = batch.q[b : b + 1, :, :n], batch.k[b : b + 1, :, :n], torch.ones(1, n, dtype=torch.bool)
        alone = gold_edges(q, k, legal_from_mask(mask))
        for h in range(3):
            assert torch.equal(edges_matrix(together, b, h)[:n, :n], edges_matrix(alone, 0, h))
    narrow = make([20], pad_left=True, causal=False, seed=5)
    wide = [torch.nn.functional.pad(x, (0, 0, 12, 0), value=torch.inf) for x in (narrow.q, narrow.k)]
    mask = torch.arange(32)[None] >= 12
    expected = edges_matrix(gold_edges(narrow.q, narrow.k, narrow.legal), 0, 1)
    assert torch.equal(edges_matrix(gold_edges(*wide, legal_from_mask(mask)), 0, 1)[12:, 12:], expected)


def test_an_item_of_padding_only_has_no_edge():
    q = torch.randn(2, 1, 4, 8)
    mask = torch.tensor([[False] * 4, [True] * 4])
    edges = gold_edges(q, q, legal_from_mask(mask))
    assert int(edge_counts(edges)[0, 0]) == 0
    assert int(edge_counts(edges)[1, 0]) >= 4


def test_bad_input_is_refused():
    q = torch.randn(1, 2, 5, 8)
    legal = legal_from_mask(torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(AlphaError):
        gold_edges(q, q, legal, 0.9)
    bad = q.clone()
    bad[0, 1, 3, 2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"k: expected finite numbers.*head 1, token 3"):
        gold_edges(q, bad, legal)
    with pytest.raises(ShapeError, match="offsets"):
        Edges(torch.zeros(2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), (1, 2, 3, 3))
