"""Time and memory of one causal layer of a language model's shape, by length, on random numbers.

    python -m benchmarks.attention_scaling --way sparse --tokens 32768      # one child: its peak of memory

Nine query heads, three heads of keys, 64 dims (SmolLM2's); the predictor is random and cut where a text's last tiles
read a fixed number of keys, since calibrated ones keep about as many keys per row at every length. Time is taken in one
process, memory in a process for each way and length (`VmHWM`, Linux), with that of the inputs beside it.
"""

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_random import GLOBALS, WINDOW, density, tiles_of
from benchmarks.paired import Ways, paired
from benchmarks.rivals import fused_softmax
from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.hf import LayerInput
from sparsefinder.patterns.legal import legal_full
from sparsefinder.patterns.positional import GlobalTokens, window
from sparsefinder.plan import Plan
from sparsefinder.predictors import layer_plan
from sparsefinder.threads import limit_threads

HEADS, KV_HEADS, DIM, TILE = 9, 3, 64, 32
KEYS = 512  # that a text's last tiles read beside window and first tokens
ALPHA = 1.5
WAYS = ("sparse", "dense", "sdpa")


@dataclass(frozen=True, eq=False)
class Layer:
    """One random layer: what each way of `WAYS` computes, and how its plan is made."""

    ways: dict[str, Callable[[], Tensor]]
    plan: Callable[[], Plan]
    call: LayerInput


def make_layer(tokens: int, seed: int) -> Layer:
    """Inputs and ways of one length."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, heads, tokens, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    legal = legal_full(1, tokens, tokens, causal=True)
    call = LayerInput(0, q, k, v, legal, torch.full((HEADS,), DIM**-0.5), None, ALPHA)
    tiles, positional = tiles_of(q, k, KEYS, TILE, causal=True), window(WINDOW) | GlobalTokens(GLOBALS)
    plan = functools.partial(layer_plan, tiles, q, k, legal, positional, TILE)
    named: dict[str, Any] = {"alpha": ALPHA, "scale": call.scale}
    ways: dict[str, Callable[[], Tensor]] = {
        "sparse": lambda: attend(q, k, v, plan(), legal=legal, **named),
        "dense": functools.partial(attend_dense, q, k, v, legal, **named),
        "sdpa": lambda: fused_softmax(call)(),  # with the copies of keys that it needs
    }
    return Layer(ways, plan, call)


def scaling_rows(lengths: Sequence[int], rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """Milliseconds and peaks of memory (MiB) of all ways at every length."""
    for tokens in lengths:
        layer = make_layer(tokens, seed)
        ways: Ways = layer.ways | {"sdpa": fused_softmax(layer.call)}
        found = {"tokens": tokens, "density": density(layer.plan(), layer.call.legal), "ms": paired(ways, rounds)[0]}
        del layer, ways
        yield found | {"mib": {way: _child(way, tokens, seed) for way in WAYS}}


def _child(way: str, tokens: int, seed: int) -> dict[str, float]:
    """Peak of a process that computes one way once, and what it held before that."""
    options = ["--way", way, "--tokens", str(tokens), "--seed", str(seed), "--threads", str(torch.get_num_threads())]
    command = [sys.executable, "-m", "benchmarks.attention_scaling", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def peak_mib() -> float:
    """The most memory that this process has had at once."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, default=0, help="0 = as many as torch chooses")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    limit_threads(options.threads)
    with torch.inference_mode():
        layer = make_layer(options.tokens, options.seed)
        before = peak_mib()
        layer.ways[options.way]()
    print(json.dumps({"before": round(before, 1), "peak": round(peak_mib(), 1)}))


if __name__ == "__main__":
    main()
