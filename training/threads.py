"""Fitting and measuring work on many small tensors: one torch thread is fastest there."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
