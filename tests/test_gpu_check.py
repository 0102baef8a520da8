"""The check that is meant for a GPU, rehearsed without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check, gpu_check_cases

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"


def run(*arguments, **environment):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHON": sys.executable, **environment}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
def test_rehearsal(tmp_path):
    pytest.importorskip("triton", reason="Triton cannot be installed on this system: the gpu backend is not tested")
    done = run("--rehearsal", "--json", str(tmp_path / "check.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all rows measured" in done.stdout
    found = json.loads((tmp_path / "check.json").read_text())
    assert [row["right"] for row in found["checks"]] == [True] * (len(gpu_check_cases.CASES) + 1)
    sizes = gpu_check.REHEARSAL
    ours = [row for row in found["rows"] if row["row"] in ("softmax", "entmax", "entmax, checked", "plan, best")]
    assert len(ours) == 4 * len(sizes.tokens) * len(sizes.batches) * len(sizes.densities)
    assert all(row["milliseconds"] > 0 for row in ours)
    absent = [row for row in found["rows"] if row["row"] in ("flash", "flex", "adasplash 1", "adasplash 2")]
    assert {row["row"] for row in absent} == {"flash", "flex", "adasplash 1", "adasplash 2"}
    assert all(row["milliseconds"] is None and "needs a GPU" in row["note"] for row in absent)
    assert [goal["ratio"] for goal in found["goals"]] == [None, None]
    assert found["about"]["triton"]


def test_a_spent_budget_ends_it(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "check_everything", lambda device, spent: [])
    found = gpu_check.main(["--rehearsal", "--budget", "0"])
    assert "rows" not in found
    assert "budget spent" in capsys.readouterr().out


def test_wrong_outputs_end_it_with_their_names(monkeypatch):
    checks = [{"call": "float32, somehow", "right": False, "said": ""}]
    monkeypatch.setattr(gpu_check, "check_everything", lambda device, spent: checks)
    with pytest.raises(SystemExit, match="wrong outputs: float32, somehow"):
        gpu_check.main(["--rehearsal", "--budget", "0"])


def test_a_kernel_that_errs_is_seen(monkeypatch):
    """One weight too many in an output is more than any tolerance here."""
    from sparsefinder.attention import api

    reference = api.BACKENDS["reference"]
    monkeypatch.setitem(api.BACKENDS, "gpu", lambda call, plan: reference(call, plan) * 1.05)
    monkeypatch.setattr(gpu_check_cases, "CASES", gpu_check_cases.CASES[-1:])
    assert [row["right"] for row in gpu_check_cases.check_everything("cpu", lambda: False)] == [False, True]


def test_goals():
    rows = [
        {"row": "flash", "tokens": 16384, "batch": 1, "density": None, "milliseconds": 3.0},
        {"row": "entmax", "tokens": 16384, "batch": 1, "density": 0.05, "milliseconds": 2.0},
        {"row": "entmax", "tokens": 16384, "batch": 8, "density": 0.05, "milliseconds": 9.0},
        {"row": "adasplash 1", "tokens": 8192, "batch": 1, "density": None, "milliseconds": None},
    ]
    assert [goal["ratio"] for goal in gpu_check._goals(rows)] == [1.5, None]


def test_what_is_missing_is_said(tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('no triton here')\n")
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    fake.chmod(0o755)
    done = run("--rehearsal", PYTHON=str(fake))
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: expected torch, triton,")
    assert "no triton here" in done.stderr
