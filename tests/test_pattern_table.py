"""docs/patterns.md: every pattern and predictor × its checks. A cell says yes because the check is run here and holds.

`python tests/test_pattern_table.py` writes the file.
"""

import functools
import sys
import warnings
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
from cases_content import HEADS, sequences
from pattern_rows import PREDICTED, ROWS, TILE, Row
from test_algebra_laws import dense
from torch import Tensor

from sparsefinder.patterns.algebra import Pattern, materialize
from sparsefinder.patterns.legal import Legal, legal_from_mask, legal_full
from sparsefinder.patterns.positional import Nothing
from sparsefinder.patterns.text import NAMES, format_pattern, parse_pattern
from sparsefinder.patterns.views import block_mask, pattern_edges
from sparsefinder.plan import build_plan, plan_matrix
from sparsefinder.predictors import PREDICTORS, layer_pattern
from sparsefinder.predictors.from_text import text_pattern, with_settings

PAGE = Path(__file__).parent.parent / "docs" / "patterns.md"
N = 19


def inputs() -> tuple[Tensor, Tensor]:
    q, k = sequences(1, N)  # grouped heads; moved off the whole numbers, so that nothing is tied
    draw = torch.Generator().manual_seed(0)
    return q + torch.rand(q.shape, generator=draw) / 2, k + torch.rand(k.shape, generator=draw) / 2


def build(row: Row, q: Tensor, k: Tensor, legal: Legal) -> Pattern:
    """From the text to pairs; names of predictors win over those of patterns, since the row says which it is."""
    if row.predictor is None:
        return parse_pattern(row.text)
    settings = dict(parse_pattern(f"sample{row.text[len(row.name) :]}", ["sample"]).settings)
    return layer_pattern(with_settings(row.predictor, settings), q, k, legal, Nothing(), TILE)


@functools.cache
def expected(name: str, h: int) -> np.ndarray:
    return next(row for row in ROWS if label(row) == name).rule(*inputs(), h)


def label(row: Row) -> str:
    return row.name if row.predictor is None else f"predictor {row.name}"


def equals_its_definition(row: Row) -> None:
    q, k = inputs()
    legal = legal_full(1, N, N)
    pattern = build(row, q, k, legal)
    for h in range(HEADS):
        wanted = expected(label(row), h)
        assert np.array_equal(materialize(pattern, legal, 0, h).numpy(), wanted)
        assert 0 < wanted.sum() < wanted.size


def keeps_the_laws(row: Row) -> None:
    """Padding on both sides and a neighbour change no pair, the second time gives the same, sets behave as sets."""
    q, k = inputs()
    wide = [torch.nn.functional.pad(x, (0, 0, 3, 2), value=torch.nan).repeat(2, 1, 1, 1) for x in (q, k)]
    mask = torch.zeros(2, N + 5, dtype=torch.bool)
    mask[0, 3 : 3 + N] = True
    mask[1, 3:5] = True
    legal = legal_from_mask(mask)
    pattern, again = build(row, *wide, legal), build(row, *wide, legal)
    for h in range(HEADS):
        found = materialize(pattern, legal, 0, h)
        assert np.array_equal(found[3 : 3 + N, 3 : 3 + N].numpy(), expected(label(row), h))
        assert found.sum() == expected(label(row), h).sum()
        assert torch.equal(materialize(again, legal, 0, h), found)
        assert torch.equal(materialize(~pattern, legal, 0, h), legal.matrix(0) & ~found)
        assert torch.equal(materialize(pattern & ~again | again, legal, 0, h), found)


def has_a_plan(row: Row) -> None:
    q, k = inputs()
    legal = legal_full(1, N, N)
    pattern = build(row, q, k, legal)
    plan = build_plan(pattern, legal, TILE, heads=HEADS)
    alone = {"global": 2, "longformer": 2, "bigbird": 2, "star_transformer": 1}.get(label(row), 0)
    for h in range(HEADS):
        wanted = expected(label(row), h)
        place = (legal.matrix(0).numpy(), [True] * N, [True] * N, TILE, alone)
        assert np.array_equal(plan_matrix(plan, legal, 0, h).numpy(), oracles.plan(wanted, *place)[1])


