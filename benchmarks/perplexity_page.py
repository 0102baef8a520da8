"""The page of `benchmarks.perplexity`: one table for each length and kind of attention, and a picture.

    python -m benchmarks.perplexity_page docs/figures/perplexity.json [docs/figures/entmax_twin.json]

No figure is written by hand: this reads the JSON of `benchmarks.perplexity`, and that of `benchmarks.entmax_twin`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.write_results import table

DOCS = Path(__file__).resolve().parent.parent / "docs"
GOAL_DENSITY = {("softmax", 2048): 0.25, ("softmax", 4096): 0.15, ("1.5-entmax", 2048): 0.15, ("1.5-entmax", 4096): 0.1}
HEAD = """# Perplexity of a causal language model

Written by `python -m benchmarks.perplexity_page` from [figures/perplexity.json](figures/perplexity.json).

- command: `{command}`
- hardware: {hardware}; versions: {versions}
- text: {text}; artifacts: {artifacts}

A cell is *perplexity relative to dense attention of the same kind* @ *computed density*, the share of legal pairs that
the plan computed (mean over layers, heads and texts), in the column of the density that was aimed at. Our rows, the
oracle, hashing and routing hold the window and the first tokens that the artifact serves, and a tile's own rows. The
oracle sees the attention that it selects from. Sizes of hashing and routing are chosen by density on the first text.

![perplexity](figures/perplexity.png)
"""

TWIN = """## From softmax to entmax

What each step gains, by `{command}` ({hardware}; {versions}; {text}). A cell is *perplexity (relative to softmax)* @
*density*, the share of legal pairs with weight.
"""

Row = dict[str, Any]


def page(result: dict[str, Any]) -> str:
    """The page as Markdown."""
    about = result["about"]
    artifacts = ", ".join(f"{kind} {version}" for kind, version in about["artifacts"].items())
    parts = [HEAD.format(**(about | {"artifacts": artifacts}))]
    for kind, tokens in groups(result["rows"]):
        rows = of_group(result["rows"], kind, tokens)
        dense = next(row for row in rows if row["row"] == "dense")
        aims = sorted({row["aim"] for row in rows if row["aim"] is not None})
        lines = [
            [name, *(_cell(rows, name, aim) for aim in aims)]
            for name in dict.fromkeys(row["row"] for row in rows if row["aim"] is not None)
        ]
        parts.append(f"## {kind}, {tokens} tokens: dense {dense['perplexity']:.2f} ({len(dense['of_texts'])} texts)\n")
        parts.append(table(["keys chosen by", *(f"aim {aim:.0%}" for aim in aims)], lines) + "\n")
        parts.append(_at_goal(rows, GOAL_DENSITY.get((kind, tokens))))
    return "\n".join(part for part in parts if part) + "\n"


def twin_section(result: dict[str, Any]) -> str:
    """What `benchmarks.entmax_twin` measured, as a table with a column for each length."""
    about, rows = result["about"], result["rows"]
    lengths = sorted({row["tokens"] for row in rows})
    lines = []
    for name in dict.fromkeys(row["row"] for row in rows):
        own = {row["tokens"]: row for row in rows if row["row"] == name}
        lines.append([name, *(_twin_cell(own[tokens]) for tokens in lengths)])
    head = TWIN.format(**about)
    return head + "\n" + table(["attention", *(f"{tokens} tokens" for tokens in lengths)], lines) + "\n"


def _twin_cell(row: Row) -> str:
    return f"{row['perplexity']:.2f} ({row['to_softmax']:.3f}) @ {row['density']:.1%}"


def groups(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """(kind of attention, tokens) in the order of the run."""
    return sorted({(row["attention"], row["tokens"]) for row in rows}, key=lambda key: (key[0] != "softmax", key[1]))


def of_group(rows: Sequence[Row], kind: str, tokens: int) -> list[Row]:
    """Rows of one kind of attention at one length."""
    return [row for row in rows if (row["attention"], row["tokens"]) == (kind, tokens)]


def loss_at(rows: Sequence[Row], name: str, density: float) -> float | None:
    """Perplexity relative to dense at a density, its logarithm linear between settings; None outside of them."""
    own = sorted((row["density"], row["to_dense"]) for row in rows if row["row"] == name and row["aim"] is not None)
    if not own or not own[0][0] <= density <= own[-1][0]:
        return None
    densities, ratios = np.array(own).T
    return float(np.exp(np.interp(density, densities, np.log(ratios))))


def _at_goal(rows: Sequence[Row], density: float | None) -> str:
    if density is None:
        return ""
    names = dict.fromkeys(row["row"] for row in rows if row["row"].startswith(("predicted", "oracle")))
    found = {name: loss_at(rows, name, density) for name in names}
    told = [f"{name} {'not measured' if loss is None else format(loss - 1, '+.1%')}" for name, loss in found.items()]
    return f"Between the settings, at {density:.0%} computed density: {', '.join(told)}.\n"


def _cell(rows: Sequence[Row], name: str, aim: float) -> str:
    found = [row for row in rows if row["row"] == name and row["aim"] == aim]
    return f"{found[0]['to_dense']:.3f} @ {found[0]['density']:.1%}" if found else "–"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Perplexity relative to dense by computed density, one panel for each length and kind."""
    keys = groups(rows)
    kinds = list(dict.fromkeys(kind for kind, _ in keys))
    wide = max(sum(kind == own for kind, _ in keys) for own in kinds)
    size = (4.2 * wide, 4.2 * len(kinds))
    figure, axes = plt.subplots(len(kinds), wide, figsize=size, sharey=True, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for kind, tokens in keys:
        at = kinds.index(kind)
        axis = axes[at][[length for own, length in keys if own == kind].index(tokens)]
        axis.set_axis_on()
        own = [row for row in of_group(rows, kind, tokens) if row["aim"] is not None]
        for name in dict.fromkeys(row["row"] for row in own):
            points = sorted((row["density"], row["to_dense"]) for row in own if row["row"] == name)
            style = "-" if name.startswith("predicted") else "--" if name.startswith("oracle") else ":"
            axis.plot(*np.array(points).T, style, marker="o", ms=4, lw=2 if style == "-" else 1.2, label=name)
        axis.axhline(1.02, color="grey", lw=0.8, ls=":")
        axis.set(title=f"{kind}, {tokens} tokens", xlabel="computed density", yscale="log", ylim=(0.98, 2.5))
        axis.set_yticks([1, 1.05, 1.1, 1.2, 1.5, 2], ["1", "1.05", "1.1", "1.2", "1.5", "2"])
        axis.minorticks_off()
        if axis in axes[:, 0]:
            axis.set_ylabel("perplexity / dense perplexity")
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str]) -> None:
    result = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    twins = [json.loads(Path(name).read_text(encoding="utf-8")) for name in arguments[1:]]
    text = "\n".join([page(result), *map(twin_section, twins)])
    (DOCS / "perplexity.md").write_text(text, encoding="utf-8")
    draw(result["rows"], DOCS / "figures" / "perplexity.png")
    print(f"Written: {DOCS / 'perplexity.md'} and its picture")


if __name__ == "__main__":
    main(sys.argv[1:])
