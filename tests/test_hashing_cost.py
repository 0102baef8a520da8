"""Buckets and hashing against simulation, depth by hand, the long document, the scripts of the cost page."""

import json
import math

import numpy as np
import oracles
import oracles_theory
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import cost_table as cost_page
from benchmarks import element_vs_block as bench
from sparsefinder.attention.api import attend
from sparsefinder.connectivity import analyse
from sparsefinder.cost import (
    Depth,
    LongDocument,
    bucket_shares,
    bucket_size,
    closed_form_pairs,
    collision_probability,
    construction_depth,
    dense_depth,
    depth_of,
    design_rows,
    design_table,
    expected_keys,
    footprint,
    miss_probability,
    rounds_needed,
)
from sparsefinder.errors import PatternError
from sparsefinder.patterns.heads import Sequential
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.positional import (
    BlockDiagonal,
    Strided,
    Window,
)


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_bucket_sizes_against_throwing(skew):
    shares = torch.softmax(skew * torch.arange(6.0), 0)
    found = bucket_size(50, 6 if skew == 0 else shares)
    mean, seen = oracles_theory.bucket_sizes(shares.tolist(), 50, 2000, seed=0)
    assert found.mean == mean
    assert found.seen == pytest.approx(seen, rel=0.02)
    assert found.seen >= found.mean


def test_buckets_of_the_lecture():
    """Exercise 3: 64 buckets, 8192 tokens."""
    found = bucket_size(8192, 64)
    assert found.mean == 128
    assert found.seen == pytest.approx(128 + 63 / 64)
    bits = torch.tensor([[True, False, False], [True, True, False]])
    assert bucket_shares(bits).tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    with pytest.raises(PatternError, match="in a bucket"):
        bucket_shares(torch.zeros(2, 3, dtype=torch.bool))
    for wrong in (0, torch.tensor([0.5, 0.6]), torch.tensor([1.5, -0.5])):
        with pytest.raises(PatternError, match="bucket_size"):
            bucket_size(5, wrong)


@pytest.mark.parametrize(("cosine", "buckets"), [(0.9, 8), (0.3, 4), (-0.5, 6), (0.0, 16), (0.97, 64), (0.6, 2)])
def test_collisions_and_misses_against_simulation(cosine, buckets):
    """Miss probability (1 − c)^m of m independent rounds, both with the hash itself and not with the formula."""
    rounds, draws = 3, 2000
    met, missed = oracles_theory.lsh(cosine, buckets, rounds, draws, seed=1)
    c = collision_probability(cosine, buckets)
    assert c == pytest.approx(met, abs=4 * math.sqrt(c * (1 - c) / (draws * rounds)) + 1e-3)
    miss = miss_probability(c, rounds)
    assert miss == pytest.approx(missed, abs=4 * math.sqrt(miss * (1 - miss) / draws) + 1e-3)


def test_collisions_at_the_ends_and_in_between():
    for buckets in (2, 4, 64):
        assert collision_probability(1.0, buckets) == 1
        assert collision_probability(-1.0, buckets) == 0
        assert collision_probability(0.0, buckets) == pytest.approx(1 / buckets, rel=1e-4)
        curve = [collision_probability(c / 10, buckets) for c in range(-9, 10, 3)]
        assert curve == sorted(curve)
    for cosine, buckets in ((1.1, 4), (0.5, 3), (0.5, 0)):
        with pytest.raises(PatternError, match="collision_probability"):
            collision_probability(cosine, buckets)


@given(st.floats(0.01, 1), st.floats(1e-6, 1))
@settings(max_examples=50)
def test_rounds_needed_is_the_least_number(collision, miss):
    rounds = rounds_needed(collision, miss)
    assert miss_probability(collision, rounds) <= miss * (1 + 1e-9)
    assert rounds == 1 or miss_probability(collision, rounds - 1) > miss
    assert expected_keys(100, collision, rounds) == pytest.approx(100 * (1 - (1 - collision) ** rounds))


def test_probabilities_outside_their_range_are_refused():
    for wrong in ((-0.1, 1), (1.1, 1), (0.5, 0)):
        with pytest.raises(PatternError, match="miss_probability"):
            miss_probability(*wrong)
    with pytest.raises(PatternError, match="rounds_needed"):
        rounds_needed(0.0, 0.1)


def test_depth_by_hand():
    """d = 2 numbers, n = 3 tokens, δ = 1/4, p = 2 patterns, s = 2 hops."""
    assert construction_depth(2, 3, 4, 2, 2) == Depth(2 * 3 * 4, 2 * 2 * 16 + 2, 3 * 4**6)
    assert dense_depth(2, 3, 4) == Depth(24, 3 * 16 + 1, 3 * 4**6)
    assert construction_depth(2, 3, 4, 2, 2).total == 24 + 66 + 12288
    ratio = construction_depth(4, 512, 10, 2, 2).context / dense_depth(4, 512, 10).context
    assert ratio == pytest.approx(2, rel=0.01)  # "roughly p times more layers"
    strided = analyse(Sequential((Window(3), Strided(3))), legal_full(1, 9, 9))
    assert depth_of(strided, 2, 4) == construction_depth(2, 9, 4, 2, 2)
    assert depth_of(analyse(BlockDiagonal(3), legal_full(1, 9, 9)), 2, 4) is None
    with pytest.raises(PatternError, match="levels"):
        dense_depth(2, 3, 0)


