"""A sweep as pictures (PNG), as one page without network (index.html), and as a table (recall.md)."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sparsefinder.errors import ConfigError, DataError
from training.config import ExtractConfig, SweepConfig
from training.sweep_fronts import SPARSITIES, Point, alone, at_sparsity, whole

if TYPE_CHECKING:
    from training.report_page import Heads
    from training.sweep import Measured
    from training.sweep_sheets import Family

EXTRA = ("matplotlib", "plotly", "textblob")
SENTENCE = 22  # tokens of the bipartite graph, at most
SHOWN_SPARSITY = 0.9
SHOWN_BUCKETS = 8

OnProgress = Callable[[str, int, int], None]
Config = TypeVar("Config", SweepConfig, ExtractConfig)


def require_extra() -> None:
    """ConfigError unless the libraries of the extra `report` are here."""
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"report: needs {', '.join(missing)}, expected `pip install 'sparsefinder[report]'` before")


def write_report(sweep: Path, out: Path, instance: int, on_progress: OnProgress) -> list[Path]:
    """Draw everything into `out`; returns the files.

    Raises:
        ConfigError: the extra `report` is not installed, or the artifact is no longer the sweep's.
        DataError: the sweep has not finished, or has no such instance.
    """
    require_extra()
    from training.report_curves import draw_front, draw_quality
    from training.report_page import page
    from training.report_pictures import (
        draw_bipartite,
        draw_clusters,
        draw_entropies,
        draw_histograms,
        draw_maps,
    )
    from training.sweep import open_sweep
    from training.sweep_files import read_json, read_sweep

    result, config = read_sweep(sweep), read_json(sweep / "config.json")
    if not 0 <= instance < result["about"]["instances"]:
        raise DataError(f"instance: expected 0 to {result['about']['instances'] - 1}, got {instance}")
    ready = open_sweep(
        restored(SweepConfig, config["sweep"]), restored(ExtractConfig, config["source"]), sweep, on_progress
    )
    out.mkdir(parents=True, exist_ok=True)
    on_progress("look at heads", 0, 3)
    heads = _heads(result, ready, instance)
    on_progress("draw", 1, 3)
    for measure in ("recall", "mass"):
        draw_front(result, measure, out / f"{measure}.png")
    if result["quality"]:
        draw_quality(result, out / "quality.png")
    draw_maps(heads.maps, out / "maps.png")
    draw_bipartite(heads.bipartite, out / "bipartite.png")
    draw_histograms(heads.histograms, heads.top, heads.buckets, out / "shared_clusters.png")
    draw_entropies(*heads.usage, heads.buckets, out / "cluster_usage.png")
    draw_clusters(heads.views, out / "clusters.png")
    on_progress("write the page", 2, 3)
    rows = recall_rows(result)
    (out / "recall.md").write_text(recall_table(result), encoding="utf-8")
    (out / "index.html").write_text(page(result, heads, rows), encoding="utf-8")
    return sorted(path for path in out.iterdir() if path.suffix in (".png", ".html", ".md"))


def restored(kind: type[Config], plain: dict[str, Any]) -> Config:
    """A configuration from its JSON."""
    names = {field.name for field in fields(kind)}
    if names != set(plain):
        raise ConfigError("report: expected the sweep of this version of the package")
    settings: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in plain.items()}
    return kind(**settings)


def recall_rows(result: dict[str, Any], only: Callable[[Point], bool] = lambda _: True) -> list[list[str]]:
    """Heading and a line for every family: recall at each sparsity, and its setting at .9."""
    from training.report_style import label, setting_text

    rows = [["family", "role", "instances", *(f"{s:g}" for s in SPARSITIES), f"setting at {SHOWN_SPARSITY:g}"]]
    for family in result["families"]:
        points = [p for p in whole(family["points"]) if only(p)]
        found = [at_sparsity(points, s) for s in SPARSITIES]
        texts = ["–" if math.isnan(recall) else f"{recall:.3f}" for recall, _ in found]
        setting = setting_text(found[SPARSITIES.index(SHOWN_SPARSITY)][1])
        rows.append([label(family), family["role"], str(family["instances"]), *texts, setting])
    return rows


def recall_table(result: dict[str, Any]) -> str:
    """Both tables as markdown: with window and global tokens where they help, and each family by itself."""
    about = result["about"]
    parts = [
        f"Recall at a stated sparsity, {about['teacher']}, {about['instances']} held-out instances of "
        f"{about['tokens']} tokens: mean over instances, heads and layers. One setting for all heads and layers, "
        "chosen on one half of the instances, read off the other; between two settings interpolated. Families that "
        "must be asked anew for every setting are measured on fewer instances.",
        "## With window and global tokens where they help",
        markdown(recall_rows(result)),
        "## Each family by itself",
        markdown([row for row in recall_rows(result, alone) if not row[0].startswith("window")]),
    ]
    return "\n\n".join(parts) + "\n"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _heads(result: dict[str, Any], ready: "Measured", instance: int) -> "Heads":
    """Everything about single heads: which ones, at which settings, over which text."""
    from training import report_heads as draw
    from training.report_page import Heads
    from training.report_style import label
    from training.report_words import is_special, readable, word_classes
    from training.sweep_families import all_families

    tokenizer = ready.opened.teacher.tokenizer
    works = draw.few_works(ready)
    count = len(works[0].lengths)
    ids = ready.chunks[:count]
    pieces, special = [readable(tokenizer, x) for x in ids], [is_special(tokenizer, x) for x in ids]
    classes = [word_classes(p, s) for p, s in zip(pieces, special, strict=True)]
    families = {family.key: family for family in all_families(ready.setup)}
    best = [(_key(r, families), r) for r in _shown(result)]
    chosen = draw.choose_heads(draw.far_shares(works, [np.array(x) for x in special]))
    b = min(instance, count - 1)
    maps = [
        draw.head_map(families[key], _at(r), works[layer], b, head, pieces[b], 0, label(r))
        for layer, head in chosen
        for key, r in best[:2]
    ]
    cluster_key, clustered = next((k, r) for k, r in best if r["family"] == "clusters")
    grid = ready.setup.config.buckets
    buckets = min(grid, key=lambda x: abs(x - SHOWN_BUCKETS))
    top = max(1, buckets // 4)
    clusters = draw.clusters_of(families[cluster_key], works, buckets)
    used = [draw.usage(c, w) for c, w in zip(clusters, works, strict=True)]
    start, end = sentence_span(pieces[b], special[b])
    cluster_family, point = families[cluster_key], _at(clustered)
    sentences = [
        draw.head_map(cluster_family, point, works[layer], b, head, pieces[b], start, label(clustered))
        for layer, head in chosen
    ]
    best_map = max(sentences, key=lambda m: int(np.isin(m.cells[: end - start, : end - start], draw.GOLD).sum()))
    span = slice(0, end - start)
    cut = replace(best_map, tokens=best_map.tokens[span], cells=best_map.cells[span, span])
    return Heads(
        maps,
        cut,
        [draw.shared_histogram(c, [w], top) for c, w in zip(clusters, works, strict=True)],
        (np.stack([draw.entropies(q) for q, _ in used]), np.stack([draw.entropies(k) for _, k in used])),
        [draw.cluster_view(clusters[x], works[x], y, pieces, classes) for x, y in chosen[-2:]],
        buckets,
        top,
        label(clustered),
    )


def _shown(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The best clusters and the best other learned family, which the maps compare; then the rest."""
    from training.report_style import best_of_rows

    learned = [r for r in best_of_rows(result["families"]) if r["role"] == "learned"]
    clusters = [r for r in learned if r["family"] == "clusters"]
    if not clusters:
        raise DataError("report: expected a sweep with the row clusters (run it without --only)")
    return [*clusters, *(r for r in learned if r["family"] != "clusters")]


def _key(result: dict[str, Any], families: dict[str, "Family"]) -> str:
    for key, family in families.items():
        if (family.name, family.objective, family.rank, family.role) == (
            result["family"], result["objective"], result["rank"], result["role"],
        ):  # fmt: skip
            return key
    raise DataError(f"report: expected the families of this artifact, got {result['family']}")


def _at(result: dict[str, Any]) -> Point:
    point = at_sparsity(whole(result["points"]), SHOWN_SPARSITY)[1]
    if point is None:
        raise DataError(f"report: {result['family']} has no measured point")
    return point


def sentence_span(pieces: Sequence[str], special: Sequence[bool]) -> tuple[int, int]:
    """The longest sentence of at most `SENTENCE` tokens, none of them special; the first tokens where there is none."""
    ends = {0, len(pieces)} | {at + 1 for at, piece in enumerate(pieces) if piece in (".", "!", "?")}
    ends |= {edge for at, hidden in enumerate(special) if hidden for edge in (at, at + 1)}
    spans = [(low, high) for low, high in pairwise(sorted(ends)) if high - low <= SENTENCE and not special[low]]
    return max(spans, key=lambda span: span[1] - span[0], default=(0, min(SENTENCE, len(pieces))))
