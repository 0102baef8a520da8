"""A tiny encoder–decoder trained to copy: patterns in its cross-attention against gold positions that are known."""

import pytest
import torch

from sparsefinder.patterns.text import parse_pattern
from training.tasks.cross_attention import (
    by_budgets,
    cross_rows,
    low_rank_budgets,
    measure_cross,
    seen_cross,
    true_budgets,
)
from training.tasks.reversal import Reversal, accuracy_of, logits_of, marian, reversal_batch, train_reversal
from training.tasks.together import Schedule


def test_a_trained_copier_reads_its_gold_positions():
    """The run of the tests: a few seconds' training, then recall against positions that are known by construction."""
    task = Reversal("copy", 3, 6, 8)
    model = marian(task, width=32)
    losses = train_reversal(task, model, Schedule(200, 1e-2, warmup=20), batch=16)
    model.eval()
    pairs = reversal_batch(task, 24, torch.Generator().manual_seed(77))
    assert losses[-1] < 0.3 * losses[0]
    with torch.no_grad():
        dense = accuracy_of(logits_of(model, pairs), pairs)
    assert dense > 0.9
    calls = seen_cross(model, pairs)
    patterns = {
        "all": lambda call: parse_pattern("~window(0)"),
        "diagonal": lambda call: parse_pattern("window(1)"),
        "learned": by_budgets(low_rank_budgets(calls, 8, 0.4)),
        "true": by_budgets(true_budgets(calls, 0.4)),
    }
    rows = cross_rows(model, pairs, patterns)
    assert rows["all"] == {"density": 1.0, "gold_recall": 1.0, "every_head": 1.0, "accuracy": pytest.approx(dense)}
    assert rows["diagonal"]["gold_recall"] == 0.0  # row i must read source position i + 1
    assert rows["diagonal"]["accuracy"] < 0.6
    for name in ("learned", "true"):
        assert rows[name]["gold_recall"] > 0.9
        assert rows[name]["accuracy"] > 0.85
        assert rows[name]["density"] < 0.6
    assert measure_cross(model, pairs, patterns["true"]).accuracy == rows["true"]["accuracy"]
