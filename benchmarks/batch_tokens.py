"""How many tokens should one forward pass of the service have, and what does packing its texts save?

    python -m benchmarks.batch_tokens [--rounds 3] [--threads 2] [--quick] [--json docs/figures/batch_tokens.json]

The texts of `benchmarks.load` (log-uniform up to 512 tokens) in their order, cut into batches of at most so many
tokens: packed, as the service computes them, and padded to the longest text of the batch. Every mode, through the model
that serves, in turn in one process. `one text` is a batch for each.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from app.model import ModelLoader, ServedModel
from app.schemas import Mode
from app.servable import Ids, Lane
from benchmarks.load_clients import texts_of
from benchmarks.paired import hardware, paired
from sparsefinder.shipped import default_artifact
from sparsefinder.teacher import load_teacher, tokenize
from training.corpus import default_texts
from training.tasks.runs import write_json
from training.versions import versions

MODES: tuple[Mode, ...] = ("original", "dense", "sparse", "auto")
TOKENS = (0, 512, 1024, 2048, 4096, 8192)  # 0: one text
CHARACTERS, TEXTS, SEED = 400_000, 80, 0


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    ids = _texts(TEXTS // (4 if options.quick else 1))
    tokens = sum(map(len, ids))
    about = {
        "command": shlex.join(["python", "-m", "benchmarks.batch_tokens", *(arguments or sys.argv[1:])]),
        "texts": f"{len(ids)}, {tokens} tokens",
        "rounds": options.rounds,
        "hardware": hardware(),
        "versions": versions("torch", "transformers", "numba"),
    }
    loader = ModelLoader("minilm", "cpu", "default")
    model = loader.build(loader.read(default_artifact()))
    rows = []
    for mode in MODES:
        ways = {
            f"{'packed' if packs else 'padded'} {size or 'one text'}": partial(_run, model, packs, mode, cut(ids, size))
            for packs in (True, False)
            for size in (TOKENS if packs else TOKENS[1:])
        }
        for name, times in paired(ways, options.rounds)[0].items():
            rate = tokens / statistics.median(times) * 1000
            rows.append({"mode": mode, "batches": name, "tokens_per_second": round(rate)})
            print(f"{mode:9} {name:16} {rate:7.0f} tokens/s", flush=True)
    result = {"about": about, "rows": rows}
    if options.json:
        write_json(options.json, result)
        print(f"\nAll figures lie in {options.json}")
    return result


def cut(ids: Sequence[Ids], most: int) -> list[list[Ids]]:
    """Batches in the order of the texts, each with at most so many tokens, or one text."""
    batches: list[list[Ids]] = [[]]
    for text in ids:
        if batches[-1] and sum(map(len, batches[-1])) + len(text) > most:
            batches.append([])
        batches[-1].append(text)
    return batches


def _run(model: ServedModel, packs: bool, mode: Mode, batches: Sequence[Sequence[Ids]]) -> None:
    model.description = replace(model.description, packs=packs)
    for batch in batches:
        model.forward(batch, Lane("embed", mode), ())


def _texts(count: int) -> list[Ids]:
    teacher = load_teacher("minilm")
    texts = texts_of(teacher.tokenizer, "\n".join(default_texts("heldout", CHARACTERS)), count, SEED)
    return tokenize(teacher, [text.text for text in texts])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times that every way runs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a quarter of the texts")
    parser.add_argument("--json", type=Path, help="write all figures there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
