"""How small can a teacher's delta be? Its factors cut to lower ranks, measured on held-out text.

    python -m benchmarks.delta_size --artifact artifacts/minilm-entmax --eval-text emma.txt

For each rank: size of the delta, mean cosine to the original embedding, correlation of the off-diagonal pairwise
similarities, density of the entmax graph. `--quick` takes 24 chunks of each text instead of 100.
"""

import argparse
import platform
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch import Tensor

from sparsefinder.artifact import load
from sparsefinder.attaching import attach_artifact
from sparsefinder.delta import low_rank
from sparsefinder.teacher import load_teacher
from training.corpus import chunk_tokens, default_texts, read_texts
from training.finetune import measure


def cut(delta: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The delta with every pair of factors cut to `rank`; what is stored whole stays."""
    out = {name: part for name, part in delta.items() if name.endswith(".full")}
    for name in (name[:-2] for name in delta if name.endswith(".a")):
        b, a = low_rank(delta[f"{name}.b"].float() @ delta[f"{name}.a"].float(), rank)
        out |= {f"{name}.b": b.half(), f"{name}.a": a.half()}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--eval-text", type=Path, action="append", default=[])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 32, 64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    artifact, count = load(options.artifact), 24 if options.quick else 100
    original = load_teacher(artifact.card.teacher)
    texts = {"default held-out": default_texts("heldout")} | {p.name: read_texts([p]) for p in options.eval_text}
    chunks = {name: chunk_tokens(original, parts, options.tokens)[:count] for name, parts in texts.items()}
    print(f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"artifact {artifact.card.version}, chunks of {options.tokens} tokens, at most {count} of each text\n")
    print("| rank | MB | text | cosine | correlation | density |")
    print("|---|---|---|---|---|---|")
    deltas = {str(rank): cut(dict(artifact.delta), rank) for rank in options.ranks} | {"shipped": dict(artifact.delta)}
    for rank, delta in {"none": {}, **deltas}.items():
        student = load_teacher(artifact.card.teacher)
        attached = attach_artifact(student, replace(artifact, delta=delta))
        size = sum(part.numel() * part.element_size() for part in delta.values()) / 1e6
        for name, items in chunks.items():
            found = measure(original, student, attached, items)
            figures = f"{found.cosine:.4f} | {found.correlation:.4f} | {found.density:.2%}"
            print(f"| {rank} | {size:.2f} | {name} ({found.texts}) | {figures} |", flush=True)


if __name__ == "__main__":
    main()
