"""Gold graphs against the definition, and what padding and other items may not change."""

import numpy as np
import oracles
import pytest
import torch
from cases_core import batches, item, make
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.edges import Edges, edge_counts, edges_matrix, gold_edges, gold_pairs, head_edges, mass_edges
from sparsefinder.errors import AlphaError, ConfigError, NonFiniteError, ShapeError
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


@given(batches(longest=14), st.sampled_from([0.3, 0.9, 0.95, 0.999]))
@settings(max_examples=20)
def test_mass_edges_equal_the_definition(batch, mass):
    scale = torch.linspace(0.2, 0.5, batch.heads)
    edges = mass_edges(batch.q.double(), batch.k.double(), batch.legal, mass, scale)
    for b in range(batch.q.shape[0]):
        for h in range(batch.heads):
            q, k, _ = item(batch, b, h)
            expected = oracles.mass_graph(q, k, batch.legal.matrix(b).numpy(), mass, float(scale[h]))
            assert np.array_equal(edges_matrix(edges, b, h).numpy(), expected)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 19))
def test_of_equal_probabilities_the_earlier_key_is_gold(weights, twentieths):
    """Sums of these are exact, so the set may not be larger by one key either."""
    p = torch.tensor([weights], dtype=torch.float64) / 64
    p = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)
    expected = oracles.mass_set(p[0].tolist(), twentieths / 20)
    assert set(gold_pairs(p, 1.0, twentieths / 20)[0].nonzero().flatten().tolist()) == expected
    assert torch.equal(gold_pairs(p.float(), 1.0, twentieths / 20), gold_pairs(p, 1.0, twentieths / 20))


def test_a_later_token_changes_no_row_before_it():
    batch = make([33], pad_left=False, causal=True, seed=6)
    changed = batch.q.clone(), batch.k.clone()
    for x in changed:
        x[:, :, 20] += 3
    first, second = (mass_edges(q, k, batch.legal, 0.95) for q, k in ((batch.q, batch.k), changed))
    for h in range(2):
        before, after = (edges_matrix(edges, 0, h) for edges in (first, second))
        assert torch.equal(before[:20], after[:20])
        assert not torch.equal(before[20:], after[20:])


def test_entmax_ignores_the_mass_and_the_mass_must_be_a_fraction():
    batch = make([9], pad_left=False, causal=False, seed=7)
    plain = gold_edges(batch.q, batch.k, batch.legal, 1.5)
    assert torch.equal(gold_edges(batch.q, batch.k, batch.legal, 1.5, gold_mass=0.5).flat, plain.flat)
    for mass in (0.0, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="gold_mass: expected a fraction"):
            mass_edges(batch.q, batch.k, batch.legal, mass)


def test_softmax_gives_all_legal_pairs():
    batch = make([4, 7], pad_left=True, causal=True, seed=3)
    edges = gold_edges(batch.q, batch.k, batch.legal, 1.0)
    assert all(torch.equal(edges_matrix(edges, b, 1), batch.legal.matrix(b)) for b in range(2))


def test_padding_and_neighbours_change_no_edge():
    """Case 6: [5, 64] in one batch against each alone, and 20 tokens padded to 32."""
    batch = make([5, 64], pad_left=False, causal=False, seed=4, heads=3, kv_heads=3)
    together, massive = gold_edges(batch.q, batch.k, batch.legal), mass_edges(batch.q, batch.k, batch.legal, 0.9)
    for b, n in enumerate((5, 64)):
        q, k, mask = batch.q[b : b + 1, :, :n], batch.k[b : b + 1, :, :n], torch.ones(1, n, dtype=torch.bool)
        alone = gold_edges(q, k, legal_from_mask(mask)), mass_edges(q, k, legal_from_mask(mask), 0.9)
        for h in range(3):
            assert torch.equal(edges_matrix(together, b, h)[:n, :n], edges_matrix(alone[0], 0, h))
            assert torch.equal(edges_matrix(massive, b, h)[:n, :n], edges_matrix(alone[1], 0, h))
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
