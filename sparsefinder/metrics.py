"""How good one named set of pairs (a pattern or a plan) is against the gold graph: counts first, averages after.

Sparsity, recall, precision, exact rows, attention mass and computed density (Treviso et al., 2022, section 4, equation
4): per instance and head, then averaged over instances, heads and layers, in that order.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from sparsefinder.edges import check_gold_mass, checked_scores, gold_pairs, head_probabilities
from sparsefinder.errors import DataError, ShapeError
from sparsefinder.patterns.algebra import Pattern, context_of, materialize
from sparsefinder.patterns.legal import Legal
from sparsefinder.plan import Plan, computed_pairs, plan_matrix
from sparsefinder.shapes import check_alpha, item_bias

SetName = Literal["pattern", "plan"]
MEASURES = ("sparsity", "recall", "precision", "exact_rows", "mass", "computed_density")


@dataclass(frozen=True, eq=False)
class HeadCounts:
    """Counts of one layer, per item and head, of the named set; exact, so that batches can be joined.

    legal, kept, gold, kept_gold: pairs. rows: queries with a legal key; exact_rows: those of them whose gold keys are
    all kept. mass_sum: teacher probability on kept pairs, summed over rows. computed: pairs that the kernel computes
    (for a pattern: the kept ones).
    """

    set_name: SetName
    legal: Int64[Tensor, "B H"]
    kept: Int64[Tensor, "B H"]
    gold: Int64[Tensor, "B H"]
    kept_gold: Int64[Tensor, "B H"]
    rows: Int64[Tensor, "B H"]
    exact_rows: Int64[Tensor, "B H"]
    mass_sum: Float64[Tensor, "B H"]
    computed: Int64[Tensor, "B H"]


@dataclass(frozen=True, eq=False)
class Report:
    """Averages of the named set: `heads[name]` is `[L, H]`, `layers[name]` is `[L]`, `overall[name]` a number.

    All are fractions; NaN where nothing could be measured. `empty_gold` counts the (instance, head) pairs per layer
    without any gold pair: they are left out of recall. `instances` is the number of items that were averaged.
    """

    set_name: SetName
    heads: dict[str, Float64[Tensor, "L H"]]
    layers: dict[str, Float64[Tensor, " L"]]
    overall: dict[str, float]
    empty_gold: Int64[Tensor, " L"]
    instances: int

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON: lists of numbers, None for what could not be measured."""
        plain: dict[str, Any] = {"set": self.set_name, "instances": self.instances}
        plain["overall"] = {name: _plain(value) for name, value in self.overall.items()}
        plain["layers"] = {name: [_plain(v) for v in values.tolist()] for name, values in self.layers.items()}
        heads = {name: values.tolist() for name, values in self.heads.items()}
        plain["heads"] = {name: [[_plain(v) for v in row] for row in rows] for name, rows in heads.items()}
        return plain | {"empty_gold": self.empty_gold.tolist()}


def counts(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    kept: Pattern | Plan,
    legal: Legal,
    alpha: float = 1.5,
    scale: float | Tensor | None = None,
    *,
    layer: int = 0,
    gold_mass: float | None = None,
    bias: Float[Tensor, "#B H N M"] | None = None,
) -> HeadCounts:
    """Compare a pattern or plan with the gold graph of α-entmax of `scale[h] q_i·k_j + bias`, head by head.

    Args:
        scale: factor of the scores, one number or one per head; None means `D ** -0.5`.
        layer: what the pattern is told of its place.
        gold_mass: of a softmax teacher, see `edges.gold_pairs`.

    Raises:
        ShapeError, AlphaError, ConfigError: arguments that do not fit.
        NonFiniteError: NaN or infinity in a real token.
    """
    return counts_of_each(q, k, [kept], legal, alpha, scale, layer=layer, gold_mass=gold_mass, bias=bias)[0]


