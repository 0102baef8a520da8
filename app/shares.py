"""A batch in equal shares, each computed by one thread of its own: for models whose kernels are torch's alone.

Two threads inside every operation wait for each other at its end, and longest where another thread of the process
takes a core for a moment. Shares wait once, at the end of the batch. Our own kernels share out their work themselves.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from app.servable import Ids, Vector

Part = Callable[[Sequence[Ids]], Sequence[Vector]]


def shares(lengths: Sequence[int], count: int) -> list[list[int]]:
    """At most `count` sets of places with about as many tokens each: the longest first, to the one that has least."""
    found: list[list[int]] = [[] for _ in range(min(count, len(lengths)))]
    loads = [0] * len(found)
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        least = loads.index(min(loads))
        found[least].append(place)
        loads[least] += lengths[place]
    return found


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "sparsefinder-share", initializer=partial(torch.set_num_threads, 1))


def in_shares(compute: Part, ids: Sequence[Ids], threads: int) -> list[Vector]:
    """`compute` of every text, in shares on so many threads at once."""
    parts = shares([len(item) for item in ids], threads)
    if len(parts) < 2:
        return list(compute(ids))
    outputs: dict[int, Vector] = {}
    for part, vectors in zip(parts, _pool(threads).map(partial(_one, compute, ids), parts), strict=True):
        outputs |= zip(part, vectors, strict=True)
    return [outputs[place] for place in range(len(ids))]


def _one(compute: Part, ids: Sequence[Ids], part: Sequence[int]) -> Sequence[Vector]:
    with torch.inference_mode():  # it holds for a thread
        return compute([ids[place] for place in part])
