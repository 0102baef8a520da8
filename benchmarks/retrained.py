"""Does retraining on one's own text pay? Recall of two artifacts' tile predictors at equal sparsity, on new text.

    sparsefinder-train run --rank 8 --text my.txt --out runs/my
    python -m benchmarks.retrained --old artifacts/minilm-entmax --new runs/my/artifact --data runs/my/shards

The text is the held-out part of my.txt; each head is cut at the sparsity in question, so thresholds play no part.
"""

import argparse
from pathlib import Path

import torch

from sparsefinder.artifact import Artifact, load
from sparsefinder.predictors import Tiles
from training.cut import curve, recalls_at
from training.extract import read_layer, read_manifest
from training.fit import measuring_items, positional_of
from training.scores import tile_parts

SPARSITIES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85)


def recalls(artifact: Artifact, heldout: Path) -> list[float]:
    """Mean over heads and layers, for every sparsity."""
    card = artifact.card
    positional = positional_of(card)
    found = []
    for layer, predictor in enumerate(artifact.layers):
        if predictor is None:  # it keeps its sliding window
            continue
        data = read_layer(heldout, layer)
        if not isinstance(predictor, Tiles):
            raise SystemExit(f"expected an artifact that serves tiles, got {card.served}")
        parts = tile_parts(predictor, data, measuring_items(data.q.shape[0]), positional, card.tile_size)
        found += [recalls_at(curve(head), SPARSITIES) for head in parts]
    return [float(value) for value in torch.tensor(found, dtype=torch.float64).nanmean(0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--old", "--new", "--data"):
        parser.add_argument(name, type=Path, required=True)
    options = parser.parse_args()
    heldout = options.data / "heldout"
    manifest = read_manifest(heldout)
    print(
        f"text: {', '.join(Path(name).name for name in manifest['text'])}, {manifest['instances']} held-out instances"
    )
    print(f"{'artifact':30}" + "".join(f"{s:>8}" for s in SPARSITIES))
    for path in (options.old, options.new):
        artifact = load(path)
        print(f"{artifact.card.version:30}" + "".join(f"{value:8.3f}" for value in recalls(artifact, heldout)))


if __name__ == "__main__":
    main()
