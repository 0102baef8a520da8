"""What the report shows of single heads: attention maps, who shares a cluster with whom, and what the clusters hold."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from sparsefinder.patterns.algebra import context_of, materialize
from sparsefinder.plan import plan_matrix
from sparsefinder.predictors import Clusters, Tiles
from sparsefinder.predictors.projections import project_item
from training.extract import LayerData, read_layer, read_manifest
from training.report_words import WORD_CLASSES
from training.sweep import Measured
from training.sweep_fronts import Point
from training.sweep_quality import locate, union_of
from training.sweep_sheets import Family, LayerWork, layer_work

INSTANCES = 24  # of the held-out ones, for clusters and histograms
SPAN = 36  # tokens on the axes of a map
FAR = 8  # tokens: beyond any usual window
OTHER, HIT, MISSED, SPARE = 0, 1, 2, 3
GOLD = (HIT, MISSED)
DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # lower ends of the histogram's bins of |i − j|

Matrix = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class HeadMap:
    """Gold against predicted pairs of one head over a span of tokens: `cells` holds OTHER, HIT, MISSED or SPARE.

    recall, sparsity: of this head and instance, over all its tokens.
    """

    title: str
    layer: int
    head: int
    tokens: list[str]
    cells: Matrix
    recall: float
    sparsity: float


@dataclass(frozen=True, eq=False)
class ClusterView:
    """Clusters of one head: `words[c]` most typical tokens, `classes [B, classes]` shares of parts of speech."""

    layer: int
    head: int
    words: list[list[str]]
    classes: npt.NDArray[np.float64]
    queries: list[int]
    keys: list[int]


def few_works(ready: Measured, instances: int = INSTANCES) -> list[LayerWork]:
    """All layers of the first held-out instances."""
    manifest = read_manifest(ready.shards / "heldout")
    return [
        layer_work(n, _first(read_layer(ready.shards / "heldout", n), instances)) for n in range(manifest["layers"])
    ]


def _first(data: LayerData, count: int) -> LayerData:
    return replace(data, q=data.q[:count].clone(), k=data.k[:count].clone(), mask=data.mask[:count])


def far_shares(works: Sequence[LayerWork], special: Sequence[npt.NDArray[np.bool_]]) -> npt.NDArray[np.float64]:
    """`[L, H]`: share of a head's gold pairs that lie more than `FAR` tokens apart, special tokens left out."""
    shares = np.zeros((len(works), works[0].heads))
    for work in works:
        for h in range(work.heads):
            far = total = 0
            for b, gold in enumerate(work.gold):
                i, j = np.divmod(gold.flat[gold.offsets[h] : gold.offsets[h + 1]], work.lengths[b])
                real = ~(special[b][i] | special[b][j])
                far += int((np.abs(i - j)[real] > FAR).sum())
                total += int(real.sum())
            shares[work.layer, h] = far / max(total, 1)
    return shares


def choose_heads(shares: npt.NDArray[np.float64], count: int = 4) -> list[tuple[int, int]]:
    """The most local head and those that look farthest, at most one of each layer."""
    order = [tuple(int(x) for x in np.unravel_index(at, shares.shape)) for at in np.argsort(-shares, axis=None)]
    chosen: list[tuple[int, int]] = [(order[-1][0], order[-1][1])]
    for layer, head in order:
        if len(chosen) < count and layer not in {known for known, _ in chosen}:
            chosen.append((layer, head))
    return sorted(chosen)


def head_map(
    family: Family, point: Point, work: LayerWork, b: int, head: int, tokens: Sequence[str], start: int, title: str
) -> HeadMap:
    """The map of one head at a setting, drawn from token `start` on."""
    sheet, setting = locate(family, point)
    q, k, legal = work.item(b)
    predictor, positional = sheet.prepare(work).predictor(setting), union_of(point)
    if isinstance(predictor, Tiles):
        kept = plan_matrix(predictor.plan(q, k, legal, positional, sheet.tile), legal, 0, head).numpy()
    else:
        pattern = predictor.pattern(q, k, legal) | positional
        kept = materialize(pattern, legal, 0, head, context_of(legal, work.layer)).numpy()
    n, gold_of = work.lengths[b], work.gold[b]
    flat = np.zeros(n * n, bool)
    flat[gold_of.flat[gold_of.offsets[head] : gold_of.offsets[head + 1]]] = True
    gold = flat.reshape(n, n)
    cells = np.where(gold & kept, HIT, np.where(gold, MISSED, np.where(kept, SPARE, OTHER)))
    span = slice(start, min(start + SPAN, n))
    recall = float((gold & kept).sum() / max(gold.sum(), 1))
    return HeadMap(title, work.layer, head, list(tokens[span]), cells[span, span], recall, float(1 - kept.mean()))


