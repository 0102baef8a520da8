"""Encoder–decoders under this project's attention: cross-attention has as many queries as it has, and biases count."""

import itertools

import oracles
import pytest
import torch
from transformers import MarianConfig, MarianMTModel, T5Config, T5ForConditionalGeneration

from sparsefinder.edges import edges_matrix, gold_edges
from sparsefinder.errors import ConfigError, IncompatibleModelError, ShapeError
from sparsefinder.metrics import counts, summarize
from sparsefinder.patterns.text import parse_pattern
from sparsefinder.plan import build_plan, plan_matrix
from sparsefinder.predictors import Tiles, random_projections
from training.tasks.cross_attention import (
    by_budgets,
    cross_rows,
    low_rank_budgets,
    measure_cross,
    seen_cross,
    true_budgets,
)
from training.tasks.encoder_decoder import attended, fold_bias
from training.tasks.reversal import Reversal, accuracy_of, logits_of, marian, reversal_batch, train_reversal
from training.tasks.together import Schedule

SOURCE, TARGET = 9, 6


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=30, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, relative_attention_num_buckets=8,
        relative_attention_max_distance=6, dropout_rate=0.0, initializer_factor=3.0, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


def marian_model():
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=30, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32, init_std=0.5,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return MarianMTModel(config).eval()


def ragged_batch():
    g = torch.Generator().manual_seed(0)
    source, target = (torch.randint(2, 30, (3, n), generator=g) for n in (SOURCE, TARGET))
    source_real = torch.arange(SOURCE)[None] < torch.tensor([[9], [4], [7]])
    target_real = torch.arange(TARGET)[None] < torch.tensor([[3], [6], [5]])
    return source, source_real, target, target_real


@torch.no_grad()
def outputs(model):
    source, source_real, target, target_real = ragged_batch()
    return model(
        input_ids=source, attention_mask=source_real.long(), decoder_input_ids=target,
        decoder_attention_mask=target_real.long(), use_cache=False,
    ).logits  # fmt: skip


@pytest.mark.parametrize("make", [t5, marian_model])
def test_softmax_of_ours_is_the_models_own(make):
    model = make()
    _, source_real, _, target_real = ragged_batch()
    plain, seen = outputs(model), []
    before = model.config._attn_implementation
    with attended(model, source_real, target_real, observe=lambda call: seen.append((call.part, call.layer))):
        ours = outputs(model)
    torch.testing.assert_close(ours[target_real], plain[target_real], atol=2e-5, rtol=1e-4)
    encoder, decoder = [("encoder", 0), ("encoder", 1)], [("decoder", 0), ("cross", 0), ("decoder", 1), ("cross", 1)]
    assert seen == encoder + decoder
    assert model.config._attn_implementation == before
    assert torch.equal(outputs(model), plain)


@pytest.mark.parametrize("make", [t5, marian_model])
def test_gold_graphs_plans_and_metrics_take_every_part(make):
    """Against loops: entmax of the model's own scores (with T5's bias) over the legal pairs of a ragged batch."""
    model, calls = make(), []
    _, source_real, _, target_real = ragged_batch()
    with attended(model, source_real, target_real, alpha=1.5, observe=calls.append):
        outputs(model)
    pattern = parse_pattern("window(3) | global(1)")
    for call in calls:
        assert call.q.shape[2] == (SOURCE if call.part == "encoder" else TARGET)
        assert call.k.shape[2] == (TARGET if call.part == "decoder" else SOURCE)
        edges = gold_edges(call.q, call.k, call.legal, 1.5, call.scale)
        plan = build_plan(pattern, call.legal, 2, heads=2)
        counted = counts(call.q, call.k, plan, call.legal, 1.5, call.scale)
        for b, h in itertools.product(range(3), range(2)):
            gold = oracle_gold(call, b, h)
            assert {divmod(int(e), call.k.shape[2]) for e in edges_matrix(edges, b, h).flatten().nonzero()} == gold
            kept = {(int(i), int(j)) for i, j in plan_matrix(plan, call.legal, b, h).nonzero()}
            assert counted.gold[b, h] == len(gold)
            assert counted.kept_gold[b, h] == len(gold & kept)
            assert counted.legal[b, h] == int(call.legal.matrix(b).sum())
        report = summarize([counted])
        assert 0 < report.overall["recall"] <= 1
        assert 0 < report.overall["sparsity"] < 1


