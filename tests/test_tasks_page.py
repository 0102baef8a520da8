"""The page of the tasks: verdicts follow the figures, tables show what was run and leave out what was not."""

import math

import pytest

from benchmarks.tasks import describe, main
from benchmarks.tasks_claims import claims
from benchmarks.tasks_page import make_page, rows_of, table
from training.tasks.studies import Scale, all_studies, quick_scale


def run(rows, **settings):
    return {"settings": settings, "seconds": 2.0, "cpu_seconds": 1.0, "figures": {"rows": rows}}


def memory(error, **form):
    plain = {"product": "none", "bias": "log", "normalised": True, "layers": 1, "heads": 8, "error": error}
    return plain | form


def verdicts(runs):
    return {claim: verdict for claim, _, verdict, _ in claims(runs)}


def adaptive(none, dot, gate, gate_free, slope):
    rows = [
        memory(none),
        memory(dot, product="dot", normalised=False),
        memory(gate, product="gate"),
        memory(gate_free, product="gate", normalised=False),
        memory(slope, product="slope"),
    ]
    return {"memory-adaptive-all": run([{"longest_jump": 3, **row} for row in rows])}


def test_adaptive_claims_are_held_against_what_a_fixed_kernel_leaves():
    seen = verdicts(adaptive(0.68, 0.2, 0.7, 0.25, 0.4))
    assert list(seen.values()) == ["holds"] * 5
    seen = list(verdicts(adaptive(0.5, 0.4, 0.3, 0.4, 0.5)).values())  # 2/3 is the floor: half of it is a third
    assert seen == ["does not hold", "does not hold", "holds", "does not hold", "does not hold"]


def test_fixed_nested_and_parallel_claims():
    runs = {"memory-fixed": run([memory(0.05), memory(0.4, bias="lin"), memory(0.3, product="dot")])}
    assert list(verdicts(runs).values()) == ["holds", "does not hold"]
    nested = [
        {"longest_jump": 3, "nesting": 1, **memory(error, product="dot", layers=layers)}
        for layers, error in ((1, 0.5), (2, 0.04), (3, 0.03))
    ]
    assert list(verdicts({"memory-nested": run(nested)}).values()) == ["holds", "holds"]
    nested[1]["error"] = 0.3  # only three layers are enough, and two gain less than half
    assert list(verdicts({"memory-nested": run(nested)}).values()) == ["does not hold", "does not hold"]
    parallel = [memory(e, layers=n, heads=h) for n, h, e in ((2, 1, 0.5), (2, 2, 0.2), (3, 1, 0.2), (3, 2, 0.1))]
    assert list(verdicts({"memory-parallel": run(parallel)}).values()) == ["holds", "does not hold"]
    assert verdicts({"memory-parallel": run(parallel[:2])}) == {}


def test_kernel_claims_count_heads():
    def points(**needed):
        rows = []
        for bias, counts in needed.items():
            for lag, count in zip((1, 4, 8), counts, strict=True):
                rows += [
                    {"bias": bias, "lag": lag, "heads": h, "error": 0.01 if h >= count else 0.9} for h in (1, 2, 4)
                ]
        return {"kernels-points": run(rows)}

    assert list(verdicts(points(log=(1, 2, 2), lin=(1, 4, 9))).values()) == ["holds", "holds"]
    assert list(verdicts(points(log=(1, 4, 9), lin=(1, 2, 4))).values()) == ["holds", "does not hold"]
    assert list(verdicts(points(log=(2, 1, 4), lin=(1, 2, 4))).values()) == ["does not hold", "does not hold"]
    decays = [
        {"decay": "exponential", "rate": 0.1, "bias": bias, "heads": 1, "error": error}
        for bias, error in (("lin", 0.001), ("log", 0.1))
    ]
    assert list(verdicts({"kernels-decays": run(decays)}).values()) == ["holds"]


def test_the_page_shows_every_kind_of_run():
    figures = {"density": 0.128, "gold_recall": 0.5, "gold_reach": 1.0, "ceiling": 1.0, "accuracy": 0.875}
    cross = {"density": 0.25, "gold_recall": 0.75, "every_head": 0.5, "accuracy": 0.625}
    runs = {
        "copy-l1-thin-star": run({"star": figures}, layers=1, group="thin", pattern={}),
        "copy-l2-thin-star": run({"star": {**figures, "accuracy": 0.25}}, layers=2, group="thin", pattern={}),
        "copy-l1-teacher": run({"learned | x": figures}, layers=1, learned=[]),
        "cross-copy": run({"low rank 4": cross}, order="copy"),
        **adaptive(0.68, 0.2, 0.7, 0.25, 0.4),
    }
    runs["cross-copy"]["figures"]["dense_accuracy"] = 1.0
    page = make_page(describe(runs, 9), runs)
    assert "5 of 9 runs" in page
    assert "| star | about 1/8 of the pairs | 12.8% | 87.5% (0.50 / 1.00) | 25.0% (0.50 / 1.00) |" in page
    assert "| learned \\| x | 12.8% | 87.5% (0.50 / 1.00) |" in page
    assert "| copy | low rank 4 | 25.0% | 0.75 | 0.50 | 62.5% |" in page
    assert "holds" in page
    assert "Nested" not in page  # no such run
    assert table(["a"], []) == ""
    assert [row["name"] for row in rows_of(runs, "copy-l1")] == ["star", "learned | x"]


def test_names_of_runs_differ_and_settings_are_plain():
    for scale in (Scale(), quick_scale()):
        names = [study.name for study in all_studies(scale)]
        assert len(set(names)) == len(names)
        assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for name in names)


def test_the_command_runs_one_study_and_takes_it_up_again(tmp_path, capsys):
    arguments = ["--quick", "--only", "kernels-points", "--runs", str(tmp_path), "--json", str(tmp_path / "all.json")]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert "1 of" in first
    assert "A longer fixed memory needs more heads" in first
    stored = tmp_path / "quick" / "kernels-points.json"
    before = stored.stat().st_mtime_ns
    assert main([*arguments, "--page", str(tmp_path / "page.md")]) == 0
    assert stored.stat().st_mtime_ns == before
    assert (tmp_path / "page.md").read_text().startswith("# Tasks with known answers")
    assert (tmp_path / "all.json").exists()


def test_ctrl_c_prints_what_is_there(tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.tasks.run_studies", stop)
    assert main(["--quick", "--runs", str(tmp_path)]) == 130
    assert "stopped" in capsys.readouterr().out


@pytest.mark.unchecked
def test_unknown_options_are_refused():
    with pytest.raises(SystemExit):
        main(["--fast"])


def test_needles_are_told_for_every_artifact():
    dense = {"found": 1.0, "log_probability": -0.5, "recall": math.nan, "computed": math.nan}
    lost = {"found": 0.0, "log_probability": -9.0, "recall": 0.25, "computed": 0.1}
    runs = {
        f"needle-{name}-64-{depth}": {
            "settings": {"run": name, "tokens": 64},
            "figures": {
                "rows": {"dense": dense, "predicted": dense | lost if depth == 10 else dense | lost | {"found": 1.0}}
            },
            "cpu_seconds": 1.0,
        }
        for name in ("first", "second")
        for depth in (10, 90)
    }
    page = make_page(describe(runs, 4), runs)
    assert page.count("| dense | 100% (-0.5) |") == 2
    assert page.count("| predicted | 50% (-9.0, 0.25, 10.0%) |") == 2
    assert "Artifact of `second`" in page
