"""The benchmark of fill-mask: its oracle by the definition, its rows at the model, its page from made-up figures."""

import math

import pytest
import tiny
import torch

from benchmarks.fill_mask import measure
from benchmarks.fill_mask_page import DENSITIES, at_densities, draw_curves, make_page
from benchmarks.fill_mask_rows import ATTENTION, GRID, LINES, Row, family_rows, oracle_rows
from sparsefinder.artifact import load
from sparsefinder.edges import edges_matrix, gold_edges
from sparsefinder.hf import LayerCall, LayerInput, attach
from sparsefinder.mlm_head import new_mlm_head
from sparsefinder.patterns.legal import legal_full
from sparsefinder.plan import plan_matrix
from sparsefinder.shipped import default_artifact
from training.mlm_head import held_draws
from training.pipeline import Opened
from training.sweep_setup import Setup

IDS = tiny.token_ids([24] * 3)


@pytest.fixture
def opened(tmp_path):
    teacher = tiny.teacher(tmp_path)
    return Opened(teacher, attach(teacher.model, alpha=1.5), None)


def test_at_zero_the_oracle_is_the_gold_graph_and_costs_nothing(opened):
    head = new_mlm_head(opened.teacher)
    dense = measure(opened, head, Row("dense", "dense", {}, None), IDS)
    assert dense["density"] == 1
    gold, *rest = (measure(opened, head, row, IDS) for row in oracle_rows())
    assert gold["line"] == "gold graph"
    assert gold["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-4)
    shares = []

    def count(call: LayerCall) -> None:
        gold = gold_edges(call.q, call.k, call.legal, call.alpha, call.scale)
        matrices = [edges_matrix(gold, b, h) | torch.eye(24, dtype=torch.bool) for b in range(3) for h in range(4)]
        shares.append(float(torch.stack(matrices).float().mean()))  # a plan reads every query itself

    with opened.attached.using("dense", observe=count):
        held_draws(opened.teacher, IDS, 4)
    assert gold["density"] == pytest.approx(sum(shares) / len(shares), abs=1e-3)
    densities = [gold["density"], *(row["density"] for row in rest)]
    assert densities == sorted(densities, reverse=True)
    assert densities[0] > densities[-1]


def test_the_oracle_keeps_what_holds_enough_attention():
    generator = torch.Generator().manual_seed(0)
    q, k = (2 * torch.randn(1, 2, 9, 4, generator=generator) for _ in range(2))
    legal = legal_full(1, 9, 9)
    call = LayerInput(0, q, k, k, legal, torch.tensor([0.5, 0.8]), None, 1.5)
    for row, least in zip(oracle_rows(), ATTENTION, strict=True):
        kept = row.plan_for(call)
        for head in range(2):
            scores = call.scale[head] * q[0, head] @ k[0, head].T
            for i in range(9):
                p = naive_entmax15(scores[i].double().tolist())
                found = plan_matrix(kept, legal, 0, head)[i].tolist()
                for j, share in enumerate(p):
                    if abs(share - least) > 1e-5:
                        assert found[j] == (share > least or i == j)


def naive_entmax15(scores):
    """1.5-entmax by bisection for τ: p = max(z/2 − τ, 0)², sum 1."""
    low, high = min(scores) / 2 - 1, max(scores) / 2
    for _ in range(200):
        tau = (low + high) / 2
        total = sum(max(z / 2 - tau, 0.0) ** 2 for z in scores)
        low, high = (tau, high) if total > 1 else (low, tau)
    return [max(z / 2 - low, 0.0) ** 2 for z in scores]


def test_between_settings_logarithms_are_straight_and_beyond_them_is_nothing():
    rows = [{"density": 0.3, "to_dense": 1.0}, {"density": 0.075, "to_dense": 1.44}]
    found = dict(zip(DENSITIES, at_densities(rows), strict=True))
    assert found[0.15] == pytest.approx(1.2)
    assert found[0.3] == pytest.approx(1.0)
    assert math.isnan(found[0.05])


def test_page_and_picture_name_every_line(tmp_path):
    rows = [{"text": "t", "line": "dense", "role": "dense", "density": 1.0, "perplexity": 9.5, "to_dense": 1.0}]
    rows += [
        {"line": line.name, "role": line.role, "density": density, "to_dense": 1.1 + 0.01 * at - density}
        for at, line in enumerate(LINES)
        for density in (0.04, 0.5)
    ]
    rows += [{"line": "gold graph", "role": "oracle", "density": 0.06, "perplexity": 9.5, "to_dense": 1.0}]
    rows += [{"line": "oracle: greatest attention", "role": "oracle", "density": 0.01, "to_dense": 1.3}]
    rows = [{"text": "t", "accuracy": 0.4, "perplexity": 9.0, **row} for row in rows]
    about = dict.fromkeys(("command", "minutes", "hardware", "versions", "artifact", "tokens"), "x")
    result = {"about": about | {"text": {"t": 3}}, "rows": rows}
    page = make_page(result)
    cells = [line for line in page.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in cells[2:]] == [
        *(x.name for x in LINES),
        "oracle: greatest attention",
    ]
    draw_curves(result, tmp_path / "a" / "picture.png")
    assert (tmp_path / "a" / "picture.png").stat().st_size > 10_000


def test_every_line_has_its_maps_in_the_shipped_artifact_and_settings_that_differ():
    setup = Setup(load(default_artifact()), GRID, lambda layer: pytest.fail("no graph is needed to name settings"))
    settings = [(row.line, tuple(row.setting.items())) for row in family_rows(setup, [])]
    assert len(set(settings)) == len(settings)
    assert {name for name, _ in settings} == {line.name for line in LINES}
    assert all(sum(name == line.name for name, _ in settings) >= 3 for line in LINES)
