"""Parameters of the content predictors, learned offline from extracted graphs: centroids, chunk maps, gates, SVD maps.

Everything is seeded: the same data and seed give the same parameters.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.edges import Edges, head_edges
from sparsefinder.entmax import entmax
from sparsefinder.errors import DataError
from sparsefinder.patterns.legal import legal_from_mask
from sparsefinder.predictors import (
    ChunkClusters,
    Gate,
    InvertedClusters,
    InvertedLists,
    Projections,
    Routing,
    block_features,
    chunk_means,
    ema_update,
    gate_scores,
    svd_projections,
)
from sparsefinder.predictors.projections import expand_heads, project_keys
from sparsefinder.predictors.routing import on_unit_ball
from sparsefinder.predictors.svd import moment_roots
from training.config import FitConfig
from training.extract import LayerData
from training.fit import fit_clusters
from training.kmeans import POINTS_PER_CLUSTER, kmeans
from training.maps import head_samples, start_maps
from training.objectives import listwise
from training.train_maps import train_layer

ROUTING_DECAY = 0.9  # for tens of updates; the paper's 0.999 is for a whole training run
MOMENT_TOKENS = 4096
GATE_RATE = 1e-2
GATE_INSTANCES = 4  # in a step


def fit_svd(data: LayerData, rank: int, seed: int = 0) -> Projections:
    """Bilinear maps of truncated SVD (`svd_projections`) for the true scores of this layer, from sampled tokens."""
    generator = torch.Generator().manual_seed(seed)
    q = head_samples(data.q, data.mask, MOMENT_TOKENS, generator).double()
    keys = head_samples(data.k, data.mask, MOMENT_TOKENS, generator)[None]
    k = expand_heads(keys, q.shape[0])[0].double()
    mean = k.mean(1)
    centred = k - mean[:, None]
    moments = q.transpose(1, 2) @ q / q.shape[1], centred.transpose(1, 2) @ centred / k.shape[1]
    return svd_projections(*moments, mean, rank, data.scale)


def fit_inverted(data: LayerData, clusters: int, threshold: float, seed: int = 0) -> InvertedLists:
    """k-means on the keys, head by head, in the metric of the queries: `root = E[q qᵀ]^{1/2}`.

    Raises:
        DataError: fewer keys than clusters.
    """
    generator = torch.Generator().manual_seed(seed)
    q = head_samples(data.q, data.mask, MOMENT_TOKENS, generator)
    keys = head_samples(data.k, data.mask, POINTS_PER_CLUSTER * clusters, generator)[None]
    root, inverse = moment_roots(q.transpose(1, 2) @ q / q.shape[1])
    points = (expand_heads(keys, q.shape[0])[0].double() @ root).float()
    found = torch.stack([kmeans(part, clusters, seed) for part in points])
    centroids = (found.double() @ inverse).float()
    return InvertedLists(centroids.contiguous(), data.scale, threshold, root.float().contiguous())


def fit_inverted_clusters(
    projections: Projections, data: LayerData, clusters: int, threshold: float, seed: int = 0
) -> InvertedClusters:
    """k-means on projected keys alone.

    Raises:
        PatternError: bilinear projections.
        DataError: fewer keys than clusters.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = head_samples(data.k, data.mask, POINTS_PER_CLUSTER * clusters, generator)[None]
    low = project_keys(projections, expand_heads(keys, projections.heads))[0]
    return InvertedClusters(projections, torch.stack([kmeans(points, clusters, seed) for points in low]), threshold)


