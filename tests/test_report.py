"""The report and the findings: files are there, hold what they should, need no network; verdicts follow the figures."""

import re
import struct

import pytest
from test_sweep import invoke, places, sweep, text  # noqa: F401 (fixtures)

from sparsefinder.errors import ConfigError
from training import report
from training.report_heads import _typical, choose_heads, entropies
from training.report_words import WORD_CLASSES, word_classes
from training.sweep_files import read_sweep

pytest.importorskip("matplotlib")
pytest.importorskip("plotly")
pytest.importorskip("textblob")

ROWS = [option for row in ("window", "random", "distance", "clusters", "quantization", "oracle", "hashing", "routing",
                           "budget", "score", "tiles") for option in ("--only", row)]  # fmt: skip


@pytest.fixture(scope="module")
def drawn(places, text, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("report")
    result = sweep(places, text, folder / "sweep", *ROWS, "--quality-points", 4)
    assert result.exit_code == 0, result.output
    result = invoke("report", "--sweep", folder / "sweep", "--out", folder / "report", "--instance", 0)
    assert result.exit_code == 0, result.output
    return folder


PICTURES = ("recall", "mass", "quality", "maps", "bipartite", "shared_clusters", "cluster_usage", "clusters")


@pytest.mark.slow
def test_every_picture_is_there_and_not_empty(drawn):
    for name in PICTURES:
        data = (drawn / "report" / f"{name}.png").read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert data[:4] == b"\x89PNG"
        assert min(width, height) > 300
        assert len(data) > 8_000, name


@pytest.mark.slow
def test_the_page_needs_no_network_and_shows_everything(drawn):
    page = (drawn / "report" / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)
    assert page.count("Plotly.newPlot(") >= 7
    for words in ("Sparsity and recall", "Attention maps", "Typical tokens", "gold, missed", "clusters, hinge"):
        assert words in page
    assert "NaN" not in page.split("<h2>About")[1]


@pytest.mark.slow
def test_the_table_holds_every_family(drawn):
    result = read_sweep(drawn / "sweep")
    lines = (drawn / "report" / "recall.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and "family" not in line and "---" not in line]
    assert len(rows) == 2 * len(result["families"]) - 1
    numbers = [float(x) for row in rows for x in row.split("|")[4:11] if x.strip() not in ("–", "")]
    assert all(0 <= x <= 1 for x in numbers)
    known = {int(family["instances"]) for family in result["families"]}
    assert {int(row.split("|")[3]) for row in rows} == known


@pytest.mark.slow
def test_findings_follow_the_figures(drawn, monkeypatch):
    findings = pytest.importorskip("benchmarks.write_findings")
    monkeypatch.setattr(findings, "PAPER_RANK", 3)  # of the maps here
    result = read_sweep(drawn / "sweep")
    written = findings.document(result)
    for title in findings.SECTIONS:
        assert f"## {title}" in written
    assert "Not covered" in written
    # Turned around, the verdict turns around.
    for family in result["families"]:
        for point in family["points"]:
            good = family["family"] in ("distance", "clusters") and family["role"] == "learned"
            for half in (point, point.get("chosen"), point.get("measured")):
                if half is not None:
                    half["recall"] = 1.0 if good else 0.0
    assert "does not hold" not in findings.dominate(result)
    for family in result["families"]:
        for point in family["points"]:
            for half in (point, point.get("chosen"), point.get("measured")):
                if half is not None:
                    half["recall"] = 1.0 - half["recall"]
    assert "**holds**" not in findings.dominate(result)


def test_verdicts():
    findings = pytest.importorskip("benchmarks.write_findings")
    assert findings.verdict(7, 7) == "**holds**"
    assert findings.verdict(5, 7).startswith("**holds in part**")
    assert findings.verdict(3, 7).startswith("**does not hold**")
    assert findings.wins([1.0, 0.5], [0.5, 0.5]) == 1


def test_a_missing_extra_is_one_line(monkeypatch):
    real = report.importlib.util.find_spec
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None if name == "plotly" else real(name))
    with pytest.raises(ConfigError, match=r"needs plotly, expected `pip install 'sparsefinder\[report\]'`"):
        report.require_extra()


def test_parts_of_speech_of_pieces():
    pieces = ["[CLS]", "the", "cat", "##s", "quickly", "sat", "on", "3", "mats", ".", "[SEP]"]
    special = [piece.startswith("[") for piece in pieces]
    names = [WORD_CLASSES[at] for at in word_classes(pieces, special)]
    assert names[0] == names[-1] == "special"
    assert names[1:4] == ["determiner", "noun", "noun"]
    assert (names[4], names[5], names[6]) == ("adverb", "verb", "preposition")
    assert (names[7], names[8], names[9]) == ("number", "noun", "punctuation")
    assert word_classes([], []) == []


def test_typical_tokens_and_entropy():
    from collections import Counter

    import numpy as np

    assert _typical(Counter(a=5, b=1), Counter(a=5, b=50, c=20), 75, 3) == ["a"]
    found = entropies(np.array([[5, 5], [10, 0]]))
    assert found.tolist() == pytest.approx([1.0, 0.0])
    heads = choose_heads(np.array([[0.1, 0.9], [0.8, 0.7], [0.95, 0.2]]), 3)
    assert heads == [(0, 0), (1, 0), (2, 0)]


def test_the_longest_sentence_that_can_be_drawn():
    pieces = ["[CLS]", "a", ".", "b", "c", "d", ".", *["e"] * 40, "."]
    special = [piece == "[CLS]" for piece in pieces]
    assert report.sentence_span(pieces, special) == (3, 7)
    assert report.sentence_span(["x"] * 50, [False] * 50) == (0, report.SENTENCE)
    assert report.sentence_span(["x"] * 5, [False] * 5) == (0, 5)
