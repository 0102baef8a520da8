"""Pictures of the whole sweep: Pareto fronts, and what the task says where the attention was replaced."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from training.report_style import (
    LABELS,
    SPARSITY_LABEL,
    STYLES,
    Result,
    best_of_rows,
    coloured,
    dominated,
    front_of,
    label,
)

SIZE, DPI = (12.5, 7.2), 110


def draw_front(result: dict[str, Any], measure: str, path: Path) -> None:
    """Best family of every row: its front as a line, its dominated points faint."""
    figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
    rows = best_of_rows(result["families"])
    for family, colour, style in coloured(rows):
        axes.plot(*dominated(family, measure), ".", color=colour, alpha=0.12, markersize=4, markeredgewidth=0)
        oracle = family["role"] == "oracle"
        axes.plot(
            *front_of(family, measure), STYLES[style], color=colour, label=label(family),
            linewidth=2.4 if family["role"] == "learned" else 1.5, alpha=0.55 if oracle else 1.0,
        )  # fmt: skip
    gold = 1 - result["about"]["gold_density"]
    axes.axvline(gold, color="black", linewidth=0.8, linestyle=(0, (4, 4)))
    axes.annotate(
        "sparsity of the\nteacher itself",
        (gold, 0.02),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    axes.set(xlabel=SPARSITY_LABEL, ylabel=LABELS[measure], xlim=(0, 1), ylim=(0, 1.02), title=_title(result))
    axes.grid(alpha=0.3)
    figure.legend(
        loc="outside right upper",
        fontsize=8.5,
        title="best family of each row,\nby recall at sparsity .9",
        title_fontsize=8.5,
    )
    _save(figure, path)


def draw_quality(result: dict[str, Any], path: Path) -> None:
    """Likeness of the embeddings with the attention really replaced, against sparsity."""
    measures = [m for m in ("cosine_dense", "correlation_dense", "cosine_original", "perplexity") if _has(result, m)]
    figure, all_axes = plt.subplots(1, len(measures), figsize=(5.4 * len(measures) + 2.5, 6.4), layout="constrained")
    panels: Sequence[Axes] = [all_axes] if len(measures) == 1 else list(all_axes)
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for point in result["quality"]:
        rows.setdefault((point["family"], point["role"]), []).append(point)
    for at, (row, points) in enumerate(rows.items()):
        ordered = sorted(points, key=lambda p: p["sparsity"])
        fake: Result = {"family": row[0], "role": row[1]}
        ((_, colour, style),) = [c for k, c in enumerate(coloured([fake] * len(rows))) if k == at]
        name = row[0] + ("" if row[1] in ("learned", "baseline") else f" ({row[1]})")
        for measure, axes in zip(measures, panels, strict=True):
            x = [p["sparsity"] for p in ordered if p[measure] is not None]
            y = [p[measure] for p in ordered if p[measure] is not None]
            axes.plot(
                x, y, STYLES[style], marker="o", markersize=5, color=colour, label=name if axes is panels[0] else None
            )
    for measure, axes in zip(measures, panels, strict=True):
        axes.set(xlabel="sparsity (share of pairs dropped)", ylabel=LABELS[measure])
        axes.grid(alpha=0.3)
    figure.suptitle(f"{_title(result)}; attention replaced on {result['about']['quality_instances']} instances")
    figure.legend(loc="outside right upper", fontsize=8.5)
    _save(figure, path)


def _has(result: dict[str, Any], measure: str) -> bool:
    return any(point.get(measure) is not None for point in result["quality"])


def _title(result: dict[str, Any]) -> str:
    about = result["about"]
    return f"{about['teacher']}, {about['instances']} held-out instances of {about['tokens']} tokens"


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
