"""The training loop: Adam on the maps of one layer, all heads at once, from extracted graphs."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsefinder.edges import edges_matrix
from sparsefinder.entmax import entmax
from sparsefinder.errors import DataError
from sparsefinder.predictors import Projections, tile_means, tile_scores
from sparsefinder.predictors.projections import expand_heads, project_keys, project_queries
from training.config import FitConfig, Objective
from training.extract import LayerData
from training.maps import Form, Maps, as_projections, detached, head_samples, start_maps
from training.objectives import HingeForm, hinge, listwise, logistic, squared_distances, tile_targets

SAMPLES = 4096  # tokens that the start is computed from
CHUNK = 256  # rows whose scores are made at once
LEAST_RATE = 0.05  # of the learning rate, at the end of the cosine

OnStep = Callable[[], None]
HINGE_FORMS: dict[str, HingeForm] = {"hinge": "pair", "hinge-sum": "sum"}
FORMS: dict[str, Form] = {
    "hinge": "metric",
    "hinge-sum": "metric",
    "logistic": "metric",
    "bilinear": "bilinear",
    "listwise": "bilinear",
}


@dataclass(frozen=True, eq=False)
class Trained:
    """Maps of one layer, the tile predictor's weight of log-distance, and the mean loss per head of every step."""

    projections: Projections
    distance_weight: Float[Tensor, " H"] | None
    losses: Float[Tensor, "steps H"]


def train_layer(
    data: LayerData, config: FitConfig, objective: Objective, rank: int, layer: int = 0, on_step: OnStep = lambda: None
) -> Trained:
    """Train the maps of one layer. The same data, configuration and layer give the same maps, bit by bit.

    Raises:
        DataError: there is no gold pair to learn from.
    """
    tiles = _TileData(data, config) if objective == "listwise" and bool(data.mask.any()) else None
    if tiles is None and data.edges.flat.shape[0] == 0:
        raise DataError("fit: expected at least one gold pair to learn from, got none")
    generator = torch.Generator().manual_seed(1_000_003 * (config.seed + 1) + 1009 * layer + rank)
    form = FORMS[objective]
    maps = _start(data, tiles, config, objective, rank, generator)
    trainable = list(maps.values())
    optimizer = torch.optim.Adam(trainable, lr=config.learning_rate)
    losses = []
    for step in range(config.steps):
        rate = 0.5 * (1 + math.cos(math.pi * step / config.steps))
        optimizer.param_groups[0]["lr"] = config.learning_rate * (LEAST_RATE + (1 - LEAST_RATE) * rate)
        projections = as_projections(maps, form)
        if tiles is not None:
            loss = tiles.loss(projections, maps.get("distance_weight"), config, generator)
        else:
            loss = _pair_loss(data, projections, maps["offset"], config, objective, generator)
        optimizer.zero_grad()
        loss.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
        on_step()
    weight = maps.get("distance_weight")
    kept = detached(as_projections(maps, form))
    return Trained(kept, None if weight is None else weight.detach().clone(), torch.stack(losses))


def _start(
    data: LayerData,
    tiles: "_TileData | None",
    config: FitConfig,
    objective: Objective,
    rank: int,
    generator: torch.Generator,
) -> Maps:
    heads = data.q.shape[1]
    q = head_samples(data.q, data.mask, SAMPLES, generator) if tiles is None else tiles.mean_samples()
    k = expand_heads(head_samples(data.k, data.mask, SAMPLES, generator)[None], heads)[0]
    maps = start_maps(
        q, k, rank, data.scale, form=FORMS[objective], shared=config.shared, start="svd", generator=generator
    )  # fmt: skip
    if tiles is not None:
        # Constants of a whole tile cancel in the share, so these would never get a gradient.
        for name in ("q_linear", "offset"):
            maps[name].requires_grad_(False)
        if config.log_distance:
            maps["distance_weight"] = torch.zeros(heads, requires_grad=True)
    return maps


