"""`sparsefinder-train sweep` and `report`; what they need of torch and of matplotlib is imported when they run."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sparsefinder.errors import ConfigError
from training.config import SWEEPS, ExtractConfig, quick_form
from training.progress_bar import progress

EXTRACT = ExtractConfig()
Option = typer.Option


def sweep_command(
    config: Annotated[str, Option(help=f"Grid: {', '.join(SWEEPS)}.")] = "paper-mlm",
    quick: Annotated[bool, Option("--quick", help="The same rows on little text and a thin grid.")] = False,
    out: Annotated[Path, Option(help="Folder to write or to complete: sweep.json and what it is made of.")] = Path(
        "runs/sweep"
    ),
    teacher: Annotated[str, Option(help="Packaged name, local folder or hub id.")] = EXTRACT.teacher,
    artifact: Annotated[
        str | None, Option(help="Artifact whose teacher delta and maps are measured. Default: the shipped one.")
    ] = None,
    text: Annotated[list[Path] | None, Option(help="UTF-8 text file, may be repeated; none = the default.")] = None,
    tokens: Annotated[int | None, Option(min=3, help="Tokens of each instance, with the special ones.")] = None,
    instances: Annotated[int | None, Option(min=1, help="Held-out instances to measure on.")] = None,
    quality_points: Annotated[int | None, Option(min=0, help="Settings at which attention is really replaced.")] = None,
    only: Annotated[list[str] | None, Option(help="Measure this row only, such as distance; may be repeated.")] = None,
    seed: Annotated[int, Option(help="Same seed, same file.")] = EXTRACT.seed,
) -> None:
    """Measure every pattern and predictor over the grid on held-out attention graphs; started again, it goes on."""
    from training.pipeline import starting_artifact
    from training.sweep import run_sweep

    if config not in SWEEPS:
        raise ConfigError(f"config: expected one of {', '.join(SWEEPS)}, got {config!r}")
    grid = quick_form(SWEEPS[config]()) if quick else SWEEPS[config]()
    asked: dict[str, Any] = {"tokens": tokens, "instances": instances, "quality_points": quality_points}
    grid = replace(grid, **{name: value for name, value in asked.items() if value is not None}, seed=seed)
    base = starting_artifact(teacher, artifact)
    if not base:
        raise ConfigError("artifact: expected an artifact with maps of this teacher (pass it as --artifact)")
    source = ExtractConfig(
        teacher=teacher, artifact=base, text=tuple(str(path) for path in text or ()), tokens=grid.tokens,
        instances=grid.train_instances, heldout_instances=grid.instances, seed=seed,
    )  # fmt: skip
    with progress() as on_progress:
        result = run_sweep(grid, source, out, tuple(only or ()), on_progress)
    points = sum(family["measured_points"] for family in result["families"])
    Console().print(
        f"{points} points of {len(result['families'])} families on {result['about']['instances']} instances lie in "
        f"{out / 'sweep.json'}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def report_command(
    sweep: Annotated[Path, Option(help="Folder that `sweep` wrote.")] = Path("runs/sweep"),
    out: Annotated[Path, Option(help="Folder of the pictures, the page and the table.")] = Path("runs/report"),
    instance: Annotated[int, Option(min=0, help="Held-out instance whose attention is drawn.")] = 1,
) -> None:
    """Draw a sweep: pictures (PNG), one page that needs no network (index.html), and a table (recall.md)."""
    from training.report import write_report

    with progress() as on_progress:
        files = write_report(sweep, out, instance, on_progress)
    Console().print(f"{len(files)} files lie in {out}; open {out / 'index.html'}", highlight=False, soft_wrap=True)