def oracle_gold(call, b, h):
    rows = range(int(call.legal.query_real[b].sum()))
    keys = int(call.legal.key_real[b].sum())
    found = set()
    for i in rows:
        scores = [
            float(call.q[b, h, i] @ call.k[b, h, j]) * call.scale
            if not (call.legal.causal and j > i)
            else float("-inf")
            for j in range(keys)
        ]
        found |= {(i, j) for j, p in enumerate(oracles.entmax(scores, 1.5)) if p > 0}
    return found


def test_the_bias_of_t5_is_in_the_folded_scores():
    model, calls = t5(), []
    _, source_real, _, target_real = ragged_batch()
    with attended(model, source_real, target_real, observe=calls.append):
        outputs(model)
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    first = next(call for call in calls if call.part == "encoder")
    assert first.q.shape[-1] == 8 + SOURCE
    bias = first.scale * (first.q @ first.k.mT - first.q[..., :8] @ first.k[..., :8].mT)
    # The diagonal is bucket 0 (no distance), for every item; what is far apart shares the last bucket.
    torch.testing.assert_close(bias[:, :, 2, 2], table[0].expand(3, -1), atol=1e-5, rtol=1e-5)
    assert torch.allclose(bias[0, :, 0, 7], bias[1, :, 0, 8], atol=1e-4)


@pytest.mark.unchecked
def test_folding_adds_the_bias_and_refuses_what_does_not_fit():
    g = torch.Generator().manual_seed(0)
    q, k, bias = (torch.randn(*shape, generator=g) for shape in ((2, 3, 4, 5), (2, 3, 6, 5), (1, 3, 4, 6)))
    more_q, more_k = fold_bias(q, k, bias, 0.3)
    torch.testing.assert_close(0.3 * more_q @ more_k.mT, 0.3 * q @ k.mT + bias, atol=1e-5, rtol=1e-5)
    with pytest.raises(ShapeError, match="bias"):
        fold_bias(q, k, bias[..., :5], 0.3)
    with pytest.raises(ShapeError, match="scale other than 0"):
        fold_bias(q, k, bias, 0.0)


def test_a_plan_of_every_key_changes_nothing_and_a_poor_one_does():
    model = marian_model()
    _, source_real, _, target_real = ragged_batch()
    plain = outputs(model)

    def run(text):
        def plan_for(call):
            return build_plan(parse_pattern(text), call.legal, 4, heads=2)

        with attended(model, source_real, target_real, plan_for=plan_for):
            return outputs(model)

    torch.testing.assert_close(run("~window(0)")[target_real], plain[target_real], atol=2e-5, rtol=1e-4)
    assert (run("window(1)") - plain)[target_real].abs().max() > 1e-3


def test_tile_predictors_plan_cross_attention():
    """Tiles of target rows against source keys: lists hold as many keys as asked for, none of padding."""
    calls = []
    _, source_real, _, target_real = ragged_batch()
    model = marian_model()
    with attended(model, source_real, target_real, observe=calls.append):
        outputs(model)
    call = next(c for c in calls if c.part == "cross")
    tiles = Tiles(random_projections(2, 3, 8, seed=0, form="bilinear"), keys_per_tile=2)
    plan = tiles.plan(call.q, call.k, call.legal, parse_pattern("window(0)"), 3)
    assert plan.shape == (3, 2, TARGET, SOURCE)
    for b, h in itertools.product(range(3), range(2)):
        matrix = plan_matrix(plan, call.legal, b, h)
        rows = int(call.legal.query_real[b].sum())
        own = {(i, i) for i in range(rows) if i < int(call.legal.key_real[b].sum())}
        for start in range(0, rows, 3):
            tile = matrix[start : min(start + 3, rows)]
            chosen = {int(j) for j in tile.any(0).nonzero()}
            assert 2 <= len(chosen) <= 2 + len({j for i, j in own if start <= i < start + 3})
        assert not matrix[rows:].any()


def test_outside_attended_nothing_runs_and_other_models_are_refused():
    model = marian_model()
    real = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(IncompatibleModelError, match="cross-attention"), attended(torch.nn.Linear(2, 2), real, real):
        pass
    model.set_attn_implementation("sparsefinder-seq2seq")
    with pytest.raises(ConfigError, match="attended"):
        outputs(model)


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
