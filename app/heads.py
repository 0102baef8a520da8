"""What a model says under a head: words in the place of masks, and how likely each token of a text is."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from app.outputs import Filled, FillMask, Score, Scored
from app.schemas import Mode
from app.servable import Ids, Lane, Task
from sparsefinder.artifact import Artifact
from sparsefinder.errors import ArtifactError, IncompatibleModelError
from sparsefinder.mlm_head import load_mlm_head
from sparsefinder.shipped import default_artifact
from sparsefinder.teacher import Teacher

SHIPPED_HEAD = "minilm-mlm-head"
LOGITS_AT_ONCE = 2**24  # 64 MiB of them: a batch has thousands of rows, a row tens of thousands of words

Head = Callable[[Tensor], Tensor]  # hidden states [rows, d] to logits [rows, V]


@dataclass(frozen=True)
class Heads:
    """The head over the untouched model, and the one over its twin; None where none fits."""

    original: Head | None = None
    twin: Head | None = None


class Headed(Protocol):
    """A model with heads."""

    heads: Heads


class _Given(torch.nn.Module):
    """Stands in for the model under a head: its hidden states are what it is handed as embeddings."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=cast(Any, inputs_embeds))


def head_of(whole: Any) -> Head:
    """The head of a model of transformers by itself, with whatever its class does to logits (scales, soft caps).

    Raises:
        IncompatibleModelError: it needs more than the last hidden states, or gives other logits than the whole model.
    """
    bare = copy.copy(whole)
    bare._modules = whole._modules | {whole.base_model_prefix: _Given()}

    def head(hidden: Tensor) -> Tensor:
        return cast(Tensor, bare(inputs_embeds=hidden[None]).logits[0])

    device = next(whole.parameters()).device
    tokens = torch.arange(1, min(9, int(whole.config.vocab_size)), device=device)[None]
    name = type(whole).__name__
    with torch.inference_mode():
        expected = whole(input_ids=tokens).logits[0]
        hidden = whole.base_model(input_ids=tokens).last_hidden_state[0]
        try:
            came = head(hidden)
        except (AttributeError, TypeError) as error:
            reason = f"expected a head over the last hidden states, got one that needs more ({type(error).__name__})"
            raise IncompatibleModelError(f"{name}: {reason}") from None
    if came.shape != expected.shape or not torch.allclose(came, expected, rtol=1e-3, atol=1e-3):
        raise IncompatibleModelError(f"{name}: expected its head to give the logits of the whole model, got others")
    return head


def read_heads(original: Teacher, twin: Teacher, artifact: Artifact, folder: Path | None) -> Heads:
    """The heads of a model: its own; under an encoder that of `folder`, else its own, else the shipped one, else none.

    A head read from a folder learned over one set of weights: where the artifact has a delta, not the untouched ones.

    Raises:
        IncompatibleModelError: the head of `folder` was trained on another teacher or with another delta, or there is
            none to put it on; a causal model's head cannot be used apart.
        ArtifactError: a head's folder is damaged, or (of `folder`) missing.
    """
    if original.causal:
        if folder is not None:
            raise IncompatibleModelError("head: expected an encoder under a fill-mask head, got a causal model")
        return Heads(head_of(original.lm), head_of(twin.lm))
    if folder is not None:
        return _from_folder(original, twin, artifact, folder)
    if original.tokenizer.mask_token_id is None:
        return Heads()
    try:
        if original.mlm is not None:
            return Heads(head_of(original.mlm), head_of(twin.mlm))
        shipped = _shipped()
        return Heads() if shipped is None else _from_folder(original, twin, artifact, shipped)
    except IncompatibleModelError:  # the model still embeds
        return Heads()


def tasks_of(original: Teacher, heads: Heads) -> tuple[Task, ...]:
    """What a model can do."""
    if original.causal:
        return ("score",)
    return ("embed",) if heads.twin is None else ("embed", "fill_mask")


