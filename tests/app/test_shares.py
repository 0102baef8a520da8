"""A batch in shares: every text once, in its place, and no share much heavier than another."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.shares import in_shares, shares


@given(st.lists(st.integers(1, 512), min_size=1, max_size=40), st.integers(1, 6))
def test_every_text_is_in_one_share_and_loads_are_even(lengths: list[int], count: int) -> None:
    found = shares(lengths, count)
    assert sorted(place for part in found for place in part) == list(range(len(lengths)))
    assert len(found) == min(count, len(lengths))
    loads = [sum(lengths[place] for place in part) for part in found]
    assert max(loads) - min(loads) <= max(lengths)


def test_outputs_come_back_in_order_from_single_threads() -> None:
    seen = set()

    def compute(ids: Sequence[list[int]]) -> list[np.ndarray]:
        seen.add(threading.current_thread().name)
        assert torch.is_inference_mode_enabled()
        assert torch.get_num_threads() == 1
        return [np.array([sum(item)], dtype=np.float32) for item in ids]

    ids = [[n] * (1 + n % 5) for n in range(17)]
    assert [float(vector[0]) for vector in in_shares(compute, ids, 3)] == [float(sum(item)) for item in ids]
    assert all(name.startswith("sparsefinder-share") for name in seen)


def test_what_a_share_raises_is_raised() -> None:
    def compute(ids: Sequence[list[int]]) -> list[np.ndarray]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_shares(compute, [[1], [2]], 2)
