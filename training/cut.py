"""Where a score is cut: thresholds and cluster counts read off the whole held-out recall/sparsity curve.

All pairs are sorted once by score; every cut is then a point of the curve. Instances count alike, as in
`sparsefinder.metrics`: a gold pair weighs `1 / (gold pairs of its instance)`, a legal pair `1 / (legal pairs)`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from sparsefinder.errors import DataError

Floats = npt.NDArray[np.float32]

CURVE_POINTS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)


@dataclass(frozen=True, eq=False)
class Part:
    """Scores of some legal pairs of one instance and head, higher = sooner kept; +inf = kept in any case.

    pairs: legal pairs that each entry stands for (a tile's key stands for its rows). gold: gold pairs among them.
    """

    scores: Float[Tensor, " P"]
    pairs: Shaped[Tensor, " P"]
    gold: Shaped[Tensor, " P"]


@dataclass(frozen=True, eq=False)
class Curve:
    """Keeping all scores ≥ `threshold[p]` gives `sparsity[p]`, which falls with p, and `recall[p]`, which rises.

    forced: the sparsest point holds pairs that are kept in any case, so nothing is sparser.
    """

    threshold: Float64[Tensor, " P"]
    sparsity: Float64[Tensor, " P"]
    recall: Float64[Tensor, " P"]
    forced: bool = False


def curve(parts: Sequence[Part]) -> Curve:
    """The whole curve over the instances of one head (or of several heads that share a threshold).

    Between two neighbouring scores the threshold is their mean, so that rounding cannot move a pair across it; equal
    scores are kept together. Parts without gold pairs count for sparsity alone.

    Raises:
        DataError: no pair at all, or no gold pair.
    """
    total = sum(int(part.gold.sum()) for part in parts)
    if not total:
        raise DataError("calibration: expected at least one gold pair on held-out text, got none")
    with_gold = sum(bool(part.gold.any()) for part in parts)
    scores = torch.cat([part.scores for part in parts]).float()
    pair_weight = torch.cat([part.pairs.double() / part.pairs.sum() for part in parts]) / len(parts)
    gold_weight = torch.cat([part.gold.double() / max(int(part.gold.sum()), 1) for part in parts]) / with_gold
    scores, order = scores.sort(descending=True)
    density, recall = pair_weight[order].cumsum(0), gold_weight[order].cumsum(0)
    last = torch.ones_like(scores, dtype=torch.bool)
    last[:-1] = scores[:-1] != scores[1:]
    at = last.nonzero().squeeze(-1)
    value = scores[at].double()
    below = torch.cat([value[1:], value[-1:] - 1])
    middle = torch.where(torch.isinf(value), below + 1, (value + below) / 2)
    # Two neighbouring floats have no mean between them: then the upper one itself is the threshold.
    threshold = torch.where(torch.isinf(value) | (middle > below), middle, value)
    return Curve(threshold, (1 - density[at]).clamp(0, 1), recall[at].clamp(0, 1), bool(torch.isinf(value[0])))


def cut_at(curve: Curve, *, recall: float | None = None, sparsity: float | None = None) -> int:
    """The point of the curve that meets the target: the sparsest with at least this recall, or the one with the most
    recall that is at least this sparse (the sparsest of all where none is)."""
    if recall is not None:
        enough = (curve.recall >= recall - 1e-12).nonzero().squeeze(-1)
        return int(enough[0]) if enough.numel() else curve.recall.shape[0] - 1
    if sparsity is None:
        raise DataError("calibration: expected a recall or a sparsity target")
    sparse = (curve.sparsity >= sparsity - 1e-12).nonzero().squeeze(-1)
    return int(sparse[-1]) if sparse.numel() else 0


def threshold_at(curve: Curve, *, recall: float | None = None, sparsity: float | None = None) -> float:
    """The threshold of `cut_at`."""
    return float(curve.threshold[cut_at(curve, recall=recall, sparsity=sparsity)])


def shared_threshold(curves: Sequence[Curve], target: Mapping[str, float | None]) -> float:
    """One threshold for all heads and layers on the normalised score (design, section 5.3), by bisection on the mean
    of the heads' curves."""
    wanted = target["recall"]

    def too_sparse(threshold: float) -> bool:
        sparsity, recall = _mean_at(curves, threshold)
        return recall < wanted if wanted is not None else sparsity >= (target["sparsity"] or 0.0)

    low, high = bisect(-50.0, 1.0, too_sparse, 40)  # scores are logarithms of shares
    return low if wanted is not None else high


def bisect(low: float, high: float, too_high: Callable[[float], bool], steps: int) -> tuple[float, float]:
    """The ends of an interval that has been halved `steps` times towards where `too_high` turns true."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if too_high(middle) else (middle, high)
    return low, high


def _mean_at(curves: Sequence[Curve], threshold: float) -> tuple[float, float]:
    sparsity, recall = 0.0, 0.0
    for c in curves:
        at = int((c.threshold >= threshold).sum()) - 1
        sparsity += float(c.sparsity[at]) if at >= 0 else 1.0
        recall += float(c.recall[at]) if at >= 0 else 0.0
    return sparsity / len(curves), recall / len(curves)


def recalls_at(curve: Curve, sparsities: Sequence[float] = CURVE_POINTS) -> list[float]:
    """Recall at each sparsity, linear between the points of the curve (a coarse curve, such as a window's, has few).

    Above its sparsest point a curve goes on to (1, 0), its pairs dropped at random; but NaN where that point holds
    pairs that are kept in any case.
    """
    x = torch.cat([torch.ones(1, dtype=torch.float64), curve.sparsity])
    y = torch.cat([torch.zeros(1, dtype=torch.float64), curve.recall])
    values = []
    for sparsity in sparsities:
        if curve.forced and sparsity > float(curve.sparsity[0]) + 1e-12:
            values.append(math.nan)
            continue
        right = min(int((x >= sparsity).sum()), x.shape[0] - 1)
        low, high = float(x[right]), float(x[right - 1])
        share = 0.0 if high == low else (high - sparsity) / (high - low)
        values.append(float(y[right - 1]) + min(max(share, 0.0), 1.0) * float(y[right] - y[right - 1]))
    return values


def recalls_by_selection(parts: Sequence[Part], sparsities: Sequence[float] = CURVE_POINTS) -> list[float]:
    """`recalls_at(curve(parts), sparsities)`, several times faster where every entry stands for one pair and all
    instances have equally many: a few order statistics then replace the sort.

    Raises:
        DataError: no gold pair.
    """
    size = parts[0].scores.shape[0] if parts else 0
    if not size or any(part.scores.shape[0] != size or not bool((part.pairs == 1).all()) for part in parts):
        return recalls_at(curve(parts), sparsities)
    scores = torch.cat([part.scores for part in parts]).float().numpy()
    gold = [part.scores[part.gold.bool()].float().numpy() for part in parts if part.gold.any()]
    if not gold:
        raise DataError("calibration: expected at least one gold pair on held-out text, got none")
    places = [min(int((1 - sparsity) * scores.shape[0]), scores.shape[0] - 1) for sparsity in sparsities]
    ordered = np.partition(scores, sorted({scores.shape[0] - 1 - place for place in places}))
    return [
        _recall_at_value(scores, gold, ordered[scores.shape[0] - 1 - place], (1 - sparsity) * scores.shape[0])
        for place, sparsity in zip(places, sparsities, strict=True)
    ]


def _recall_at_value(scores: Floats, gold: Sequence[Floats], value: np.float32, wanted: float) -> float:
    """Recall where all scores above `value` are kept, and of those equal to it as large a share as is still wanted."""
    above, equal = int((scores > value).sum()), int((scores == value).sum())
    share = min(max((wanted - above) / equal, 0.0), 1.0)
    if np.isinf(value) and share < 1.0 - 1e-9:
        return math.nan
    kept = [((part > value).sum() + share * (part == value).sum()) / part.shape[0] for part in gold]
    return float(sum(kept) / len(kept))
