"""Softmax → entmax: distil a model into its entmax twin, an encoder by its hidden states, a causal one by its words.

The student starts as the original with its softmax replaced by entmax on scaled scores, and learns to give back what
the original gives. Each head learns its own scale; where a density is asked for, all scales are moved together along
the gradient of the mean density so that it stays there: density goes to the heads where it lowers the loss most.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sparsefinder.artifact import Artifact
from sparsefinder.delta import apply_delta, make_delta
from sparsefinder.edges import head_probabilities
from sparsefinder.errors import ConfigError, DataError
from sparsefinder.hf import Attached, LayerCall, attach
from sparsefinder.teacher import Teacher, batch, embed, load_teacher, require_causal, require_encoder
from training.config import LEARNING_RATES, FinetuneConfig
from training.distances import Student, distance, divergence, masked_loss
from training.finetune_state import State
from training.head_scale import fit_head_scale
from training.low_rank import add_low_rank, fold_low_rank
from training.masking import Ids

# Density falls about like scale^-1.45 on MiniLM (docs/decisions.md); a third of the correction a step keeps it calm.
SCALE_GAIN = 0.3
SCALE_LIMIT = 0.06
SCALE_TEXTS = 2  # chunks that each head's first scale is fitted on
INSIDE = re.compile(r"(^|\.)layers?\.\d")  # of a layer, by the name of a parameter or module
ROWS_APART = 16  # of a long causal text every so many rows are asked for their density


@dataclass(frozen=True)
class Quality:
    """Held-out likeness of two models: mean cosine, correlation of off-diagonal similarities, entmax density."""

    cosine: float
    correlation: float
    density: float
    texts: int


@dataclass(frozen=True)
class CausalQuality:
    """Held-out likeness of two causal models: both perplexities, nats from one to the other, entmax density."""

    perplexity: float
    original_perplexity: float
    divergence: float
    density: float
    texts: int


def make_student(config: FinetuneConfig, start: Artifact | None = None, texts: Ids = ()) -> Student:
    """Load the model once more, put entmax into it and choose what may change; `start` = go on from that artifact.

    texts: what each head's own scale is fitted on, where it is to have one; none = a kept one follows.

    Raises:
        ArtifactError: the delta to start from does not fit this model.
        ConfigError: the form finds nothing to train in this model.
        IncompatibleModelError: neither encoder nor causal language model, or a model that does not route its attention
            (see `sparsefinder.hf.attach`).
    """
    teacher = load_teacher(config.teacher)
    (require_causal if teacher.causal else require_encoder)(teacher)
    model = teacher.model
    if start is not None:
        scale = torch.tensor(start.card.head_scale)
    elif config.start_scale is None and texts:
        scale = fit_head_scale(teacher, texts, config.alpha)
    else:
        shape = (model.config.num_hidden_layers, model.config.num_attention_heads)
        scale = torch.full(shape, config.start_scale or 1.0)
    attached = attach(model, alpha=config.alpha, head_scale=scale)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    if start is not None:
        apply_delta(model, start.delta)
    _choose_parameters(model, config)
    return Student(teacher, attached, before)


def _choose_parameters(model: torch.nn.Module, config: FinetuneConfig) -> None:
    for name, weight in model.named_parameters():
        attention = "attention" in name or "attn" in name
        chosen = config.form == "all" or (config.form == "attention" and attention)
        weight.requires_grad_(chosen and INSIDE.search(name) is not None)
    if config.form == "lora":
        linears = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and INSIDE.search(name)]
        add_low_rank(linears, config.rank, config.seed)
    if config.form != "scales" and not any(weight.requires_grad for weight in model.parameters()):
        raise ConfigError(f"form: {config.form!r} finds no parameter to train in {type(model).__name__}")


def batches(sources: Sequence[Ids], size: int, seed: int) -> Iterator[list[Sequence[int]]]:
    """Endless batches, their items from the sources in turn; each source is shuffled anew when it is used up.

    Raises:
        DataError: a source without an item.
    """
    for number, source in enumerate(sources):
        if not source:
            raise DataError(f"text source {number}: expected at least one chunk, got none")

    def endless(source: Ids, generator: torch.Generator) -> Iterator[Sequence[int]]:
        while True:
            for i in torch.randperm(len(source), generator=generator).tolist():
                yield source[i]

    streams = [endless(s, torch.Generator().manual_seed(seed + n)) for n, s in enumerate(sources)]
    items = (next(stream) for stream in itertools.cycle(streams))
    while True:
        yield list(itertools.islice(items, size))


@torch.no_grad()
def _hold_density(log_scale: Float[Tensor, "L H"], shares: Float[Tensor, "L H"], target: float) -> None:
    """Move every head's log scale against its own share of the excess.

    A head of density d loses about `1.45 d` of it per unit of log scale, so this runs along the gradient of the mean
    density, as a Lagrange multiplier would: heads that are sparse anyway are left alone.
    """
    wanted = SCALE_GAIN * math.log(float(shares.mean()) / target)
    step = wanted * shares * (shares.sum() / shares.square().sum())
    log_scale += step.clamp(-SCALE_LIMIT, SCALE_LIMIT).to(log_scale)


class Density:
    """An observer that measures the share of non-zero weights per layer and head: of a batch's first item, or of all.

    A batch's items count alike. apart: of a causal layer only every so many rows are looked at.
    """

    def __init__(self, every_item: bool = False, apart: int = 1) -> None:
        self.every_item, self.apart = every_item, apart
        self.layers: list[Tensor] = []

    def __call__(self, call: LayerCall) -> None:
        items = range(call.q.shape[0] if self.every_item else 1)
        self.layers.append(torch.stack([self._item(call, b) for b in items]).mean(0))

    def _item(self, call: LayerCall, b: int) -> Float[Tensor, " H"]:
        step = self.apart if call.legal.causal else 1
        real = call.legal.query_real[b].nonzero()[:, 0][step // 2 :: step]
        keys = torch.arange(call.k.shape[2], device=call.k.device)
        legal = call.legal.allows(b, real[:, None], keys[None, :])
        q, k, scale = call.q[b].detach()[:, real], call.k[b].detach(), call.scale.detach()
        group, heads = q.shape[0] // k.shape[0], range(q.shape[0])
        kept = [head_probabilities(q[h], k[h // group], scale[h], None, legal, call.alpha) > 0 for h in heads]
        return torch.stack(kept).sum((-2, -1)) / legal.sum()

    def shares(self) -> Float[Tensor, "L H"]:
        return torch.stack(self.layers).cpu()

    def mean(self) -> float:
        return float(self.shares().mean())


def finetune(
    config: FinetuneConfig,
    sources: Sequence[Ids],
    *,
    start: Artifact | None = None,
    on_step: Callable[[int, float, float], None] = lambda step, loss, density: None,
    state: State | None = None,
    until: int | None = None,
) -> tuple[Student, dict[str, Tensor]]:
    """Train a student; returns the original plus the delta, as it will be read back, and the delta itself.

    `on_step` is told the step, the loss and the smoothed density. Dropout is off: the target is a function, not data.
    state: where the training is kept while it runs, and goes on from. until: stop after so many of the steps.
    """
    fitting = () if state is not None and state.kept() else _first(sources)
    original, student = load_teacher(config.teacher), make_student(config, start, fitting)
    weights = [w for w in student.teacher.model.parameters() if w.requires_grad]
    log_scale = student.attached.head_scale.log().requires_grad_()
    optimizer = _optimizer(config, weights, log_scale)
    rates = [group["lr"] for group in optimizer.param_groups]
    smoothed = torch.zeros_like(log_scale, requires_grad=False)
    first = state.read(optimizer, smoothed) if state else 0
    stream = itertools.islice(batches(sources, config.batch_size, config.seed), first, None)
    for step, items in zip(range(first, until or config.steps), stream, strict=False):
        student.attached.head_scale = log_scale.exp()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * _rate(step, config)
        loss, shares = _step_loss(student, original, items, config, step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        smoothed.copy_(shares if step == 0 else 0.85 * smoothed + 0.15 * shares.to(smoothed))
        if config.density is not None:
            _hold_density(log_scale, smoothed, config.density)
        if state is not None:
            state.write(optimizer, smoothed, step + 1)
        on_step(step, float(loss.detach()), float(smoothed.mean()))
    student.attached.head_scale = log_scale.detach().exp()
    fold_low_rank(student.teacher.model)
    delta = make_delta(student.before, dict(student.teacher.model.named_parameters()), config.rank)
    student.teacher.model.load_state_dict(dict(student.before), strict=False)
    apply_delta(student.teacher.model, delta)
    return student, delta


def _first(sources: Sequence[Ids]) -> Ids:
    """A few chunks from the middle of every source, for the first scales."""
    return [item for source in sources for item in source[len(source) // 2 :][:SCALE_TEXTS]]


def _step_loss(
    student: Student, original: Teacher, items: Ids, config: FinetuneConfig, step: int
) -> tuple[Tensor, Float[Tensor, "L H"]]:
    """The loss of a batch, and the densities of its heads."""
    observer = Density(apart=ROWS_APART)
    generator = torch.Generator().manual_seed(config.seed + step)
    with student.attached.using("dense", observe=observer):
        loss = distance(student, original, items, config, step, generator)
    if student.teacher.mlm is not None:
        with student.attached.using("dense"):
            loss = loss + config.mlm_weight * masked_loss(student, items, config.mlm_share, generator)
    return loss, observer.shares()


def _optimizer(config: FinetuneConfig, weights: list[torch.nn.Parameter], log_scale: Tensor) -> torch.optim.Optimizer:
    rate = LEARNING_RATES[config.form] if config.learning_rate is None else config.learning_rate
    groups = [{"params": weights, "lr": rate}, {"params": [log_scale], "lr": config.scale_rate}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)


def _rate(step: int, config: FinetuneConfig) -> float:
    """A linear warm-up, then half a cosine down to a hundredth."""
    decay = 0.5 * (1 + math.cos(math.pi * step / config.steps))
    return min(1.0, (step + 1) / config.warmup) * max(decay, 0.01)


@torch.no_grad()
def measure_causal(original: Teacher, student: Teacher, attached: Attached, items: Ids) -> CausalQuality:
    """Compare a causal student with its original on held-out token ids, one at a time.

    Raises:
        DataError: no item, or one of fewer than two tokens.
    """
    if min(map(len, items), default=0) < 2:
        raise DataError("evaluation text: expected chunks of at least 2 tokens")
    found: list[tuple[float, ...]] = []
    for item in items:
        tokens, density = batch(original, [item])[0], Density(every_item=True, apart=ROWS_APART)
        theirs = original.lm(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        with attached.using("dense", observe=density):
            ours = student.lm(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        losses = (torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]) for logits in (ours, theirs))
        found.append((*map(float, losses), float(divergence(ours, theirs).mean()), density.mean()))
    loss, loss_before, apart, share = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
    return CausalQuality(math.exp(loss), math.exp(loss_before), apart, share, len(items))


@torch.no_grad()
def measure(original: Teacher, student: Teacher, attached: Attached, items: Ids, size: int = 8) -> Quality:
    """Compare a student with its original on held-out token ids.

    Raises:
        DataError: fewer than three items (a correlation of pairs needs them).
    """
    if len(items) < 3:
        raise DataError(f"evaluation text: expected at least 3 chunks, got {len(items)}")
    densities, ours, theirs = [], [], []
    for start in range(0, len(items), size):
        tokens, mask = batch(original, items[start : start + size])
        theirs.append(embed(original, tokens, mask))
        density = Density(every_item=True)
        with attached.using("dense", observe=density):
            ours.append(embed(student, tokens, mask))
        densities += [density.mean()] * len(tokens)
    a, b = torch.cat(ours), torch.cat(theirs)
    return Quality(
        float(torch.cosine_similarity(a, b).mean()), correlation(a, b), sum(densities) / len(items), len(items)
    )


def correlation(a: Float[Tensor, "n d"], b: Float[Tensor, "n d"]) -> float:
    """Pearson correlation of the off-diagonal pairwise cosine similarities of two sets of vectors."""
    a, b = torch.nn.functional.normalize(a, dim=-1), torch.nn.functional.normalize(b, dim=-1)
    above = torch.triu(torch.ones(len(a), len(a), dtype=torch.bool), diagonal=1)
    return float(torch.corrcoef(torch.stack([(a @ a.T)[above], (b @ b.T)[above]]))[0, 1])