def counts_of_each(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    sets: Sequence[Pattern | Plan],
    legal: Legal,
    alpha: float = 1.5,
    scale: float | Tensor | None = None,
    *,
    layer: int = 0,
    gold_mass: float | None = None,
    bias: Float[Tensor, "#B H N M"] | None = None,
) -> list[HeadCounts]:
    """`counts` of several patterns or plans of the same q and k, whose gold graph is then computed once."""
    dims, scales, added = checked_scores(q, k, legal, scale, bias)
    ctx, order = context_of(legal, layer), check_alpha(alpha)
    check_gold_mass(gold_mass)
    tables: list[list[tuple[float, ...]]] = [[] for _ in sets]
    for b, h in itertools.product(range(dims.batch), range(dims.heads)):
        more = None if added is None else item_bias(added, b)[h]
        truth = _truth(q[b, h], k[b, h // dims.group], scales[h], more, legal, b, order, gold_mass)
        for table, kept in zip(tables, sets, strict=True):
            pairs = plan_matrix(kept, legal, b, h) if isinstance(kept, Plan) else materialize(kept, legal, b, h, ctx)
            table.append(_compared(truth, pairs))
    return [_head_counts(kept, table, dims.batch, dims.heads) for kept, table in zip(sets, tables, strict=True)]


def _head_counts(kept: Pattern | Plan, table: list[tuple[float, ...]], batch: int, heads: int) -> HeadCounts:
    columns = torch.tensor(table, dtype=torch.float64).T.reshape(7, batch, heads)
    pairs, chosen, gold, kept_gold, rows, exact = columns[:6].long().unbind()  # float64 is exact up to 2**53
    computed = computed_pairs(kept).cpu() if isinstance(kept, Plan) else chosen.clone()
    name: SetName = "plan" if isinstance(kept, Plan) else "pattern"
    return HeadCounts(name, pairs, chosen, gold, kept_gold, rows, exact, columns[6], computed)


def no_counts(heads: int, set_name: SetName = "plan") -> HeadCounts:
    """The counts of a layer for which nothing is predicted: no item, so that its measures are NaN and enter no mean."""
    none = torch.zeros(0, heads, dtype=torch.int64)
    return HeadCounts(set_name, none, none, none, none, none, none, none.double(), none)


@dataclass(frozen=True, eq=False)
class _Truth:
    """One head of one item: its real rows and columns, and there the attention, the legal pairs and the gold ones.

    keys, gold_keys: legal and gold ones of every row.
    """

    rows: Int64[Tensor, " n"]
    columns: Int64[Tensor, " m"]
    p: Float64[Tensor, "n m"]
    visible: Bool[Tensor, "n m"]
    gold: Bool[Tensor, "n m"]
    keys: Int64[Tensor, " n"]
    gold_keys: Int64[Tensor, " n"]


def _truth(
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    legal: Legal,
    b: int,
    alpha: float,
    gold_mass: float | None,
) -> _Truth | None:
    """Only real tokens enter the scores, as in `gold_edges`; None where there are none."""
    rows, columns = legal.query_real[b].nonzero().squeeze(-1), legal.key_real[b].nonzero().squeeze(-1)
    if 0 in (rows.shape[0], columns.shape[0]):
        return None
    visible = legal.visible(rows[:, None], columns[None, :])
    more = None if bias is None else bias[rows][:, columns]
    p = head_probabilities(q[rows], k[columns], scale, more, visible, alpha)
    visible = torch.ones_like(p, dtype=torch.bool) if visible is None else visible
    gold = gold_pairs(p, alpha, gold_mass)
    return _Truth(rows, columns, p.double(), visible, gold, visible.sum(1), gold.sum(1))


def _compared(truth: _Truth | None, kept: Bool[Tensor, "N M"]) -> tuple[float, ...]:
    """The seven counts of one head."""
    if truth is None:
        return (0.0,) * 7
    whole = kept.shape == truth.p.shape  # without padding nothing needs to be picked out, which would copy it twice
    chosen = (kept if whole else kept[truth.rows][:, truth.columns]) & truth.visible
    hit = torch.count_nonzero(truth.gold & chosen, 1)
    legal_row = truth.keys > 0
    complete = (hit == truth.gold_keys) & legal_row
    numbers = [
        truth.keys.sum(), torch.count_nonzero(chosen), truth.gold_keys.sum(), hit.sum(), legal_row.sum(), complete.sum()
    ]  # fmt: skip
    return (*(float(n) for n in numbers), float(truth.p[chosen].sum()))


def join(parts: Sequence[HeadCounts]) -> HeadCounts:
    """The counts of several batches of one layer as one.

    Raises:
        DataError: nothing to join.
        ShapeError: different sets or numbers of heads.
    """
    if not parts:
        raise DataError("metrics: expected counts of at least one batch, got none")
    if len({(part.set_name, part.legal.shape[1]) for part in parts}) > 1:
        raise ShapeError("metrics: expected counts of one set and one number of heads")
    names = [f.name for f in fields(HeadCounts) if f.name != "set_name"]
    return HeadCounts(parts[0].set_name, **{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def instance_measures(counted: HeadCounts) -> dict[str, Float64[Tensor, "B H"]]:
    """Every measure per item and head, a fraction; NaN where its denominator is zero (such as recall without gold)."""
    return {
        "sparsity": 1 - _ratio(counted.kept, counted.legal),
        "recall": _ratio(counted.kept_gold, counted.gold),
        "precision": _ratio(counted.kept_gold, counted.kept),
        "exact_rows": _ratio(counted.exact_rows, counted.rows),
        "mass": _ratio(counted.mass_sum, counted.rows),
        "computed_density": _ratio(counted.computed, counted.legal),
    }


def summarize(layers: Sequence[HeadCounts]) -> Report:
    """Averages over instances, then heads, then layers; an instance or head without a value is left out of its mean.

    Raises:
        DataError: no layer.
        ShapeError: layers of different sets or numbers of heads.
    """
    if not layers:
        raise DataError("metrics: expected counts of at least one layer, got none")
    if len({(layer.set_name, layer.legal.shape[1]) for layer in layers}) > 1:
        raise ShapeError("metrics: expected layers of one set and one number of heads")
    measured = [instance_measures(layer) for layer in layers]
    heads = {name: torch.stack([values[name].nanmean(0) for values in measured]) for name in MEASURES}
    per_layer = {name: values.nanmean(1) for name, values in heads.items()}
    overall = {name: float(values.nanmean()) for name, values in per_layer.items()}
    empty = torch.stack([(layer.gold == 0).sum() for layer in layers])
    instances = max(int((layer.legal > 0).any(1).sum()) for layer in layers)
    return Report(layers[0].set_name, heads, per_layer, overall, empty, instances)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part.double() / whole.double(), math.nan)


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
