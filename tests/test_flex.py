"""The flex backend: the cases of the other backends with softmax, and its blocks pair by pair."""

from functools import partial

import numpy as np
import pytest
import test_attention as cases
import torch
from cases_core import batches, make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex

from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.attention.flex import plan_block_mask, rows_with_keys
from sparsefinder.errors import BackendError
from sparsefinder.patterns.positional import Window
from sparsefinder.plan import build_plan, plan_matrix

RUN, DENSE = cases.run, cases.dense


@pytest.fixture(autouse=True)
def _eager_softmax(monkeypatch):
    """The cases of the other backends run with α = 1 and this one. Eager: tracing takes longer than the cases."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(cases, "NAMES", ["flex", "reference"])
    for name, compute in (("attend", attend), ("attend_dense", attend_dense)):
        monkeypatch.setattr(cases, name, partial(compute, alpha=1.0))
    monkeypatch.setattr(
        cases, "run", lambda batch, plan, name, alpha=1.0, scale=0.2: RUN(batch, plan, name, alpha, scale)
    )
    monkeypatch.setattr(cases, "dense", lambda batch, alpha=1.0, scale=0.2: DENSE(batch, alpha, scale))


@given(batches(longest=40), st.sampled_from([3, 16]))
@settings(max_examples=15)
def test_it_equals_the_definition(batch, size):
    exact, plan = cases.doubled(batch), build_plan(batch.pattern, batch.legal, size)
    scales = torch.linspace(0.2, 0.4, batch.heads)
    allowed = [
        [plan_matrix(plan, batch.legal, b, h).numpy() for h in range(batch.heads)] for b in range(batch.q.shape[0])
    ]
    expected = cases.by_oracle(exact, lambda b, h: allowed[b][h], 1.0, scales)
    cases.close(RUN(exact, plan, "flex", 1.0, scales), expected, 1e-10)
    cases.close(RUN(batch, plan, "flex", 1.0, scales), expected.float(), 1e-6)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_neighbours_and_padding_change_nothing(left, causal, monkeypatch):
    cases.test_neighbours_and_padding_change_nothing(left, causal)


@pytest.mark.parametrize("n", [1, 63, 64, 65])
def test_lengths_around_a_tile(n):
    cases.test_lengths_around_a_tile(n)


def test_the_other_cases():
    cases.test_strict_causality(1.0)
    cases.test_rows_without_a_key_are_zero_and_harm_nobody()
    cases.test_grouped_heads_are_repeated_heads()
    cases.test_scores_that_overflow_are_visible()
    cases.test_global_rows_are_dense_rows()


@given(batches(longest=60), st.sampled_from([1, 5, 16, 128]), st.sampled_from([4, 16]))
@settings(max_examples=40)
def test_the_blocks_hold_exactly_the_pairs_of_the_plan(batch, size, block):
    plan = build_plan(batch.pattern, batch.legal, size)
    mask = plan_block_mask(plan, block)
    for b in range(batch.q.shape[0]):
        for h in range(batch.heads):
            matrix = plan_matrix(plan, batch.legal, b, h).numpy()
            assert mask.full_kv_num_blocks is None  # so every pair of a block is checked
            i, j = (torch.arange(n) for n in matrix.shape)
            pairs = mask.mask_mod(torch.tensor(b), torch.tensor(h), i[:, None], j[None, :])
            assert np.array_equal(pairs.numpy(), matrix)
            assert np.array_equal(rows_with_keys(plan)[b, h].numpy(), matrix.any(1))
            blocks = np.pad(matrix, ((0, -matrix.shape[0] % block), (0, -matrix.shape[1] % block)))
            blocks = blocks.reshape(blocks.shape[0] // block, block, -1, block).any((1, 3))
            for t, wanted in enumerate(blocks):  # where causal, also blocks that only later rows of a tile may read
                listed = set(mask.kv_indices[b, h, t, : mask.kv_num_blocks[b, h, t]].tolist())
                needed = set(wanted.nonzero()[0].tolist())
                assert needed <= listed if batch.legal.causal else needed == listed


def test_what_it_cannot_do_is_refused():
    batch = make([6], pad_left=False, causal=False, seed=0)
    plan = build_plan(Window(1), batch.legal, 4, heads=2)
    with pytest.raises(BackendError, match="backend flex: expected alpha 1"):
        RUN(batch, plan, "flex", 1.5)
    bias = torch.zeros(1, 2, 6, 6)
    with pytest.raises(BackendError, match="backend flex: expected no bias"):
        attend(batch.q, batch.k, batch.v, plan, legal=batch.legal, alpha=1.0, bias=bias, backend="flex")


@pytest.mark.slow
def test_it_can_be_traced(monkeypatch):
    """As on a GPU, where it is compiled: no part of the predicate may depend on the data."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    batch = make([20, 12], pad_left=False, causal=True, seed=1)
    plan = build_plan(batch.pattern, batch.legal, 16)
    cases.close(RUN(batch, plan, "flex", 1.0), RUN(batch, plan, "reference", 1.0), 1e-6)