def fill_mask_modes(original: Teacher, heads: Heads, modes: Sequence[Mode]) -> tuple[Mode, ...]:
    """The modes whose weights its fill-mask head fits, none where it has no such head."""
    if original.causal:
        return ()
    fits = {True: heads.original, False: heads.twin}
    return tuple(mode for mode in modes if fits[mode == "original"] is not None)


def _shipped() -> Path | None:
    try:
        return default_artifact(SHIPPED_HEAD)
    except ArtifactError:
        return None


def _from_folder(original: Teacher, twin: Teacher, artifact: Artifact, folder: Path) -> Heads:
    if original.tokenizer.mask_token_id is None:
        raise IncompatibleModelError("head: expected a tokenizer with a mask token under a fill-mask head, got none")
    fits = load_mlm_head(folder, twin, artifact)
    return Heads(None if artifact.delta else load_mlm_head(folder, original, None), fits)


def fill_mask(
    model: Headed, teacher: Teacher, ids: Sequence[Ids], tokens: Tensor, mask: Tensor, lane: Lane
) -> list[Filled]:
    """The task `fill_mask`: what stands in the place of each mask token of a batch."""
    options = lane.options if isinstance(lane.options, FillMask) else FillMask()
    hidden = teacher.model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
    places = (tokens == teacher.tokenizer.mask_token_id) & mask
    parts = [_best(rows, options) for rows in logprob_rows(_head(model, lane), hidden[places])]
    words, logprobs = _by_item(places, parts)
    positions = [np.flatnonzero(row) for row in places.cpu().numpy()]
    return [Filled(*item) for item in zip(positions, words, logprobs, strict=True)]


def score(
    model: Headed, teacher: Teacher, ids: Sequence[Ids], tokens: Tensor, mask: Tensor, lane: Lane
) -> list[Scored]:
    """The task `score`: the log-probability of each token of a right-padded batch after those before it."""
    options = lane.options if isinstance(lane.options, Score) else Score()
    hidden = teacher.model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).last_hidden_state
    scored, parts, start = mask[:, 1:], [], 0
    own = tokens[:, 1:][scored][:, None]
    for rows in logprob_rows(_head(model, lane), hidden[:, :-1][scored]):
        end = start + len(rows)
        parts.append((rows.gather(1, own[start:end])[:, 0], *_best(rows, options)))
        start = end
    return [Scored(*item) for item in zip(*_by_item(scored, parts), strict=True)]


def _head(model: Headed, lane: Lane) -> Head:
    head = model.heads.original if lane.mode == "original" else model.heads.twin
    if head is None:
        raise IncompatibleModelError(f"{lane.task}: expected a head for mode {lane.mode}, got none")
    return head


def _by_item(places: Bool[Tensor, "B N"], parts: Sequence[tuple[Tensor, ...]]) -> list[list[Any]]:
    """The columns of `parts`, whose rows belong to the places that are True, cut into the rows of each item."""
    sizes = places.sum(1).tolist()
    columns = [torch.split(torch.cat(column).cpu(), sizes) for column in zip(*parts, strict=True)]
    return [[rows.numpy() for rows in column] for column in columns]


def logprob_rows(head: Head, hidden: Float[Tensor, "rows d"]) -> Iterator[Float[Tensor, "part V"]]:
    """Log-probabilities over the vocabulary, some rows at a time, so that all of them never lie in memory at once."""
    words = head(hidden[:1]).shape[-1]
    for part in torch.split(hidden, max(1, LOGITS_AT_ONCE // words)):
        yield head(part).float().log_softmax(-1)


def _best(rows: Float[Tensor, "part V"], options: FillMask | Score) -> tuple[Tensor, Tensor]:
    """Words and log-probabilities `[part, K]`: of the targets in their order, else the best ones, best first."""
    if isinstance(options, FillMask) and options.targets:
        words = torch.tensor(options.targets, device=rows.device).expand(len(rows), -1)
        return words, rows.gather(1, words)
    found = rows.topk(min(options.top_k, rows.shape[1]), dim=1)
    return found.indices, found.values
