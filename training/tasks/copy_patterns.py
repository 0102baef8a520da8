"""Patterns that are trained on the copying task, at two densities, and what learned ones find under a teacher."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsefinder.edges import gold_edges
from sparsefinder.entmax import entmax
from sparsefinder.patterns.algebra import materialize
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.text import parse_pattern
from sparsefinder.predictors import Predictor, RowBudget
from training.config import FitConfig, Objective
from training.extract import LayerData
from training.tasks.copy_model import CopyModel, Pairs, ProbabilityMap, by_masks, pattern_masks
from training.tasks.copying import Copying, copy_accuracy, copy_batch, copy_loss, direct_recall, reached_share
from training.tasks.together import OnStep, Schedule, train_together
from training.train_maps import train_layer

DENSE = "~window(0)"
SCHEDULE = Schedule(400, 1e-2)
ALPHA = 1.5

# One query reads about 1/8 (thin) or 1/4 (wide) of the 126 tokens. The stride 8 does not divide the distance 63 that
# has to be bridged; 7 does, so that its strided pattern holds the answer by luck.
THIN: dict[str, str] = {
    "strided, sequential": "sparse_transformer('strided', 8)",
    "strided, multihead": "sparse_transformer('strided', 8, heads='multihead')",
    "fixed, sequential": "sparse_transformer('fixed', 16, 2)",
    "fixed, multihead": "sparse_transformer('fixed', 16, 2, heads='multihead')",
    "star": "star_transformer(7)",
    "random": "random(16)",
    "BigBird": "bigbird(1, 4, 11, 1)",
    "window": "window(17)",
    "strided 7 (divides 63), multihead": "sparse_transformer('strided', 7, heads='multihead')",
}
WIDE: dict[str, str] = {
    "strided, union": "sparse_transformer('strided', 8, heads='union')",
    "fixed, union": "sparse_transformer('fixed', 16, 2, heads='union')",
    "star": "star_transformer(15)",
    "random": "random(32)",
    "BigBird": "bigbird(1, 8, 23, 1)",
    "window": "window(33)",
}


@dataclass(frozen=True)
class CopySize:
    """The models of one run, and how they are trained.

    entmax_steps: a dense teacher learns under softmax, and then under 1.5-entmax for so many steps (it is ten times as
    slow on a CPU, and finds its way from there as the shipped teacher does).
    """

    layers: int = 1
    heads: int = 4
    width: int = 64
    batch: int = 8
    test_texts: int = 32
    schedule: Schedule = SCHEDULE
    entmax_steps: int = 80


def softmax_map(z: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed pairs, zeros where there is none."""
    return entmax(z, 1.0, allowed)


def entmax_map(z: Tensor, allowed: Tensor) -> Tensor:
    """1.5-entmax over the allowed pairs."""
    return entmax(z, ALPHA, allowed)


def train_copying(
    task: Copying,
    texts: Sequence[str],
    size: CopySize,
    apply: ProbabilityMap = softmax_map,
    on_step: OnStep = lambda done, total: None,
) -> tuple[CopyModel, Bool[Tensor, "G L H n n"]]:
    """One model for every pattern (as text), trained together; and what their layers may read."""
    masks = pattern_masks([parse_pattern(text) for text in texts], size.layers, size.heads, task.tokens)
    seed = size.schedule.seed
    model = CopyModel(len(texts), size.layers, size.heads, size.width, task.tokens, task.vocabulary, seed)

    def loss_of(generator: torch.Generator) -> Tensor:
        ids, targets = copy_batch(task, size.batch, generator)
        return copy_loss(model(ids, by_masks(masks), apply), targets)

    train_together(model, size.schedule, loss_of, on_step)
    return model, masks


def train_teacher(
    task: Copying, size: CopySize, on_step: OnStep = lambda done, total: None
) -> tuple[CopyModel, Bool[Tensor, "1 L H n n"]]:
    """A dense model under 1.5-entmax, whose graphs are sparse, and its pairs (all of them)."""
    steps, more = size.schedule.steps, size.entmax_steps
    model, masks = train_copying(task, [DENSE], size, softmax_map, lambda done, total: on_step(done, steps + more))

    def loss_of(generator: torch.Generator) -> Tensor:
        ids, targets = copy_batch(task, size.batch, generator)
        return copy_loss(model(ids, by_masks(masks), entmax_map), targets)

    slower = replace(size.schedule, steps=more, rate=size.schedule.rate / 4, seed=size.schedule.seed + 1)
    train_together(model, slower, loss_of, lambda done, total: on_step(steps + done, steps + more))
    return model, masks


@torch.no_grad()
def copy_rows(
    task: Copying, names: Sequence[str], model: CopyModel, masks: Tensor, size: CopySize, apply: ProbabilityMap
) -> dict[str, dict[str, float]]:
    """Density, gold recall, gold reach and accuracy of every trained model on new texts."""
    ids, targets = unseen_texts(task, size)
    right = copy_accuracy(model(ids, by_masks(masks), apply), targets).tolist()
    return {
        name: {"density": float(own.float().mean()), **known_figures(task, own), "accuracy": accuracy}
        for name, own, accuracy in zip(names, masks, right, strict=True)
    }


