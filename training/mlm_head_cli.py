"""`sparsefinder-train mlm-head`; what it needs of torch is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from training.cli_options import Base, Seed, Teacher
from training.config import MlmHeadConfig
from training.progress_bar import progress

DEFAULT = MlmHeadConfig()
Option = typer.Option


def mlm_head_command(
    out: Annotated[Path, Option(help="Folder to write: draws (they may be deleted) and head/.")] = Path(
        "runs/mlm-head"
    ),
    teacher: Teacher = DEFAULT.teacher,
    artifact: Base = None,
    text: Annotated[list[Path] | None, Option(help="Text files beside the embedded default; may be repeated.")] = None,
    eval_text: Annotated[list[Path] | None, Option(help="Text to measure on; no span of it is trained on.")] = None,
    tokens: Annotated[int, Option(min=1, help="Tokens of every text, special ones included.")] = DEFAULT.tokens,
    batch_size: Annotated[int, Option(min=1, help="Texts in a batch.")] = DEFAULT.batch_size,
    batches: Annotated[int, Option(min=1, help="Batches the teacher reads, each masked once.")] = DEFAULT.batches,
    epochs: Annotated[int, Option(min=1, help="Passes of the head over all masked positions.")] = DEFAULT.epochs,
    positions: Annotated[int, Option(min=1, help="Masked positions in a step of the head.")] = DEFAULT.positions,
    learning_rate: Annotated[float, Option(min=0.0)] = DEFAULT.learning_rate,
    eval_chunks: Annotated[int, Option(min=1, help="Texts to measure on, from each held-out text.")] = 100,
    seed: Seed = DEFAULT.seed,
) -> None:
    """Train a fill-mask head on a frozen teacher; started again, it goes on with the texts that were read."""
    from training.mlm_head import train_mlm_head
    from training.pipeline import starting_artifact

    config = MlmHeadConfig(
        teacher=teacher, artifact=starting_artifact(teacher, artifact), tokens=tokens, batch_size=batch_size,
        batches=batches, epochs=epochs, positions=positions, learning_rate=learning_rate, seed=seed,
    )  # fmt: skip
    with progress() as on_progress:
        card = train_mlm_head(
            config, out, text=text or [], eval_text=eval_text or [], eval_chunks=eval_chunks, on_progress=on_progress
        )
    figures = card.training["held_out"]
    table = Table(title="held-out text at masked positions", title_justify="left")
    for heading in ("text", *next(iter(figures.values()))):
        table.add_column(heading.replace("_", " "), justify="left" if heading == "text" else "right")
    for name, row in figures.items():
        table.add_row(name, *(str(value) for value in row.values()))
    Console().print(table)
    Console().print(f"Head {card.head_sha256[:12]} lies in {out / 'head'}", highlight=False, soft_wrap=True)