def clusters_of(family: Family, works: Sequence[LayerWork], buckets: int) -> list[Clusters]:
    """The centroids of every layer at this number of clusters."""
    sheet = next(sheet for sheet in family.sheets if sheet.parameters[0]["buckets"] == buckets)
    found = [sheet.prepare(work).predictor(0) for work in works]
    return [clusters for clusters in found if isinstance(clusters, Clusters)]


def usage(clusters: Clusters, work: LayerWork) -> tuple[Matrix, Matrix]:
    """How many queries and how many keys are nearest to each centroid, `[H, B]` each, over the instances."""
    one = replace(clusters, top_k=torch.ones_like(clusters.top_k))
    parts = []
    for b in range(len(work.lengths)):
        q, k, legal = work.item(b)
        item = project_item(clusters.projections, q, k, legal, 0)
        parts.append([one.members(x).sum(1).numpy() for x in (item.q, item.k)])
    queries, keys = (np.sum(column, 0) for column in zip(*parts, strict=True))
    return queries, keys


def entropies(counts: Matrix) -> npt.NDArray[np.float64]:
    """Entropy of the usage of clusters over its maximum, per head: 1 = all alike, 0 = one cluster holds everything."""
    share = counts / counts.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(share > 0, -share * np.log(share), 0.0)
    found: npt.NDArray[np.float64] = terms.sum(-1) / np.log(counts.shape[-1])
    return found


def shared_histogram(clusters: Clusters, works: Sequence[LayerWork], top: int) -> npt.NDArray[np.float64]:
    """`[2, shared + 1, distance bins]`: share of the gold pairs, and of the other pairs, by the number of clusters
    that the two tokens share among their `top` nearest, and by the bin of `DISTANCES` of |i − j|. One layer."""
    (work,) = works
    table = np.zeros((2, top + 1, len(DISTANCES)))
    near = replace(clusters, top_k=torch.full_like(clusters.top_k, top))
    for b, n in enumerate(work.lengths):
        q, k, legal = work.item(b)
        item = project_item(clusters.projections, q, k, legal, 0)
        shared = (near.members(item.q).float() @ near.members(item.k).float().transpose(1, 2)).long().numpy()
        place = np.searchsorted(DISTANCES, np.abs(np.arange(n)[:, None] - np.arange(n)), side="right") - 1
        cell = shared * len(DISTANCES) + place
        whole = np.bincount(cell.ravel(), minlength=table[0].size)
        gold = work.gold[b]
        owner = np.repeat(np.arange(work.heads), np.diff(gold.offsets))
        hit = np.bincount(cell.reshape(work.heads, -1)[owner, gold.flat], minlength=table[0].size)
        table[0] += hit.reshape(table[0].shape)
        table[1] += (whole - hit).reshape(table[1].shape)
    found: npt.NDArray[np.float64] = table / np.maximum(table.sum((1, 2), keepdims=True), 1)
    return found


def cluster_view(
    clusters: Clusters,
    work: LayerWork,
    head: int,
    words: Sequence[Sequence[str]],
    classes: Sequence[Sequence[int]],
    count: int = 8,
) -> ClusterView:
    """Tokens that are typical of each cluster (much more frequent in it than elsewhere, keys and queries together) and
    the parts of speech in it. words, classes: of every token of every instance."""
    one = replace(clusters, top_k=torch.ones_like(clusters.top_k))
    total = clusters.centroids.shape[1]
    inside: list[Counter[str]] = [Counter() for _ in range(total)]
    everywhere: Counter[str] = Counter()
    table, sides = np.zeros((total, len(WORD_CLASSES))), np.zeros((2, total), np.int64)
    for b in range(len(work.lengths)):
        q, k, legal = work.item(b)
        item = project_item(clusters.projections, q, k, legal, 0)
        for side, x in enumerate((item.q, item.k)):
            of_token = one.members(x)[head].long().argmax(-1).tolist()
            for place, cluster in enumerate(of_token):
                inside[cluster][words[b][place]] += 1
                everywhere[words[b][place]] += 1
                table[cluster, classes[b][place]] += 1
                sides[side, cluster] += 1
    size = sum(everywhere.values())
    typical = [_typical(part, everywhere, size, count) for part in inside]
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    return ClusterView(work.layer, head, typical, shares, sides[0].tolist(), sides[1].tolist())


def _typical(inside: Counter[str], everywhere: Counter[str], size: int, count: int) -> list[str]:
    """By count × log of (share here / share everywhere), the token's part of the divergence of the two."""
    total = sum(inside.values())
    weight = {w: c * np.log((c / total) / (everywhere[w] / size)) for w, c in inside.items()}
    return sorted((w for w in weight if weight[w] > 0), key=lambda w: (-weight[w], w))[:count]
