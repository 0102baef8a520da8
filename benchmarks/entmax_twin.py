"""What each step from softmax to entmax gains: perplexity of a causal model's twins on held-out text.

    sparsefinder-train finetune --teacher smollm2 --out runs/smollm2-entmax
    python -m benchmarks.entmax_twin --twin runs/smollm2-entmax [--tokens 1024 2048] [--quick] [--json FILE]

Rows: softmax; entmax with one scale for all heads; each head's own scale, fitted to its output in the softmax model;
all scales together by the divergence of the next word in the twin itself (closed loop); and every artifact given as
--twin. Density is the share of legal pairs with weight. Scales are fitted on training text, here and now.
"""

import argparse
import functools
import math
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.perplexity import held_out_texts
from sparsefinder.artifact import load
from sparsefinder.attaching import attach_artifact
from sparsefinder.hf import Attached, attach
from sparsefinder.teacher import Teacher, load_teacher
from training.config import FinetuneConfig, finetune_config
from training.corpus import chunk_tokens, default_texts
from training.finetune import Density, finetune
from training.head_scale import fit_head_scale
from training.pipeline import spread
from training.tasks.runs import write_json
from training.versions import versions

ONE_SCALE, FIT_TEXTS, FIT_TOKENS = 0.25, 2, 1024
LOOP_TOKENS, LOOP_STEPS, LOOP_RATE = 512, 40, 0.05

Made = Callable[[], tuple[Teacher, Attached]]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _options(arguments)
    original = load_teacher(options.teacher)
    result: dict[str, Any] = {"about": _about(options), "rows": []}
    texts = {
        tokens: held_out_texts(original, options.text, tokens, options.texts, options.seed) for tokens in options.tokens
    }
    print(f"{'':26} {'tokens':>6} {'density':>8} {'perplexity':>11} {'to softmax':>11}")
    softmax: dict[int, float] = {}
    for name, made in _stages(options, original):
        teacher, attached = made()
        for tokens, items in texts.items():
            perplexity, density = perplexity_of(teacher, attached, items)
            ratio = perplexity / softmax.setdefault(tokens, perplexity)
            found = {"row": name, "tokens": tokens, "density": density, "perplexity": perplexity, "to_softmax": ratio}
            result["rows"].append(found)
            print(f"{name:26} {tokens:6} {density:8.3f} {perplexity:11.3f} {ratio:11.3f}", flush=True)
    if options.json:
        write_json(options.json, result)
        print(f"\nAll figures lie in {options.json}")
    return result


def _stages(options: argparse.Namespace, original: Teacher) -> Iterator[tuple[str, Made]]:
    """Name of each row, and how its model is made; a later one may change the model of an earlier one."""
    train = default_texts("train", 100_000)
    chunks = spread(chunk_tokens(original, train, options.fit_tokens), options.fit_texts, options.seed)
    attached = attach(original.model, alpha=1.0)

    def scaled(alpha: float, scale: Callable[[], torch.Tensor]) -> Made:
        def made() -> tuple[Teacher, Attached]:
            attached.head_scale, attached.alpha = scale(), alpha
            return original, attached

        return made

    ones = torch.ones_like(attached.head_scale)
    yield "softmax", scaled(1.0, lambda: ones)
    yield f"entmax, one scale {ONE_SCALE}", scaled(1.5, lambda: ONE_SCALE * ones)
    own = fit_head_scale(load_teacher(options.teacher), chunks, 1.5)
    yield "scale per head, local", scaled(1.5, lambda: own)
    if options.loop_steps:
        yield "scale per head, closed loop", scaled(1.5, lambda: _closed_loop(options, original, train))
    for folder in options.twin:
        yield folder.name, functools.partial(_twin, options, folder)


def _closed_loop(options: argparse.Namespace, original: Teacher, train: list[str]) -> torch.Tensor:
    config: FinetuneConfig = replace(
        finetune_config(options.teacher), teacher=options.teacher, form="scales", steps=options.loop_steps,
        scale_rate=LOOP_RATE, tokens=options.loop_tokens, batch_size=1, warmup=1, start_scale=None, density=None,
        seed=options.seed,
    )  # fmt: skip
    student, _ = finetune(config, [chunk_tokens(original, train, config.tokens)])
    return student.attached.head_scale


def _twin(options: argparse.Namespace, folder: Path) -> tuple[Teacher, Attached]:
    teacher = load_teacher(options.teacher)
    return teacher, attach_artifact(teacher, load(folder))


@torch.no_grad()
def perplexity_of(teacher: Teacher, attached: Attached, texts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Perplexity over all texts, and the share of legal pairs with weight (1 for softmax)."""
    losses, shares = [], []
    for text in texts:
        ids, density = torch.tensor([text]), Density(apart=16)
        with attached.using("dense", observe=density if attached.alpha > 1 else None):
            logits = teacher.lm(input_ids=ids, use_cache=False).logits[0, :-1]
        losses.append(float(torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:])))
        shares.append(density.mean() if attached.alpha > 1 else 1.0)
    return math.exp(sum(losses) / len(losses)), sum(shares) / len(shares)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="smollm2")
    parser.add_argument("--twin", type=Path, action="append", default=[], help="an artifact; may be repeated")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048], help="lengths of the texts")
    parser.add_argument("--texts", type=int, default=4, help="texts of each length")
    parser.add_argument("--text", type=Path, action="append", default=[], help="UTF-8 file instead of the default text")
    parser.add_argument("--loop-steps", type=int, default=LOOP_STEPS, help="of the closed loop, 0 = leave it out")
    parser.add_argument("--quick", action="store_true", help="one text of 512 tokens, 6 steps of the closed loop")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.fit_texts, options.fit_tokens, options.loop_tokens = FIT_TEXTS, FIT_TOKENS, LOOP_TOKENS
    if options.quick:
        options.tokens, options.texts, options.loop_steps = [512], 1, min(options.loop_steps, 6)
        options.fit_texts, options.fit_tokens = 1, 512
    return options


def _about(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "-m", "benchmarks.entmax_twin", *sys.argv[1:]]),
        "text": ", ".join(path.name for path in options.text) or "held-out default",
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": versions("torch", "transformers", "numba"),
    }


if __name__ == "__main__":
    main()
