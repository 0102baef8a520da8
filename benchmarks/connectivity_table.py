"""What every positional pattern can pass from token to token, and which probability maps suit it: docs/connectivity.md.

    python -m benchmarks.connectivity_table [--tokens 256] [--out docs/connectivity.md]

Without --out the page is printed. No figure is typed by hand: the patterns are read from their text form and analysed.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages import deliver
from sparsefinder.connectivity import Connectivity, analyse, connectivity_table
from sparsefinder.cost import dense_depth, depth_of
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.text import parse_pattern
from sparsefinder.probability_maps import check_margin, probability_maps

# Text of the pattern, and layers of the cycle where random draws depend on the layer (1 otherwise, or as in the text).
PATTERNS: dict[str, int | None] = {
    "window(3)": None,
    "window(31)": None,
    "dilated(4, 2)": None,
    "dilated(4, 2) | global(1)": None,
    "global(1)": None,
    "window(1) | global(1)": None,
    "longformer(31, 1)": None,
    "star_transformer(1)": None,
    "strided(16)": None,
    "sparse_transformer('strided', 16)": None,
    "sparse_transformer('strided', 16, heads='multihead')": None,
    "sparse_transformer('strided', 16, heads='union')": None,
    "sparse_transformer('fixed', 16)": None,
    "sparse_transformer('fixed', 16, heads='multihead')": None,
    "sparse_transformer('fixed', 16, heads='union')": None,
    "blocks(16)": None,
    "blocks(16) | global(15)": None,
    "bigbird(16, 1, 3, 1)": None,
    "random(2)": 1,
    "random(8)": 1,
    "window(1) | random(2)": 1,
    "window(1) | random(8)": 1,
    "window(3) | random(2)": 1,
    "random_blocks(16, 2)": 1,
}
NOT_CAUSAL = ("random", "bigbird")  # they draw from the whole text, so a causal layer refuses them
CAUSAL_ONLY: dict[str, int | None] = {"random(8, causal=True)": 1, "window(3) | random(2, causal=True)": 1}
SHORT = ("sparse_transformer('strided', 16)", "sparse_transformer('fixed', 16)")
DEPTH_OF = ("star_transformer(1)", *SHORT, "longformer(31, 1)", "window(3)")
DIM, LEVELS = 2, 10
MARGINS = ((0.1, 0.01), (1.0, 0.1))


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, help="write the page to this file instead of printing it")
    options = parser.parse_args(arguments)
    return deliver(make_page(options.tokens), options.out)


def make_page(tokens: int) -> str:
    """The whole page as Markdown."""
    both = analysed(PATTERNS, tokens, causal=False)
    past = {text: layers for text, layers in PATTERNS.items() if not any(word in text for word in NOT_CAUSAL)}
    causal = analysed(past | CAUSAL_ONLY, tokens, causal=True)
    odd = analysed(dict.fromkeys(SHORT), tokens - 6, causal=False)
    parts = [
        "# Connectivity",
        f"Written by `python -m benchmarks.connectivity_table --tokens {tokens} --out docs/connectivity.md`.",
        ABOUT,
        f"## {tokens} tokens, bidirectional",
        connectivity_table(both),
        ABOUT_RANDOM,
        f"## {tokens} tokens, causal",
        ABOUT_CAUSAL,
        connectivity_table(causal),
        f"## {tokens - 6} tokens: a last segment that is cut short",
        ABOUT_SHORT,
        connectivity_table(odd),
        "## Depth of the construction",
        ABOUT_DEPTH.format(dim=DIM, levels=LEVELS, tokens=tokens),
        depth_table({f"`{text}`": both[f"`{text}`"] for text in DEPTH_OF}),
        "## Probability maps",
        ABOUT_MAPS.format(tokens=tokens),
        margin_table(tokens),
    ]
    return "\n\n".join(parts) + "\n"


def analysed(patterns: dict[str, int | None], tokens: int, causal: bool) -> dict[str, Connectivity]:
    """Every pattern, by its text."""
    legal = legal_full(1, tokens, tokens, causal)
    return {f"`{text}`": analyse(parse_pattern(text), legal, layers=layers) for text, layers in patterns.items()}


def depth_table(rows: dict[str, Connectivity]) -> str:
    dense = dense_depth(DIM, next(iter(rows.values())).tokens, LEVELS)
    lines = [["pattern", "attention blocks", "against dense"], ["---"] * 3]
    for name, row in rows.items():
        depth = depth_of(row, DIM, LEVELS)
        cells = ["–", "–"] if depth is None else [f"{depth.context:,}", f"{depth.context / dense.context:.3f}"]
        lines.append([name, *cells])
    lines.append(["full attention", f"{dense.context:,}", "1"])
    return _markdown(lines)


def margin_table(tokens: int) -> str:
    head = ["map"]
    for margin, rest in MARGINS:
        head += [f"least t (ζ = {margin:g}, η = {rest:g})", "t of the proof"]
    lines = [head, ["---"] * len(head)]
    for name, each in probability_maps().items():
        cells = [name]
        for margin, rest in MARGINS:
            found = check_margin(each.apply, margin, rest, tokens)
            small = found.scale is not None and found.scale < 1e-4 / margin
            cells.append("none" if found.scale is None else "any" if small else f"{found.scale:.3f}")
            cells.append(
                "any" if each.enough(margin, rest, tokens) == 0 else f"{each.enough(margin, rest, tokens):.3f}"
            )
        lines.append(cells)
    return _markdown(lines)


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


ABOUT = """\
Yun et al. ("O(n) Connections are Expressive Enough", 2020) prove that sparse Transformers are universal approximators
of continuous sequence-to-sequence functions if their patterns satisfy Assumption 1: every token reads itself in every
layer; the union of the patterns of a cycle has a Hamiltonian path, an order of all tokens in which each reads the one
before; and after some number of layers ("hops") every token has reached every other. The last is necessary, the first
two are used by the proof. p is the number of patterns in the cycle. A path comes with how it was found, a "no" with the
reason; "unknown" would mean that a bounded search ended first. Keys per token are means over tokens and layers."""

ABOUT_RANDOM = """\
Few random keys alone fail for a simple reason: with c keys a token, about n/eᶜ of n tokens are read by nobody. The same
few beside the smallest window qualify, and need far fewer hops than the window alone. Only global tokens, without a
window, fail too: through one hub only two chains can be joined, where the proof needs a chain of all."""

ABOUT_CAUSAL = """\
The theorem speaks of encoders. Here hops are layers until every token has reached all tokens before it, and the only
order that can be a Hamiltonian path is the order of the text. Global tokens at the start of the text pass nothing on,
since they read no later token: star and Longformer need as many hops as their windows (but for the global token
itself), and what global tokens joined above stays apart. The strided and fixed patterns keep their two hops."""

ABOUT_SHORT = """\
The paper says that the fixed pattern qualifies for all segment lengths. That holds where the text is a whole number of
segments: tokens of a last, shorter segment have no summary token, so no other segment ever hears of them. Making the
last token global (`| positions((-1,))`) repairs it."""

ABOUT_DEPTH = """\
Blocks in which the construction really attends, `p(n − 1)/δᵈ + s` (section 4.1), for tokens of d = {dim} numbers, grid
steps δ = 1/{levels} and n = {tokens}. About p times those of full attention; hops hardly count. (Quantization and value
mapping need no attention and the same number of blocks in both; the value mapping, `n/δᵈⁿ`, dwarfs all else.)"""

ABOUT_MAPS = """\
Assumption 2: for every margin ζ and rest η there is a scale t such that a map puts at least 1 − η on the best of
t-times scaled scores whenever it leads by ζ. The least such t, found numerically over hard and random score vectors of
{tokens} tokens, beside a t that is proved to be enough (appendix B)."""


if __name__ == "__main__":
    main()
