"""The report as one HTML page that needs no network: plotly with its script inside."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from training.report_heads import HIT, MISSED, SPARE, ClusterView, HeadMap
from training.report_pictures import CELL_COLOURS, CELL_NAMES, distance_names, map_title
from training.report_style import (
    COLOURS,
    DASHES,
    LABELS,
    SPARSITY_LABEL,
    Result,
    best_of_rows,
    coloured,
    dominated,
    label,
    setting_text,
)
from training.report_words import WORD_CLASSES
from training.sweep_fronts import front, value, whole

NO_BOX = "<extra></extra>"  # plotly draws a second box with the name otherwise
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { line-height: 1.2 } h2 { margin-top: 2.2em; border-bottom: 1px solid #ccc } .note { color: #555 }
table { border-collapse: collapse; font-size: 14px } td, th { border: 1px solid #ddd; padding: 2px 8px }
td, th { text-align: right }
td:first-child, th:first-child { text-align: left } .wide { overflow-x: auto }
"""

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Heads:
    """What the page shows of single heads; see `report_heads`."""

    maps: Sequence[HeadMap]
    bipartite: HeadMap
    histograms: Sequence[Numbers]
    usage: tuple[Numbers, Numbers]
    views: Sequence[ClusterView]
    buckets: int
    top: int
    cluster_name: str


def page(result: dict[str, Any], heads: Heads, table: Sequence[Sequence[str]]) -> str:
    """The whole page."""
    about = result["about"]
    gold = about["gold_density"]
    sections = [
        ("Sparsity and recall", _fronts(result, "recall"), "Best family of each row as a line, its dominated points "
         "faint; click a name to hide it, hover for the setting. The dashed line is the sparsity of the teacher."),
        ("Sparsity and attention mass", _fronts(result, "mass"), "The teacher's probability on kept pairs."),
        ("Sparsity and the task", _quality(result), f"The attention really replaced in all layers, on "
         f"{about['quality_instances']} held-out instances."),
        ("Attention maps", _maps(heads.maps), "Gold against predicted pairs over the first tokens of a text."),
        ("Bipartite graph of a sentence", _bipartite(heads.bipartite), map_title(heads.bipartite)),
        ("Distance and shared clusters", _histograms(heads), f"{heads.cluster_name}: how many of their {heads.top} "
         f"nearest of {heads.buckets} clusters two tokens share, by their distance; columns add up to one."),
        ("Usage of the clusters", _usage(heads.usage), "Entropy over its maximum: 1 = all clusters alike."),
        ("What the clusters hold", _clusters(heads.views), "Parts of speech by textblob's tagger."),
    ]  # fmt: skip
    body = []
    for number, (title, figure, note) in enumerate(sections):
        drawn = "" if figure is None else figure.to_html(
            full_html=False, include_plotlyjs=not number, config={"displaylogo": False}
        )  # fmt: skip
        body.append(f"<h2>{html.escape(title)}</h2><p class=note>{html.escape(note)}</p>{drawn}")
    body.append(f"<h3>Typical tokens</h3>{_words(heads.views)}")
    facts = "".join(f"<li>{html.escape(str(k))}: {html.escape(str(v))}</li>" for k, v in about.items())
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>Sparse patterns of {about['teacher']}</title>"
        f"<style>{STYLE}</style></head><body><h1>Which sparse pattern keeps what the model attends to?</h1>"
        f"<p>{about['instances']} held-out instances of {about['tokens']} tokens, {about['layers']} layers, "
        f"{about['heads']} heads; the teacher gives {gold:.1%} of the pairs a weight above zero.</p>"
        f"<h2>Recall at a stated sparsity</h2><p class=note>Setting chosen on one half of the instances, figure read "
        f"off the other.</p><div class=wide>{_table(table)}</div>{''.join(body)}<h2>About</h2><ul>{facts}</ul>"
        "</body></html>"
    )


