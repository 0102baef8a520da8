"""Tasks with known answers: copying, memories, cross-attention that copies and reverses, needles; docs/tasks.md.

    python -m benchmarks.tasks [--runs runs/tasks] [--quick] [--only copy]
                               [--needle ARTIFACT ...] [--json docs/figures/tasks.json] [--page docs/tasks.md]

Every run leaves one JSON file in --runs when it ends; what is there is not run again, so the command can be stopped
with Ctrl-C and started again at any time. Prints the tables of what has been run. `--quick` (its own folder, too few
steps to be believed) shows in a few minutes that everything runs.
"""

import argparse
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.tasks_page import make_page
from training.progress_bar import progress
from training.tasks.needle_study import NeedleRun, needle_studies
from training.tasks.runs import read_run, run_studies, write_json
from training.tasks.studies import Scale, all_studies, quick_scale
from training.threads import single_thread


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/tasks"), help="folder of finished runs")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--needle", nargs="+", default=[], help="artifacts of causal teachers, for needles in long text"
    )
    parser.add_argument("--only", default="", help="only runs whose names begin so (kernels, cross, memory, copy)")
    parser.add_argument("--last-first", action="store_true", help="from the end (for a second process)")
    parser.add_argument("--print-only", action="store_true", help="no new runs, tables of what is there")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--page", type=Path, help="write the tables to this file as well")
    options = parser.parse_args(arguments)
    folder = options.runs / "quick" if options.quick else options.runs
    studies = all_studies(quick_scale() if options.quick else Scale())
    studies += [study for artifact in options.needle for study in needle_studies(NeedleRun(artifact))]
    wanted = [study for study in studies if study.name.startswith(options.only)]
    order = wanted[::-1] if options.last_first else wanted
    began, code = time.perf_counter(), 0
    try:
        if not options.print_only:
            with progress() as on_progress, single_thread():
                run_studies(order, folder, on_progress)
    except KeyboardInterrupt:
        print("stopped; finished runs are kept, the same command goes on from here")
        code = 130
    found = {study.name: read_run(folder / f"{study.name}.json", study.settings) for study in studies}
    runs = {name: run for name, run in found.items() if run is not None}
    about = describe(runs, len(studies))
    page = make_page(about, runs)
    print(page)
    print(f"{time.perf_counter() - began:.0f} s now", flush=True)
    if options.json:
        write_json(options.json, {"about": about, "runs": runs})
    if options.page:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(page, encoding="utf-8")
    return code


def describe(runs: dict[str, dict[str, Any]], total: int) -> dict[str, Any]:
    """Hardware, versions and time, for the figures."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, each run on one thread",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "runs": len(runs),
        "of": total,
        "cpu_minutes": round(sum(run["cpu_seconds"] for run in runs.values()) / 60, 1),
        "longest_run_cpu_seconds": max((run["cpu_seconds"] for run in runs.values()), default=0.0),
    }


if __name__ == "__main__":
    raise SystemExit(main())
