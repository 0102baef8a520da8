"""Softmax → entmax: distil a model's own hidden states and embedding into its entmax twin.

The student starts as the original with its softmax replaced by entmax on scaled scores, and learns to give the
original's hidden states back. Each head learns its own scale, and all scales are moved together along the gradient of
the mean density so that it stays at its target: density goes to the heads where it lowers the loss most.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import parametrize

from sparsefinder.artifact import Artifact
from sparsefinder.delta import apply_delta, make_delta
from sparsefinder.entmax import support
from sparsefinder.errors import ConfigError, DataError
from sparsefinder.hf import Attached, LayerCall, attach
from sparsefinder.teacher import Teacher, batch, embed, load_teacher, pool, require_encoder
from training.config import FORMS, LEARNING_RATES, FinetuneConfig
from training.masking import Ids, mask_texts

# Density falls about like scale^-1.45 on MiniLM (docs/decisions.md); a third of the correction a step keeps it calm.
SCALE_GAIN = 0.3
SCALE_LIMIT = 0.06


@dataclass(frozen=True)
class Student:
    """The twin in training: its teacher record, its attention, and the parameters before the first step."""

    teacher: Teacher
    attached: Attached
    before: Mapping[str, Tensor] = field(repr=False)


@dataclass(frozen=True)
class Quality:
    """Held-out likeness of two models: mean cosine, correlation of off-diagonal similarities, entmax density."""

    cosine: float
    correlation: float
    density: float
    texts: int


def make_student(config: FinetuneConfig, start: Artifact | None = None) -> Student:
    """Load the model once more, put entmax into it and choose what may change; `start` = go on from that artifact.

    Raises:
        ArtifactError: the delta to start from does not fit this model.
        ConfigError: an unknown form, or a rank below 1.
        IncompatibleModelError: the model does not route its attention (see `sparsefinder.hf.attach`).
    """
    if config.form not in FORMS or config.rank < 1:
        raise ConfigError(f"form: expected one of {', '.join(FORMS)} and rank >= 1, got {config.form!r}, {config.rank}")
    teacher = load_teacher(config.teacher)
    require_encoder(teacher)
    model = teacher.model
    scale = torch.full((model.config.num_hidden_layers, model.config.num_attention_heads), config.start_scale)
    if start is not None:
        scale = torch.tensor(start.card.head_scale)
    attached = attach(model, alpha=config.alpha, head_scale=scale)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    if start is not None:
        apply_delta(model, start.delta)
    _choose_parameters(model, config)
    return Student(teacher, attached, before)


class _LowRank(torch.nn.Module):
    """LoRA (Hu et al., 2021): `W + b a`, `b` zero at first."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator):
        super().__init__()
        rows, columns = weight.shape
        self.a = torch.nn.Parameter(torch.randn(rank, columns, generator=generator) / math.sqrt(columns))
        self.b = torch.nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def _choose_parameters(model: torch.nn.Module, config: FinetuneConfig) -> None:
    generator = torch.Generator().manual_seed(config.seed)
    for name, weight in model.named_parameters():
        inside = ".layer" in name and (config.form == "all" or (config.form == "attention" and "attention" in name))
        weight.requires_grad_(inside)
    if config.form == "lora":
        linears = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".layer" in name]
        for linear in linears:
            parametrize.register_parametrization(linear, "weight", _LowRank(linear.weight, config.rank, generator))
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ConfigError(f"form: {config.form!r} finds no parameter to train in {type(model).__name__}")


def _merge(model: torch.nn.Module) -> dict[str, Tensor]:
    """Fold LoRA factors into their weights, then give every parameter under its own name."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    return dict(model.named_parameters())


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


def _distance(student: Student, original: Teacher, items: Sequence[Sequence[int]], config: FinetuneConfig) -> Tensor:
    """Relative squared error of the hidden states, averaged over layers, plus one minus the embeddings' cosine."""
    tokens, mask = batch(original, items)
    inputs = {"input_ids": tokens, "attention_mask": mask.long(), "output_hidden_states": True}
    with torch.no_grad():
        expected = original.model(**inputs)
    came = student.teacher.model(**inputs)
    pairs = list(zip(came.hidden_states[1:], expected.hidden_states[1:], strict=True))
    hidden = torch.stack([((a - b)[mask] ** 2).mean() / b[mask].var() for a, b in pairs]).mean()
    ours, theirs = (pool(original, output.last_hidden_state, mask) for output in (came, expected))
    return hidden + config.embedding_weight * (1 - torch.cosine_similarity(ours, theirs).mean())


