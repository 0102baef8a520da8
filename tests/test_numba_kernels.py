"""Compiled kernels on disk: where they lie, and that no kernel outlives the code it was compiled from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsefinder.numba_kernels import choose_cache_folder, package_state


def test_another_state_of_the_kernels_has_another_name(tmp_path):
    """numba looks only at the file of a kernel, so an edited helper in another file would go unnoticed."""
    (tmp_path / "inner").mkdir()
    helper, other = tmp_path / "inner" / "helper.py", tmp_path / "other.py"
    helper.write_text("from sparsefinder.numba_kernels import inline_kernel\nx = 1\n")
    other.write_text("y = 1\n")
    before = package_state(tmp_path)
    other.write_text("y = 2\n")
    assert package_state(tmp_path) == before
    helper.write_text("from sparsefinder.numba_kernels import inline_kernel\nx = 2\n")
    changed = package_state(tmp_path)
    assert changed != before
    helper.rename(tmp_path / "helper.py")
    assert package_state(tmp_path) not in (before, changed)


def test_the_cache_folder_is_one_for_a_process_and_those_that_it_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "asked"))
    first = choose_cache_folder()
    assert first is not None
    assert first.parent == tmp_path / "asked"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(first))
    assert choose_cache_folder() == first


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    found = choose_cache_folder()
    assert found is not None
    assert Path(found).is_relative_to(tmp_path / "home" / "sparsefinder" / "numba")


SCORES_OF_A_CAUSAL_TILE = """
import numpy as np
from sparsefinder.attention.cpu import weigh_tile
scores, ends, listed = np.ones((1, 8, 8), np.float32), np.arange(1, 9), np.arange(16, dtype=np.int32)
index, counts, tau = np.zeros((1, 9), np.int32), np.zeros(1, np.int64), np.zeros(8, np.float32)
sums = np.zeros(8, np.float32), np.zeros(8, np.float32)
weigh_tile(scores, ends, 8, listed, 1.5, np.float32(1e-7), index, counts, sums, tau)
print(sums[0].tolist(), scores[0].sum(0).round(5).tolist())
"""


@pytest.mark.slow
def test_a_kernel_that_comes_from_the_cache_gives_what_it_gave_when_it_was_compiled(tmp_path):
    """Helpers are compiled once more with those that call them, and it is this code that the cache holds. There LLVM
    once took the factor out of a sum of products with zero, and rows that read few of their tile's keys became NaN."""
    command, names = [sys.executable, "-c", SCORES_OF_A_CAUSAL_TILE], os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [subprocess.run(command, env=names, capture_output=True, text=True, check=True) for _ in range(2)]
    assert [run.stdout for run in runs] == [f"{[1.0] * 8} {[1.0] * 8}\n"] * 2
