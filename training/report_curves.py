"""Pictures of the whole sweep: Pareto fronts, and what the task says where the attention was replaced."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from training.report_style import (
    GROUPS,
    LABELS,
    SPARSITY_LABEL,
    STYLES,
    Result,
    best_of_rows,
    coloured,
    dominated,
    front_of,
    group,
    label,
)

SIZE, DPI = (15, 11.5), 100
MARKERS = ("o", "s", "^")  # with the line styles, where a row has one point only
TICKS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995)
MOST = 0.9998  # of a likeness that is drawn: 1 lies infinitely high


def draw_front(result: dict[str, Any], measure: str, path: Path) -> None:
    """Best family of every row: its front as a line, its dominated points faint; a panel for every kind of row."""
    figure, axes = plt.subplots(2, 2, figsize=SIZE, layout="constrained", sharex=True, sharey=True)
    rows = best_of_rows(result["families"])
    window = next((r for r in rows if r["family"] == "window"), None)
    gold = 1 - result["about"]["gold_density"]
    for ax, name in zip(axes.flat, GROUPS, strict=True):
        for family, colour, style in coloured([r for r in rows if group(r) == name]):
            ax.plot(*dominated(family, measure), ".", color=colour, alpha=0.15, markersize=4, markeredgewidth=0)
            ax.plot(*front_of(family, measure), STYLES[style], color=colour, label=label(family), linewidth=1.8)
        if window is not None and name != GROUPS[2]:
            ax.plot(*front_of(window, measure), color="black", linewidth=1, linestyle=(0, (1, 1)), label="window")
        ax.axvline(gold, color="black", linewidth=0.8, linestyle=(0, (4, 4)))
        ax.text(gold - 0.006, 1.005, "teacher", ha="right", va="bottom", fontsize=7.5)
        ax.set_title(name, fontsize=11, loc="left")
        ax.set(xlim=(0, 1), ylim=(0, 1.06))
        ax.grid(alpha=0.3)
        ax.legend(loc="lower left", fontsize=8, framealpha=0.85)
    for ax in axes[1]:
        ax.set_xlabel(SPARSITY_LABEL)
    for ax in axes[:, 0]:
        ax.set_ylabel(LABELS[measure])
    figure.suptitle(f"{_title(result)}; best family of each row, by recall at sparsity .9")
    _save(figure, path)


def draw_quality(result: dict[str, Any], path: Path) -> None:
    """Likeness of the embeddings with the attention really replaced, against sparsity."""
    measures = [m for m in ("cosine_dense", "correlation_dense", "cosine_original", "perplexity") if _has(result, m)]
    figure, all_axes = plt.subplots(1, len(measures), figsize=(6 * len(measures), 6.6), layout="constrained")
    panels: Sequence[Axes] = [all_axes] if len(measures) == 1 else list(all_axes)
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for point in result["quality"]:
        rows.setdefault((point["family"], point["role"]), []).append(point)
    stand_ins: list[Result] = [{"family": name, "role": role} for name, role in rows]
    for (row, colour, style), points in zip(coloured(stand_ins), rows.values(), strict=True):
        ordered = sorted(points, key=lambda p: p["sparsity"])
        name = row["family"] + ("" if row["role"] in ("learned", "baseline") else f" ({row['role']})")
        for measure, ax in zip(measures, panels, strict=True):
            x = [p["sparsity"] for p in ordered if p[measure] is not None]
            y = [p[measure] for p in ordered if p[measure] is not None]
            y = y if measure == "perplexity" else [min(value, MOST) for value in y]
            ax.plot(x, y, STYLES[style], marker=MARKERS[style], markersize=5, color=colour, label=name)
    for measure, ax in zip(measures, panels, strict=True):
        if measure != "perplexity":  # .99 and .999 lie as far apart as .9 and .99
            drawn = [p[measure] for p in result["quality"] if p[measure] is not None]
            ax.set_ylim(max(0.9 * min(drawn), 0.02), MOST)
            ax.set_yscale("logit", nonpositive="clip")
            ax.yaxis.set_major_locator(FixedLocator(TICKS))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_locator(NullLocator())
        ax.set_xlabel("sparsity (share of pairs dropped)")
        ax.set_title(LABELS[measure], fontsize=10)
        ax.grid(alpha=0.3)
    figure.suptitle(f"{_title(result)}; attention replaced on {result['about']['quality_instances']} instances")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=9)
    _save(figure, path)


def _has(result: dict[str, Any], measure: str) -> bool:
    return any(point.get(measure) is not None for point in result["quality"])


def _title(result: dict[str, Any]) -> str:
    about = result["about"]
    return f"{about['teacher']}, {about['instances']} held-out instances of {about['tokens']} tokens"


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
