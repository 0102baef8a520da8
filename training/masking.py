"""Masked texts, and what a frozen encoder says at their masks: drawn once, kept in files, read by every pass of a head.

Every chosen token becomes the mask token. BERT leaves some as they are, so that the encoder in training is not asked at
masks alone; here the encoder learns nothing from it, and a fill-mask model is only ever asked at masks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sparsefinder.errors import ConfigError, DataError
from sparsefinder.teacher import Teacher, batch
from training.extract import write_tensors

MASKED_SHARE = 0.15  # of the ordinary tokens (Devlin et al., 2019, section 3.1)
BATCHES_PER_FILE = 16

Ids = Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class Masked:
    """Texts with masks: token ids, real tokens, where the masks are, and (in that order) the words that stood there."""

    tokens: Int[Tensor, "B N"]
    real: Bool[Tensor, "B N"]
    hidden: Bool[Tensor, "B N"]
    words: Int[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class Draws:
    """Hidden states at masks, as float16, and the words that stood there."""

    hidden: Float[Tensor, "n d"]
    words: Int[Tensor, " n"]


def mask_texts(teacher: Teacher, items: Ids, share: float, generator: torch.Generator) -> Masked:
    """Texts with a share of their ordinary tokens masked, at least one of each; special tokens never are.

    Raises:
        ConfigError: the teacher's tokenizer has no mask token. DataError: as in `batch`.
    """
    if teacher.tokenizer.mask_token_id is None:
        raise ConfigError(f"teacher: expected a tokenizer with a mask token, that of {teacher.name} has none")
    tokens, real = batch(teacher, items)
    special = torch.tensor(teacher.tokenizer.all_special_ids, device=tokens.device)
    ordinary = real & ~torch.isin(tokens, special)
    draws = torch.rand(tokens.shape, generator=generator).to(tokens.device).masked_fill(~ordinary, torch.inf)
    hidden = ((draws < share) | (draws == draws.amin(1, keepdim=True))) & ordinary
    return Masked(tokens.masked_fill(hidden, int(teacher.tokenizer.mask_token_id)), real, hidden, tokens[hidden])


@torch.no_grad()
def draw(teacher: Teacher, items: Ids, share: float, generator: torch.Generator) -> Draws:
    """Mask every text once, and read it once, in the mode the model is in."""
    masked = mask_texts(teacher, items, share, generator)
    hidden = teacher.model(input_ids=masked.tokens, attention_mask=masked.real.long()).last_hidden_state
    return Draws(hidden[masked.hidden].half().cpu(), masked.words.cpu())


def kept_draws(
    teacher: Teacher,
    stream: Iterator[list[Sequence[int]]],
    batches: int,
    folder: Path,
    share: float,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Draws:
    """Draws of the stream's first `batches`, from the files of `folder` where they are there, and kept there.

    The folder belongs to one stream, share and seed. Every file has a generator of its own, so that going on gives what
    one go gives.

    Raises:
        ConfigError: the teacher's tokenizer has no mask token. DataError: a file that cannot be read or written.
    """
    parts: list[Draws] = []
    for start in range(0, batches, BATCHES_PER_FILE):
        stop = min(start + BATCHES_PER_FILE, batches)
        items = [next(stream) for _ in range(start, stop)]
        path = folder / f"{start:06d}-{stop:06d}.safetensors"
        if not path.is_file():
            generator = torch.Generator().manual_seed(seed * 1_000_003 + start)
            found = []
            for done, texts in enumerate(items, start):
                on_progress(done, batches)
                found.append(draw(teacher, texts, share, generator))
            drawn = joined(found)
            write_tensors(path, {"hidden": drawn.hidden, "words": drawn.words})
        parts.append(_read(path))
        on_progress(stop, batches)
    return joined(parts)


def joined(parts: Sequence[Draws]) -> Draws:
    """All positions of several draws."""
    return Draws(torch.cat([part.hidden for part in parts]), torch.cat([part.words for part in parts]))


def _read(path: Path) -> Draws:
    try:
        tensors = load_file(path)
        return Draws(tensors["hidden"], tensors["words"])
    except (SafetensorError, OSError, KeyError) as error:
        raise DataError(f"{path}: expected masked positions, got a damaged file ({error}); delete it") from None
