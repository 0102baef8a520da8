"""The benchmark of perplexity: densities aimed at, the oracle against loops, the dense row against the model."""

import math
from pathlib import Path

import pytest
import tiny_llama
import torch

from benchmarks import perplexity
from benchmarks.perplexity import _about, _measure, _options
from benchmarks.perplexity_page import page, twin_section
from benchmarks.perplexity_rows import PooledMass, Row, _nearest, content_rows, positional_rows, predicted
from sparsefinder.hf import LayerInput, attach
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.positional import GlobalTokens, window
from sparsefinder.plan import build_plan, computed_pairs, plan_matrix
from sparsefinder.predictors import Projections, Routing, Tiles
from training.calibrate import held_points
from training.extract import extract, make_manifest

TOKENS, TILE, HEADS, KV_HEADS, DIM = 96, 8, 4, 2, 8
LEGAL = legal_full(1, TOKENS, TOKENS, causal=True)
FITTED = "predicted, fitted at 2048"


def a_call(seed: int) -> LayerInput:
    g = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(1, HEADS, TOKENS, DIM, generator=g)
    k, v = (2 * torch.randn(1, KV_HEADS, TOKENS, DIM, generator=g) for _ in range(2))
    return LayerInput(0, q, k, v, LEGAL, torch.full((HEADS,), 0.5), None, 1.0)


def test_the_nearest_pattern_is_the_first_that_is_dense_enough():
    patterns = [window(2 * radius + 1) for radius in range(1, 40)]
    pairs = [int(computed_pairs(build_plan(p, LEGAL, TILE, heads=1)).sum()) for p in patterns]
    for aim in (0.2, 0.3, 0.5):
        wanted = aim * TOKENS * (TOKENS + 1) / 2
        found = _nearest(patterns, TOKENS, TILE, aim)
        assert found is patterns[next(at for at, count in enumerate(pairs) if count >= wanted)]


