"""Text to train and to measure on: the embedded default, or the user's own files.

The default is what every installation already holds: the help topics of CPython (`pydoc_data.topics`) and the long
docstrings of the installed libraries, read with `ast` and never imported. Whole libraries and topics are held out, by
the hash of their name, and no span of 50 characters of held-out text is left in the training text.
"""

import ast
import functools
import hashlib
import random
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from sparsefinder.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sparsefinder.teacher import Teacher

Split = Literal["train", "heldout"]

SHORTEST_DOCSTRING = 200
SPAN = 50
HELDOUT_BUCKET, BUCKETS = 4, 10
CHARACTERS = {"train": 200_000, "heldout": 150_000}  # of each library: none may drown the others
ORDER_SEED = 0
_OWN = {"sparsefinder", "training", "app"}
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def default_texts(split: Split, characters: int | None = None) -> list[str]:
    """The embedded text of one split, in the same order on every call and every run of one installation.

    Args:
        split: `train`, or `heldout`: other libraries and topics, sharing no span of 50 characters with `train`.
        characters: at most about so many from each library (held out: in all); None = 200 000 from each (150 000).

    Pieces that share a span with held-out text are left out of the training text, so the held-out text does not
    depend on how much training text is asked for.
    """
    limit = CHARACTERS[split] if characters is None else characters
    if split == "heldout":
        heldout = list(_heldout())
        return heldout if characters is None else _cut(heldout, characters)
    pieces = [text for name, text in sorted(topics.items()) if not is_heldout(f"topic {name}")]
    for folder in _libraries():
        if not is_heldout(folder.name):
            pieces += _docstrings(folder, limit)
    return drop_shared(_mixed(pieces), _heldout())


def is_heldout(name: str) -> bool:
    """Whether a library or topic is kept out of training: one in ten, by the hash of its name."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % BUCKETS == HELDOUT_BUCKET


def read_texts(paths: Sequence[str | Path]) -> list[str]:
    """The user's files, one text each.

    Raises:
        DataError: a file is missing, cannot be read, is not UTF-8 or binary, or holds nothing but white space.
    """
    texts = []
    for path in map(Path, paths):
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: expected UTF-8 text, byte {error.start} is not") from None
        except OSError as error:
            raise DataError(f"{path}: expected a readable text file, got {error.strerror or error}") from None
        if "\0" in text:  # UTF-8 allows it; it comes from binary files, and from text as UTF-16
            raise DataError(f"{path}: expected UTF-8 text, byte {len(text[: text.index(chr(0))].encode())} is not")
        if not text.strip():
            raise DataError(f"{path}: expected text, the file is empty")
        texts.append(text)
    return texts


def split_texts(texts: Sequence[str], heldout_share: float = 0.1) -> tuple[list[str], list[str]]:
    """(training, held-out) pieces of the user's texts: the last part of every text is held out, cut at a line's end.

    Training lines that share a span of 50 characters with the held-out part are dropped. A text without a line's end
    near the cut is cut at a space.
    """
    if not 0.0 < heldout_share < 1.0:
        raise ConfigError(f"heldout_share: expected a fraction between 0 and 1, got {heldout_share}")
    train, heldout = [], []
    for text in texts:
        cut = round(len(text) * (1 - heldout_share))
        newline = text.find("\n", cut, cut + 1000)
        at = newline if newline >= 0 and text[newline:].strip() else text.find(" ", cut)
        at = at if at >= 0 else cut
        train += blocks(text[:at])
        heldout.append(text[at:].strip())
    heldout = [text for text in heldout if text]
    return drop_shared(train, heldout), heldout


def shared_spans(train_texts: Iterable[str], eval_texts: Iterable[str], length: int = SPAN) -> list[str]:
    """Spans of `length` characters that occur in both, sorted, white space counted as one space; [] is what we want."""
    references = [normalize_spaces(text) for text in eval_texts]
    known = _known_windows(references, length)
    found = set()
    for text in map(normalize_spaces, train_texts):
        for start in np.flatnonzero(_hits(text, known, length)):
            span = text[start : start + length]
            if span not in found and any(span in reference for reference in references):
                found.add(span)
    return sorted(found)


def drop_shared(texts: Iterable[str], eval_texts: Iterable[str], length: int = SPAN) -> list[str]:
    """The texts that share no span of `length` characters with `eval_texts`."""
    known = _known_windows([normalize_spaces(text) for text in eval_texts], length)
    return [text for text in texts if not _hits(normalize_spaces(text), known, length).any()]


def chunk_tokens(teacher: "Teacher", texts: Sequence[str], tokens: int = 256) -> list[list[int]]:
    """Token ids of consecutive chunks of all the texts, each of exactly `tokens` ids with the special ones.

    What is left at the end is dropped, unless it is all there is (then the only chunk is shorter).

    Raises:
        ConfigError: `tokens` leaves no room beside the special tokens, or is longer than the teacher allows.
        DataError: there is not one token of text.
    """
    prefix, suffix = special_tokens(teacher)
    body = tokens - len(prefix) - len(suffix)
    if body < 1 or tokens > teacher.max_tokens:
        least = len(prefix) + len(suffix) + 1
        raise ConfigError(f"tokens: expected {least} to {teacher.max_tokens} for this teacher, got {tokens}")
    stream: list[int] = []
    for text in texts:
        stream += _plain_ids(teacher, text)
    if not stream:
        raise DataError("text: expected at least one token, got none")
    starts = range(0, max(len(stream) - body + 1, 1), body)
    return [[*prefix, *stream[start : start + body], *suffix] for start in starts]


def special_tokens(teacher: "Teacher") -> tuple[list[int], list[int]]:
    """The ids this teacher's tokenizer puts before and after every text."""
    plain = _plain_ids(teacher, "a")
    full = list(teacher.tokenizer("a")["input_ids"])
    at = next(i for i in range(len(full)) if full[i : i + len(plain)] == plain)
    return full[:at], full[at + len(plain) :]


