"""What keeps the memory of the service level, and quick to get, where the C library is glibc; others are left alone."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameters of mallopt
# A tensor of a batch is made and freed many times a second. glibc would take those of some megabytes from the system
# each time, whose first touch costs a tenth of a forward pass; up to 32 MiB, its most, they stay in the heap.
_IN_HEAP, _KEPT = 32 * 2**20, 256 * 2**20

_SHAPES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


def forget_old_shapes() -> None:
    """Let oneDNN keep code for a few shapes only, instead of a thousand. Call it before torch computes.

    A batch has as many rows as its texts have tokens, so nearly each is a new shape; what is kept of it serves no
    other, and grew by some MiB a minute. GELU alone runs there: building it anew costs nothing that could be measured.
    """
    os.environ.setdefault(_SHAPES, "16")


def share_one_heap() -> bool:
    """One heap for all threads, which keeps what batches need again; whether glibc agreed.

    Call it before other threads start. Tensors are made on one thread and freed on another, and each heap would keep
    what was freed in it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _IN_HEAP), (_TRIM_THRESHOLD, _KEPT))
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in wanted)


def return_freed_memory() -> bool:
    """Give pages that hold nothing back to the system; whether there were any.

    A reload leaves holes between what was made before and after it; without this `benchmarks.soak` saw some megabytes
    more after every reload.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    return bool(trim(ctypes.c_size_t(0)))
