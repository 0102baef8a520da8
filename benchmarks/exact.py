"""What a proof of exactness costs: survivors and repairs of real plans, and time beside dense entmax attention.

    python -m benchmarks.exact --data runs/smollm2-twin [--tokens 1024 2048 4096] [--layers 2 8 14 20 26]
                               [--ranks 40 64] [--quick] [--json FILE]

The entmax twin of a run reads held-out text with the run's own plans; the queries, keys and values of some layers are
kept, and each layer's attention is computed in turn by every way, `--repeats` times (medians; ratios are medians of
ratios within a turn):

    plan      attention over the plan alone          certify   thresholds and bounds, no output
    exact     plan, proof and repair                 dense     this project's entmax over all legal keys
    package   the `entmax` package, partial sort, in blocks of rows
"""

import argparse
import functools
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.paired import paired, ratio
from benchmarks.perplexity import held_out_texts
from benchmarks.rivals import package_entmax
from sparsefinder.artifact import load
from sparsefinder.attaching import attach_artifact
from sparsefinder.attention.api import attend, attend_dense
from sparsefinder.certificate import attend_exact, certify
from sparsefinder.errors import DataError
from sparsefinder.hf import LayerCall
from sparsefinder.plan import computed_pairs
from sparsefinder.teacher import load_teacher
from training.progress_bar import progress
from training.tasks.runs import write_json
from training.versions import versions


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _options(arguments)
    result: dict[str, Any] = {"about": _about(options), "rows": []}
    for name, value in result["about"].items():
        print(f"{name}: {value}")
    print(f"\n{'tokens':>6} {'layer':>5} {'rank':>4} {'density':>7} {'proven':>6} {'survive':>7} {'added':>6} ", end="")
    print(
        f"{'repaired':>8} {'plan':>7} {'certify':>7} {'exact':>7} {'dense':>7} {'package':>8} "
        f"{'to dense':>8} {'error':>7}"
    )
    with progress() as on_progress:
        cases = len(options.tokens) * len(options.layers)
        for done, call in enumerate(_calls(options)):
            on_progress(f"{call.q.shape[2]} tokens, layer {call.layer}", done, cases)
            for row in measure(call, options.ranks, options.repeats):
                result["rows"].append(row)
                print(_line(row), flush=True)
    if options.json:
        write_json(options.json, result)
        print(f"\nAll figures lie in {options.json}")
    return result


def _line(row: dict[str, Any]) -> str:
    times = " ".join(f"{row['ms'][name]:7.1f}" for name in ("plan", "certify", "exact", "dense"))
    return (
        f"{row['tokens']:6} {row['layer']:5} {row['rank']:4} {row['density']:7.3f} {row['proven']:6.3f} "
        f"{row['survivors_per_row']:7.1f} {row['added_per_row']:6.2f} {row['repaired']:8.3f} {times} "
        f"{row['ms']['package']:8.1f} {row['dense_to_exact']:8.2f} {row['error']:7.1e}"
    )


@torch.inference_mode()
def measure(call: LayerCall, ranks: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """One row for every rank of the bound; `error` is the largest difference from dense attention."""
    plan = call.plan
    if plan is None:
        raise DataError(f"layer {call.layer}: expected a plan, got none (a sliding-window layer)")
    qkv = (call.q, call.k, call.v)
    shared: dict[str, Any] = {"alpha": call.alpha, "scale": call.scale}
    dense = functools.partial(attend_dense, *qkv, call.legal, **shared)
    ways: dict[str, Callable[[], Any]] = {
        "plan": functools.partial(attend, *qkv, plan, legal=call.legal, **shared),
        "dense": dense,
        "package": functools.partial(package_entmax, call),
    }
    for rank in ranks:
        exact: dict[str, Any] = {"legal": call.legal, "rank": rank, **shared}
        ways[f"certify {rank}"] = functools.partial(certify, call.q, call.k, plan, **exact)
        ways[f"exact {rank}"] = functools.partial(attend_exact, *qkv, plan, **exact)
    times, _ = paired(ways, repeats)
    legal_pairs = call.q.shape[1] * sum(call.legal.count(b) for b in range(call.q.shape[0]))
    rows = []
    for rank in ranks:
        output, repair = attend_exact(*qkv, plan, legal=call.legal, rank=rank, **shared)
        taken = {name: times[name] for name in ("plan", "dense", "package")}
        taken |= {name: times[f"{name} {rank}"] for name in ("certify", "exact")}
        row: dict[str, Any] = {"tokens": call.q.shape[2], "layer": call.layer, "rank": rank}
        row |= {"density": int(computed_pairs(plan).sum()) / legal_pairs, "proven": repair.proven / repair.rows}
        row |= {"survivors_per_row": repair.mean_survivors, "most_survivors": repair.most_survivors}
        row |= {"survivors": repair.survivors / legal_pairs, "repaired": repair.repaired / repair.rows}
        row |= {"added_per_row": repair.added / repair.rows, "error": float((output - dense()).abs().max())}
        row |= {"plan_error": float((ways["plan"]() - dense()).abs().max())}
        row |= {"ms": {name: statistics.median(found) for name, found in taken.items()}}
        row["dense_to_exact"] = ratio(taken["dense"], taken["exact"])
        row["package_to_exact"] = ratio(taken["package"], taken["exact"])
        rows.append(row)
    return rows


def _calls(options: argparse.Namespace) -> Iterator[LayerCall]:
    """The wanted layers on one held-out text of each length, while the twin reads it with its plans."""
    artifact = load(options.data / "artifact")
    if artifact.card.alpha != 1.5:
        raise DataError(f"{options.data}: expected a twin with α = 1.5, got α = {artifact.card.alpha}")
    teacher = load_teacher(artifact.card.teacher)
    attached = attach_artifact(teacher, artifact)
    for tokens in options.tokens:
        (text,) = held_out_texts(teacher, options.text, tokens, 1, options.seed)
        seen: list[LayerCall] = []
        keep = functools.partial(_keep, seen, options.layers)
        with torch.inference_mode(), attached.using("sparse", observe=keep):
            teacher.model(input_ids=torch.tensor([text]))
        yield from seen


def _keep(seen: list[LayerCall], layers: Sequence[int], call: LayerCall) -> None:
    if call.layer in layers:
        seen.append(call)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of a run of an entmax twin")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 14, 20, 26])
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[40, 64], help="of the bound; the head's dims = no bound"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--text", type=Path, action="append", default=[], help="UTF-8 file instead of the default text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two layers at 1024 and 2048 tokens")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.layers = [1024, 2048], [8, 20]
    return options


def _about(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "-m", "benchmarks.exact", *sys.argv[1:]]),
        "artifact": load(options.data / "artifact").card.version,
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": versions("torch", "numba", "entmax"),
    }


if __name__ == "__main__":
    main()
