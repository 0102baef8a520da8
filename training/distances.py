"""How far a twin is from its original, as losses: hidden states, embeddings, next words, single layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparsefinder.hf import Attached
from sparsefinder.teacher import Teacher, batch, pool
from training.config import FinetuneConfig
from training.masking import Ids, mask_texts


@dataclass(frozen=True)
class Student:
    """The twin in training: its teacher record, its attention, and the parameters before the first step."""

    teacher: Teacher
    attached: Attached
    before: Mapping[str, Tensor] = field(repr=False)


def distance(
    student: Student, original: Teacher, items: Ids, config: FinetuneConfig, step: int, generator: torch.Generator
) -> Tensor:
    """The loss of a step: of single layers during the first `local_steps`, then of the whole model."""
    if step < config.local_steps:
        return layers_distance(student, original, items)
    if original.lm is not None:
        return causal_distance(student, original, items, config, generator)
    return encoder_distance(student, original, items, config)


def encoder_distance(student: Student, original: Teacher, items: Ids, config: FinetuneConfig) -> Tensor:
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


def masked_loss(student: Student, items: Ids, share: float, generator: torch.Generator) -> Tensor:
    """Cross-entropy of masked tokens through the model's own head."""
    masked = mask_texts(student.teacher, items, share, generator)
    logits = student.teacher.mlm(input_ids=masked.tokens, attention_mask=masked.real.long()).logits
    return torch.nn.functional.cross_entropy(logits[masked.hidden], masked.words)


def causal_distance(
    student: Student, original: Teacher, items: Ids, config: FinetuneConfig, generator: torch.Generator
) -> Tensor:
    """Kullback–Leibler divergence of the next word (original to twin) plus weighted angles of the hidden states.

    The head of a small model costs as much as its layers, so words are compared at `config.positions` places drawn
    anew in each step; hidden states at all.
    """
    tokens, mask = batch(original, items)
    places = torch.randperm(tokens.shape[1], generator=generator)[: config.positions].sort().values.to(tokens.device)
    inputs = {
        "input_ids": tokens, "attention_mask": mask.long(), "output_hidden_states": True, "use_cache": False,
        "logits_to_keep": places,
    }  # fmt: skip
    with torch.no_grad():
        expected = original.lm(**inputs)
    came = student.teacher.lm(**inputs)
    words = divergence(came.logits, expected.logits)[mask[:, places]].mean()
    if not config.hidden_weight:
        return words
    pairs = zip(came.hidden_states[1:], expected.hidden_states[1:], strict=True)
    return words + config.hidden_weight * torch.stack([_turned(a, b, mask) for a, b in pairs]).mean()


def divergence(ours: Float[Tensor, "B N V"], theirs: Float[Tensor, "B N V"]) -> Float[Tensor, "B N"]:
    """`KL(softmax(theirs) ‖ softmax(ours))` of every row, in nats."""
    ours, theirs = ours.float().log_softmax(-1), theirs.float().log_softmax(-1)
    return torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)


def _turned(a: Float[Tensor, "B N d"], b: Float[Tensor, "B N d"], mask: Bool[Tensor, "B N"]) -> Tensor:
    """One minus the cosine, token by token: lengths differ a hundredfold, and the next layer drops them."""
    return 1 - torch.cosine_similarity(a, b, dim=-1)[mask].mean()


def layers_distance(student: Student, original: Teacher, items: Ids) -> Tensor:
    """Relative squared error of each attention layer's output, given what the original's layer is given.

    Errors do not pass from layer to layer, and no other part of the twin is computed.
    """
    tokens, mask = batch(original, items)
    calls = _calls(student, original, tokens, mask)
    losses = []
    for module, args, kwargs, expected in calls:
        came = module(*args, **kwargs)[0]
        losses.append((came - expected)[mask].square().sum() / expected[mask].square().sum())
    return torch.stack(losses).mean()


@torch.no_grad()
def _calls(
    student: Student, original: Teacher, tokens: Tensor, mask: Tensor
) -> list[tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], Tensor]]:
    """Each call of an attention layer in the original: the twin's module, the arguments, and what came out."""
    names = {module: name for name, module in student.teacher.model.named_modules()}
    found: list[tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], Tensor]] = []
    handles = []
    for ours in student.attached.places:

        def keep(_: Any, args: Any, kwargs: Any, output: Any, ours: torch.nn.Module = ours) -> None:
            found.append((ours, args, {**kwargs, "attention_mask": mask}, output[0]))

        handles.append(original.model.get_submodule(names[ours]).register_forward_hook(keep, with_kwargs=True))
    try:
        original.model(input_ids=tokens, attention_mask=mask.long(), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found
