"""Where freed memory stays, and when it goes back: settings of glibc; other C libraries are left alone."""

import ctypes
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameters of mallopt
_IN_HEAP = 32 * 2**20  # the most that mallopt accepts: larger blocks still come from the system
EVERYTHING = 2**31 - 1


def share_one_heap(kept: int = EVERYTHING) -> bool:
    """One heap for all threads, which keeps freed blocks, and at its end up to `kept` bytes; whether glibc agreed.

    Call it before other threads start. Tensors are made on one thread and freed on another, and each heap would keep
    what was freed in it. By itself glibc maps and unmaps tensors of some hundred kilobytes at every operation, and the
    system has to clear their pages each time: on a virtual machine that took more than the arithmetic (measured: 40
    instances of the row clusters in 10.1 s, and in 1.5 s with this), and a tenth of a forward pass.
    """
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    asked = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _IN_HEAP), (_TRIM_THRESHOLD, kept))
    agreed = [mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in asked]
    return all(agreed)


def return_freed_memory() -> bool:
    """Give pages that hold nothing back to the system; whether there were any.

    A reload leaves holes between what was made before and after it; without this `benchmarks.soak` saw some megabytes
    more after every reload.
    """
    trim = _glibc("malloc_trim")
    return trim is not None and bool(trim(ctypes.c_size_t(0)))


def _glibc(name: str) -> Any:
    """A function of the C library; None where it has no such one."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
