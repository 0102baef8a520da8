"""The text form: what it means, that it comes back the same, and that nothing else gets in."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefinder.errors import PatternError
from sparsefinder.patterns.algebra import Complement, Intersection, Union, materialize
from sparsefinder.patterns.compositions import bigbird, longformer, sparse_transformer, star_transformer
from sparsefinder.patterns.content import Listed
from sparsefinder.patterns.heads import Multihead, Sequential
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.positional import (
    BlockDiagonal,
    Dilated,
    Fixed,
    GlobalPositions,
    GlobalTokens,
    Nothing,
    Past,
    Strided,
    Window,
)
from sparsefinder.patterns.random_keys import RandomBlocks, RandomKeys
from sparsefinder.patterns.text import NAMES, Predicted, format_pattern, parse_pattern, resolve
from sparsefinder.predictors import Clusters, Distance, Quantization, Tiles, layer_pattern, random_projections
from sparsefinder.predictors.from_text import text_pattern

LEAVES = [
    Nothing(),
    Past(),
    Window(0),
    Window(3),
    GlobalTokens(2),
    GlobalTokens((2,)),
    GlobalTokens((3, 1)),
    GlobalPositions(()),
    GlobalPositions((0, -1)),
    Dilated(2, 3),
    Strided(4),
    Fixed(4),
    Fixed(4, 2),
    BlockDiagonal(3),
    BlockDiagonal(3, 1),
    RandomKeys(2),
    RandomKeys(2, 5, causal=True),
    RandomBlocks(2, 3, 4),
    Predicted("clusters"),
    Predicted(
        "distance", (("threshold", 1.5), ("name", "a | global"), ("shared", True), ("limit", None), ("low", -1e-30))
    ),
]
PREDICTED = ("clusters", "distance", "inverted_metric")


def compositions(inner):
    several = st.lists(inner, min_size=1, max_size=3).map(tuple)
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda pair: Union(*pair)),
        pairs.map(lambda pair: Intersection(*pair)),
        inner.map(Complement),
        several.map(Sequential),
        several.map(Multihead),
    )


expressions = st.recursive(st.sampled_from(LEAVES), compositions, max_leaves=12)


@given(expressions)
@settings(max_examples=200)
def test_every_expression_comes_back_as_the_same_value(pattern):
    text = format_pattern(pattern)
    assert parse_pattern(text, PREDICTED) == pattern
    assert format_pattern(parse_pattern(f"  ({text})\n", PREDICTED)) == text


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("window(5) | global(1) & ~strided(8)", Window(2) | (GlobalTokens(1) & ~Strided(8))),
        ("window(0)", Nothing()),
        ("window(window_size=7)", Window(3)),
        ("past", Past()),
        ("~~past()", ~~Past()),
        ("(window(1) | past) & past", (Window(0) | Past()) & Past()),
        ("positions((-1, 0))", GlobalPositions((-1, 0))),
        ("global((3, 1))", GlobalTokens((3, 1))),
        ("fixed(8, 2) | blocks(4, radius=1)", Fixed(8, 2) | BlockDiagonal(4, 1)),
        ("random(3, causal=True) & random_blocks(2, 1, 9)", RandomKeys(3, causal=True) & RandomBlocks(2, 1, 9)),
        (
            "sequential(window(3), multihead(past, strided(2)))",
            Sequential((Window(1), Multihead((Past(), Strided(2))))),
        ),
        ("longformer(5, dilation=2)", longformer(5, dilation=2)),
        ("bigbird(block=4, seed=1)", bigbird(4, seed=1)),
        ("sparse_transformer('fixed', 4, heads=\"union\")", sparse_transformer("fixed", 4, heads="union")),
        ("star_transformer(2)", star_transformer(2)),
    ],
)
def test_what_the_text_means(text, pattern):
    assert parse_pattern(text) == pattern


def test_predictors_are_names_until_they_are_resolved():
    pattern = parse_pattern("window(5) | ~(clusters(top=2) & sequential(tiles))", ["clusters", "tiles"])
    assert pattern == Window(2) | ~(Predicted("clusters", (("top", 2),)) & Sequential((Predicted("tiles"),)))
    with pytest.raises(PatternError, match="clusters: expected a predictor"):
        materialize(pattern, legal_full(1, 4, 4), 0, 0)
    filled = resolve(pattern, lambda leaf: {"clusters": Strided(2), "tiles": Past()}[leaf.name])
    assert filled == Window(2) | ~(Strided(2) & Sequential((Past(),)))


BAD = {
    "": "expected",
    "window(5": "never closed",
    "window(4)": "odd",
    "window(5) |": "expected",
    "window(5) + global(1)": "expected a name, a call or",
    "window(5) and global(1)": "expected a name, a call or",
    "-window(5)": "expected a name, a call or",
    "not window(5)": "expected a name, a call or",
    "5": "expected a name, a call or",
    "windw(5)": "expected one of window, .*got 'windw'",
    "clusters(top=2)": "expected one of window",
    "distance(1.5)": "by name",
    "distance(threshold=[1])": "words or tuples",
    "distance(threshold=1e999)": "words or tuples",
    "distance(threshold=-1e999)": "words or tuples",
    "distance(threshold=2j)": "words or tuples",
    "distance(threshold=b'1')": "words or tuples",
    "distance(threshold=...)": "words or tuples",
    "distance(threshold=(1.5, 2))": "words or tuples",
    "distance(threshold=1, threshold=2)": "repeated",
    "distance(**{'threshold': 1})": "words or tuples",
    "window(*[5])": "words or tuples",
    "window()": "missing.*expected window_size",
    "window(5, 5)": "too many.*expected window_size",
    "window(size=5)": "window: .*size.*expected window_size",
    "past(1)": "expected no argument",
    "window('5')": "odd",
    "window(True)": "odd",
    "window(5.0)": "odd",
    "global(1.0)": "at least 0",
    "global('1')": "at least 0",
    "positions(0)": "tuple",
    "positions((0, 'a'))": "words or tuples",
    "strided(0)": "stride",
    "strided(99999999999)": "stride",
    "strided(99999999999999999999)": "words or tuples",
    "random(1, causal=2)": "causal",
    "random_blocks(1, 1, causal='yes')": "causal",
    "sequential()": "one or more",
    "sequential(3)": "expected a name",
    "sequential(patterns=past)": "expected",
    "sparse_transformer('star', 3)": "strided or fixed",
    "global(9" + "9" * 5000 + ")": "characters",
    "global(" + "9" * 3900 + ")": "words or tuples",
    "~" * 3000 + "past": "expected",
    "(" * 300 + "past" + ")" * 300: "expected",
    "past" + " | past" * 200: "levels",
    "3 | global(1)": "expected a name",
    "past # | window(5)": "without #",
    "past\0": "expected",
    "\ud800": "expected",
    "__import__('os').system('true')": "expected a name",
    "__import__('os')": "expected one of",
    "past.__class__": "expected a name",
    "(lambda: past)()": "expected a name",
    "[past for x in y]": "expected a name",
    "past if past else past": "expected a name",
    "past; past": "expected",
    "x := past": "expected",
    "f'{past}'": "expected a name",
}


@pytest.mark.unchecked
@pytest.mark.parametrize("text", BAD)
def test_everything_else_is_refused_in_one_line(text):
    with pytest.raises(PatternError, match=BAD[text]) as caught:
        parse_pattern(text, ["distance"])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.unchecked
def test_random_lines_are_read_or_refused():
    """No other exception, whatever the line."""
    draw = random.Random(0)
    parts = [*NAMES, "distance", "(", ")", "|", "&", "~", ",", "=", "1", "-", "5", ".", "'a'", " ", "True", "seed"]
    read = 0
    for _ in range(3000):
        text = "".join(draw.choice(parts) for _ in range(draw.randrange(8)))
        try:
            pattern = parse_pattern(text, ["distance"])
        except PatternError:
            continue
        read += 1
        assert parse_pattern(format_pattern(pattern), ["distance"]) == pattern
    assert read > 20


HEADS = 2
MAPS = random_projections(HEADS, 3, 4, seed=0)
LAYER = {
    "distance": Distance(MAPS, torch.tensor([0.5, 1.0])),
    "clusters": Clusters(
        MAPS, torch.randn(HEADS, 5, 3, generator=torch.Generator().manual_seed(1)), torch.ones(2).long()
    ),
    "tiles": Tiles(MAPS, keys_per_tile=2),
    "quantization": Quantization(MAPS, 3),
}


def test_predictors_come_from_a_layer_with_other_settings():
    draw = torch.Generator().manual_seed(2)
    q, k = torch.randn(1, HEADS, 12, 4, generator=draw), torch.randn(1, 1, 12, 4, generator=draw)
    legal = legal_full(1, 12, 12)
    text = "window(3) | distance(threshold=1.25) & ~clusters(top=2) | tiles(keys_per_tile=None, threshold=-1.0)"
    found = text_pattern(parse_pattern(text, LAYER), LAYER, q, k, legal, tile_size=4)
    distance = Distance(MAPS, torch.tensor([1.25, 1.25])).pattern(q, k, legal)
    clusters = Clusters(MAPS, LAYER["clusters"].centroids, torch.tensor([2, 2])).pattern(q, k, legal)
    tiles = layer_pattern(Tiles(MAPS, threshold=-1.0), q, k, legal, Nothing(), 4)
    for h in range(HEADS):
        expected = materialize(Window(1) | distance & ~clusters | tiles, legal, 0, h)
        assert torch.equal(materialize(found, legal, 0, h), expected)
        assert expected.float().mean() < 0.95


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distance(limit=1.5)", "distance: expected settings among threshold, got 'limit'"),
        ("distance(projections=1)", "among threshold"),
        ("clusters(centroids=1)", "among top_k"),
        ("clusters(top=9)", "1 to 5 clusters"),
        ("clusters(top=1.5)", "type int"),
        ("clusters(top=True)", "type int"),
        ("distance(threshold='a')", "type float"),
        ("distance(threshold=None)", "type float"),
        ("quantization(bins=2.5)", "type int"),
        ("tiles(threshold=1)", "exactly one"),
        ("lsh", "lsh: expected one of clusters, distance"),
    ],
)
@pytest.mark.unchecked
def test_settings_that_do_not_fit_are_refused(text, message):
    x = torch.zeros(1, HEADS, 4, 4)
    with pytest.raises(PatternError, match=message):
        text_pattern(parse_pattern(text, [*LAYER, "lsh"]), LAYER, x, x, legal_full(1, 4, 4))


def test_patterns_with_tensors_have_no_text():
    with pytest.raises(PatternError, match="Listed"):
        format_pattern(Window(1) | Listed(legal_full(1, 2, 2).matrix(0)[None, None]))
