"""`sparsefinder-train finetune`; what it needs of torch is imported when it runs."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from training.config import FINETUNES, FORMS, FinetuneConfig, finetune_config

DEFAULT = FinetuneConfig()
Option = typer.Option
# What is not given comes from the teacher's configuration, so these have no default of their own.
OWN = f"the teacher's own ({', '.join(FINETUNES)}), else"


def finetune_command(
    out: Annotated[Path, Option(help="Folder of the artifact to write.")] = Path("runs/finetuned"),
    teacher: Annotated[str, Option(help="Packaged name, local folder or hub id.")] = DEFAULT.teacher,
    text: Annotated[list[Path] | None, Option(help="Text files beside the embedded default; may be repeated.")] = None,
    eval_text: Annotated[list[Path] | None, Option(help="Text to measure on; no span of it is trained on.")] = None,
    artifact: Annotated[Path | None, Option(help="Go on from this artifact's delta and head scale.")] = None,
    form: Annotated[
        str | None, Option(help=f"Trained beside the heads' scales: {', '.join(FORMS)}; {OWN} {DEFAULT.form}.")
    ] = None,
    rank: Annotated[int | None, Option(help=f"Rank of the stored delta (and of LoRA); {OWN} {DEFAULT.rank}.")] = None,
    steps: Annotated[int | None, Option(min=1, help=f"Optimizer steps; {OWN} {DEFAULT.steps}.")] = None,
    until: Annotated[
        int | None, Option(min=1, help="Stop after so many steps; the learning rate falls as for all of them.")
    ] = None,
    local_steps: Annotated[
        int | None, Option(min=0, help="First steps that compare each attention layer by itself.")
    ] = None,
    batch_size: Annotated[int | None, Option(min=1, help=f"{OWN} {DEFAULT.batch_size}.")] = None,
    tokens: Annotated[
        int | None, Option(help=f"Tokens of every chunk, special tokens included; {OWN} {DEFAULT.tokens}.")
    ] = None,
    learning_rate: Annotated[float | None, Option(min=0.0, help="Default: what suits the form.")] = None,
    scale_rate: Annotated[
        float | None, Option(min=0.0, help=f"Learning rate of the heads' log scales; {OWN} {DEFAULT.scale_rate}.")
    ] = None,
    embedding_weight: Annotated[
        float | None, Option(min=0.0, help="Of encoders: the embedding's cosine beside the hidden states.")
    ] = None,
    hidden_weight: Annotated[
        float | None, Option(min=0.0, help="Of causal models: the hidden states beside the next words.")
    ] = None,
    density: Annotated[
        float | None,
        Option(min=0.0, max=1.0, help=f"Share of non-zero weights to hold, 0 = none; {OWN} {DEFAULT.density}."),
    ] = None,
    eval_chunks: Annotated[
        int | None,
        Option(min=3, help="Chunks to measure on, from each held-out text; default: 100, of causal models 8."),
    ] = None,
    seed: Annotated[int, Option()] = DEFAULT.seed,
) -> None:
    """Replace a model's softmax by entmax and distil the original into it; writes a small delta with its figures.

    Started again after an interruption, it goes on where it stopped.
    """
    options: dict[str, Any] = {
        "teacher": teacher, "form": form, "rank": rank, "steps": steps, "local_steps": local_steps,
        "batch_size": batch_size, "tokens": tokens, "learning_rate": learning_rate, "scale_rate": scale_rate,
        "embedding_weight": embedding_weight, "hidden_weight": hidden_weight, "density": density, "seed": seed,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    if density == 0:
        given["density"] = None
    config = replace(finetune_config(teacher), **given)
    from training.finetune_run import finetune_artifact

    sources = {"text": text or [], "eval_text": eval_text or []}
    finetune_artifact(config, out, **sources, artifact=artifact, eval_chunks=eval_chunks, until=until)
