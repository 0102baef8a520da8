"""Every view of a random expression shows the same pairs: matrix, edges, bounds, plan, block mask, text."""

import contextlib

import numpy as np
import oracles
import torch
from cases_patterns import calls, expressions
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.edges import edges_matrix
from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import materialize
from sparsefinder.patterns.bounds import bounds
from sparsefinder.patterns.content import InEdges
from sparsefinder.patterns.heads import at_layer
from sparsefinder.patterns.text import format_pattern, parse_pattern
from sparsefinder.patterns.views import block_mask, pattern_edges
from sparsefinder.plan import build_plan, plan_matrix

TILES = st.sampled_from([1, 3, 4, 16])


def tile(matrix, tile_q, tile_k, inside):
    """`inside` (any or all) of every tile."""
    n, m = matrix.shape
    return np.array(
        [[inside(matrix[i : i + tile_q, j : j + tile_k]) for j in range(0, m, tile_k)] for i in range(0, n, tile_q)]
    )


def dense(mask, b, h):
    """What a kernel computes from a block mask: full blocks unchecked, partial ones pair by pair, others not at all."""
    (n, m), (tile_q, tile_k) = mask.seq_lengths, mask.BLOCK_SIZE
    found = np.zeros((n, m), bool)
    for t in range(-(-n // tile_q)):
        i = torch.arange(t * tile_q, min(n, (t + 1) * tile_q))
        full = mask.full_kv_indices[b, h, t, : mask.full_kv_num_blocks[b, h, t]].tolist()
        partial = mask.kv_indices[b, h, t, : mask.kv_num_blocks[b, h, t]].tolist()
        assert not set(full) & set(partial)
        for s in full + partial:
            j = torch.arange(s * tile_k, min(m, (s + 1) * tile_k))
            checked = mask.mask_mod(torch.tensor(b), torch.tensor(h), i[:, None], j[None, :])
            found[i[0] : i[-1] + 1, j[0] : j[-1] + 1] = True if s in full else checked.numpy()
    return found


@given(st.data(), calls(), TILES, TILES)
@settings(max_examples=40)
def test_all_views_agree(data, call, tile_q, tile_k):
    expression = data.draw(expressions(call))
    pattern, legal, ctx = expression.pattern, call.legal, call.ctx
    edges = pattern_edges(pattern, legal, call.heads, ctx)
    plan = build_plan(pattern, legal, tile_q, ctx, heads=call.heads)
    mask = block_mask(pattern, legal, call.heads, (tile_q, tile_k), ctx)
    for b, h in call.places:
        chosen, pairs = expression.matrix(b, h), call.legal_pairs(b)
        expected = chosen & pairs
        assert np.array_equal(materialize(pattern, legal, b, h, ctx).numpy(), expected)
        assert np.array_equal(edges_matrix(edges, b, h).numpy(), expected)
        assert np.array_equal(dense(mask, b, h), expected)
        some, every = bounds(pattern, legal, tile_q, tile_k, b, h, ctx)
        assert not (tile(expected, tile_q, tile_k, np.any) & ~some.numpy()).any()
        assert not (every.numpy() & ~tile(expected, tile_q, tile_k, np.all)).any()
        place = (*call.real(b), tile_q, expression.alone(b), legal.causal, legal.query_offset)
        assert np.array_equal(plan_matrix(plan, legal, b, h).numpy(), oracles.plan(chosen, pairs, *place)[1])


@given(st.data(), calls())
@settings(max_examples=10)
def test_edges_are_a_pattern_again(data, call):
    pattern = data.draw(expressions(call, 3)).pattern
    again = InEdges(pattern_edges(pattern, call.legal, call.heads, call.ctx))
    for b, h in call.places:
        assert torch.equal(
            materialize(again, call.legal, b, h, call.ctx), materialize(pattern, call.legal, b, h, call.ctx)
        )


@given(st.data(), calls())
@settings(max_examples=30)
def test_text_and_layer_keep_the_pairs(data, call):
    """Where there is a text form: what it is read as has the same pairs. The pattern of one layer has them too."""
    pattern = data.draw(expressions(call)).pattern
    same = [at_layer(pattern, call.layer)]
    with contextlib.suppress(PatternError):  # patterns that hold tensors have no text
        same.append(parse_pattern(format_pattern(pattern)))
    for b, h in call.places:
        expected = materialize(pattern, call.legal, b, h, call.ctx)
        for other in same:
            assert torch.equal(materialize(other, call.legal, b, h, call.ctx), expected)


@given(st.data(), calls())
@settings(max_examples=10)
def test_the_laws_of_sets(data, call):
    a, b, c = (data.draw(expressions(call, 3)).pattern for _ in range(3))

    def pairs(pattern):
        return torch.stack([materialize(pattern, call.legal, *place, call.ctx) for place in call.places])

    assert torch.equal(pairs(a & (b | c)), pairs(a & b | a & c))
    assert torch.equal(pairs(~(a | b)), pairs(~a & ~b))
    assert torch.equal(pairs(a | a & b), pairs(a))
    assert torch.equal(pairs(~~a), pairs(a))
    assert not pairs(a & ~a).any()
    legal = torch.stack([call.legal.matrix(b) for b, _ in call.places])
    assert torch.equal(pairs(a | ~a), legal)
