"""Pictures of single heads."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from training.report_heads import DISTANCES, HIT, MISSED, SPARE, ClusterView, HeadMap
from training.report_words import WORD_CLASSES

CELL_COLOURS = ("#ffffff", "#12507b", "#d62728", "#c9dcea")  # nothing, kept gold, missed gold, spare
CELL_NAMES = {HIT: "gold, kept", MISSED: "gold, missed", SPARE: "spare: kept, weight zero"}
DPI = 110

Numbers = npt.NDArray[np.float64]


def draw_maps(maps: Sequence[HeadMap], path: Path) -> None:
    """Gold against predicted pairs, a panel for every head and predictor."""
    columns = 2
    rows = -(-len(maps) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(8.2 * columns, 8.3 * rows), layout="constrained", squeeze=False)
    for ax, shown in zip(axes.flat, maps, strict=False):
        ax.imshow(shown.cells, cmap=ListedColormap(CELL_COLOURS), vmin=0, vmax=3, interpolation="nearest")
        ticks = range(len(shown.tokens))
        ax.set_xticks(ticks, shown.tokens, rotation=90, fontsize=7.5)
        ax.set_yticks(ticks, shown.tokens, fontsize=7.5)
        ax.set_xlabel("key")
        ax.set_ylabel("query")
        ax.set_title(map_title(shown), fontsize=10)
    for ax in axes.flat[len(maps) :]:
        ax.axis("off")
    handles = [Patch(facecolor=CELL_COLOURS[kind], edgecolor="grey", label=name) for kind, name in CELL_NAMES.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=11)
    _save(figure, path)


def map_title(shown: HeadMap) -> str:
    """Head, predictor, and this instance's figures."""
    figures = f"recall {shown.recall:.2f} at sparsity {shown.sparsity:.2f}"
    return f"layer {shown.layer}, head {shown.head}: {shown.title} ({figures})"


def draw_bipartite(shown: HeadMap, path: Path) -> None:
    """Queries on the left, keys on the right, an edge for every pair that is gold or kept."""
    count = len(shown.tokens)
    figure, ax = plt.subplots(figsize=(9, 0.33 * count + 1.6), layout="constrained")
    widths = {SPARE: 0.7, HIT: 1.4, MISSED: 1.6}
    for kind in (SPARE, HIT, MISSED):
        for i, j in zip(*np.nonzero(shown.cells == kind), strict=True):
            ax.plot([0, 1], [i, j], color=_edge_colour(kind), linewidth=widths[kind], zorder=kind == MISSED)
    for place, token in enumerate(shown.tokens):
        ax.text(-0.02, place, token, ha="right", va="center", fontsize=9)
        ax.text(1.02, place, token, ha="left", va="center", fontsize=9)
    ax.text(-0.02, -1.3, "queries", ha="right", fontsize=10, style="italic")
    ax.text(1.02, -1.3, "keys", ha="left", fontsize=10, style="italic")
    ax.set(xlim=(-0.22, 1.22), ylim=(count - 0.3, -1.8), title=map_title(shown))
    ax.axis("off")
    handles = [Line2D([], [], color=_edge_colour(kind), label=name) for kind, name in CELL_NAMES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    _save(figure, path)


def _edge_colour(kind: int) -> str:
    return "#a9c6dc" if kind == SPARE else CELL_COLOURS[kind]


def draw_histograms(tables: Sequence[Numbers], top: int, buckets: int, path: Path) -> None:
    """Distance × number of shared clusters of every layer: gold pairs above, the others below."""
    figure, axes = plt.subplots(
        2, len(tables), figsize=(2.6 * len(tables) + 1.6, 5.6), layout="constrained", squeeze=False, sharey=True
    )
    # Within one distance: the paper's question is which pairs share a cluster, not how many pairs are near.
    image = None
    for layer, table in enumerate(tables):
        for row, name in enumerate(("gold pairs", "other pairs")):
            ax = axes[row][layer]
            share = table[row] / np.maximum(table[row].sum(0, keepdims=True), 1e-12)
            image = ax.imshow(share, origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=1)
            ax.set_xticks(range(len(DISTANCES)), distance_names(), rotation=90, fontsize=7)
            ax.set_yticks(range(top + 1))
            ax.set_title(f"layer {layer}: {name}", fontsize=9)
            if row:
                ax.set_xlabel("distance |i − j| (tokens)", fontsize=8)
            if not layer:
                ax.set_ylabel(f"shared among {top} nearest", fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=axes, label="share of the pairs at this distance")
    figure.suptitle(f"How many of {buckets} clusters two tokens share (mean over heads)")
    _save(figure, path)


def distance_names() -> list[str]:
    """The bins of the histogram in words."""
    ends = [*DISTANCES[1:], 0]
    return [
        str(low) if high == low + 1 else f"{low}–{high - 1}" if high else f"{low}+"
        for low, high in zip(DISTANCES, ends, strict=True)
    ]


def draw_entropies(queries: Numbers, keys: Numbers, buckets: int, path: Path) -> None:
    """Entropy of cluster usage of every head, queries and keys apart."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained", sharey=True)
    image = None
    for ax, table, name in zip(axes, (queries, keys), ("queries", "keys"), strict=True):
        image = ax.imshow(table, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for (layer, head), x in np.ndenumerate(table):
            ax.text(
                head, layer, f"{x:.2f}", ha="center", va="center", fontsize=7.5, color="white" if x < 0.6 else "black"
            )
        ax.set(xlabel="head", title=name, xticks=range(table.shape[1]), yticks=range(table.shape[0]))
    axes[0].set_ylabel("layer")
    if image is not None:
        figure.colorbar(image, ax=axes, label="entropy of usage / maximum (1 = all alike)")
    figure.suptitle(f"Usage of {buckets} clusters")
    _save(figure, path)


def draw_clusters(views: Sequence[ClusterView], path: Path) -> None:
    """Parts of speech of every cluster of the chosen heads, with its most typical tokens."""
    colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    figure, axes = plt.subplots(
        len(views), 1, figsize=(14, sum(0.42 * len(v.words) + 1.3 for v in views)), layout="constrained", squeeze=False
    )
    for ax, view in zip(axes[:, 0], views, strict=True):
        left = np.zeros(len(view.words))
        for at, name in enumerate(WORD_CLASSES):
            ax.barh(range(len(view.words)), view.classes[:, at], left=left, color=colours[at], label=name)
            left += view.classes[:, at]
        for cluster, words in enumerate(view.words):
            ax.text(1.01, cluster, " ".join(words).replace("$", r"\$"), va="center", fontsize=8.5)
        names = [f"{c}: {q} q, {k} k" for c, (q, k) in enumerate(zip(view.queries, view.keys, strict=True))]
        ax.set_yticks(range(len(view.words)), names, fontsize=8.5)
        ax.set(xlim=(0, 1.75), ylim=(len(view.words) - 0.4, -0.6), xlabel="share of the cluster's tokens")
        ax.set_xticks([0, 0.25, 0.5, 0.75, 1])
        ax.set_title(
            f"layer {view.layer}, head {view.head}: cluster (queries, keys), parts of speech, typical tokens",
            fontsize=10,
        )
        ax.xaxis.set_label_coords(0.29, -0.1)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines["bottom"].set_bounds(0, 1)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=7, fontsize=9)
    _save(figure, path)


def _save(figure: object, path: Path) -> None:
    figure.savefig(path, dpi=DPI)  # type: ignore[attr-defined]
    plt.close(figure)  # type: ignore[arg-type]
