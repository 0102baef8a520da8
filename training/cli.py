"""`sparsefinder-train`: extract, fit, evaluate, run, finetune, sweep, report and audit.

A user's mistake is one line on stderr and exit code 2; Ctrl-C is one line and 130, and what is finished stays.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sparsefinder.errors import ConfigError, SparsefinderError
from sparsefinder.faiss_choice import check_faiss_wheels
from training.audit_cli import audit_command
from training.calibrate_cli import calibrate_command, missed_target
from training.cli_options import (
    EXTRACT,
    FIT,
    Alpha,
    Also,
    Base,
    ClusterCount,
    GoldMass,
    Heldout,
    Instances,
    ObjectiveName,
    Option,
    Predictor,
    Rank,
    Recall,
    Seed,
    Shared,
    Sparsity,
    Steps,
    Teacher,
    Text,
    Tiles,
    TileSize,
    Tokens,
    Top,
    Window,
)
from training.config import KINDS, ExtractConfig, FitConfig, RunConfig, Target, run_config
from training.finetune_cli import finetune_command
from training.mlm_head_cli import mlm_head_command
from training.progress_bar import progress
from training.sweep_cli import report_command, sweep_command

USAGE_ERROR, INTERRUPTED = 2, 130

app = typer.Typer(
    name="sparsefinder-train",
    no_args_is_help=True,
    add_completion=False,
    help="Train the prediction of attention: extract graphs, fit projections, measure, write an artifact.",
)


def _friendly(command: Callable[..., None]) -> Callable[..., None]:
    """Typed errors and Ctrl-C as one line and an exit code."""

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        try:
            check_faiss_wheels()
            command(**arguments)
        except SparsefinderError as error:
            _say_error(str(error))
            raise typer.Exit(USAGE_ERROR) from None
        except KeyboardInterrupt:
            _say_error("interrupted; what is finished is kept, run the same command again")
            raise typer.Exit(INTERRUPTED) from None

    return wrapped


@app.command()
@_friendly
def extract(
    out: Annotated[Path, Option(help="Folder of the shards to write or to complete.")] = Path("runs/shards"),
    teacher: Teacher = EXTRACT.teacher,
    artifact: Base = None,
    text: Text = None,
    tokens: Tokens = None,
    instances: Instances = None,
    heldout: Heldout = None,
    alpha: Alpha = None,
    gold_mass: GoldMass = None,
    seed: Seed = EXTRACT.seed,
) -> None:
    """Save q, k and gold edges of every layer and head; started again, it goes on where it stopped."""
    from training.pipeline import read_and_extract

    config, console = _extract_config(**locals()), Console(stderr=True)
    with progress(console) as on_progress:
        found = read_and_extract(config, out, on_progress, _saying(console))
    _say(f"{found['train']} training and {found['heldout']} held-out instances of {config.tokens} tokens lie in {out}")


@app.command()
@_friendly
def fit(
    data: Annotated[Path, Option(help="Folder that `extract` wrote.")] = Path("runs/shards"),
    out: Annotated[Path, Option(help="Folder of the artifact to write.")] = Path("runs/artifact"),
    artifact: Base = None,
    objective: ObjectiveName = FIT.objective,
    predictor: Predictor = None,
    rank: Rank = None,
    shared: Shared = FIT.shared,
    recall: Recall = None,
    sparsity: Sparsity = None,
    clusters: ClusterCount = FIT.clusters,
    top: Top = None,
    steps: Steps = None,
    tile_size: TileSize = None,
    tiles: Tiles = None,
    window: Window = None,
    also: Also = None,
    seed: Seed = FIT.seed,
) -> None:
    """Train projections and thresholds from extracted graphs, measure them, and write an artifact."""
    from training.extract import read_manifest
    from training.pipeline import fit_artifact

    manifest = read_manifest(data / "train")
    base = _base(manifest["teacher"], artifact, manifest["delta"])
    config = _fit_config(teacher=manifest["teacher"], **locals())
    with progress() as on_progress:
        extracted = ExtractConfig(teacher=manifest["teacher"], artifact=base, text=tuple(manifest["text"]))
        card, reports = fit_artifact(config, extracted, data, out, on_progress)
    _show(reports)
    _say(f"Artifact {card.version} lies in {out}")


@app.command()
@_friendly
def run(
    out: Annotated[Path, Option(help="Folder to write: shards/ and artifact/.")] = Path("runs/default"),
    teacher: Teacher = EXTRACT.teacher,
    artifact: Base = None,
    text: Text = None,
    tokens: Tokens = None,
    instances: Instances = None,
    heldout: Heldout = None,
    alpha: Alpha = None,
    gold_mass: GoldMass = None,
    objective: ObjectiveName = FIT.objective,
    predictor: Predictor = None,
    rank: Rank = None,
    shared: Shared = FIT.shared,
    recall: Recall = None,
    sparsity: Sparsity = None,
    clusters: ClusterCount = FIT.clusters,
    top: Top = None,
    steps: Steps = None,
    tile_size: TileSize = None,
    tiles: Tiles = None,
    window: Window = None,
    also: Also = None,
    seed: Seed = FIT.seed,
) -> None:
    """Extract, fit and evaluate in one go; the artifact can be loaded into a running service."""
    from training.pipeline import run as run_all

    options = locals()
    config = RunConfig(_extract_config(**options), _fit_config(**options), _target(teacher, recall, sparsity))
    console = Console(stderr=True)
    with progress(console) as on_progress:
        card, reports = run_all(config, out, on_progress, _saying(console))
    _show(reports)
    if config.target is not None and (missed := missed_target(config.target, card.calibration["allotted"]["reached"])):
        _say(missed)
    _say(f"Artifact {card.version} lies in {out / 'artifact'}")


@app.command()
@_friendly
def evaluate(
    artifact: Annotated[Path, Option(help="Artifact to measure.")],
    data: Annotated[Path, Option(help="Folder that `extract` wrote.")] = Path("runs/shards"),
    pattern: Annotated[
        str, Option(help='Measure this pattern instead, such as "window(5) | global(1) | clusters16(top=2)".')
    ] = "",
    maps: Annotated[str, Option(help="The artifact's maps that predictors in the pattern use, such as hinge-r8.")] = "",
    json_file: Annotated[Path | None, Option("--json", help="File for the figures of every layer and head.")] = None,
    write: Annotated[
        bool,
        Option(
            "--write", help="Write the figures into the artifact, with working points and with figures in the loop."
        ),
    ] = False,
) -> None:
    """Measure an artifact's served predictors, or any pattern, on the held-out shards."""
    import json

    from training.pattern_text import evaluate_pattern
    from training.pipeline import evaluate_artifact, write_figures

    if write and pattern:
        raise ConfigError("evaluate: expected --write or --pattern, got both: an artifact holds figures of its own")
    card = None
    with progress() as on_progress:
        if write:
            card, reports = write_figures(artifact, data, on_progress)
        elif pattern:
            reports = evaluate_pattern(
                artifact, data, pattern, maps, lambda done, total: on_progress("measure", done, total)
            )
        else:
            reports = evaluate_artifact(artifact, data, on_progress)
    _show(reports)
    if card is not None:
        _say_written(card, artifact)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps({name: report.as_dict() for name, report in reports.items()}, indent=1))
        _say(f"Figures of {artifact} lie in {json_file}")
    else:
        _say(f"Figures of {artifact}; --json FILE keeps them with every head")