def _fronts(result: dict[str, Any], measure: str) -> go.Figure:
    figure = go.Figure()
    for family, colour, style in coloured(best_of_rows(result["families"])):
        name, key = label(family), label(family)
        x, y = dominated(family, measure)
        faint = {"color": colour, "size": 4, "opacity": 0.15}
        figure.add_scattergl(
            x=x, y=y, mode="markers", marker=faint, legendgroup=key, showlegend=False, hoverinfo="skip"
        )
        line = front(whole(family["points"]), measure)
        figure.add_scatter(
            x=[value(p, "sparsity") for p in line], y=[value(p, measure) for p in line],
            mode="lines", line={"color": colour, "dash": DASHES[style], "width": 2.2}, name=name, legendgroup=key,
            text=[setting_text(p) for p in line],
            hovertemplate=f"{html.escape(name)}<br>%{{text}}<br>sparsity %{{x:.3f}}, {measure} %{{y:.3f}}" + NO_BOX,
        )  # fmt: skip
    figure.add_vline(x=1 - result["about"]["gold_density"], line_dash="dash", line_width=1, line_color="black")
    figure.update_xaxes(title=SPARSITY_LABEL, range=[0, 1])
    figure.update_yaxes(title=LABELS[measure], range=[0, 1.02])
    return figure.update_layout(template="plotly_white", height=620, margin={"t": 20}, legend={"font": {"size": 11}})


