"""Fitting and measuring work on many small tensors: one torch thread is fastest there."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

LONG = 1024  # tokens from which on a layer's tensors are large enough that threads do not wait for the interpreter
MOST = 4  # layers at once, each with its shards in memory

T = TypeVar("T")


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
