"""How every numba kernel of this package is compiled: cached on disk, one parallel region at a time.

Two traps are closed here. numba raises at import where its cache folder cannot be written, so a writable one is chosen
first; and its `workqueue` threading layer kills the process when two threads enter a parallel kernel at once, so one
lock surrounds them all.
"""

import functools
import inspect
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def choose_cache_folder() -> Path | None:
    """The first writable folder among NUMBA_CACHE_DIR, the user's cache folder and the temporary folder."""
    asked = os.environ.get("NUMBA_CACHE_DIR")
    candidates = [Path(asked)] if asked else []
    candidates.append(Path(os.environ.get("XDG_CACHE_HOME", Path("~/.cache").expanduser())) / "sparsefinder" / "numba")
    candidates.append(Path(tempfile.gettempdir()) / f"sparsefinder-numba-{os.getuid()}")
    return next((folder for folder in candidates if _writable(folder)), None)


_CACHE_FOLDER = choose_cache_folder()
if _CACHE_FOLDER is not None:
    os.environ["NUMBA_CACHE_DIR"] = str(_CACHE_FOLDER)

import numba  # noqa: E402  (the cache folder must be known before numba reads its settings)

if _CACHE_FOLDER is not None:
    numba.config.CACHE_DIR = str(_CACHE_FOLDER)  # type: ignore[attr-defined]

# Not the whole of fastmath: NaN and infinity keep their meaning, so a bad row stays visibly bad.
FASTMATH = {"reassoc", "nsz", "contract", "arcp"}
_PARALLEL = threading.Lock()


def parallel_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` with numba, parallel over its `prange` loops, cached on disk and called under one lock."""
    # Unwrapped, because shape-checked tests wrap every function and numba must see the plain one.
    plain = inspect.unwrap(function)
    compiled = numba.njit(parallel=True, fastmath=FASTMATH, cache=_CACHE_FOLDER is not None, nogil=True)(plain)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with _PARALLEL:
            return compiled(*args)

    return call


def inline_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a helper that parallel kernels call (no lock, no threads of its own)."""
    plain = inspect.unwrap(function)
    compiled: Callable[..., Any] = numba.njit(fastmath=FASTMATH, cache=_CACHE_FOLDER is not None, nogil=True)(plain)
    return compiled


def exact_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without fast arithmetic: results are bit for bit those of the same operations in torch."""
    plain = inspect.unwrap(function)
    compiled: Callable[..., Any] = numba.njit(cache=_CACHE_FOLDER is not None, nogil=True)(plain)
    return compiled
