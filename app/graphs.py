"""Attention graphs of a text: per layer and head what was computed, what was predicted, and what attention needed.

Gold is the served model's own attention on its own q and k of that very pass: the support of its entmax; of softmax
the fewest keys of a row that hold a given share of it (`sparsefinder.edges.gold_pairs`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from app.graph_values import (
    Buckets,
    BucketSets,
    GoldRows,
    Graph,
    GraphOptions,
    HeadGraph,
    LayerGraph,
    Rows,
    SetName,
)
from sparsefinder.artifact import Artifact, predicted
from sparsefinder.edges import gold_pairs, head_probabilities
from sparsefinder.hf import Attached, LayerCall
from sparsefinder.metrics import HeadCounts, instance_measures
from sparsefinder.patterns.algebra import Pattern, context_of, materialize
from sparsefinder.patterns.content import WORD_BITS, BucketsMeet
from sparsefinder.patterns.legal import Legal, legal_to
from sparsefinder.patterns.positional import Nothing
from sparsefinder.plan import Plan, computed_pairs, plan_matrix
from sparsefinder.predictors import Clusters, Predictor, Tiles
from sparsefinder.shapes import item_bias
from sparsefinder.teacher import Teacher

GOLD_MASS = 0.95  # of a softmax model whose artifact does not say what its gold keys hold


def graphs(
    attached: Attached, artifact: Artifact, teacher: Teacher, tokens: Tensor, mask: Tensor, options: GraphOptions
) -> list[Graph]:
    """The task `graph`: one forward pass of a batch in whatever mode is on, and the graphs of each item."""
    cut = attached.run().cut  # of another density than the served one
    predictors = attached.predictors if cut is None else cut.predictors
    seen = GraphObserver(options, artifact, predictors, attached.tile_size)
    cache = {"use_cache": False} if teacher.causal else {}
    with attached.watching(seen):
        teacher.model(input_ids=tokens, attention_mask=mask.long(), **cache)
    return seen.graphs()


@dataclass(eq=False)
class GraphObserver:
    """Sees the layers of one forward pass and keeps the graphs of every item of the batch.

    tile_size: of the served plans; predictors are those of the model's layers, None where a layer has none.
    """

    options: GraphOptions
    artifact: Artifact
    predictors: Sequence[Predictor | None]
    tile_size: int | Tensor
    seen: list[list[LayerGraph]] = field(default_factory=list)

    def __call__(self, call: LayerCall) -> None:
        """See one layer."""
        if self.options.layers is None or call.layer in self.options.layers:
            chosen = _predicted(self.predictors[call.layer], call, self.tile_size) if self.options.pattern else None
            sets = _bucket_sets(self.artifact, self.predictors[call.layer], call) if self.options.clusters else None
            items = range(call.q.shape[0])
            self.seen.append([_layer(call, b, self.options, chosen, sets, self.gold_mass) for b in items])

    @property
    def gold_mass(self) -> float | None:
        """What the gold keys of a row of softmax hold together; None where gold is the support of entmax."""
        card = self.artifact.card
        return None if card.alpha > 1 else card.gold_mass or GOLD_MASS

    def graphs(self) -> list[Graph]:
        """One per item, layers in the order that was asked for."""
        found = []
        for item in zip(*self.seen, strict=True):
            by_layer = {layer.layer: layer for layer in item}
            order = self.options.layers or sorted(by_layer)
            found.append(Graph(tuple(by_layer[layer] for layer in order), self.gold_mass))
        return found


def _predicted(predictor: Predictor | None, call: LayerCall, tile_size: int | Tensor) -> Plan | Pattern | None:
    """What the predictor alone chooses; None in a layer that asked none. A tile predictor chooses for whole tiles."""
    if predictor is None or call.plan is None:
        return None
    if isinstance(predictor, Tiles):
        return predictor.plan(call.q, call.k, call.legal, Nothing(), tile_size)
    return predictor.pattern(call.q, call.k, call.legal)


Matrix = npt.NDArray[np.bool_]
SetsOf = Callable[[int, int], BucketSets]


def _bucket_sets(artifact: Artifact, predictor: Predictor | None, call: LayerCall) -> SetsOf | None:
    """Buckets of (item, head): those of the served predictor, or else of a clustering that the artifact holds."""
    if predictor is None:
        return None
    if not isinstance(predictor, Tiles):
        met = predictor.pattern(call.q, call.k, call.legal)
        if isinstance(met, BucketsMeet):
            return _sets_of(str(predictor.kind), True, met, call.legal)
    names = sorted(artifact.centroids, key=lambda name: (name.endswith("-b16"), name))
    if not names or names[-1].rpartition("-b")[0] not in artifact.projections:
        return None
    name, place, legal = names[-1], predicted(artifact).index(call.layer), legal_to(call.legal, "cpu")
    maps, centroids = artifact.projections[name.rpartition("-b")[0]][place], artifact.centroids[name][place]
    nearest = Clusters(maps, centroids, torch.ones(centroids.shape[0], dtype=torch.long))
    return _sets_of(name, False, cast(BucketsMeet, nearest.pattern(call.q.cpu(), call.k.cpu(), legal)), legal)


def _sets_of(name: str, served: bool, met: BucketsMeet, legal: Legal) -> SetsOf:
    def sets(b: int, h: int) -> BucketSets:
        queries, width = _members(met.query_bits[b, h][legal.query_real[b]])
        keys, _ = _members(met.key_bits[b, h][legal.key_real[b]])
        return BucketSets(name, served, width, queries, keys)

    return sets


def _members(bits: Tensor) -> tuple[Buckets, int]:
    """The buckets of every token, and how many there are: of bools `[n, W]`, or of words of 64 buckets."""
    if bits.dtype != torch.bool:
        places = torch.arange(WORD_BITS, device=bits.device)
        bits = ((bits[..., None] >> places) & 1).bool().flatten(-2)
    at = rows_of(bits.cpu().numpy())
    return tuple(tuple(at.keys[low:high].tolist()) for low, high in pairwise(at.offsets)), bits.shape[-1]


def _layer(
    call: LayerCall,
    b: int,
    options: GraphOptions,
    chosen: Plan | Pattern | None,
    sets: SetsOf | None,
    gold_mass: float | None,
) -> LayerGraph:
    rows, columns = call.legal.query_real[b].nonzero().flatten(), call.legal.key_real[b].nonzero().flatten()
    real = call.legal.allows(b, rows[:, None], columns[None, :])
    legal: Matrix = real.cpu().numpy()
    pairs = int(np.count_nonzero(legal))
    computed = None if call.plan is None else computed_pairs(call.plan)[b].tolist()
    heads = []
    for h in range(call.q.shape[1]) if options.heads is None else options.heads:
        kept: dict[SetName, tuple[Matrix, int]] = {"plan": (legal, pairs)}
        if call.plan is not None and computed is not None:
            kept["plan"] = (_among(plan_matrix(call.plan, call.legal, b, h), rows, columns), computed[h])
        if chosen is not None:
            pattern = _among(_matrix(chosen, call, b, h), rows, columns)
            kept["pattern"] = (pattern, int(np.count_nonzero(pattern)))
        p = _probabilities(call, b, h, rows, columns, real) if options.gold else None
        gold = None if p is None else _Gold(p.cpu().numpy(), gold_pairs(p, call.alpha, gold_mass).cpu().numpy())
        heads.append(_head(h, kept, legal, gold, sets(b, h) if sets else None))
    parts = (call.q[b][:, rows], call.k[b][:, columns], call.output[b][:, rows])
    finite = all(bool(part.isfinite().all()) for part in parts)
    return LayerGraph(call.layer, call.ran, call.legal.radius, pairs, tuple(heads), finite)


def _among(matrix: Bool[Tensor, "N M"], rows: Tensor, columns: Tensor) -> Matrix:
    """What of a matrix is between real tokens."""
    whole = tuple(matrix.shape) == (rows.shape[0], columns.shape[0])
    return (matrix if whole else matrix[rows[:, None], columns]).cpu().numpy()


def _matrix(chosen: Plan | Pattern, call: LayerCall, b: int, h: int) -> Bool[Tensor, "N M"]:
    if isinstance(chosen, Plan):
        return plan_matrix(chosen, call.legal, b, h)
    return materialize(chosen, call.legal, b, h, context_of(call.legal, call.layer)) & call.legal.matrix(b)


def _probabilities(
    call: LayerCall, b: int, h: int, rows: Tensor, columns: Tensor, legal: Tensor
) -> Float[Tensor, "n m"]:
    group = call.q.shape[1] // call.k.shape[1]
    bias = None if call.bias is None else item_bias(call.bias, b)[h, rows][:, columns]
    queries, keys = call.q[b, h, rows], call.k[b, h // group, columns]
    return head_probabilities(queries, keys, call.scale[h], bias, legal, call.alpha)


@dataclass(frozen=True, eq=False)
class _Gold:
    """What attention gives to the pairs of a head, and which of them are gold."""

    p: npt.NDArray[np.float32]
    pairs: Matrix


def _head(
    head: int,
    kept: Mapping[SetName, tuple[Matrix, int]],
    legal: Matrix,
    gold: _Gold | None,
    clusters: BucketSets | None,
) -> HeadGraph:
    """kept: of each set the pairs, and how many a kernel computes for them."""
    measures = {name: _measures(name, *kept[name], legal, gold) for name in kept}
    plan = kept["plan"][0]
    pattern = rows_of(kept["pattern"][0]) if "pattern" in kept else None
    if gold is None:
        return HeadGraph(head, rows_of(plan), pattern, None, None, measures, clusters)
    at = rows_of(gold.pairs)
    gold_rows = GoldRows(at.offsets, at.keys, gold.p[gold.pairs])
    return HeadGraph(head, rows_of(plan), pattern, gold_rows, rows_of(gold.pairs & ~plan), measures, clusters)


def rows_of(matrix: Matrix) -> Rows:
    """The pairs of a matrix, row by row."""
    offsets = np.zeros(matrix.shape[0] + 1, np.int32)
    np.cumsum(np.count_nonzero(matrix, axis=1), out=offsets[1:])
    return Rows(offsets, matrix.nonzero()[1].astype(np.int32))


def _measures(name: SetName, kept: Matrix, computed: int, legal: Matrix, gold: _Gold | None) -> dict[str, float | None]:
    """As `sparsefinder.metrics` defines them; without gold only what needs none."""
    needed = np.zeros_like(legal) if gold is None else gold.pairs
    mass = 0.0 if gold is None else float(gold.p[kept].sum(dtype=np.float64))
    row_exists, hit = legal.any(1), needed & kept
    parts = {"legal": legal, "kept": kept, "gold": needed, "kept_gold": hit, "rows": row_exists}
    parts["exact_rows"] = row_exists & (hit == needed).all(1)
    counted = {part: torch.tensor([[np.count_nonzero(pairs)]]) for part, pairs in parts.items()}
    counted["computed"] = torch.tensor([[computed]])
    values = instance_measures(HeadCounts(name, mass_sum=torch.tensor([[mass]], dtype=torch.float64), **counted))
    wanted = values if gold is not None else ("sparsity", "computed_density")
    plain = {measure: float(values[measure]) for measure in wanted}
    return {measure: value if math.isfinite(value) else None for measure, value in plain.items()}