def text_hash(texts: Iterable[str]) -> str:
    """sha256 over the texts in order: names a corpus in manifests and cards."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()


def normalize_spaces(text: str) -> str:
    """The text with every run of white space as one space: re-wrapped text counts as the same text."""
    return re.sub(r"\s+", " ", text).strip()


def _plain_ids(teacher: "Teacher", text: str) -> list[int]:
    return list(teacher.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def blocks(text: str, lines: int = 20) -> list[str]:
    """Pieces of a few lines: small enough that dropping one with a shared span loses little."""
    rows = text.splitlines()
    return [block for i in range(0, len(rows), lines) if (block := "\n".join(rows[i : i + lines]).strip())]


@functools.cache
def _heldout() -> tuple[str, ...]:
    pieces = [text for name, text in sorted(topics.items()) if is_heldout(f"topic {name}")]
    for folder in _libraries():
        if is_heldout(folder.name):
            pieces += _docstrings(folder, CHARACTERS["heldout"])
    return tuple(_mixed(pieces))


def _mixed(pieces: list[str]) -> list[str]:
    """Without repetitions, in a seeded order that mixes the libraries."""
    unique = {normalize_spaces(piece): piece for piece in reversed(pieces)}
    order = sorted(unique)
    random.Random(ORDER_SEED).shuffle(order)
    return [unique[key] for key in order]


def _cut(texts: list[str], characters: int) -> list[str]:
    kept, used = [], 0
    for text in texts:
        used += len(text)
        kept.append(text)
        if used >= characters:
            break
    return kept


def _libraries() -> list[Path]:
    """Folders of the installed libraries, by name."""
    roots = {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")}
    folders = {path.name: path for root in sorted(roots) for path in Path(root).iterdir() if path.is_dir()}
    return [folders[name] for name in sorted(folders) if name.isidentifier() and name[0] != "_" and name not in _OWN]


def _docstrings(folder: Path, limit: int) -> list[str]:
    """Long docstrings of one library, from its files in an order given by their hashes, until `limit` characters."""
    files = [path for path in folder.rglob("*.py") if "tests" not in path.parts]
    names = {path: path.relative_to(folder.parent).as_posix() for path in files}
    found: list[str] = []
    used = 0
    for path in sorted(files, key=lambda path: hashlib.sha256(names[path].encode()).digest()):
        for text in _file_docstrings(path):
            found.append(text)
            used += len(text)
        if used >= limit:
            break
    return found


def _file_docstrings(path: Path) -> Iterator[str]:
    try:
        source = path.read_bytes().decode("utf-8")
        if '"""' not in source:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # another library's broken file is not our user's mistake
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= SHORTEST_DOCSTRING:
                yield text


def _windows(text: str, length: int) -> npt.NDArray[np.uint64]:
    """One 64-bit hash per span of `length` characters, by doubling: h(2w)[i] = h(w)[i]·B^w + h(w)[i + w]."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    count = len(codes) - length + 1
    if count < 1:
        return np.empty(0, np.uint64)
    power = (codes + np.uint64(1)) * _MULTIPLIER
    base, width, done = np.uint64(0xD6E8FEB86659FD93), 1, 0
    result = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        power ^= power >> np.uint64(29)
        while True:
            if length & width:
                result = result * base + power[done : done + count]
                done += width
            if 2 * width > length:
                return result
            power = power[:-width] * base + power[width:]
            base, width = base * base, 2 * width


def _known_windows(texts: Sequence[str], length: int) -> npt.NDArray[np.uint64]:
    if length < 1:
        raise ConfigError(f"length: expected at least 1 character, got {length}")
    return np.unique(np.concatenate([np.empty(0, np.uint64), *(_windows(text, length) for text in texts)]))


def _hits(text: str, known: npt.NDArray[np.uint64], length: int) -> npt.NDArray[np.bool_]:
    windows = _windows(text, length)
    if not len(known):
        return np.zeros(len(windows), np.bool_)
    place = np.minimum(np.searchsorted(known, windows), len(known) - 1)
    hits: npt.NDArray[np.bool_] = known[place] == windows
    return hits
