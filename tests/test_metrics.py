"""Metrics against a second implementation, by their definitions, on ragged, causal and grouped-query batches."""

import json
import math

import numpy as np
import oracles_predict as oracle
import pytest
import torch
from torch import Tensor
from watching import largest_tensor

from sparsefinder.edges import gold_edges
from sparsefinder.errors import AlphaError, DataError, NonFiniteError, ShapeError
from sparsefinder.metrics import MEASURES, HeadCounts, counts, instance_measures, join, summarize
from sparsefinder.patterns.algebra import Pattern, materialize
from sparsefinder.patterns.content import InEdges, Listed
from sparsefinder.patterns.legal import Legal, legal_from_mask, legal_full
from sparsefinder.patterns.positional import GlobalTokens, Nothing, Window
from sparsefinder.plan import Plan, build_plan

SCALES = torch.tensor([0.5, 1.0, 1.5, 2.0])  # exact in float32
LENGTHS, WIDTH = (1, 7, 13, 0), 13


def layer(seed: int, kv_heads: int, causal: bool) -> tuple[Tensor, Tensor, Pattern, Legal]:
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(len(LENGTHS), heads, WIDTH, 4, generator=g, dtype=torch.float64) for heads in (4, kv_heads))
    mask = torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]
    listed = Listed(torch.rand(len(LENGTHS), 4, WIDTH, WIDTH, generator=g) < 0.3)
    return q, k, listed & ~Window(0), legal_from_mask(mask, causal)


def kept_by_pattern(pattern: Pattern, legal: Legal, b: int, h: int) -> tuple[oracle.Graph, int]:
    kept = {(int(i), int(j)) for i, j in materialize(pattern, legal, b, h).nonzero()}
    return kept, len(kept)


def kept_by_plan(plan: Plan, b: int, h: int) -> tuple[oracle.Graph, int]:
    """Straight from the lists."""
    kept: oracle.Graph = set()
    computed = 0
    for t in range(len(plan.tile_start)):
        if (int(plan.tile_batch[t]), int(plan.tile_head[t])) == (b, h):
            for e in range(int(plan.offsets[t]), int(plan.offsets[t + 1])):
                rows = range(int(plan.first_row[e]), int(plan.tile_rows[t]))
                computed += len(rows)
                kept |= {(int(plan.tile_start[t]) + r, int(plan.keys[e])) for r in rows}
    return kept, computed


