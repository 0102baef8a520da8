"""What is trained on the memories of Wang & E (2024): one function for each of the paper's claims.

Each gives rows of plain numbers; `error` is the mean squared error over the target's variance on unseen sequences: 0 is
perfect, 1 is what the best constant gets.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from training.tasks.kernels import best_error, point_kernel
from training.tasks.memories import (
    Alphabet,
    adaptive_read,
    boolean_alphabet,
    convolved,
    decaying_kernel,
    error_share,
    fixed_memories,
    jump_alphabet,
    nested_memories,
    parallel_memories,
)
from training.tasks.memory_model import Bias, MemoryModel, Product, Setting, Size
from training.tasks.together import OnStep, Schedule, train_together

Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]  # (sequences) -> inputs `[B, n, d]`, outputs `[B, n]`
Row = dict[str, Any]

BIASES: tuple[Bias, ...] = get_args(Bias)
PRODUCTS: tuple[Product, ...] = get_args(Product)
SCHEDULE = Schedule(800, 1e-2)
UNSEEN = 256  # sequences that errors are measured on
KERNELS = (("exponential", 0.1), ("exponential", 0.5), ("polynomial", 0.8), ("polynomial", 1.5))


@dataclass(frozen=True)
class Plan:
    """How long every study trains, and how many seeds of each setting."""

    schedule: Schedule = SCHEDULE
    batch: int = 16
    tokens: int = 24
    seeds: int = 2


def of_tokens(alphabet: Alphabet, y: Callable[[Tensor, Alphabet], Tensor], tokens: int) -> Draw:
    """Random tokens as one-hot vectors, and the output `y(tokens, alphabet)`."""

    def draw(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = torch.randint(alphabet.size, (batch, tokens), generator=generator)
        return torch.nn.functional.one_hot(ids, alphabet.size).float(), y(ids, alphabet)

    return draw


def of_signs(y: Callable[[Tensor], Tensor], tokens: int) -> Draw:
    """Random signs ±1 as inputs of one dimension."""

    def draw(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randint(2, (batch, tokens), generator=generator).float() * 2 - 1
        return x[..., None], y(x)

    return draw


def train_memories(
    draw: Draw, settings: Sequence[Setting], size: Size, plan: Plan, on_step: OnStep = lambda done, total: None
) -> list[Row]:
    """Train every setting with every seed, those of one form together; one row for each, in the order given.

    error: the least over seeds (what can be learned); errors: of every seed.
    """
    forms = list(dict.fromkeys((s.product, s.normalised) for s in settings))
    found: dict[Setting, list[float]] = {}
    for number, form in enumerate(forms):
        own = [s for s in dict.fromkeys(settings) if (s.product, s.normalised) == form]
        repeated = [s for s in own for _ in range(plan.seeds)]
        errors = _train(draw, repeated, size, plan, _shifted(on_step, number, len(forms)))
        found |= dict(zip(own, torch.tensor(errors).view(len(own), plan.seeds).tolist(), strict=True))
    return [{**_described(s, size), "error": min(found[s]), "errors": found[s]} for s in settings]


def _train(draw: Draw, settings: Sequence[Setting], size: Size, plan: Plan, on_step: OnStep) -> list[float]:
    model = MemoryModel(settings, size, plan.schedule.seed)

    def loss_of(generator: torch.Generator) -> Float[Tensor, " G"]:
        x, y = draw(plan.batch, generator)
        return error_share(model(x), y)

    train_together(model, plan.schedule, loss_of, on_step)
    with torch.no_grad():
        x, y = draw(UNSEEN, torch.Generator().manual_seed(1_000_003 + plan.schedule.seed))
        return error_share(model(x), y).tolist()


def fixed_study(plan: Plan, on_step: OnStep) -> list[Row]:
    """One layer on `y_t = x_{t−1} x_{t−3}`: every form, both biases (section 4: is a dot product needed?)."""
    draw = of_signs(lambda x: fixed_memories(x, (1, 3)), plan.tokens)
    return train_memories(draw, _forms(("none", "dot")), Size(layers=1, inputs=1), plan, on_step)


def adaptive_study(plan: Plan, on_step: OnStep, product: Product, longest: int) -> list[Row]:
    """One attention layer and a linear readout on `y_t = x_{t − g(x_t)}` (propositions 5.2 and 5.3)."""
    alphabet = jump_alphabet(longest)
    draw = of_tokens(alphabet, adaptive_read, plan.tokens)
    size = Size(layers=1, inputs=alphabet.size, readout=0)
    rows = train_memories(draw, _forms((product,)), size, plan, on_step)
    return [{"longest_jump": longest, **row} for row in rows]


def nested_study(plan: Plan, on_step: OnStep, longest: int, depth: int, layers: int) -> list[Row]:
    """Nesting `depth` with 4 heads a layer (theorem 5.4); `longest` 0 is the paper's Boolean example."""
    alphabet = jump_alphabet(longest) if longest else boolean_alphabet()
    draw = of_tokens(alphabet, lambda ids, a: nested_memories(ids, a, depth), plan.tokens)
    settings = [s for s in _forms(("none", "dot")) if s.normalised]
    rows = train_memories(draw, settings, Size(layers=layers, heads=4, inputs=alphabet.size), plan, on_step)
    return [{"longest_jump": max(alphabet.jumps), "nesting": depth, **row} for row in rows]


