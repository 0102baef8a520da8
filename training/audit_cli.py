"""`sparsefinder-train audit`: how much of the attention a running service keeps, on text that is sent to it."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from sparsefinder.errors import ConfigError
from sparsefinder.whole_files import write_text
from training.audit_client import Service
from training.audit_run import Audited, audit
from training.progress_bar import progress

BELOW = 1
MEASURES = {"recall": "recall", "sparsity": "sparsity", "mass": "mass", "exact_rows": "exact\nrows"}
Option = typer.Option


def audit_command(
    url: Annotated[str, Option(help="Where the service listens.")] = "http://127.0.0.1:8000",
    key_env: Annotated[
        str, Option(help="Environment variable that holds the API key; the key itself is never an option.")
    ] = "SPARSEFINDER_API_KEY",
    text: Annotated[list[Path] | None, Option(help="UTF-8 text file, may be repeated; none = held-out text.")] = None,
    requests: Annotated[int, Option(min=1, help="Pieces of text to send, one after the other.")] = 100,
    attention: Annotated[str, Option(help="sparse or auto: only a plan can miss something.")] = "sparse",
    min_recall: Annotated[
        float | None, Option(min=0.0, max=1.0, help="Exit with 1 where the live recall's interval lies wholly below.")
    ] = None,
    out: Annotated[Path | None, Option(help="JSON file for all figures, every head included.")] = None,
) -> None:
    """Send text to a running service, wait for its audits, and show live beside calibrated figures."""
    service = Service(url, os.environ.get(key_env, "").strip() or None, key_env)
    with progress() as on_progress:
        found = audit(service, text or (), requests, attention, on_progress)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(table(found.sparsity))
    for line in words(found):
        console.print(line, soft_wrap=True)
    if out is not None:
        write_text(out, json.dumps(found.as_dict(), indent=1))
        console.print(f"All figures lie in {out}", soft_wrap=True)
    if min_recall is not None and _below(found.sparsity["live"], min_recall):
        console.print(f"The live recall lies below {min_recall:.1%}", soft_wrap=True)
        raise typer.Exit(BELOW)


def table(sparsity: dict[str, Any]) -> Table:
    """Per layer and measure, in percent: the card's calibration, the one in the loop, and live."""
    calibration, live = sparsity["calibration"] or {}, sparsity["live"]
    sources = {"card": calibration, "loop": calibration.get("loop") or {}, "live": live}
    shown = Table(
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title_justify="left",
        title=f"{sparsity['artifact']} {sparsity['artifact_version']}, in %",
    )
    shown.caption = "card: calibrated on q and k of the dense model; loop: calibrated with the plan in the loop"
    shown.add_column("layer", justify="right")
    for measure, heading in MEASURES.items():
        for source in sources:
            shown.add_column(f"{heading}\n{source}", justify="right")
        if measure == "recall":
            shown.add_column("95 %\ninterval", justify="right")
    for index in range(len(live["layers"])):
        rows = {name: _at(source.get("layers") or [], index) for name, source in sources.items()}
        shown.add_row(str(index), *_cells(rows), end_section=index + 1 == len(live["layers"]))
    shown.add_row("all", *_cells({name: source.get("overall") or {} for name, source in sources.items()}))
    return shown


def words(found: Audited) -> list[str]:
    """What the table does not say: how many requests, what audits cost, and whether the recall drifts."""
    live = found.sparsity["live"]
    cost, drift = live["cost"], live["drift"]
    share = "" if cost["share_of_inference"] is None else f" ({cost['share_of_inference']:.1%} of inference)"
    lines = [
        f"{found.requests} requests of {found.tokens / found.requests:.0f} tokens in mode {found.attention};"
        f" {live['requests']} audited requests in the service's window, {found.before} of them before this command",
        f"audits: {cost['seconds']:.2f} s since the start{share}, longest delay of a batch"
        f" {cost['longest_delay_ms']:.1f} ms (bound: {cost['bound_ms']:g} ms and one layer), {cost['dropped']} dropped",
    ]
    if drift is None:
        return [*lines, f"drift: not known ({live['drift_reason']})"]
    state = "DRIFTING" if drift["drifting"] else "none"
    return [
        *lines,
        f"drift: {state}; calibrated in the loop {drift['calibrated_recall']:.1%},"
        f" live {drift['live_recall']:.1%}, allowed fall {drift['margin']:.1%}",
    ]


def _below(live: dict[str, Any], least: float) -> bool:
    span = (live["overall"] or {}).get("recall_interval")
    if span is None:
        raise ConfigError(
            "min-recall: expected at least two audited requests with gold pairs; send more with --requests"
        )
    return bool(span[1] < least)


def _at(layers: list[dict[str, Any]], index: int) -> dict[str, Any]:
    return layers[index] if index < len(layers) else {}


def _cells(rows: dict[str, dict[str, Any]]) -> list[str]:
    cells = []
    for measure in MEASURES:
        cells += ["–" if row.get(measure) is None else f"{100 * row[measure]:.1f}" for row in rows.values()]
        if measure == "recall":
            span = rows["live"].get("recall_interval")
            cells.append(f"{100 * span[0]:.1f}–{100 * span[1]:.1f}" if span else "–")
    return cells