def by_definition(
    layers: list[tuple[Tensor, Tensor, Pattern | Plan, Legal]], gold_mass: float | None = None
) -> dict[str, dict[str, object]]:
    per_head: list[list[dict[str, float | None]]] = []
    for q, k, chosen, legal in layers:
        rows = []
        for h in range(q.shape[1]):
            values = []
            for b in range(q.shape[0]):
                allowed = oracle.legal_pairs(legal.query_real[b].tolist(), legal.causal)
                kept = kept_by_plan(chosen, b, h) if isinstance(chosen, Plan) else kept_by_pattern(chosen, legal, b, h)
                arrays = q[b, h].numpy(), k[b, h // (q.shape[1] // k.shape[1])].numpy()
                values.append(oracle.head_numbers(*arrays, float(SCALES[h]), allowed, *kept, gold_mass))
            rows.append({name: oracle.mean([v[name] for v in values]) for name in MEASURES})
        per_head.append(rows)
    per_layer = {name: [oracle.mean([row[name] for row in rows]) for rows in per_head] for name in MEASURES}
    heads = {name: [[row[name] for row in rows] for rows in per_head] for name in MEASURES}
    overall = {name: oracle.mean(values) for name, values in per_layer.items()}
    return {"heads": heads, "layers": per_layer, "overall": overall}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", ["pattern", "plan"])
@pytest.mark.parametrize("gold_mass", [None, 0.5, 0.95])
def test_metrics_are_their_definitions(causal: bool, kv_heads: int, name: str, gold_mass: float | None) -> None:
    layers = []
    for seed in range(2):
        q, k, pattern, legal = layer(seed, kv_heads, causal)
        chosen = build_plan(pattern | GlobalTokens(seed), legal, 4) if name == "plan" else pattern
        layers.append((q, k, chosen, legal))
    alpha = 1.5 if gold_mass is None else 1.0
    report = summarize([counts(*parts, alpha, SCALES, gold_mass=gold_mass) for parts in layers])
    expected = by_definition(layers, gold_mass)
    assert report.set_name == name
    assert report.instances == 3
    assert report.empty_gold.tolist() == [4, 4]  # the item of padding, in each of four heads
    for measure in MEASURES:
        for got, want in ((report.heads, "heads"), (report.layers, "layers")):
            np.testing.assert_allclose(
                got[measure].numpy(), np.array(expected[want][measure], float), rtol=0, atol=1e-12
            )
        assert report.overall[measure] == pytest.approx(expected["overall"][measure], abs=1e-12)


def test_the_gold_graph_is_kept_exactly() -> None:
    q, k, _, legal = layer(3, 2, True)
    edges = gold_edges(q, k, legal, 1.5, SCALES)
    overall = summarize([counts(q, k, InEdges(edges), legal, 1.5, SCALES)]).overall
    assert overall["recall"] == overall["precision"] == overall["exact_rows"] == 1
    assert overall["mass"] == pytest.approx(1, abs=1e-12)
    assert overall["computed_density"] == pytest.approx(1 - overall["sparsity"], abs=1e-15)


def test_nothing_and_everything() -> None:
    q, k, _, legal = layer(4, 4, False)
    nothing = summarize([counts(q, k, Nothing(), legal)])
    assert nothing.overall["recall"] == nothing.overall["mass"] == nothing.overall["exact_rows"] == 0
    assert nothing.overall["sparsity"] == 1
    assert math.isnan(nothing.overall["precision"])  # nothing was kept, so there is no share of it
    everything = summarize([counts(q, k, ~Nothing(), legal)]).overall
    assert everything["recall"] == everything["exact_rows"] == everything["computed_density"] == 1
    assert everything["sparsity"] == 0


def test_a_batch_and_its_items_give_equal_counts() -> None:
    q, k, pattern, legal = layer(5, 2, True)
    q[:, :, 7:][1], k[:, :, 7:][1] = torch.nan, torch.inf  # padding may hold anything
    whole = counts(q, k, pattern, legal, 1.5, SCALES)
    assert isinstance(pattern, Pattern)
    for b, length in enumerate(LENGTHS[:3]):
        matrices = torch.stack([materialize(pattern, legal, b, h)[:length, :length] for h in range(4)])
        alone = counts(q[b : b + 1, :, :length], k[b : b + 1, :, :length], Listed(matrices[None]), legal_full(1, length, length, True), 1.5, SCALES)  # fmt: skip # noqa: E501
        for name in ("legal", "kept", "gold", "kept_gold", "rows", "exact_rows", "computed", "mass_sum"):
            assert torch.equal(getattr(whole, name)[b], getattr(alone, name)[0])


def test_batches_join_into_instances() -> None:
    first, second = (counts(*layer(seed, 2, False), 1.5, SCALES) for seed in (6, 7))
    both = join([first, second])
    assert both.legal.shape == (8, 4)
    for name, values in instance_measures(both).items():
        parts = torch.cat([instance_measures(part)[name] for part in (first, second)])
        torch.testing.assert_close(values, parts, equal_nan=True, rtol=0, atol=0)


def test_a_report_is_plain_json() -> None:
    q, k, _, legal = layer(8, 4, False)
    plain = summarize([counts(q, k, Nothing(), legal)]).as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["set"] == "pattern"
    assert plain["overall"]["precision"] is None
    assert len(plain["heads"]["recall"][0]) == 4


def test_with_softmax_and_no_gold_mass_every_legal_pair_is_gold() -> None:
    q, k, pattern, legal = layer(9, 4, False)
    counted = counts(q, k, pattern, legal, alpha=1.0)
    assert torch.equal(counted.gold, counted.legal)
    assert torch.equal(counted.kept_gold, counted.kept)


def test_never_more_than_one_head_of_scores_at_a_time() -> None:
    n = 64
    q, k = torch.randn(2, 8, n, 4), torch.randn(2, 8, n, 4)
    plan = build_plan(Window(2), legal_full(2, n, n), 16, heads=8)
    with largest_tensor() as largest:
        counts(q, k, plan, legal_full(2, n, n))
        counts(q, k, Window(3), legal_full(2, n, n))
    assert largest.size <= n * n


@pytest.mark.unchecked
def test_what_does_not_fit_is_a_typed_error() -> None:
    q, k, pattern, legal = layer(10, 4, False)
    with pytest.raises(DataError, match="at least one layer"):
        summarize([])
    with pytest.raises(DataError, match="at least one batch"):
        join([])
    plan = counts(q, k, build_plan(pattern, legal, 4), legal)
    with pytest.raises(ShapeError, match="one set"):
        summarize([plan, counts(q, k, pattern, legal)])
    with pytest.raises(ShapeError, match="one set"):
        join([plan, counts(q[:, :2], k[:, :2], pattern, legal)])
    with pytest.raises(AlphaError):
        counts(q, k, pattern, legal, 0.5)
    with pytest.raises(ShapeError):
        counts(q, k[..., :3], pattern, legal)
    q[1, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="item 1, head 0, token 0"):
        counts(q, k, pattern, legal)
    assert isinstance(plan, HeadCounts)
