"""How every numba kernel of this package is compiled: cached on disk, one parallel region at a time.

Three traps are closed here. numba raises at import where its cache folder cannot be written, so a writable one is
chosen first. It compiles a kernel anew only when that kernel's own file has changed, not when a helper in another file
has, so every state of the package has a cache folder of its own. And its `workqueue` threading layer kills the process
when two threads enter a parallel kernel at once, so one lock surrounds them all.
"""

import functools
import hashlib
import inspect
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def choose_cache_folder() -> Path | None:
    """For this state of the package: in NUMBA_CACHE_DIR, the user's cache folder or the temporary one, if writable."""
    asked = os.environ.get("NUMBA_CACHE_DIR")
    candidates = [Path(asked)] if asked else []
    candidates.append(Path(os.environ.get("XDG_CACHE_HOME", Path("~/.cache").expanduser())) / "sparsefinder" / "numba")
    candidates.append(Path(tempfile.gettempdir()) / f"sparsefinder-numba-{os.getuid()}")
    state = package_state(Path(__file__).parent)
    # What a process hands to those that it starts names the state already.
    states = (folder if folder.name == state else folder / state for folder in candidates)
    return next((folder for folder in states if _writable(folder)), None)


def package_state(package: Path) -> str:
    """A name for the modules of a package that hold kernels, or helpers of them, as they are now."""
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        source = path.read_bytes()
        if b"numba_kernels" in source or b"vector_code" in source:
            found.update(f"{path.relative_to(package)} {len(source)}\n".encode() + source)
    return found.hexdigest()[:16]


_CACHE_FOLDER = choose_cache_folder()
if _CACHE_FOLDER is not None:
    os.environ["NUMBA_CACHE_DIR"] = str(_CACHE_FOLDER)

import numba  # noqa: E402  (the cache folder must be known before numba reads its settings)

if _CACHE_FOLDER is not None:
    numba.config.CACHE_DIR = str(_CACHE_FOLDER)  # type: ignore[attr-defined]

# Not the whole of fastmath: NaN and infinity keep their meaning, so a bad row stays visibly bad.
FASTMATH = {"reassoc", "nsz", "contract", "arcp"}
_PARALLEL = threading.Lock()


def kernel_array(x: Tensor) -> np.ndarray:
    """A tensor as kernels read it: on the CPU and contiguous, since numba compiles once more for any other layout."""
    return np.ascontiguousarray(x.detach().cpu().numpy())


def _compiled(function: Callable[..., Any], **flags: Any) -> Callable[..., Any]:
    # Unwrapped, because shape-checked tests wrap every function and numba must see the plain one.
    made: Callable[..., Any] = numba.njit(cache=_CACHE_FOLDER is not None, nogil=True, **flags)(
        inspect.unwrap(function)
    )
    return made


def parallel_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` with numba, parallel over its `prange` loops, cached on disk and called under one lock."""
    compiled = _compiled(function, parallel=True, fastmath=FASTMATH)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with _PARALLEL:
            return compiled(*args)

    return call


def inline_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a helper that parallel kernels call (no lock, no threads of its own)."""
    return _compiled(function, fastmath=FASTMATH)


def quick_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a helper whose numbers are never NaN, or whose answer is not used where they are."""
    return _compiled(function, fastmath=FASTMATH | {"nnan"})


def exact_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without fast arithmetic: results are bit for bit those of the same operations in torch."""
    return _compiled(function)