def _pair_loss(
    data: LayerData,
    maps: Projections,
    offset: Tensor,
    config: FitConfig,
    objective: Objective,
    generator: torch.Generator,
) -> Float[Tensor, " H"]:
    heads = data.q.shape[1]
    items, rows = _draw(data, config, generator)
    q, k = data.q[items][:, :, rows], expand_heads(data.k[items], heads)
    legal = _legal_rows(data, items, rows)
    pairs = ((b, h) for b in items.tolist() for h in range(heads))
    gold = torch.stack([edges_matrix(data.edges, b, h)[rows] for b, h in pairs])
    gold = gold.view(items.shape[0], heads, *gold.shape[1:])
    low_q, low_k = project_queries(maps, q), project_keys(maps, k)
    if objective in HINGE_FORMS:
        distances = squared_distances(low_q, low_k)
        return hinge(distances, gold, legal, generator, config.margin, HINGE_FORMS[objective])
    if objective == "logistic":
        return logistic(offset[:, None, None] - squared_distances(low_q, low_k), gold, legal, config.positive_power)
    scores = low_q @ low_k.transpose(-1, -2) + offset[:, None, None]
    if maps.q_linear is not None and maps.k_linear is not None:
        scores = scores + q @ maps.q_linear[:, :, None] + (k @ maps.k_linear[:, :, None]).transpose(-1, -2)
    return logistic(scores, gold, legal, config.positive_power)


def _draw(data: LayerData, config: FitConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Instances and query rows of a step; rows of padding may be among them, they count nowhere."""
    items = torch.randperm(data.q.shape[0], generator=generator)[: config.instances]
    longest = int(data.mask[items].sum(-1).max())
    return items, torch.randperm(longest, generator=generator)[: config.rows].sort().values


def _legal_rows(data: LayerData, items: Tensor, rows: Tensor) -> Bool[Tensor, "B R M"]:
    mask = data.mask[items]
    legal = mask[:, rows, None] & mask[:, None, :]
    return legal & (torch.arange(mask.shape[1])[None, None, :] <= rows[None, :, None]) if data.causal else legal


class _TileData:
    """Tile means and targets of all instances, made once: the tiles of a step are then cheap to fetch."""

    def __init__(self, data: LayerData, config: FitConfig):
        self.data, self.tile_size = data, config.tile_size
        self.lengths = data.mask.sum(-1)
        self.means, self.targets = [], []
        for b, n in enumerate(self.lengths.tolist()):
            q, k = data.q[b, :, :n], expand_heads(data.k[b : b + 1, :, :n], data.q.shape[1])[0]
            self.means.append(tile_means(q, self.tile_size, data.causal))
            heads = [_head_targets(q[h] * data.scale[h], k[h], data, config) for h in range(q.shape[0])]
            self.targets.append(torch.stack(heads))

    def mean_samples(self) -> Float[Tensor, "H P D"]:
        return torch.cat(self.means, 1)[:, :SAMPLES]

    def loss(
        self, maps: Projections, weight: Tensor | None, config: FitConfig, generator: torch.Generator
    ) -> Float[Tensor, " H"]:
        """Instances of a step have one length, since their tiles are computed together."""
        order = torch.randperm(self.lengths.shape[0], generator=generator)
        same = order[self.lengths[order] == self.lengths[order[0]]][: config.instances].tolist()
        n = int(self.lengths[same[0]])
        which = _spread(self.means[same[0]].shape[1], config.tiles, generator)
        means = torch.stack([self.means[b][:, which] for b in same])
        target = torch.stack([self.targets[b][:, which] for b in same])
        k = torch.stack([self.data.k[b, :, :n] for b in same])
        return listwise(tile_scores(maps, weight, means, k, self.tile_size, self.data.causal, which), target)


def _spread(tiles: int, wanted: int | None, generator: torch.Generator) -> Int[Tensor, " T"]:
    """At most so many tiles (None = all), at equal distances from a random first one."""
    stride = 1 if wanted is None else -(-tiles // wanted)
    first = int(torch.randint(stride, (1,), generator=generator)) if stride > 1 else 0
    return torch.arange(first, tiles, stride)


def _head_targets(
    q: Float[Tensor, "n D"], k: Float[Tensor, "n D"], data: LayerData, config: FitConfig
) -> Float[Tensor, "T n"]:
    """What every tile of one head should share out, a few tiles' rows at a time (they then stay in cache)."""
    n, size = q.shape[0], config.tile_size
    found, rows = torch.zeros(-(-n // size), n), max(1, CHUNK // size) * size
    for start in range(0, n, rows):
        end = min(start + rows, n)
        keys = end if data.causal else n
        mask = torch.arange(keys)[None, :] <= torch.arange(start, end)[:, None] if data.causal else None
        part = tile_targets(entmax(q[start:end] @ k[:keys].T, data.alpha, mask), size, config.mass_power)
        found[start // size : start // size + part.shape[0], :keys] = part
    return found
