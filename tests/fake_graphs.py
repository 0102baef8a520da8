"""Graphs that are easy to foresee, for the fake model: sets of pairs written down as sets."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from app.graph_values import BucketSets, GoldRows, Graph, GraphOptions, HeadGraph, LayerGraph, Rows

Pairs = set[tuple[int, int]]


def plan_pairs(tokens: int, layer: int, head: int) -> Pairs:
    """Every query reads itself, the first token, and one that depends on layer and head."""
    return {(i, j) for i in range(tokens) for j in (0, i, (i + 2 * layer + head) % tokens)}


def gold_weights(tokens: int) -> dict[tuple[int, int], float]:
    """Every query needs the first token (.25) and the next one (.75)."""
    weights = {(i, 0): 0.25 for i in range(tokens)}
    return weights | {(i, (i + 1) % tokens): 0.75 for i in range(tokens - 1)}


def rows_of(pairs: Pairs, tokens: int) -> Rows:
    keys = [sorted(j for i, j in pairs if i == row) for row in range(tokens)]
    offsets = np.cumsum([0, *map(len, keys)], dtype=np.int32)
    return Rows(offsets, np.array([j for row in keys for j in row], dtype=np.int32))


def pairs_of(rows: Mapping[str, Any]) -> Pairs:
    """What rows of an answer say, as a set."""
    spans = zip(rows["offsets"], rows["offsets"][1:], strict=False)
    return {(i, j) for i, (low, high) in enumerate(spans) for j in map(int, rows["keys"][low:high])}


def fake_graph(tokens: int, options: GraphOptions, layers: int, heads: int, finite: bool) -> Graph:
    legal = tokens * tokens

    def one(layer: int, head: int) -> HeadGraph:
        plan, weights = plan_pairs(tokens, layer, head), gold_weights(tokens)
        at = rows_of(set(weights), tokens)
        gold = GoldRows(at.offsets, at.keys, np.array([weights[pair] for pair in sorted(weights)], dtype=np.float32))
        hit = set(weights) & plan
        measures = {"sparsity": 1 - len(plan) / legal, "computed_density": len(plan) / legal}
        if options.gold:
            measures |= {"recall": len(hit) / len(weights), "mass": 0.5, "exact_rows": 0.25, "precision": None}
        chosen = plan - {(i, i) for i in range(tokens)}
        clusters = BucketSets("fake", True, 3, tuple((i % 3,) for i in range(tokens)), ((0,),) * tokens)
        return HeadGraph(
            head,
            rows_of(plan, tokens),
            rows_of(chosen, tokens) if options.pattern else None,
            gold if options.gold else None,
            rows_of(set(weights) - plan, tokens) if options.gold else None,
            {"plan": measures} | ({"pattern": measures} if options.pattern else {}),
            clusters if options.clusters else None,
        )

    wanted = [range(count) if one is None else one for one, count in ((options.layers, layers), (options.heads, heads))]
    found = [LayerGraph(n, "sparse", None, legal, tuple(one(n, h) for h in wanted[1]), finite) for n in wanted[0]]
    return Graph(tuple(found))
