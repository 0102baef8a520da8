"""Compiled kernels on disk: where they lie, and that no kernel outlives the code it was compiled from."""

from pathlib import Path

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
