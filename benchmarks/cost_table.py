"""What patterns cost at any length, what hashing misses, and a design for 200 000 tokens: docs/cost.md.

    python -m benchmarks.cost_table [--timing docs/figures/element_vs_block.json] [--out docs/cost.md]

Without --out the page is printed. With the figures of `benchmarks.element_vs_block` the page shows them too.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.pages import deliver
from sparsefinder.cost import (
    LongDocument,
    attention_price,
    bucket_size,
    closed_form_pairs,
    collision_probability,
    design_rows,
    design_table,
    expected_keys,
    footprint_at,
    full_footprint,
    miss_probability,
    rounds_needed,
)
from sparsefinder.patterns.heads import at_layer
from sparsefinder.patterns.text import parse_pattern

LENGTHS = (1024, 4096, 16_384)
TILE, DIM = 32, 64
# Text of the pattern and layers over which it alternates.
PATTERNS = {
    "window(257)": 1,
    "longformer(257, 16)": 1,
    "bigbird(64, 3, 3, 1)": 1,
    "sparse_transformer('strided', 128)": 2,
    "sparse_transformer('fixed', 128)": 2,
    "random(128)": 1,
    "blocks(128)": 1,
}
COSINES = (0.0, 0.3, 0.5, 0.7, 0.9)
BUCKETS, ROUNDS, PAIRS = 64, (1, 2, 4, 8), 20_000


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--timing", type=Path, help="figures of benchmarks.element_vs_block")
    parser.add_argument("--out", type=Path, help="write the page to this file instead of printing it")
    options = parser.parse_args(arguments)
    return deliver(make_page(options.lengths, options.timing), options.out)


def make_page(lengths: Sequence[int], timing: Path | None) -> str:
    """The whole page as Markdown."""
    lecture, long = 8192, LongDocument()
    seen = bucket_size(lecture, BUCKETS)
    parts = [
        "# Cost",
        "Written by `python -m benchmarks.cost_table`; no figure is typed by hand.",
        "## Patterns against full attention",
        ABOUT_PATTERNS.format(tile=TILE, dim=DIM),
        pattern_table(lengths),
        "## Buckets",
        ABOUT_BUCKETS.format(tokens=lecture, buckets=BUCKETS, mean=seen.mean, seen=seen.seen),
        skew_table(lecture),
        "## Hashing: what rounds miss",
        ABOUT_HASHING.format(buckets=BUCKETS, pairs=PAIRS, tokens=lecture),
        hashing_table(lecture),
        "## Questions about sections of a 200 000-token document",
        ABOUT_DESIGN.format(**vars(long)),
        design_table(design_rows(long)),
        AFTER_DESIGN.format(window=2 * long.radius + 1, **vars(long)),
    ]
    if timing:
        parts += ["## Single keys against blocks of keys", ABOUT_TIMING, timing_table(timing)]
    return "\n\n".join(parts) + "\n"


def pattern_table(lengths: Sequence[int]) -> str:
    lines = [["pattern", "tokens", "keys per query", "density", "computed density", "operations", "bytes"], ["---"] * 7]
    for text, layers in PATTERNS.items():
        for tokens in lengths:
            full = full_footprint(tokens, TILE)
            sizes = [footprint_at(parse_pattern(text), tokens, TILE, layer=layer) for layer in range(layers)]
            exact = [closed_form_pairs(at_layer(parse_pattern(text), layer), tokens) for layer in range(layers)]
            mark = "" if None not in exact or not any(size.error for size in sizes) else " ±"
            prices = [attention_price(size, DIM) for size in sizes]
            whole = attention_price(full, DIM, lists=False)
            lines.append(
                [
                    f"`{text}`",
                    str(tokens),
                    f"{sum(size.pairs for size in sizes) / layers / tokens:.1f}{mark}",
                    f"{sum(size.density for size in sizes) / layers:.2%}",
                    f"{sum(size.computed_density for size in sizes) / layers:.2%}",
                    f"{sum(price.flops for price in prices) / layers / whole.flops:.3f}",
                    f"{sum(price.bytes for price in prices) / layers / whole.bytes:.3f}",
                ]
            )
    return _markdown(lines)


def skew_table(tokens: int) -> str:
    lines = [["largest share of a bucket", "tokens of a token's own bucket", "against even buckets"], ["---"] * 3]
    even = bucket_size(tokens, BUCKETS).seen
    for slope in (0.0, 0.5, 1.0):
        shares = torch.arange(1, BUCKETS + 1, dtype=torch.float64) ** -slope
        shares /= shares.sum()
        seen = bucket_size(tokens, shares).seen
        lines.append([f"{float(shares.max()):.1%}", f"{seen:.0f}", f"{seen / even:.1f}"])
    return _markdown(lines)


def hashing_table(tokens: int) -> str:
    head = ["cosine", "collision c", *(f"missed by {m} (simulated)" for m in ROUNDS), "rounds for 1 % missed"]
    lines = [head, ["---"] * len(head)]
    for cosine in COSINES:
        c = collision_probability(cosine, BUCKETS)
        misses = [f"{miss_probability(c, m):.3f} ({simulated_miss(cosine, m):.3f})" for m in ROUNDS]
        lines.append([f"{cosine:g}", f"{c:.4f}", *misses, str(rounds_needed(c, 0.01))])
    keys = [f"{expected_keys(tokens, 1 / BUCKETS, m):.0f} keys" for m in ROUNDS]
    lines.append(["a query of any direction reads", "", *keys, ""])
    return _markdown(lines)


def simulated_miss(cosine: float, rounds: int) -> float:
    """Share of pairs of vectors with this cosine that `argmax[Rx; −Rx]` never puts into one bucket."""
    draw = torch.Generator().manual_seed(0)
    missed = torch.ones(PAIRS, dtype=torch.bool)
    for _ in range(rounds):
        x, y = torch.randn(2, PAIRS, BUCKETS // 2, generator=draw)
        y = cosine * x + (1 - cosine**2) ** 0.5 * y
        missed &= torch.cat([x, -x], -1).argmax(-1) != torch.cat([y, -y], -1).argmax(-1)
    return float(missed.float().mean())


def timing_table(path: Path) -> str:
    figures = json.loads(path.read_text(encoding="utf-8"))
    lines = [["tokens", "density", "row", "ms", "times faster than full", "computed density"], ["---"] * 6]
    for row in figures["rows"]:
        cells = [str(row["tokens"]), f"{row['density']:.1%}", row["row"], f"{row['milliseconds']:.2f}"]
        lines.append([*cells, f"{row['to_full']:.2f}", f"{row['computed_density']:.1%}"])
    about = "\n".join(f"- {name}: {value}" for name, value in figures["about"].items())
    return about + "\n\n" + _markdown(lines)


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


ABOUT_PATTERNS = """\
Means over the layers of a pattern. Density: pairs of the pattern / legal pairs. Computed density: what a kernel
really computes, whose tiles of {tile} queries share one list of keys. Operations and bytes: of full attention, one
head of dimension {dim} in half precision, where bytes are those that a tiled kernel moves (queries, outputs, the
listed keys and values of each tile, the lists). A row of a global token is a tile of its own and loads all keys for
itself alone: in bytes a few of them outweigh the rest. ±: counted on 64 evenly spread tiles; the rest is exact."""

ABOUT_BUCKETS = """\
{tokens} tokens in {buckets} even buckets: {mean:.0f} tokens in a bucket, so a token attends to {seen:.0f}, itself
included. Buckets of LSH and of k-means are not even, and a full bucket is met by more tokens: with shares that fall
like 1, 1/√w and 1/w the price is:"""

ABOUT_HASHING = """\
Collision probability of `argmax[Rx; −Rx]` with {buckets} buckets by numeric integration, miss probability (1 − c)^m,
and in brackets the share that {pairs} simulated pairs missed. Below: different keys of {tokens} that a query reads
when all buckets are even."""

ABOUT_DESIGN = """\
The question's {question} tokens come first and are global: each reads all {tokens} tokens in one hop, and all read
them. A window of radius {radius} reads the wording around each token. The last token of every section of {section}
tokens is read by all (`fixed({section})`), a table of contents with content. And every tile of {tile_size} queries
reads {retrieved} keys that are predicted from content, wherever they lie: what no position can know. Any two tokens
are two layers apart, by way of the question. Per layer and head, dimension {dim}; the steps add up:"""

AFTER_DESIGN = """\
Prediction must stay a small part. Comparing tile means with every key, the better predictor at 2048 tokens, is
quadratic and too dear here; inverted lists over {clusters} clusters at rank {rank} are not. In text:
`window({window}) | global({question}) | fixed({section})`, and the predictor of the artifact beside it."""

ABOUT_TIMING = """\
At equal numbers of pairs. Single keys lose twice: gathering a key serves one query instead of a tile, and a small
matrix product becomes many products of a matrix with one vector. A tile kernel can only read the union of its rows'
keys."""


if __name__ == "__main__":
    main()