def parallel_study(plan: Plan, on_step: OnStep, layers: int) -> list[Row]:
    """M = 2 memories without nesting: two layers with more heads, or M + 1 layers with fewer (proposition 5.5)."""
    alphabet = jump_alphabet(3)
    draw = of_tokens(alphabet, lambda ids, a: parallel_memories(ids, a, (0, 3)), plan.tokens)
    settings = [Setting("dot", bias, True, heads) for bias in BIASES for heads in (1, 2, 4)]
    return train_memories(draw, settings, Size(layers=layers, heads=4, inputs=alphabet.size), plan, on_step)


def essential_study(plan: Plan, on_step: OnStep) -> list[Row]:
    """Convolutions with decaying kernels by one layer without dot product, 1 to 4 heads (section 6)."""
    rows = []
    for number, (decay, rate) in enumerate(KERNELS):
        kernel = decaying_kernel(decay, rate, plan.tokens)  # type: ignore[arg-type]
        draw = of_signs(lambda x, k=kernel: convolved(x, k), plan.tokens)  # type: ignore[misc]
        settings = [Setting("none", bias, False, heads) for bias in BIASES for heads in (1, 2, 4)]
        size = Size(layers=1, heads=4, inputs=1, readout=0)
        own = train_memories(draw, settings, size, plan, _shifted(on_step, number, len(KERNELS)))
        rows += [{"decay": decay, "rate": rate, **row} for row in own]
    return rows


def point_study(
    lags: Sequence[int], heads: Sequence[int], length: int, starts: int, steps: int, on_step: OnStep
) -> list[Row]:
    """The least error of H heads for single memories T back, without training (theorem 4.1, the attention's part)."""
    kernels = torch.stack([point_kernel(lag, length) for lag in lags])
    return _best_rows(kernels, [{"lag": lag} for lag in lags], heads, starts, steps, on_step)


def decay_study(heads: Sequence[int], length: int, starts: int, steps: int, on_step: OnStep) -> list[Row]:
    """The same for the decaying kernels of `essential_study` (theorem 6.1)."""
    kernels = torch.stack([decaying_kernel(*kernel, length) for kernel in KERNELS])  # type: ignore[arg-type]
    about = [{"decay": decay, "rate": rate} for decay, rate in KERNELS]
    return _best_rows(kernels, about, heads, starts, steps, on_step)


def _best_rows(
    kernels: Tensor, about: Sequence[Row], heads: Sequence[int], starts: int, steps: int, on_step: OnStep
) -> list[Row]:
    rows = []
    cases = list(itertools.product(BIASES, heads))
    for done, (bias, count) in enumerate(cases):
        errors = best_error(kernels, bias, count, starts, steps).tolist()
        rows += [{**one, "bias": bias, "heads": count, "error": e} for one, e in zip(about, errors, strict=True)]
        on_step(done + 1, len(cases))
    return rows


def _forms(products: Sequence[Product]) -> list[Setting]:
    return [Setting(p, bias, normal) for p in products for bias in BIASES for normal in (True, False)]


def _described(setting: Setting, size: Size) -> Row:
    heads = size.heads if setting.heads is None else setting.heads
    form = {"product": setting.product, "bias": setting.bias, "normalised": setting.normalised}
    return {**form, "layers": size.layers, "heads": heads}


def _shifted(on_step: OnStep, part: int, parts: int) -> OnStep:
    """Steps of one of several equal parts, counted over all of them."""
    return lambda done, total: on_step(part * total + done, parts * total)


def quick(plan: Plan) -> Plan:
    """A few steps of one seed: enough to see that everything runs."""
    return replace(plan, schedule=replace(plan.schedule, steps=60), seeds=1)
