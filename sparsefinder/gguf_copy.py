"""Language models that are published as one GGUF file, as a plain float32 folder that transformers reads at once.

Reading the quantized file takes most of a minute, so the copy is kept in the user's cache folder, under the file's
sha256. It appears there whole or not at all.
"""

import hashlib
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch

from sparsefinder.errors import DataError, first_line

READ = 1 << 20  # bytes hashed at once


def plain_folder(gguf: Path) -> Path:
    """The folder of the float32 copy of `gguf` (`$XDG_CACHE_HOME/sparsefinder/models/…`), made where there is none.

    Raises:
        DataError: the packages that read GGUF are missing, the file cannot be read, or the cache cannot be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = cache / "sparsefinder" / "models" / f"{gguf.stem}-{_sha256(gguf)[:16]}"
    return folder if folder.is_dir() else _make(gguf, folder)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while part := stream.read(READ):
                digest.update(part)
    except OSError as error:
        raise DataError(f"{path}: expected a readable file ({error.strerror})") from None
    return digest.hexdigest()


def _make(gguf: Path, folder: Path) -> Path:
    model, tokenizer = _read(gguf)
    new = folder.with_name(f".{folder.name}.new-{secrets.token_hex(4)}")
    try:
        new.mkdir(parents=True)
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        for path in (*new.iterdir(), new):
            _flush(path)
        new.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was faster, and its copy is the same
            reason = error.strerror or error
            raise DataError(f"{folder}: cannot be written, set XDG_CACHE_HOME to another folder ({reason})") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return folder


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(gguf: Path) -> tuple[Any, Any]:
    """A model of the plain class, without traces of the quantization, and the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.float32}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, **settings)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        raise DataError(f"teacher: expected `pip install sparsefinder[causal]` before ({first_line(error)})") from None
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{gguf}: expected a GGUF language model ({first_line(error)})") from None
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):  # no random weights are drawn; what is assigned here is only written, never run
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    return plain, tokenizer