app.command("calibrate")(_friendly(calibrate_command))
app.command("finetune")(_friendly(finetune_command))
app.command("mlm-head")(_friendly(mlm_head_command))
app.command("sweep")(_friendly(sweep_command))
app.command("audit")(_friendly(audit_command))
app.command("report")(_friendly(report_command))


def main() -> None:
    """The commands, with every module imported; `training.__main__` is the console script."""
    app()


def _extract_config(
    *, teacher: str, artifact: str | None, text: list[Path] | None, heldout: int | None, **options: Any
) -> ExtractConfig:
    from training.pipeline import starting_artifact

    base = run_config(teacher).extract
    changed = {name: options[name] for name in ("tokens", "instances", "alpha", "gold_mass", "seed")}
    changed |= {"teacher": teacher, "artifact": starting_artifact(teacher, artifact), "heldout_instances": heldout}
    changed |= {"text": tuple(str(path) for path in text or ())}
    return replace(base, **{name: value for name, value in changed.items() if value is not None})


FIT_OPTIONS = ("objective", "rank", "shared", "clusters", "top", "steps", "tile_size", "tiles", "seed")


def _fit_config(*, teacher: str, **options: Any) -> FitConfig:
    """What is given, over the teacher's own configuration; `fit` takes the teacher from its shards."""
    changed = {name: options[name] for name in FIT_OPTIONS}
    changed |= {"kind": options["predictor"], "window_size": options["window"]}  # checked by FitConfig
    changed |= {"also": tuple(_named(text) for text in options["also"] or ())}
    given = {name: value for name, value in changed.items() if value is not None}
    if options["recall"] is not None or options["sparsity"] is not None:
        given |= {"recall": options["recall"], "sparsity": options["sparsity"]}
    return replace(run_config(teacher).fit, **given)


