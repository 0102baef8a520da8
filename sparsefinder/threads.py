"""How many threads a numba kernel gets: never more than torch's, and one where the work is too small to share.

A parallel region ends with a barrier. Where cores are busy with something else, waiting there costs milliseconds, more
than small kernels take in all (measured: 3 ms of work became 50 ms on two busy cores).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numba
import torch

GRAIN = 4_000_000  # elementary steps, a few milliseconds


def limit_threads(most: int) -> None:
    """Let this thread's torch and numba kernels use up to `most` threads each; 0 = as many as torch chose.

    They take turns, so together they never use more; numba cannot have more than it was started with.
    """
    if most:
        torch.set_num_threads(most)
    numba.set_num_threads(min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS)))  # type: ignore[attr-defined]


@contextmanager
def threads_for(work: int) -> Iterator[int]:
    """Inside, numba uses one thread per `GRAIN` steps of `work`, up to `torch.get_num_threads()`."""
    before = numba.get_num_threads()
    most = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    count = max(1, min(torch.get_num_threads(), most, work // GRAIN))
    numba.set_num_threads(count)
    try:
        yield count
    finally:
        numba.set_num_threads(before)


@contextmanager
def single_thread() -> Iterator[None]:
    """One torch thread inside, as many as before afterwards.

    A parallel region waits for its slowest thread: measured on two cores with another process on one of them, rows of
    the quality table took 3 s on two threads and 0.3 s on one. It also makes sums come out alike on every machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
