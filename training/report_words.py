"""Tokens as people read them, and their parts of speech (tagger: `textblob`, whose word list comes in the package)."""

from collections.abc import Sequence
from typing import Any

WORD_CLASSES = (
    "noun", "name", "verb", "modal", "adjective", "adverb", "pronoun", "determiner", "preposition", "conjunction",
    "number", "punctuation", "special", "other",
)  # fmt: skip

_PREFIXES = {
    "NNP": "name", "NN": "noun", "MD": "modal", "VB": "verb", "JJ": "adjective", "RB": "adverb", "WRB": "adverb",
    "PRP": "pronoun", "WP": "pronoun", "DT": "determiner", "PDT": "determiner", "WDT": "determiner",
    "IN": "preposition", "TO": "preposition", "CC": "conjunction", "CD": "number",
}  # fmt: skip


def readable(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One word piece per token, `##` for what continues a word."""
    return [str(token).replace("Ġ", "").replace("▁", "") for token in tokenizer.convert_ids_to_tokens(list(ids))]


def is_special(tokenizer: Any, ids: Sequence[int]) -> list[bool]:
    """Tokens that the tokenizer adds."""
    special = set(tokenizer.all_special_ids)
    return [token in special for token in ids]


def word_classes(pieces: Sequence[str], special: Sequence[bool]) -> list[int]:
    """The place in `WORD_CLASSES` of every piece: that of the word it belongs to, in its sentence."""
    words: list[str] = []
    owner: list[int] = []
    for piece, hidden in zip(pieces, special, strict=True):
        if hidden:
            owner.append(-1)
            continue
        if piece.startswith("##") and words:
            words[-1] += piece[2:]
        else:
            words.append(piece)
        owner.append(len(words) - 1)
    found = [_class_of(word, tag) for word, tag in _tags(words)]
    return [WORD_CLASSES.index("special") if at < 0 else WORD_CLASSES.index(found[at]) for at in owner]


def _tags(words: Sequence[str]) -> list[tuple[str, str]]:
    """(word, Penn Treebank tag); sentence by sentence, since the tagger looks at the neighbours."""
    from textblob.en import tag

    found: list[tuple[str, str]] = []
    start = 0
    for at, word in enumerate(words):
        if word in (".", "!", "?") or at == len(words) - 1:
            part = words[start : at + 1]
            tagged = tag(" ".join(part), tokenize=False)
            # A tagger that splits or joins words would shift all that follow: such a sentence has no tags.
            found += (
                [(w, str(t)) for w, (_, t) in zip(part, tagged, strict=True)]
                if len(tagged) == len(part)
                else [(w, "") for w in part]
            )
            start = at + 1
    return found


def _class_of(word: str, tag: str) -> str:
    if not any(ch.isalnum() for ch in word):
        return "punctuation"
    if word.isdigit():
        return "number"
    for length in (3, 2):
        if tag[:length] in _PREFIXES:
            return _PREFIXES[tag[:length]]
    return "other"