def _target(teacher: str, recall: float | None, sparsity: float | None) -> Target | None:
    """Teachers whose budgets are allotted to heads take a recall or a sparsity for that."""
    own = run_config(teacher).target
    if own is None or (recall is None and sparsity is None):
        return own
    return Target("recall", recall) if recall is not None else Target("density", 1 - (sparsity or 0.0))


def _named(text: str) -> tuple[str, int]:
    name, _, rank = text.partition(":")
    if name not in KINDS or not rank.isdigit() or int(rank) < 1:
        raise ConfigError(f"also: expected an objective and a rank such as hinge:4, got {text!r}")
    return name, int(rank)


def _base(teacher: str, asked: str | None, delta: str) -> str:
    """The artifact whose delta the shards were made with: the one that is named, or the shipped one if it matches."""
    from sparsefinder.artifact import delta_hash, load
    from training.pipeline import starting_artifact

    base = starting_artifact(teacher, asked) if delta or asked else ""
    if delta_hash(load(base) if base else None) != delta:
        raise ConfigError("artifact: expected one with the teacher delta of the shards (pass it as --artifact)")
    return base


def _show(reports: dict[Any, Any]) -> None:
    """Figures per layer of each named set."""
    for name, report in reports.items():
        table = Table(title=f"set {name}, {report.instances} held-out instances", title_justify="left")
        for heading in ("layer", *report.overall):
            table.add_column(heading.replace("_", " "), justify="right")
        for layer in range(len(report.empty_gold)):
            table.add_row(str(layer), *(f"{float(values[layer]):.3f}" for values in report.layers.values()))
        table.add_row("mean", *(f"{value:.3f}" for value in report.overall.values()))
        Console().print(table)


def _say_written(card: Any, folder: Path) -> None:
    points = card.calibration.get("points", [])
    densities = ", ".join(f"{point['density']:.3f}" for point in points) or "none, its predictors have no cut to move"
    _say(f"Artifact {card.version} in {folder} holds these figures; working points at densities {densities}")


def _saying(console: Console) -> Callable[[str], None]:
    """What says a line while a bar is shown on this console."""
    return functools.partial(console.print, highlight=False, soft_wrap=True, markup=False)


def _say(text: str) -> None:
    Console().print(text, highlight=False, soft_wrap=True)


def _say_error(text: str) -> None:
    sys.stdout.flush()
    Console(stderr=True).print(f"error: {text}", highlight=False, soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