def _mlm_loss(student: Student, items: Ids, share: float, generator: torch.Generator) -> Tensor:
    """Cross-entropy of masked tokens through the model's own head."""
    masked = mask_texts(student.teacher, items, share, generator)
    logits = student.teacher.mlm(input_ids=masked.tokens, attention_mask=masked.real.long()).logits
    return torch.nn.functional.cross_entropy(logits[masked.hidden], masked.words)


@torch.no_grad()
def _hold_density(log_scale: Float[Tensor, "L H"], shares: Float[Tensor, "L H"], target: float) -> None:
    """Move every head's log scale against its own share of the excess.

    A head of density d loses about `1.45 d` of it per unit of log scale, so this runs along the gradient of the mean
    density, as a Lagrange multiplier would: heads that are sparse anyway are left alone.
    """
    wanted = SCALE_GAIN * math.log(float(shares.mean()) / target)
    step = wanted * shares * (shares.sum() / shares.square().sum())
    log_scale += step.clamp(-SCALE_LIMIT, SCALE_LIMIT).to(log_scale)


class _Density:
    """An observer that measures the share of non-zero weights per layer and head: of a batch's first item, or of all.

    A batch's items count alike.
    """

    def __init__(self, every_item: bool = False) -> None:
        self.every_item = every_item
        self.layers: list[Tensor] = []

    def __call__(self, call: LayerCall) -> None:
        items = range(call.q.shape[0] if self.every_item else 1)
        self.layers.append(torch.stack([self._item(call, b) for b in items]).mean(0))

    def _item(self, call: LayerCall, b: int) -> Float[Tensor, " H"]:
        real = call.legal.key_real[b]
        q, k, scale = call.q[b].detach()[:, real], call.k[b].detach()[:, real], call.scale.detach()
        scores = scale[:, None, None] * (q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).transpose(-1, -2))
        return support(scores, call.alpha).float().mean((-2, -1))

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
) -> tuple[Student, dict[str, Tensor]]:
    """Train a student; returns the original plus the delta, as it will be read back, and the delta itself.

    `on_step` is told the step, the loss and the smoothed density. Dropout is off: the target is a function, not data.
    """
    original, student = load_teacher(config.teacher), make_student(config, start)
    weights = [w for w in student.teacher.model.parameters() if w.requires_grad]
    log_scale = student.attached.head_scale.log().requires_grad_()
    optimizer = _optimizer(config, weights, log_scale)
    rates = [group["lr"] for group in optimizer.param_groups]
    stream, generator = batches(sources, config.batch_size, config.seed), torch.Generator().manual_seed(config.seed)
    smoothed: Tensor | None = None
    for step in range(config.steps):
        items, observer = next(stream), _Density()
        student.attached.head_scale = log_scale.exp()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * _rate(step, config)
        with student.attached.using("dense", observe=observer):
            loss = _distance(student, original, items, config)
        if student.teacher.mlm is not None:
            with student.attached.using("dense"):
                loss = loss + config.mlm_weight * _mlm_loss(student, items, config.mlm_share, generator)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        smoothed = observer.shares() if smoothed is None else 0.85 * smoothed + 0.15 * observer.shares()
        _hold_density(log_scale, smoothed, config.density)
        on_step(step, float(loss.detach()), float(smoothed.mean()))
    student.attached.head_scale = log_scale.detach().exp()
    delta = make_delta(student.before, _merge(student.teacher.model), config.rank)
    student.teacher.model.load_state_dict(dict(student.before), strict=False)
    apply_delta(student.teacher.model, delta)
    return student, delta


def _optimizer(config: FinetuneConfig, weights: list[torch.nn.Parameter], log_scale: Tensor) -> torch.optim.Optimizer:
    rate = LEARNING_RATES[config.form] if config.learning_rate is None else config.learning_rate
    groups = [{"params": weights, "lr": rate}, {"params": [log_scale], "lr": config.scale_rate}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)


def _rate(step: int, config: FinetuneConfig) -> float:
    """A linear warm-up, then half a cosine down to a hundredth."""
    decay = 0.5 * (1 + math.cos(math.pi * step / config.steps))
    return min(1.0, (step + 1) / config.warmup) * max(decay, 0.01)


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
        density = _Density(every_item=True)
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