def test_the_long_document_design_adds_up():
    """A small copy of the real thing is counted exactly; the steps and shares must fit together."""
    design = LongDocument().smaller(400)
    assert (design.tokens, design.section, design.radius, design.question) == (500, 5, 1, 1)
    connected = analyse(design.positional()["+ section summaries"], legal_full(1, 100, 100))
    assert (connected.assumption, connected.hops) == ("yes", 2)
    rows = {row.name: row for row in design_rows(design, sample=10_000)}
    legal = legal_full(1, 500, 500)
    for name, pattern in design.positional().items():
        assert rows[name].size == footprint(pattern, legal, 32)
    assert rows["window"].size.pairs == closed_form_pairs(Window(1), 500)
    retrieved = rows["+ retrieved keys"].size.pairs - rows["+ section summaries"].size.pairs
    assert retrieved == (500 - 1) * 512
    assert rows["full attention"].flops_share == rows["full attention"].bytes_share == 1
    assert rows["full attention"].size.pairs == 500 * 500
    table = design_table(list(rows.values()))
    assert len(table.splitlines()) == len(rows) + 2
    with pytest.raises(PatternError, match="whole number of sections"):
        LongDocument(tokens=1001, section=10)


@pytest.mark.slow
def test_the_cost_page_is_whole(tmp_path):
    timing, row = (
        tmp_path / "timing.json",
        {"row": "blocks", "milliseconds": 2.5, "to_full": 4, "computed_density": 0.1},
    )
    timing.write_text(json.dumps({"about": {"hardware": "some"}, "rows": [row | {"tokens": 32, "density": 0.1}]}))
    page = cost_page.make_page([64], timing)
    assert "| `blocks(128)` | 64 | 64.0 | 100.00% | 100.00% | 1.000 |" in page
    assert "| full attention | 200,000 | 100.00% |" in page
    assert "| 32 | 10.0% | blocks | 2.50 | 4.00 | 10.0% |" in page
    assert all(f"`{text}`" in page for text in cost_page.PATTERNS)
    assert "{" not in page


@pytest.mark.slow
def test_at_full_length_the_design_is_cheap_and_prediction_by_tiles_is_not():
    rows = {row.name: row for row in design_rows(LongDocument(), sample=2)}
    window = rows["window"].size
    assert window.pairs == pytest.approx(closed_form_pairs(Window(256), 200_000), rel=2e-3)
    design = rows["+ retrieved keys"]
    assert design.flops_share < 0.01
    assert rows["prediction by inverted lists"].price.flops < 0.2 * design.price.flops
    assert rows["prediction by tile × key"].price.flops > 0.2 * design.price.flops


def test_both_sides_of_the_timing_compute_what_they_say():
    tokens, heads = 128, 2
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, 8, generator=draw) for _ in range(3))
    own = bench.element_lists(heads, tokens, 32, draw)
    shared = bench.block_lists(heads, tokens, 2, draw)
    union = bench.union_lists(own)
    lists = {
        "elements": [[set(own[h, i].tolist()) for i in range(tokens)] for h in range(heads)],
        "blocks": [[set(shared[h, i // 32].tolist()) for i in range(tokens)] for h in range(heads)],
        "union": [[set(union[h * 4 + i // 32].tolist()) for i in range(tokens)] for h in range(heads)],
    }
    plans = {
        "blocks": bench.plan_of_lists(list(shared.flatten(0, 1)), heads, tokens),
        "union": bench.plan_of_lists(union, heads, tokens),
    }
    legal = legal_full(1, tokens, tokens)
    found = {"elements": bench.by_query(q, k, v, own), "blocks": bench.by_tile(q, k, v, shared)}
    found |= {name + "/tile": attend(q, k, v, plan, legal=legal, alpha=1.0) for name, plan in plans.items()}
    for name, out in found.items():
        for h in range(heads):
            allowed = np.array([[j in keys for j in range(tokens)] for keys in lists[name.split("/")[0]][h]])
            expected = oracles.attention(q[0, h].numpy(), k[0, h].numpy(), v[0, h].numpy(), allowed, 1.0, 8**-0.5)
            assert np.allclose(out[0, h].numpy(), expected, atol=1e-5), name
    assert {len(keys) for keys in lists["elements"][0]} == {32}
    assert {len(keys) for keys in lists["blocks"][1]} == {64}


def test_the_timing_script_writes_its_figures(tmp_path, capsys):
    out = tmp_path / "figures.json"
    sizes = ["--tokens", "128", "--heads", "1", "--dim", "8", "--densities", "0.25", "--repeats", "1"]
    rows = bench.main([*sizes, "--json", str(out)])
    assert json.loads(out.read_text())["rows"] == rows
    assert {row["row"] for row in rows} == {"full", "elements", "elements/tile", "blocks", "blocks/tile"}
    density = {row["row"]: (row["density"], row["computed_density"]) for row in rows}
    assert density["elements"] == density["blocks"] == density["blocks/tile"] == (0.25, 0.25)
    assert density["elements/tile"][1] > 0.95
    assert "hardware" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--tokens", "100"])
