"""Which form of finetuning comes nearest to the original at equal steps: all weights, attention only, or LoRA?

    python -m benchmarks.finetune_forms --text novel.txt --eval-text other.txt

Each form starts anew, sees the same batches and is held to the same density. Printed as they end: seconds, size of the
delta, and the figures on held-out text. `--quick` takes 4 steps and 8 chunks of each text.
"""

import argparse
import os
import platform
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from sparsefinder.teacher import load_teacher
from training.config import LEARNING_RATES, FinetuneConfig
from training.corpus import chunk_tokens
from training.finetune import finetune, measure
from training.finetune_run import prepare_texts

TRIALS = ("all", "all:1e-4", "attention", "lora:1.5e-3:8", "lora:1.5e-3:32", "lora:1.5e-3:64")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default=FinetuneConfig.teacher)
    parser.add_argument("--text", type=Path, action="append", default=[], help="trained on, beside the default text")
    parser.add_argument("--eval-text", type=Path, action="append", default=[], help="measured on, never trained on")
    parser.add_argument("--trials", nargs="+", default=TRIALS, help="form, form:rate or form:rate:rank")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--chunks", type=int, default=48)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    steps, chunks = (4, 8) if options.quick else (options.steps, options.chunks)
    original = load_teacher(options.teacher)
    train, held_out = prepare_texts(options.text, options.eval_text)
    sources = [chunk_tokens(original, part) for part in train]
    texts = {name: chunk_tokens(original, parts)[:chunks] for name, parts in held_out.items()}
    base = replace(FinetuneConfig(), teacher=options.teacher, steps=steps, warmup=max(steps // 6, 1))
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__},"
        f" transformers {transformers.__version__}"
    )
    print(
        f"{steps} steps of {base.batch_size} chunks of 256 tokens, seed {base.seed}, density held to {base.density:.1%}"
    )
    print(f"trained on {[len(source) for source in sources]} chunks; measured on at most {chunks} of each text\n")
    print("| form | rank | rate | seconds | delta MB | text | cosine | correlation | density |")
    print("|---|---|---|---|---|---|---|---|---|")
    for trial in options.trials:
        form, rate, rank = (*trial.split(":"), "", "")[:3]
        learning_rate = float(rate) if rate else LEARNING_RATES[form]
        config = replace(base, form=form, learning_rate=learning_rate, rank=int(rank) if rank else base.rank)
        began = time.perf_counter()
        student, delta = finetune(config, sources)
        seconds = time.perf_counter() - began
        size = sum(part.numel() * part.element_size() for part in delta.values()) / 1e6
        for name, items in texts.items():
            found = measure(original, student.teacher, student.attached, items)
            figures = f"{found.cosine:.4f} | {found.correlation:.4f} | {found.density:.2%}"
            print(
                f"| {form} | {config.rank} | {learning_rate:g} | {seconds:.0f} | {size:.2f} | {name} | {figures} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
