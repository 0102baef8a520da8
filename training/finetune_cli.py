"""`sparsefinder-train finetune`; what it needs of torch is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from training.config import FinetuneConfig

DEFAULT = FinetuneConfig()
Option = typer.Option


def finetune_command(
    out: Annotated[Path, Option(help="Folder of the artifact to write.")] = Path("runs/finetuned"),
    teacher: Annotated[str, Option(help="Packaged name, local folder or hub id.")] = DEFAULT.teacher,
    text: Annotated[list[Path] | None, Option(help="Text files beside the embedded default; may be repeated.")] = None,
    eval_text: Annotated[list[Path] | None, Option(help="Text to measure on; no span of it is trained on.")] = None,
    artifact: Annotated[Path | None, Option(help="Go on from this artifact's delta and head scale.")] = None,
    form: Annotated[str, Option(help="What is trained: all, attention or lora.")] = DEFAULT.form,
    rank: Annotated[int, Option(help="Rank of the stored delta (and of LoRA).")] = DEFAULT.rank,
    steps: Annotated[int, Option(min=1, help="Optimizer steps.")] = DEFAULT.steps,
    batch_size: Annotated[int, Option(min=1)] = DEFAULT.batch_size,
    tokens: Annotated[int, Option(help="Tokens of every chunk, special tokens included.")] = 256,
    learning_rate: Annotated[float | None, Option(min=0.0, help="Default: what suits the form.")] = None,
    scale_rate: Annotated[float, Option(min=0.0, help="Learning rate of the heads' log scales.")] = DEFAULT.scale_rate,
    embedding_weight: Annotated[
        float, Option(min=0.0, help="Weight of the embedding's cosine beside the hidden states.")
    ] = DEFAULT.embedding_weight,
    density: Annotated[float, Option(min=0.001, max=1.0, help="Target share of non-zero weights.")] = DEFAULT.density,
    eval_chunks: Annotated[int, Option(min=3, help="Chunks to measure on, from each held-out text.")] = 100,
    seed: Annotated[int, Option()] = DEFAULT.seed,
) -> None:
    """Replace a model's softmax by entmax and distil the original into it; writes a small delta with its figures."""
    config = FinetuneConfig(
        teacher=teacher, form=form, rank=rank, steps=steps, batch_size=batch_size,  # type: ignore[arg-type]
        learning_rate=learning_rate, scale_rate=scale_rate,
        embedding_weight=embedding_weight, density=density, seed=seed,
    )  # fmt: skip
    from training.finetune_run import finetune_artifact

    sources = {"text": text or [], "eval_text": eval_text or []}
    finetune_artifact(config, out, **sources, artifact=artifact, tokens=tokens, eval_chunks=eval_chunks)
