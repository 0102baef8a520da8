"""`sparsefinder-train calibrate`: budgets of heads for a target, and what they gain over one budget for all."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sparsefinder.errors import ConfigError
from training.config import Measure, Target
from training.progress_bar import progress

Option = typer.Option
MISS = 5e-4  # a smaller one does not show in what is printed


def calibrate_command(
    artifact: Annotated[Path, Option(help="Artifact whose predictors are cut.")],
    data: Annotated[Path, Option(help="Folder that `extract` wrote.")] = Path("runs/shards"),
    out: Annotated[Path | None, Option(help="Folder of the artifact to write; default: in place.")] = None,
    recall: Annotated[float | None, Option(help="At least this share of the gold pairs.")] = None,
    mass: Annotated[float | None, Option(help="At least this share of the teacher's attention.")] = None,
    density: Annotated[float | None, Option(help="At most this share of the legal pairs computed.")] = None,
    max_output_error: Annotated[
        float | None, Option(help="At most this relative error of what attention adds (root mean square over layers).")
    ] = None,
    json_file: Annotated[Path | None, Option("--json", help="File for the table, the curve and every head.")] = None,
) -> None:
    """Allot density to heads and layers where it buys most, for one target; exactly one is given.

    Working points of the cut before are dropped: `evaluate --write` measures new ones.
    """
    from training.pipeline import calibrate_artifact

    target = _target({"recall": recall, "mass": mass, "density": density, "output": max_output_error})
    with progress() as on_progress:
        card, _, found = calibrate_artifact(artifact, data, target, on_progress, out)
    table = Table(title="allotted against uniform budgets, on instances of neither", title_justify="left")
    for heading in ("budgets", *next(iter(found.table.values()))):
        table.add_column(heading.replace("_", " "), justify="left" if heading == "budgets" else "right")
    for name, row in found.table.items():
        table.add_row(name, *("–" if value is None else f"{value:.4f}" for value in row.values()))
    console = Console()
    console.print(table)
    if missed := missed_target(target, found.reached):
        console.print(missed, highlight=False, soft_wrap=True)
    heads = f"{found.every} heads read every key, {found.none} need no prediction, of {found.density.size}"
    console.print(f"{heads}; artifact {card.version} lies in {out or artifact}", highlight=False, soft_wrap=True)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(found.as_dict(), indent=1), encoding="utf-8")


def missed_target(target: Target, reached: dict[str, float | None]) -> str:
    """A line where the figures reached on the half that budgets were chosen on are not the target; else nothing.

    Density is missed where no head has a sparser point than its positional pattern alone; the others where the pairs
    that a predictor can find at all, or heads without a gold pair, leave no more.
    """
    name = "output_error" if target.measure == "output" else target.measure
    came = reached[name]
    if came is None:
        return ""
    over = came - target.value if target.measure in ("density", "output") else target.value - came
    if over < MISS:
        return ""
    what = "is what window and global tokens compute alone" if target.measure == "density" else "is reached"
    return f"target not reached: {name.replace('_', ' ')} {target.value:.3f} asked, {came:.3f} {what}"


def _target(asked: dict[Measure, float | None]) -> Target:
    given = [(measure, value) for measure, value in asked.items() if value is not None]
    if len(given) != 1:
        raise ConfigError("target: expected exactly one of --recall, --mass, --density and --max-output-error")
    return Target(*given[0])