def test_the_oracle_keeps_what_a_tile_attends_to_most():
    call, oracle = a_call(0), PooledMass(window(3) | GlobalTokens(1), TILE)
    oracle.see(call)
    for aim in (0.3, 0.5, 0.7):
        plan = oracle.plan(call, aim)
        density = float(computed_pairs(plan).sum()) / (HEADS * TOKENS * (TOKENS + 1) / 2)
        assert density == pytest.approx(aim, abs=0.03)
        for h in range(HEADS):
            kept = plan_matrix(plan, LEGAL, 0, h)
            for start in range(TILE, TOKENS, TILE):
                mass = [0.0] * start
                for i in range(start, start + TILE):
                    scores = [0.5 * float(call.q[0, h, i] @ call.k[0, h // 2, j]) for j in range(i + 1)]
                    total = sum(math.exp(s - max(scores)) for s in scores)
                    for j in range(start):
                        mass[j] += math.exp(scores[j] - max(scores)) / total
                near = {0, *range(start - 1, start)}  # read in any case, by the first row or all
                inside = [mass[j] for j in range(start) if kept[start + TILE - 1, j] and j not in near]
                outside = [mass[j] for j in range(start) if not kept[start + TILE - 1, j]]
                assert min(inside, default=1.0) >= max(outside, default=0.0) - 1e-6


def test_the_dense_row_is_the_models_own_perplexity_and_a_plan_of_everything_changes_nothing():
    teacher = tiny_llama.teacher()
    texts = [tiny_llama.token_ids(40, seed) for seed in range(2)]
    with torch.no_grad():
        losses = [teacher.lm(input_ids=torch.tensor([t]), labels=torch.tensor([t])).loss for t in texts]
    attached = attach(teacher.lm, alpha=1.0)
    dense = _measure(teacher, attached, Row("dense", None, None), texts)
    assert dense["perplexity"] == pytest.approx(math.exp(sum(map(float, losses)) / 2), rel=1e-4)
    assert dense["density"] == 1
    everything = Row("all", 1.0, lambda call: build_plan(window(81), call.legal, TILE, heads=HEADS))
    assert _measure(teacher, attached, everything, texts)["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-4)


def test_rows_of_others_come_near_the_density_aimed_at():
    teacher = tiny_llama.teacher()
    attached = attach(teacher.lm, alpha=1.0)
    text, seen = [tiny_llama.token_ids(256)], []
    _measure(teacher, attached, Row("dense", None, None), text, seen.append)
    routing = [Routing(torch.randn(HEADS, 16, DIM, generator=torch.Generator().manual_seed(n))) for n in range(2)]
    own = window(3) | GlobalTokens(1)
    rows = [
        *positional_rows(256, HEADS, 16, [0.4]),
        *content_rows(seen, routing, own, 16, [0.4, 0.8], every=1),
    ]
    found = [_measure(teacher, attached, row, text) for row in rows]
    names = ["window + sinks", "Longformer, dilated", "BigBird"]
    assert [row["row"] for row in found] == [*names, *["Reformer, keys apart"] * 2, *["Routing"] * 2]
    for row in found:
        assert row["density"] == pytest.approx(row["aim"], abs=0.2), row
        assert math.isfinite(row["perplexity"])


def test_predicted_rows_have_the_density_aimed_at_whatever_the_length_they_were_allotted_at(tmp_path):
    teacher = tiny_llama.teacher()
    attached = attach(teacher.lm, alpha=1.0)
    generator = torch.Generator().manual_seed(0)
    maps = [
        Projections(*torch.randn(2, HEADS, 2, DIM, generator=generator), *torch.zeros(2, HEADS, 2), form="bilinear")
        for _ in range(tiny_llama.LAYERS)
    ]
    layers = [Tiles(part, threshold=0.0) for part in maps]
    own, items = window(3) | GlobalTokens(1), [0]
    shards = [[tiny_llama.token_ids(64, seed)] for seed in range(2)]
    extract(
        teacher,
        attached,
        shards[0],
        tmp_path,
        make_manifest(teacher, attached, shards[0], split="heldout", shard_size=1, gold_mass=0.95),
    )
    points = held_points(tmp_path, layers, own, 16, items)
    text, seen = [tiny_llama.token_ids(256)], []
    _measure(teacher, attached, Row("dense", None, None), text, seen.append)
    for row in predicted(layers, points, seen, own, 16, [0.2, 0.35]):
        found = _measure(teacher, attached, row, text)
        assert found["density"] == pytest.approx(row.aim, abs=0.06)


def test_the_page_holds_every_row_at_the_density_it_ran_at():
    options = _options(["--data", "somewhere"])
    rows = [
        {"row": "dense", "aim": None, "density": 1.0, "perplexity": 10.0, "to_dense": 1.0, "of_texts": [10.0]},
        *(
            {"row": name, "aim": aim, "density": aim + 0.01, "perplexity": 10 * loss, "to_dense": loss, "of_texts": []}
            for name, aim, loss in (
                (FITTED, 0.2, 1.04),
                (FITTED, 0.3, 1.02),
                ("oracle", 0.2, 1.01),
                ("BigBird", 0.3, 1.5),
            )
        ),
    ]
    rows = [row | {"tokens": 2048, "attention": "softmax"} for row in rows]
    text = page({"about": _about(options, {}), "rows": rows})
    assert f"| {FITTED} | 1.040 @ 21.0% | 1.020 @ 31.0% |" in text
    assert "| BigBird | – | 1.500 @ 31.0% |" in text
    assert f"at 25% computed density: {FITTED} +3.2%, oracle not measured" in text


def test_the_steps_to_entmax_stand_beside_softmax():
    about = {"command": "c", "hardware": "h", "versions": "v", "text": "t"}
    steps = [("softmax", 8.0, 1.0, 1.0), ("scales", 9.0, 1.125, 0.05)]
    rows = [
        {"row": name, "tokens": tokens, "perplexity": found, "to_softmax": ratio, "density": density}
        for tokens in (64, 32)
        for name, found, ratio, density in steps
    ]
    text = twin_section({"about": about, "rows": rows})
    assert "| attention | 32 tokens | 64 tokens |" in text
    assert "| scales | 9.00 (1.125) @ 5.0% | 9.00 (1.125) @ 5.0% |" in text


def test_a_length_is_served_by_the_run_fitted_at_it_or_the_next_greater_one(monkeypatch):
    names = {"short": ("softmax", 64), "long": ("softmax", 256), "twin": ("1.5-entmax", 64)}
    monkeypatch.setattr(perplexity, "fitted_at", lambda folder: names[folder.name][1])
    monkeypatch.setattr(perplexity, "load", lambda path: path.parent.name)
    monkeypatch.setattr(perplexity, "attention_name", lambda name: names[name][0])
    runs = [Path(name) for name in names]
    for tokens, softmax in ((32, "short"), (64, "short"), (65, "long"), (999, "long")):
        assert [folder.name for folder in perplexity.serving(runs, tokens)] == [softmax, "twin"]
