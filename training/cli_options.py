"""Options that several commands of `sparsefinder-train` share."""

from pathlib import Path
from typing import Annotated

import typer

from training.config import KINDS, RUNS, ExtractConfig, FitConfig

EXTRACT, FIT = ExtractConfig(), FitConfig()
Option = typer.Option

Teacher = Annotated[str, Option(help="Packaged name, local folder or hub id.")]
Text = Annotated[list[Path] | None, Option(help="UTF-8 text file, may be repeated; none = the embedded default.")]
Base = Annotated[
    str | None,
    Option("--artifact", help="Start from this artifact's teacher delta; 'none' = the teacher as it is. "
           "Default: the shipped artifact for the teacher minilm."),
]  # fmt: skip
# What is not given comes from the teacher's configuration (`config.run_config`), so these have no default of their own.
OWN = f"the teacher's own ({', '.join(RUNS)}), else"
Tokens = Annotated[
    int | None, Option(min=1, help=f"Tokens of each instance, with the special ones; {OWN} {EXTRACT.tokens}.")
]
Instances = Annotated[int | None, Option(min=1, help=f"Instances to train on; {OWN} {EXTRACT.instances}.")]
Heldout = Annotated[
    int | None, Option(min=1, help=f"Instances to calibrate and measure on; {OWN} {EXTRACT.heldout_instances}.")
]
Alpha = Annotated[
    float | None, Option(help=f"α of the entmax on the teacher's scores, 1 = its softmax; {OWN} {EXTRACT.alpha}.")
]
GoldMass = Annotated[
    float | None, Option(help=f"What the gold keys of a softmax row hold together; {OWN} {EXTRACT.gold_mass}.")
]
Seed = Annotated[int, Option(help="Same seed, same artifact.")]
ObjectiveName = Annotated[str, Option(help=f"One of {', '.join(KINDS)}.")]
Predictor = Annotated[
    str | None, Option("--predictor", help="How scores become pairs; default: the first that fits the objective "
                       f"({'; '.join(f'{name}: {chr(44).join(kinds)}' for name, kinds in KINDS.items())})."),
]  # fmt: skip
Rank = Annotated[int | None, Option(min=1, help=f"Dimensions of the projected space; {OWN} {FIT.rank}.")]
Shared = Annotated[bool, Option("--shared/--separate", help="One map for queries and keys, or one for each.")]
Recall = Annotated[float | None, Option(help="Target recall on held-out text, between 0 and 1.")]
Sparsity = Annotated[float | None, Option(help="Target sparsity, between 0 and 1; instead of --recall.")]
ClusterCount = Annotated[int, Option(min=1, help="Clusters of the predictor `clusters`.")]
Top = Annotated[int | None, Option(min=1, help="Nearest clusters of each token; default: from the target.")]
Steps = Annotated[int | None, Option(min=1, help=f"Optimizer steps for each layer; {OWN} {FIT.steps}.")]
TileSize = Annotated[
    int | None, Option(min=1, max=128, help=f"Query rows that share one key list; {OWN} {FIT.tile_size}.")
]
Tiles = Annotated[
    int | None, Option(min=1, help="Tiles of each instance that a step of `listwise` reads, evenly spread; "
                       f"{OWN} all of them.")
]  # fmt: skip
Window = Annotated[int | None, Option("--window", min=0, help=f"Window size, odd, 0 = none; {OWN} {FIT.window_size}.")]
Also = Annotated[list[str] | None, Option(help="Further maps to keep, such as hinge:4; may be repeated.")]
