"""Masked positions and what a frozen encoder says there: drawn once, kept in files, read by every pass of a head."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sparsefinder.errors import ConfigError, DataError
from sparsefinder.teacher import Teacher, batch
from training.extract import write_tensors

AS_MASK, AS_RANDOM = 0.8, 0.1  # of the chosen tokens (Devlin et al., 2019, section 3.1); the rest stay as they are
BATCHES_PER_FILE = 16

Ids = Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class Draws:
    """Hidden states at masked positions, as float16, and the words that stood there."""

    hidden: Float[Tensor, "n d"]
    words: Int[Tensor, " n"]


def mask_item(
    item: Sequence[int], teacher: Teacher, share: float, generator: torch.Generator
) -> tuple[list[int], list[int]]:
    """The text as the model is asked it, and the positions to answer, in order: a share of them, at least one.

    Special tokens are never chosen; a text of nothing else has no position.
    """
    special = set(teacher.tokenizer.all_special_ids)
    able = [at for at, word in enumerate(item) if word not in special]
    draws = torch.rand(len(able), generator=generator).tolist()
    chosen = [at for at, draw in zip(able, draws, strict=True) if draw < share]
    if able and not chosen:
        chosen = [able[min(range(len(able)), key=draws.__getitem__)]]
    asked, words = list(item), int(teacher.model.config.vocab_size)
    how = torch.rand(len(chosen), generator=generator).tolist()
    other = torch.randint(words, (len(chosen),), generator=generator).tolist()
    for at, draw, word in zip(chosen, how, other, strict=True):
        if draw < AS_MASK:
            asked[at] = int(teacher.tokenizer.mask_token_id)
        elif draw < AS_MASK + AS_RANDOM:
            asked[at] = word
    return asked, chosen


@torch.no_grad()
def draw(teacher: Teacher, items: Ids, share: float, generator: torch.Generator) -> Draws:
    """Mask every text once, and read it once, in the mode the model is in."""
    pairs = [mask_item(item, teacher, share, generator) for item in items]
    tokens, mask = batch(teacher, [asked for asked, _ in pairs])
    hidden = teacher.model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
    rows = [row for row, (_, chosen) in enumerate(pairs) for _ in chosen]
    places = [at for _, chosen in pairs for at in chosen]
    words = [item[at] for item, (_, chosen) in zip(items, pairs, strict=True) for at in chosen]
    return Draws(hidden[rows, places].half().cpu(), torch.tensor(words, dtype=torch.long))


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
    if teacher.tokenizer.mask_token_id is None:
        raise ConfigError(f"teacher: expected a tokenizer with a mask token, that of {teacher.name} has none")
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
            _write(path, joined(found))
        parts.append(_read(path))
        on_progress(stop, batches)
    return joined(parts)


def joined(parts: Sequence[Draws]) -> Draws:
    """All positions of several draws."""
    return Draws(torch.cat([part.hidden for part in parts]), torch.cat([part.words for part in parts]))


def _write(path: Path, draws: Draws) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path.parent}: expected a folder that can be written, got {error.strerror}") from None
    write_tensors(path, {"hidden": draws.hidden, "words": draws.words})


def _read(path: Path) -> Draws:
    try:
        tensors = load_file(path)
        return Draws(tensors["hidden"], tensors["words"])
    except (SafetensorError, OSError, KeyError) as error:
        raise DataError(f"{path}: expected masked positions, got a damaged file ({error}); delete it") from None
