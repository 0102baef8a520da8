"""Fitting and measuring work on many small tensors: one torch thread is fastest there."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sparsefinder.threads import single_thread

__all__ = ["over_layers", "single_thread"]

LONG = 1024  # tokens from which on a layer's tensors are large enough that threads do not wait for the interpreter
MOST = 4  # layers at once, each with its shards in memory

T = TypeVar("T")


def over_layers(work: Callable[[int], T], layers: Sequence[int], tokens: int) -> Iterator[T]:
    """`work(layer)` of each in order; of long texts several layers at once, as many as there are cores, at most four.

    What `work` returns must not depend on what runs beside it; each layer draws from a generator of its own.
    """
    workers = 1 if tokens < LONG else min(os.cpu_count() or 1, MOST, len(layers))
    if workers <= 1:
        yield from map(work, layers)
        return
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(work, layers)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C the layers that have begun are still finished
