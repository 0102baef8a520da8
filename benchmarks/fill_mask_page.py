"""Page and picture of `benchmarks.fill_mask`: nothing is typed by hand."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.tasks_page import table
from training.report_style import COLOURS, STYLES

DENSITIES = (0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
MOST = 1.6  # of the ratio to dense that is drawn
PANELS = (("learned",), ("baseline", "control"))

HEAD = """# Fill-mask: sparsity against perplexity

Made by `{command}` in {minutes} minutes ({hardware}; {versions}); figures in
[figures/fill_mask.json](figures/fill_mask.json). Artifact `{artifact}` under the shipped fill-mask head, attention
replaced in all layers, {tokens} tokens a text, 15 % of the ordinary tokens masked. Learned and hashed rows are
joined with the window and the global token that the artifact serves. A pattern is computed pair by pair; the rows of
`tiles` compute whole tiles, and their density counts all of that.

![perplexity against density](figures/fill_mask.png)
"""


def make_page(result: dict[str, Any]) -> str:
    """The page as Markdown."""
    parts = [HEAD.format(**result["about"])]
    for text, count in result["about"]["text"].items():
        rows = [row for row in result["rows"] if row["text"] == text]
        dense, gold = (next(row for row in rows if row["line"] == line) for line in ("dense", "gold graph"))
        figures = f"perplexity {dense['perplexity']:.2f}, accuracy {dense['accuracy']:.1%}"
        parts.append(f"""## {text[0].upper()}{text[1:]} ({count} texts)

Dense entmax: {figures}. The gold graph, {gold["density"]:.1%} of the pairs: perplexity {gold["perplexity"]:.2f}.
Perplexity as a multiple of dense at equal computed density, between the measured settings of a line (none beyond them):

{table(["", *(f"{d:.0%}" for d in DENSITIES)], _lines(rows))}""")
    return "\n".join(parts)


def _lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Best line at the middle density first, the oracle last."""
    names = list(dict.fromkeys(row["line"] for row in rows if row["role"] not in ("dense", "oracle")))
    found = {name: at_densities([row for row in rows if row["line"] == name]) for name in names}
    middle = len(DENSITIES) // 2
    order = sorted(names, key=lambda name: math.inf if math.isnan(found[name][middle]) else found[name][middle])
    oracle = at_densities([row for row in rows if row["role"] == "oracle"])
    named = [(name, found[name]) for name in order] + [("oracle: greatest attention", oracle)]
    return [[name, *("–" if math.isnan(x) else f"{x:.3f}" for x in values)] for name, values in named]


def at_densities(rows: Sequence[dict[str, Any]]) -> list[float]:
    """The ratio to dense at `DENSITIES`, between measured points (logarithms of both); NaN beyond them."""
    points = sorted((row["density"], row["to_dense"]) for row in rows)
    x, y = np.log([p[0] for p in points]), np.log([p[1] for p in points])
    return [float(np.exp(np.interp(math.log(d), x, y, left=np.nan, right=np.nan))) for d in DENSITIES]


def draw_curves(result: dict[str, Any], path: Path) -> None:
    """A row of panels for every text: learned lines, then the others, the oracle in both."""
    texts = list(result["about"]["text"])
    figure, axes = plt.subplots(
        len(texts), 2, figsize=(13, 5.2 * len(texts)), layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    for row_of_axes, text in zip(axes, texts, strict=True):
        rows = [row for row in result["rows"] if row["text"] == text]
        for ax, roles in zip(row_of_axes, PANELS, strict=True):
            names = list(dict.fromkeys(row["line"] for row in rows if row["role"] in roles))
            for at, name in enumerate(names):
                points = sorted((row["density"], row["to_dense"]) for row in rows if row["line"] == name)
                style = STYLES[at // len(COLOURS)]
                ax.plot(*zip(*points, strict=True), style, marker="o", ms=4, color=COLOURS[at], label=name)
            points = sorted((row["density"], row["to_dense"]) for row in rows if row["role"] == "oracle")
            ax.plot(*zip(*points, strict=True), color="black", marker="s", ms=4, label="oracle: greatest attention")
            ax.axhline(1, color="black", linewidth=0.8, linestyle=(0, (4, 4)))
            ax.set(xscale="log", yscale="log", ylim=(0.98, MOST), xlim=(0.01, 0.7))
            ax.set_xticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5], ["1 %", "2 %", "5 %", "10 %", "20 %", "50 %"])
            ax.set_yticks([1, 1.05, 1.1, 1.2, 1.4, 1.6], ["1", "1.05", "1.1", "1.2", "1.4", "1.6"])
            ax.minorticks_off()
            ax.grid(alpha=0.3)
            ax.set_title(f"{text}: {' and '.join(roles)}", fontsize=10, loc="left")
            ax.legend(fontsize=8)
        row_of_axes[0].set_ylabel("perplexity at masks / that of dense entmax")
    for ax in axes[-1]:
        ax.set_xlabel("computed density (share of the legal pairs)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