def _quality(result: dict[str, Any]) -> go.Figure | None:
    measures = [m for m in LABELS if any(p.get(m) is not None for p in result["quality"])]
    measures = [m for m in measures if m not in ("recall", "mass")]
    if not measures:
        return None
    rows: dict[tuple[str, str], list[Result]] = {}
    for point in result["quality"]:
        rows.setdefault((point["family"], point["role"]), []).append(point)
    figure = go.Figure()
    for at, ((name, role), points) in enumerate(rows.items()):
        ordered = sorted(points, key=lambda p: p["sparsity"])
        for measure in measures:
            figure.add_scatter(
                x=[p["sparsity"] for p in ordered], y=[p.get(measure) for p in ordered], mode="lines+markers",
                name=name if role in ("learned", "baseline") else f"{name} ({role})", visible=measure == measures[0],
                line={"color": COLOURS[at % len(COLOURS)], "dash": DASHES[at // len(COLOURS) % 3]},
                text=[_settings(p) for p in ordered],
                hovertemplate="%{text}<br>%{x:.3f}, %{y:.4f}<extra>" + html.escape(name) + "</extra>",
            )  # fmt: skip
    buttons = [
        {"label": LABELS[m], "method": "update",
         "args": [{"visible": [m == other for _ in rows for other in measures]}, {"yaxis.title.text": LABELS[m]}]}
        for m in measures
    ]  # fmt: skip
    figure.update_xaxes(title=SPARSITY_LABEL)
    figure.update_yaxes(title=LABELS[measures[0]])
    menu = {"buttons": buttons, "x": 0, "y": 1.12, "xanchor": "left"}
    return figure.update_layout(template="plotly_white", height=600, updatemenus=[menu], margin={"t": 70})


def _settings(point: dict[str, Any]) -> str:
    return setting_text({k: v for k, v in point.items() if k not in (*LABELS, "family", "role")})


def _maps(maps: Sequence[HeadMap]) -> go.Figure:
    columns, rows = 2, -(-len(maps) // 2)
    figure = make_subplots(
        rows,
        columns,
        subplot_titles=[map_title(m) for m in maps],
        horizontal_spacing=0.14,
        vertical_spacing=0.32 / max(rows, 2),
    )
    scale = [[(k + d) / 4, colour] for k, colour in enumerate(CELL_COLOURS) for d in (0, 1)]
    names = {0: "not kept, weight zero", **CELL_NAMES}
    for at, shown in enumerate(maps):
        ticks = list(range(len(shown.tokens)))
        text = [[f"{q} → {k}: {names[c]}" for k, c in zip(shown.tokens, line, strict=True)]
                for q, line in zip(shown.tokens, shown.cells.tolist(), strict=True)]  # fmt: skip
        figure.add_heatmap(
            z=shown.cells, zmin=-0.5, zmax=3.5, colorscale=scale, showscale=False, text=text, hoverinfo="text",
            row=at // columns + 1, col=at % columns + 1,
        )  # fmt: skip
        place = {"row": at // columns + 1, "col": at % columns + 1}
        figure.update_xaxes(tickvals=ticks, ticktext=shown.tokens, tickangle=-90, tickfont_size=8, title="key", **place)
        figure.update_yaxes(
            tickvals=ticks, ticktext=shown.tokens, tickfont_size=8, autorange="reversed", title="query", **place
        )
    for kind, name in CELL_NAMES.items():
        marker = {"color": CELL_COLOURS[kind], "symbol": "square", "size": 12, "line": {"color": "grey", "width": 1}}
        figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=name)
    figure.update_annotations(font_size=12)
    return figure.update_layout(
        template="plotly_white", height=620 * rows, legend={"orientation": "h", "y": 1.04, "yanchor": "bottom"}
    )


def _bipartite(shown: HeadMap) -> go.Figure:
    figure = go.Figure()
    for kind in (SPARE, HIT, MISSED):
        x: list[float | None] = []
        y: list[float | None] = []
        for i, j in zip(*np.nonzero(shown.cells == kind), strict=True):
            x += [0, 1, None]
            y += [int(i), int(j), None]
        colour = "#a9c6dc" if kind == SPARE else CELL_COLOURS[kind]
        figure.add_scatter(x=x, y=y, mode="lines", line={"color": colour, "width": 1.4}, name=CELL_NAMES[kind])
    for side, anchor, name in ((0, "right", "query"), (1, "left", "key")):
        for place, token in enumerate(shown.tokens):
            figure.add_annotation(
                x=side, y=place, text=html.escape(token), showarrow=False, xanchor=anchor, hovertext=name
            )
    figure.update_xaxes(visible=False, range=[-0.3, 1.3])
    figure.update_yaxes(visible=False, range=[len(shown.tokens), -1])
    return figure.update_layout(
        template="plotly_white", height=26 * len(shown.tokens) + 120, legend={"orientation": "h"}
    )


def _histograms(heads: Heads) -> go.Figure:
    count = len(heads.histograms)
    titles = [f"layer {layer}: {name}" for name in ("gold pairs", "other pairs") for layer in range(count)]
    figure = make_subplots(2, count, subplot_titles=titles, shared_yaxes=True, vertical_spacing=0.22)
    for layer, table in enumerate(heads.histograms):
        for row in range(2):
            share = table[row] / np.maximum(table[row].sum(0, keepdims=True), 1e-12)
            figure.add_heatmap(
                z=share, x=distance_names(), y=list(range(share.shape[0])), zmin=0, zmax=1, colorscale="Viridis",
                showscale=not layer and not row, row=row + 1, col=layer + 1,
                colorbar={"title": {"text": "share of the pairs<br>at this distance"}},
            )  # fmt: skip
            figure.update_xaxes(type="category", tickangle=-90, tickfont_size=9, row=row + 1, col=layer + 1)
    figure.update_xaxes(title="distance (tokens)", title_font_size=11, row=2)
    figure.update_yaxes(title="shared clusters", col=1)
    figure.update_annotations(font_size=11)
    return figure.update_layout(template="plotly_white", height=620)


def _usage(usage: tuple[Numbers, Numbers]) -> go.Figure:
    figure = make_subplots(1, 2, subplot_titles=("queries", "keys"), shared_yaxes=True)
    for side, table in enumerate(usage):
        figure.add_heatmap(
            z=table, zmin=0, zmax=1, colorscale="Viridis", texttemplate="%{z:.2f}", showscale=side == 1, row=1,
            col=side + 1, colorbar={"title": {"text": "entropy /<br>maximum"}},
        )  # fmt: skip
    figure.update_xaxes(title="head", dtick=1)
    figure.update_yaxes(title="layer", autorange="reversed", dtick=1)
    return figure.update_layout(template="plotly_white", height=380)


def _clusters(views: Sequence[ClusterView]) -> go.Figure:
    titles = [f"layer {v.layer}, head {v.head}" for v in views]
    figure = make_subplots(1, len(views), subplot_titles=titles, shared_yaxes=True)
    palette = [*COLOURS, "#bbbbbb", "#dddddd"]
    for column, view in enumerate(views):
        for at, name in enumerate(WORD_CLASSES):
            figure.add_bar(
                y=[str(c) for c in range(len(view.words))], x=view.classes[:, at], orientation="h", name=name,
                marker_color=palette[at % len(palette)], legendgroup=name, showlegend=not column, row=1, col=column + 1,
            )  # fmt: skip
    figure.update_xaxes(title="share of the cluster's tokens", range=[0, 1])
    figure.update_yaxes(title="cluster", autorange="reversed", col=1)
    return figure.update_layout(template="plotly_white", barmode="stack", height=420)


def _words(views: Sequence[ClusterView]) -> str:
    rows = [["head", "cluster", "queries", "keys", "most typical tokens"]]
    for view in views:
        for c, words in enumerate(view.words):
            rows.append(
                [
                    f"layer {view.layer}, head {view.head}",
                    str(c),
                    str(view.queries[c]),
                    str(view.keys[c]),
                    " ".join(words),
                ]
            )
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f"<table><tr>{head}</tr>{body}</table>"
