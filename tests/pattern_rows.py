"""The rows of docs/patterns.md: every pattern and predictor with its source, its text and its naive definition."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracles_content as content
import oracles_patterns as naive
import oracles_predict as predict
import torch
from cases_content import DIM, HEADS, RANK, gate_maps, maps, unit, whole
from torch import Tensor

from sparsefinder.predictors import (
    ChunkClusters,
    Clustered,
    Clusters,
    Distance,
    Gate,
    InvertedClusters,
    InvertedLists,
    Lsh,
    Predictor,
    Quantization,
    RoutedChunks,
    Routing,
    RowBudget,
    Score,
    Smyrf,
    Tiles,
    TopKeys,
    WindowOnly,
    clustered_hashes,
    lsh_rotations,
    smyrf_directions,
)
from sparsefinder.predictors.clustered import ITERATIONS

TILE = 4
Vectors = list[list[float]]


@dataclass(frozen=True)
class Row:
    """name: in the text form. text: an example; for predictors with a setting other than that of `predictor`.

    rule: `rule(q, k, h)` gives the matrix of one item without padding, of head `h`, by definition.
    """

    name: str
    text: str
    source: str
    says: str
    rule: Callable[[Tensor, Tensor, int], np.ndarray]
    predictor: Predictor | None = None


def _positional(name: str, text: str, source: str, says: str, rule: Callable[..., bool]) -> Row:
    def matrix(q: Tensor, k: Tensor, h: int) -> np.ndarray:
        return naive.matrix(rule, q.shape[2], k.shape[2], h=h)

    return Row(name, text, source, says, matrix)


CHILD, YUN = "Child et al. (2019), 4.3; Yun et al. (2020), 4", "Yun et al. (2020), 5"
BELTAGY, ZAHEER = "Beltagy et al. (2020), 3.1", "Zaheer et al. (2020), 2 and D"
POSITIONAL = [
    _positional("window", "window(5)", BELTAGY, "at most 2 tokens apart; an odd width", naive.window(2)),
    _positional("dilated", "dilated(2, step=3)", BELTAGY, "a window with gaps", naive.dilated(2, 3)),
    _positional("global", "global(2)", BELTAGY, "the first tokens see all, all see them", naive.global_tokens(2)),
    _positional(
        "positions", "positions((3, -1))", BELTAGY, "global tokens anywhere, −1 is the last",
        naive.global_positions((3, -1)),
    ),
    _positional("past", "past()", "", "not after the query", naive.past()),
    _positional("strided", "strided(4)", CHILD, "every 4th token from the query", naive.strided(4)),
    _positional("fixed", "fixed(4, summary=2)", CHILD, "itself, and the ends of all segments", naive.fixed(4, 2)),
    _positional("blocks", "blocks(4)", "Qiu et al. (2020)", "the own segment, or near ones", naive.segment(4)),
    _positional("random", "random(3, seed=1)", YUN, "3 keys drawn per query", naive.random_blocks(1, 3, 1, False)),
    _positional(
        "random_blocks", "random_blocks(3, count=2)", ZAHEER, "2 blocks of keys drawn for every block of queries",
        naive.random_blocks(3, 2, 0, False),
    ),
    _positional(
        "sequential", "sequential(window(3), strided(3))", YUN, "layers alternate",
        naive.sequential(naive.window(1), naive.strided(3)),
    ),
    _positional(
        "multihead", "multihead(window(3), strided(3))", YUN, "heads are divided",
        naive.multihead(naive.window(1), naive.strided(3)),
    ),
    _positional(
        "longformer", "longformer(5, global_tokens=2)", BELTAGY, "window | global",
        naive.either(naive.window(2), naive.global_tokens(2)),
    ),
    _positional(
        "bigbird", "bigbird(2, random_blocks=1)", ZAHEER, "blocks | global | random_blocks",
        naive.either(naive.block_band(2, 1), naive.global_tokens(2), naive.random_blocks(2, 1, 0, False)),
    ),
    _positional(
        "sparse_transformer", "sparse_transformer('fixed', 4, heads='union')", CHILD, "blocks and fixed",
        naive.either(naive.segment(4), naive.fixed(4, 1)),
    ),
    _positional(
        "star_transformer", "star_transformer(2)", "Guo et al. (2019); Yun et al. (2020), 4", "window | global(1)",
        naive.either(naive.window(2), naive.global_tokens(1)),
    ),
]  # fmt: skip


def head(x: Tensor, h: int) -> Vectors:
    return x[0, h // (HEADS // x.shape[1])].double().tolist()


def low(form: str, q: Tensor, k: Tensor, h: int) -> tuple[Vectors, Vectors]:
    p = maps(form)
    queries = [content.apply(p.q_map[h].tolist(), p.q_bias[h].tolist(), x) for x in head(q, h)]
    return queries, [content.apply(p.k_map[h].tolist(), p.k_bias[h].tolist(), x) for x in head(k, h)]


def products(left: Vectors, right: Vectors) -> Vectors:
    return [[content.dot(x, y) for y in right] for x in left]


def gaps(left: Vectors, right: Vectors) -> Vectors:
    return [[-(math.dist(x, y) ** 2) for y in right] for x in left]


def _predictor(name: str, settings: str, source: str, says: str, predictor: Predictor, rule: Callable[..., Any]) -> Row:
    """`rule` gets q, k, the head and the predictor as the text changes it, and gives a set of pairs."""

    def matrix(q: Tensor, k: Tensor, h: int) -> np.ndarray:
        found = np.zeros((q.shape[2], k.shape[2]), bool)
        for i, j in rule(q, k, h):
            found[i, j] = True
        return found

    return Row(name, f"{name}({settings})", source, says, matrix, predictor)


def _everyone(q: Tensor) -> set[tuple[int, int]]:
    return {(i, j) for i in range(q.shape[2]) for j in range(q.shape[2])}


def _tiles(q: Tensor, k: Tensor, h: int) -> set[tuple[int, int]]:
    p = maps("bilinear")
    parts = tuple(getattr(p, name)[h].double().numpy() for name in ("q_map", "k_map", "q_bias", "k_bias"))
    options = {"size": TILE, "causal": False, "before": 7, "weight": 0.0, "metric": False, "k_linear": np.zeros(DIM)}
    shares = predict.tile_log_shares(np.array(head(q, h)), np.array(head(k, h)), parts, **options)
    n = q.shape[2]
    chosen = {(i, j) for (t, j), v in shares.items() if v >= -3.0 for i in range(t * TILE, min(n, (t + 1) * TILE))}
    return chosen | {(i, j) for i in range(n) for j in range(n) if i // TILE == j // TILE}  # a tile reads itself


def _clustered(q: Tensor, k: Tensor, h: int) -> set[tuple[int, int]]:
    codes = [[content.dot(row, x) > 0 for row in HASHES[h].tolist()] for x in head(q, h)]
    owner = content.hamming_clusters(codes, 5, ITERATIONS)
    return content.clustered(head(q, h), head(k, h), owner, 3)


def _inverted(q: Tensor, k: Tensor, h: int) -> set[tuple[int, int]]:
    scores = [[0.3 * v for v in row] for row in products(head(q, h), WIDE[h].tolist())]
    return content.probing(scores, [content.nearest(x, WIDE[h].tolist()) for x in head(k, h)], False, -1.5)


def _inverted_metric(q: Tensor, k: Tensor, h: int) -> set[tuple[int, int]]:
    low_q, low_k = low("metric", q, k, h)
    owner = [content.nearest(x, SMALL[h].tolist()) for x in low_k]
    return content.probing(gaps(low_q, SMALL[h].tolist()), owner, False, -1.5)


def _chunked(q: Tensor, k: Tensor, h: int, routed: bool) -> set[tuple[int, int]]:
    parts = content.blocks(q.shape[2], 3)
    sides = [[content.mean([x[i] for i in part]) for part in parts] for x in low("metric", q, k, h)]
    c = SMALL[h].tolist()
    if routed:
        return content.spread(content.routed(*sides, c, 2), parts, parts)
    few = [[content.nearest_few(x, c, 2) for x in side] for side in sides]
    return content.spread(content.share_a_bucket(*few), parts, parts)


def _gate(q: Tensor, k: Tensor, h: int) -> set[tuple[int, int]]:
    parts, p = content.blocks(q.shape[2], 3), gate_maps()
    queries, keys = ([content.mean_and_max([x[i] for i in part]) for part in parts] for x in (head(q, h), head(k, h)))
    low_q, low_k = products(queries, p.q_map[h].tolist()), products(keys, p.k_map[h].tolist())
    column = [content.dot(p.k_linear[h].tolist(), y) for y in keys]
    scores = [[v + extra for v, extra in zip(row, column, strict=True)] for row in products(low_q, low_k)]
    return content.spread(content.gate(scores, 2, None), parts, parts)


LIMITS = torch.full((HEADS,), 9.0)
SMALL, WIDE, BALL = whole(HEADS, 6, RANK, seed=1), whole(HEADS, 7, DIM, seed=2), unit(HEADS, 5, DIM, seed=3)
HASHES, TURNS, LINES = (
    clustered_hashes(HEADS, DIM, 11, 0),
    lsh_rotations(HEADS, DIM, 6, 3, 0),
    smyrf_directions(HEADS, DIM, 2, 0),
)
TREVISO = "Treviso et al. (2022), 4.3"
OURS = "this project"
PREDICTED = [
    _predictor(
        "distance", "threshold=5.5", TREVISO, "projections within a distance", Distance(maps(), LIMITS),
        lambda q, k, h: predict.distance_graph(*low("metric", q, k, h), 5.5, _everyone(q)),
    ),
    _predictor(
        "score", "threshold=2.5", OURS, "a learned score above a threshold", Score(maps("bilinear"), LIMITS),
        lambda q, k, h: predict.score_graph(np.array(products(*low("bilinear", q, k, h))), 2.5, _everyone(q)),
    ),
    _predictor(
        "clusters", "top=2", TREVISO, "the sets of nearest centroids meet",
        Clusters(maps(), SMALL, torch.ones(HEADS, dtype=torch.int64)),
        lambda q, k, h: predict.cluster_graph(*low("metric", q, k, h), SMALL[h].tolist(), 2, _everyone(q)),
    ),
    _predictor(
        "budget", "density=0.2", OURS, "a share of the keys of every row", RowBudget(maps(), 0.5),
        lambda q, k, h: predict.budget_graph(np.array(gaps(*low("metric", q, k, h))), "0.2", _everyone(q)),
    ),
    _predictor(
        "tiles", "threshold=-3.0", OURS, "keys of a tile of queries, by a share of its scores",
        Tiles(maps("bilinear"), threshold=-1.0), _tiles,
    ),
    _predictor(
        "window", "radius=2", OURS, "control: nothing is predicted", WindowOnly(1),
        lambda q, k, h: {(i, j) for i, j in _everyone(q) if abs(i - j) <= 2},
    ),
    _predictor(
        "quantization", "bins=7", TREVISO, "a bin of equal count shared in any dimension", Quantization(maps(), 3),
        lambda q, k, h: content.quantization(*low("metric", q, k, h), 7),
    ),
    _predictor(
        "topk", "keys=4", OURS, "a number of keys of every row", TopKeys(maps(), 1),
        lambda q, k, h: content.top_keys(gaps(*low("metric", q, k, h)), _everyone(q), 4),
    ),
    _predictor(
        "lsh", "shared=False", "Kitaev et al. (2020), 2", "argmax [Rx; −Rx] equal in a round", Lsh(TURNS, True),
        lambda q, k, h: content.lsh(head(q, h), head(k, h), TURNS[:, h].tolist()),
    ),
    _predictor(
        "smyrf", "buckets=4", "Daras et al. (2020), 3", "balanced buckets of asymmetric hashes", Smyrf(LINES, 2),
        lambda q, k, h: content.smyrf(head(q, h), head(k, h), LINES[:, h].tolist(), 4),
    ),
    _predictor(
        "routing", "window=3", "Roy et al. (2021), 4.1", "every centroid takes its nearest tokens", Routing(BALL),
        lambda q, k, h: content.routing(head(q, h), head(k, h), BALL[h].tolist(), 3),
    ),
    _predictor(
        "clustered", "keys=3, clusters=5", "Vyas et al. (2020), 3", "clusters of queries, keys of their mean",
        Clustered(HASHES, 2, 1), _clustered,
    ),
    _predictor(
        "inverted", "threshold=-1.5", OURS, "keys in one cluster, queries probe several",
        InvertedLists(WIDE, torch.full((HEADS,), 0.3), -0.5), _inverted,
    ),
    _predictor(
        "inverted_metric", "threshold=-1.5", OURS, "the same with learned projections",
        InvertedClusters(maps(), SMALL, -0.5), _inverted_metric,
    ),
    _predictor(
        "chunks", "top=2", "Treviso et al. (2022), v1", "clusters of chunk means",
        ChunkClusters(maps(), SMALL, 1, 3), lambda q, k, h: _chunked(q, k, h, routed=False),
    ),
    _predictor(
        "routed_chunks", "window=2", "Treviso et al. (2022), v2", "its centroids take their nearest chunks",
        RoutedChunks(maps(), SMALL, None, 3), lambda q, k, h: _chunked(q, k, h, routed=True),
    ),
    _predictor(
        "gate", "top=2", "Gao et al. (2024)", "a learned gate on pooled blocks", Gate(gate_maps(), 3, top=1), _gate,
    ),
]  # fmt: skip
ROWS = [*POSITIONAL, *PREDICTED]