def fit_routing(
    data: LayerData, clusters: int, window: int | None = None, seed: int = 0, decay: float = ROUTING_DECAY
) -> Routing:
    """Online k-means (`ema_update`), one update for each instance in turn; it starts at sampled queries and keys.

    Raises:
        DataError: fewer queries and keys than clusters.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = data.q.shape[1]
    q = head_samples(data.q, data.mask, clusters, generator)
    k = expand_heads(head_samples(data.k, data.mask, clusters, generator)[None], heads)[0]
    points = on_unit_ball(torch.cat([q, k], 1))
    if points.shape[1] < clusters:
        raise DataError(f"routing: expected at least {clusters} tokens for {clusters} clusters, got {points.shape[1]}")
    centroids = points[:, torch.randperm(points.shape[1], generator=generator)[:clusters]]
    for b in torch.randperm(data.q.shape[0], generator=generator).tolist():
        one = slice(b, b + 1)
        centroids = ema_update(centroids, data.q[one], data.k[one], legal_from_mask(data.mask[one]), decay)
    return Routing(centroids.contiguous(), window)


def fit_chunks(
    data: LayerData, chunk: int, rank: int, clusters: int, config: FitConfig, layer: int = 0, top: int = 1
) -> ChunkClusters:
    """The paper's version 1: hinge projections on chunk means against the graph of chunks, then k-means on chunks.

    `RoutedChunks(fitted.projections, fitted.centroids, window, chunk)` is version 2 on the same chunks. `config` gives
    steps, learning rate, margin and seed.

    Raises:
        DataError: no gold pair, a causal layer, or fewer chunks than clusters.
    """
    if data.causal:
        raise DataError("chunks: expected graphs of a bidirectional layer, got a causal one")
    chunks = chunk_data(data, chunk)
    projections = train_layer(chunks, config, "hinge", rank, layer).projections
    fitted, _ = fit_clusters(projections, chunks, clusters, config.seed, top)
    return ChunkClusters(projections, fitted.centroids, top, chunk)


def chunk_data(data: LayerData, chunk: int) -> LayerData:
    """A layer seen chunk by chunk: mean queries and keys, and an edge where any pair of their tokens is gold.

    Instances are padded on the right, as extraction writes them.
    """
    tokens = data.mask.shape[1]
    count = -(-tokens // chunk)
    lengths = data.mask.sum(1)
    means = [data.q.new_zeros(x.shape[0], x.shape[1], count, x.shape[3]) for x in (data.q, data.k)]
    for b, n in enumerate(lengths.tolist()):
        for out, x in zip(means, (data.q, data.k), strict=True):
            if n:
                found = chunk_means(x[b, :, :n], chunk)
                out[b, :, : found.shape[1]] = found
    mask = torch.arange(count)[None, :] * chunk < lengths[:, None]
    edges = _chunk_edges(data.edges, chunk, count)
    return LayerData(means[0], means[1], mask, edges, data.causal, data.alpha, data.scale)


def _chunk_edges(edges: Edges, chunk: int, count: int) -> Edges:
    batch, heads, _, keys = edges.shape
    found = []
    for b in range(batch):
        for h in range(heads):
            flat = head_edges(edges, b, h)
            found.append(torch.unique(flat // keys // chunk * count + flat % keys // chunk))
    sizes = torch.tensor([0] + [part.shape[0] for part in found])
    return Edges(sizes.cumsum(0), torch.cat(found), (batch, heads, count, count))


def fit_gate(
    data: LayerData, block: int, rank: int, steps: int = 200, top: int = 1, layer: int = 0, seed: int = 0
) -> Gate:
    """A gate whose share of key blocks follows the teacher's pooled attention (Gao et al., 2024, section 3).

    The target of a pair of blocks is the greatest probability between their tokens, as a share of its row of blocks;
    the loss is the Kullback–Leibler divergence. The maps start at the SVD of the pooled scores. Use
    `dataclasses.replace(gate, top=…)` or `Gate(gate.maps, block, threshold=…)` for other cuts.

    Raises:
        DataError: a causal layer.
    """
    if data.causal:
        raise DataError("gate: expected graphs of a bidirectional layer, got a causal one")
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + 1009 * layer + rank)
    queries, keys, targets = _gate_data(data, block)
    q, k = (torch.cat(parts, 1)[:, :MOMENT_TOKENS] for parts in (queries, keys))
    one = torch.ones(data.q.shape[1])
    maps = start_maps(q, k, rank, one, form="bilinear", shared=False, start="svd", generator=generator)
    trained = [maps[name] for name in ("q_map", "k_map", "q_bias", "k_bias", "k_linear")]
    optimizer = torch.optim.Adam(trained, lr=GATE_RATE)
    for _ in range(steps):
        drawn = torch.randperm(len(queries), generator=generator)[:GATE_INSTANCES].tolist()
        loss = torch.stack([
            listwise(gate_scores(_gate_maps(maps), queries[b][None], keys[b][None]), targets[b][None])
            for b in drawn
        ]).mean(0)  # fmt: skip
        optimizer.zero_grad()
        loss.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    kept = {name: tensor.detach().clone() for name, tensor in maps.items()}
    return Gate(_gate_maps(kept), block, top)


def _gate_maps(maps: dict[str, Tensor]) -> Projections:
    """Constants of a row of blocks cancel in the share, so they stay behind."""
    q_map, k_map, q_bias, k_bias = (maps[name] for name in ("q_map", "k_map", "q_bias", "k_bias"))
    return Projections(q_map, k_map, q_bias, k_bias, "bilinear", k_linear=maps["k_linear"])


def _gate_data(data: LayerData, block: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Features of the blocks of queries and of keys, and the pooled attention, of every instance."""
    heads = data.q.shape[1]
    queries, keys, targets = [], [], []
    for b, n in enumerate(data.mask.sum(1).tolist()):
        if not n:
            continue
        q, k = data.q[b, :, :n], expand_heads(data.k[b : b + 1, :, :n], heads)[0]
        mass = torch.stack([entmax(data.scale[h] * q[h] @ k[h].T, data.alpha) for h in range(heads)])
        queries.append(block_features(q, block))
        keys.append(block_features(k, block))
        targets.append(_pooled(mass, block))
    return queries, keys, targets


def _pooled(mass: Float[Tensor, "H n m"], block: int) -> Float[Tensor, "H T S"]:
    """The greatest entry of every pair of blocks."""
    rows = torch.stack([part.amax(1) for part in torch.split(mass, block, dim=1)], 1)
    return torch.stack([part.amax(2) for part in torch.split(rows, block, dim=2)], 2)
