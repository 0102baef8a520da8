"""`make train` with files whose names a shell, or make itself, would take apart; nothing is installed for it."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMAND = '#!/bin/sh\nprintf "%s\\n" "$@"\n'  # in the place of sparsefinder-train: what it was called with


@pytest.mark.parametrize(("given", "expected"), [
    (["TEXT=/tmp/my own.txt"], ["--out", "runs/my own", "--text", "/tmp/my own.txt"]),
    (["TEXT=/a b/it's \"new\".v2.txt"], ["--out", "runs/it's \"new\".v2", "--text", "/a b/it's \"new\".v2.txt"]),
    (["TEXT=corpus.txt", "OUT=runs/of mine"], ["--out", "runs/of mine", "--text", "corpus.txt"]),
    (["TEXT=some/corpus.txt"], ["--out", "runs/corpus", "--text", "some/corpus.txt"]),
    ([], ["--out", "runs/default"]),
])  # fmt: skip
def test_a_texts_name_comes_whole(given: list[str], expected: list[str], tmp_path: Path) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    command = tmp_path / "bin" / "sparsefinder-train"
    command.parent.mkdir()
    command.write_text(COMMAND)
    command.chmod(0o755)
    (tmp_path / ".ready").touch()
    called = subprocess.run(
        [make, "--no-print-directory", f"VENV={tmp_path}", "train", *given],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert called.stdout.splitlines() == ["run", *expected]
