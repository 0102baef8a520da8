"""Figures of audited requests: ratios of sums over requests, with a bootstrap interval of the recall over requests.

Requests and not rows are drawn anew, because the rows of one request are correlated. Every figure is of the same
draws: the counts of all layers and heads are summed in one matrix product.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FIELDS = ("rows", "legal", "kept", "gold", "kept_gold", "mass", "exact_rows")
GOLD, KEPT_GOLD = FIELDS.index("gold"), FIELDS.index("kept_gold")
Record = npt.NDArray[np.float64]
RESAMPLES = 400
PERCENTILES = (2.5, 97.5)
BLOCK = 2**21  # drawn counts that are held at once


def live_figures(records: Sequence[Record]) -> dict[str, Any]:
    """Overall, per layer and per head, of records `[L, H, len(FIELDS)]`; `overall` is None where there is none."""
    figures: dict[str, Any] = {"requests": len(records), "overall": None, "layers": []}
    if not records:
        return figures
    heads = np.stack(records)
    count, layers, width, _ = heads.shape
    # One column per figure: all, then every layer, then every head of every layer.
    columns = [heads.sum((1, 2))[:, None], heads.sum(2), heads.reshape(count, layers * width, -1)]
    shown = _summaries(np.concatenate(columns, 1))
    figures["overall"] = shown[0]
    for layer in range(layers):
        first = 1 + layers + layer * width
        inside = [{"head": head} | shown[first + head] for head in range(width)]
        figures["layers"].append({"layer": layer} | shown[1 + layer] | {"heads": inside})
    return figures


def pooled_recall(records: Sequence[Record]) -> tuple[float | None, list[float] | None]:
    """The recall over all layers and heads, and its interval."""
    if not records:
        return None, None
    pooled = np.stack([record.sum((0, 1)) for record in records])
    gold, kept = pooled[:, [GOLD]], pooled[:, [KEPT_GOLD]]
    return _ratio(kept.sum(), gold.sum()), intervals(kept, gold)[0]


def layer_recalls(records: Sequence[Record]) -> list[float | None]:
    """The recall of every layer."""
    sums = np.sum(records, axis=0).sum(1)
    return [_ratio(layer[KEPT_GOLD], layer[GOLD]) for layer in sums]


def intervals(above: Record, below: Record) -> list[list[float] | None]:
    """95 % bootstrap intervals (percentiles) of Σ above / Σ below over requests, one for each column of `[n, C]`.

    None for fewer than two requests and where a column has nothing to divide by.
    """
    count, columns = below.shape
    if count < 2:
        return [None] * columns
    random, equal = np.random.default_rng(0), np.full(count, 1 / count)
    ratios = np.empty((RESAMPLES, columns))
    step = max(1, BLOCK // count)
    for start in range(0, RESAMPLES, step):
        drawn = random.multinomial(count, equal, min(step, RESAMPLES - start)).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios[start : start + step] = (drawn @ above) / (drawn @ below)
    known = np.flatnonzero(below.sum(0) > 0)
    edges = np.nanpercentile(np.where(np.isfinite(ratios[:, known]), ratios[:, known], np.nan), PERCENTILES, axis=0)
    found: list[list[float] | None] = [None] * columns
    for place, column in enumerate(known):
        found[column] = [float(edge) for edge in edges[:, place]]
    return found


def _summaries(counts: Record) -> list[dict[str, Any]]:
    """One summary for each column of `[requests, C, len(FIELDS)]`; None where there is nothing to divide by."""
    spans = intervals(counts[:, :, KEPT_GOLD], counts[:, :, GOLD])
    return [_summary(sums, span) for sums, span in zip(counts.sum(0), spans, strict=True)]


def _summary(sums: Record, span: list[float] | None) -> dict[str, Any]:
    rows, legal, kept, gold, kept_gold, mass, exact = (float(value) for value in sums)
    return {
        "rows": int(rows),
        "gold_pairs": int(gold),
        "sparsity": 1 - kept / legal if legal else None,
        "recall": _ratio(kept_gold, gold),
        "recall_interval": span,
        "mass": _ratio(mass, rows),
        "exact_rows": _ratio(exact, rows),
    }


def _ratio(above: float, below: float) -> float | None:
    return float(above / below) if below else None