def known_figures(task: Copying, masks: Bool[Tensor, "L H n n"]) -> dict[str, float]:
    """What the pattern alone decides, and the accuracy that no model over it can beat but by luck."""
    reach = reached_share(task, masks)
    ceiling = reach + (1 - reach) / task.symbols
    return {"gold_recall": direct_recall(task, masks), "gold_reach": reach, "ceiling": ceiling}


def unseen_texts(task: Copying, size: CopySize) -> tuple[Int[Tensor, "B n"], Int[Tensor, "B n"]]:
    """Texts that training, which draws from other seeds, has not seen."""
    return copy_batch(task, size.test_texts, torch.Generator().manual_seed(1_000_003 + size.schedule.seed))


@torch.no_grad()
def seen_layers(
    model: CopyModel, ids: Int[Tensor, "B n"], pairs: Pairs, apply: ProbabilityMap
) -> list[tuple[Float[Tensor, "B H n d"], Float[Tensor, "B H n d"]]]:
    """q and k of every layer of the first model."""
    found = []

    def note(layer: int, q: Tensor, k: Tensor) -> Tensor:
        found.append((q[0].contiguous(), k[0].contiguous()))
        return pairs(layer, q, k)

    model(ids, note, apply)
    return found


def fit_predictors(
    task: Copying, model: CopyModel, size: CopySize, objective: Objective, rank: int, density: float, steps: int = 200
) -> tuple[RowBudget, ...]:
    """A predictor for each layer of a dense entmax teacher, from its graphs of 16 texts."""
    generator = torch.Generator().manual_seed(2_000_003 + size.schedule.seed)
    ids, _ = copy_batch(task, 16, generator)
    config = FitConfig(objective=objective, rank=rank, steps=steps, kind="budget")
    found = []
    for layer, (q, k) in enumerate(seen_layers(model, ids, by_masks(_all(task, size)), entmax_map)):
        legal = legal_full(q.shape[0], task.tokens, task.tokens)
        scale = torch.full((size.heads,), q.shape[-1] ** -0.5)
        edges = gold_edges(q, k, legal, ALPHA)
        data = LayerData(q, k, legal.key_real, edges, causal=False, alpha=ALPHA, scale=scale)
        found.append(RowBudget(train_layer(data, config, objective, rank, layer).projections, density))
    return tuple(found)


def by_predictors(predictors: Sequence[Predictor], tokens: int, seen: list[Tensor]) -> Pairs:
    """Pairs that each layer's predictor chooses from q and k; what was chosen is appended to `seen`."""

    def pairs(layer: int, q: Tensor, k: Tensor) -> Tensor:
        legal = legal_full(q.shape[1], tokens, tokens)
        pattern = predictors[layer].pattern(q[0], k[0], legal)  # type: ignore[union-attr]
        chosen = [[materialize(pattern, legal, b, h) for h in range(q.shape[2])] for b in range(q.shape[1])]
        seen.append(torch.stack([torch.stack(heads) for heads in chosen]))
        return seen[-1][None]

    return pairs


def support_pairs(seen: list[Tensor]) -> Pairs:
    """All pairs; the support of the teacher's entmax is appended to `seen`."""

    def pairs(layer: int, q: Tensor, k: Tensor) -> Tensor:
        seen.append(entmax(q[0] @ k[0].transpose(-1, -2) * q.shape[-1] ** -0.5, ALPHA) > 0)
        return torch.ones(1, dtype=torch.bool)

    return pairs


@torch.no_grad()
def under_teacher(
    task: Copying, model: CopyModel, size: CopySize, choose: Callable[[list[Tensor]], Pairs]
) -> dict[str, float]:
    """A trained dense teacher with its pairs replaced: density, gold recall, reach, accuracy (means over texts)."""
    ids, targets = unseen_texts(task, size)
    seen: list[Tensor] = []
    logits = model(ids, choose(seen), entmax_map)
    layers = torch.stack(seen, 1)  # [B, L, H, n, n]
    known = [known_figures(task, own) for own in layers]
    means = {name: sum(row[name] for row in known) / len(known) for name in known[0]}
    return {"density": float(layers.float().mean()), **means, "accuracy": float(copy_accuracy(logits, targets)[0])}


def static_pairs(masks: Bool[Tensor, "L H n n"], texts: int) -> Callable[[list[Tensor]], Pairs]:
    """A fixed pattern in the form that `under_teacher` takes."""

    def choose(seen: list[Tensor]) -> Pairs:
        def pairs(layer: int, q: Tensor, k: Tensor) -> Tensor:
            seen.append(masks[layer].expand(texts, *masks.shape[1:]))
            return masks[layer][None, None]

        return pairs

    return choose


def _all(task: Copying, size: CopySize) -> Bool[Tensor, "1 L H n n"]:
    return torch.ones(1, size.layers, size.heads, task.tokens, task.tokens, dtype=torch.bool)
