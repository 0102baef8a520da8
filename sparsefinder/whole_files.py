"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from sparsefinder.errors import DataError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; it is flushed to disk and renamed at the end.

    After an error, or Ctrl-C, nothing is left of it.

    Raises:
        DataError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        said = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be written ({said})") from None


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all. DataError where that fails."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