def has_a_block_mask(row: Row) -> None:
    q, k = inputs()
    legal = legal_full(1, N, N)
    pattern = build(row, q, k, legal)
    mask, edges = block_mask(pattern, legal, HEADS, (TILE, 8)), pattern_edges(pattern, legal, HEADS)
    for h in range(HEADS):
        assert np.array_equal(dense(mask, 0, h), expected(label(row), h))
    assert edges.flat.shape[0] == sum(expected(label(row), h).sum() for h in range(HEADS))


def comes_back_from_text(row: Row) -> None:
    if row.predictor is None:
        pattern = parse_pattern(row.text)
        assert parse_pattern(format_pattern(pattern)) == pattern
        return
    named = row.text if row.name not in NAMES else f"{row.name}_only{row.text[len(row.name) :]}"
    name = named.split("(")[0]
    pattern = parse_pattern(f"~{named}", [name])
    assert parse_pattern(format_pattern(pattern), [name]) == pattern
    q, k = inputs()
    legal = legal_full(1, N, N)
    found = text_pattern(pattern, {name: row.predictor}, q, k, legal, TILE)
    for h in range(HEADS):
        assert np.array_equal(materialize(~found, legal, 0, h).numpy(), expected(label(row), h))
    assert with_settings(row.predictor, {}).settings() == row.predictor.settings()


CHECKS = {
    "oracle": equals_its_definition,
    "laws": keeps_the_laws,
    "plan": has_a_plan,
    "block mask": has_a_block_mask,
    "text": comes_back_from_text,
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("row", ROWS, ids=label)
def test_every_cell(row: Row, check: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CHECKS[check](row)


def test_no_row_is_missing() -> None:
    assert sorted(row.name for row in ROWS if row.predictor is None) == sorted(NAMES)
    assert sorted(row.name for row in PREDICTED) == sorted(PREDICTORS)
    assert all(type(row.predictor) is PREDICTORS[row.name] for row in PREDICTED)


def cell(row: Row, check: str) -> str:
    try:
        test_every_cell(row, check)
    except Exception as error:  # noqa: BLE001  (whatever it is, the cell is a gap)
        return f"no ({type(error).__name__})"
    return "yes"


def page(cells: dict[tuple[str, str], str]) -> str:
    """The whole file."""
    lines = [
        "# Patterns",
        "",
        "Which query may look at which key, as one line of text: names joined by `|`, `&`, `~` and brackets, for",
        'example `"window(5) | global(1) & ~strided(8) | clusters(top=2)"`. Each row is checked by',
        "`tests/test_pattern_table.py`, which writes this page:",
        "",
        "- oracle: equal to a naive definition, pair by pair, on four heads that share two sets of keys;",
        "- laws: padding on either side, a neighbour in the batch and a second call change no pair; `|`, `&`, `~` are",
        "  those of sets;",
        "- plan: the plan computes what its definition says, a tile at a time;",
        "- block mask: FlexAttention's blocks, and the sorted edges, hold the same pairs;",
        "- text: what is written is read back as the same value.",
        "",
    ]
    for title, rows in (
        ("By position", [row for row in ROWS if row.predictor is None]),
        ("By content (predictors)", PREDICTED),
    ):
        lines += [f"## {title}", "", f"| pattern | example | keys of a query | source | {' | '.join(CHECKS)} |"]
        lines += ["|" + "---|" * (4 + len(CHECKS))]
        for row in rows:
            found = " | ".join(cells[label(row), check] for check in CHECKS)
            lines.append(f"| {row.name} | `{row.text}` | {row.says.replace('|', '∪')} | {row.source} | {found} |")
        lines.append("")
    return "\n".join(lines)


def test_the_page_is_up_to_date() -> None:
    """Every cell is tested above, so here all of them say yes."""
    wanted = page({(label(row), check): "yes" for row in ROWS for check in CHECKS})
    assert PAGE.read_text() == wanted, "run: python tests/test_pattern_table.py"


if __name__ == "__main__":
    PAGE.write_text(page({(label(row), check): cell(row, check) for row in ROWS for check in CHECKS}))
    sys.exit("no (" in PAGE.read_text())
