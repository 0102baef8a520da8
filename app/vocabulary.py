"""A model's vocabulary as answers show it: pieces, where they stand in a text, and words that are one piece."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """One text in tokens. offsets: characters [start, end) of the text; None for tokens that are not in it."""

    ids: list[int]
    pieces: list[str | None]
    offsets: list[Span | None]


class Vocabulary:
    """Pieces of a tokenizer. `pieces` may be called anywhere; the rest asks the tokenizer, so on one thread only."""

    def __init__(self, tokenizer: Any, size: int):
        """size: words that the model knows; ids that its tokenizer does not have have no piece."""
        self._tokenizer = tokenizer
        self._pieces: list[str | None] = tokenizer.convert_ids_to_tokens(list(range(size)))
        self._ids = {piece: number for number, piece in enumerate(self._pieces) if piece is not None}
        self.mask: int | None = tokenizer.mask_token_id
        self.mask_piece: str | None = tokenizer.mask_token

    def __len__(self) -> int:
        return len(self._pieces)

    def pieces(self, ids: Sequence[int]) -> list[str | None]:
        """The pieces of these ids as the vocabulary writes them."""
        return [self._pieces[number] if number < len(self._pieces) else None for number in ids]

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text with its special tokens, never cut; no offsets where the tokenizer (a slow one) knows none."""
        places = bool(getattr(self._tokenizer, "is_fast", False))
        told = {"return_offsets_mapping": places, "return_special_tokens_mask": True}
        found = self._tokenizer(list(texts), add_special_tokens=True, truncation=False, verbose=False, **told)
        encoded = []
        for row, ids in enumerate(found["input_ids"]):
            offsets: list[Span | None] = [None] * len(ids)
            if places:
                spans, added = found["offset_mapping"][row], found["special_tokens_mask"][row]
                offsets = [None if extra else tuple(span) for span, extra in zip(spans, added, strict=True)]
            encoded.append(Encoded(list(ids), self.pieces(ids), offsets))
        return encoded

    def split(self, word: str) -> list[int]:
        """The pieces of a word: itself where the vocabulary holds it as it is written, else as in a text."""
        if word in self._ids:
            return [self._ids[word]]
        ids = self._tokenizer(word, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        return [] if self._tokenizer.unk_token_id in ids else list(ids)
