"""How good is the prediction? Recall at equal sparsity on held-out text, beside window, random projection and oracle.

    python -m benchmarks.quality --artifact artifacts/minilm-entmax [--quick] [--json FILE] [--text FILE ...]

Prints, for text that no map was trained on: recall of every row at sparsity .5 to .95 (mean over instances, heads and
layers); figures per layer of the predictor that the artifact serves; cosine of its embeddings to the dense entmax model
and to the original softmax model. Without --text the held-out part of the embedded default text is used.
"""

import argparse
import json
import math
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality_rows import SPARSITIES, Row, all_rows, choose
from sparsefinder.artifact import Artifact, load, predicted
from sparsefinder.attaching import attach_artifact
from sparsefinder.hf import Attached
from sparsefinder.metrics import Report, SetName, summarize
from sparsefinder.predictors import Clusters, mixed_share
from sparsefinder.teacher import Teacher, batch, embed, load_teacher
from training.corpus import chunk_tokens, default_texts, read_texts
from training.evaluate import has_pattern, layer_counts
from training.extract import LayerData, extract_batch, join_layer
from training.fit import positional_of
from training.pipeline import spread
from training.scores import legal_of
from training.threads import single_thread
from training.versions import versions

BATCH = 4
INSTANCES, QUICK_INSTANCES = 16, 6


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    artifact = load(options.artifact)
    teacher = load_teacher(artifact.card.teacher)
    attached = attach_artifact(teacher, artifact)
    count = QUICK_INSTANCES if options.quick else INSTANCES
    texts = read_texts(options.text) if options.text else default_texts("heldout")
    chunks = spread(chunk_tokens(teacher, texts, options.tokens), count, options.seed)
    result: dict[str, Any] = {"about": _about(options, artifact, chunks)}
    for name, value in result["about"].items():
        print(f"{name}: {value}")
    layers = _extract(teacher, attached, chunks, artifact)
    chosen, measured = list(range(0, len(chunks), 2)), list(range(1, len(chunks), 2)) or [0]
    result["recall"] = []
    _print_heading()
    with single_thread():
        for row in all_rows(artifact, options.ranks, options.seed):
            result["recall"].append(_recall(row, layers, chosen, measured))
            _print_recall(result["recall"][-1])
        result["mixed_clusters"] = _mixed(artifact, layers)
    result["served"] = {name: report.as_dict() for name, report in _served(artifact, layers, measured).items()}
    result["cosine"] = _cosines(artifact, teacher, attached, chunks)
    print("\nCosine of embeddings, mean (least):")
    for name, (mean, least) in result["cosine"].items():
        print(f"  {name:24} {mean:.4f} ({least:.4f})")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(_finite(result), indent=1, ensure_ascii=False), encoding="utf-8")
        print(f"\nAll figures lie in {options.json}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True, help="folder of the artifact")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_INSTANCES} instances instead of {INSTANCES}")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--text", type=Path, action="append", default=[], help="UTF-8 file instead of the default text")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each instance")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def _about(options: argparse.Namespace, artifact: Artifact, chunks: list[list[int]]) -> dict[str, Any]:
    card = artifact.card
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    shape = f"{len(chunks)} instances of {max(map(len, chunks))} tokens, {card.layers} layers, {card.heads} heads"
    return {
        "command": shlex.join(["python", "-m", "benchmarks.quality", *sys.argv[1:]]),
        "artifact": f"{card.version}, serves {card.served}",
        "text": ", ".join(path.name for path in options.text) or "held-out default",
        "shapes": f"{shape}, head dimension {card.head_dim}",
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads, GPU {gpu}",
        "versions": versions("torch", "transformers", "numba", "entmax"),
    }


def _extract(teacher: Teacher, attached: Attached, chunks: list[list[int]], artifact: Artifact) -> list[LayerData]:
    tokens = max(map(len, chunks))
    parts = [extract_batch(teacher, attached, chunks[i : i + BATCH], tokens) for i in range(0, len(chunks), BATCH)]
    return [join_layer(parts, layer, artifact.card.alpha) for layer in predicted(artifact)]


def _recall(row: Row, layers: list[LayerData], chosen: list[int], measured: list[int]) -> dict[str, Any]:
    table, picks = [], []
    for layer, data in enumerate(layers):
        options = row.options(layer, data, measured)
        before = options if len(options) == 1 else row.options(layer, data, chosen)
        found = choose(options, before)
        table.append([[recall for recall, _ in line] for line in found])
        picks += [[option for _, option in line] for line in found]
    values = torch.tensor(table, dtype=torch.float64)  # layer, head, sparsity
    usual = [max(set(column), key=column.count) for column in zip(*picks, strict=True)]
    return {
        "row": row.name,
        "rank": row.rank,
        "control": row.control,
        # A sparsity that one head cannot reach has no mean over all heads.
        "recall": values.mean((0, 1)).tolist(),
        "layers": values.mean(1).tolist(),
        "usual_option": usual if any(usual) else None,
    }


def _print_heading() -> None:
    print("\nRecall at equal sparsity (mean over instances, heads and layers; set: pattern, for tiles the plan)")
    heads = "".join(f"{s:>7}" for s in SPARSITIES)
    print(f"{'row':52}{'rank':>5}{heads}   option at 0.9")


def _print_recall(row: dict[str, Any]) -> None:
    values = "".join(f"{value:7.3f}" if math.isfinite(value) else f"{'–':>7}" for value in row["recall"])
    option = row["usual_option"][SPARSITIES.index(0.9)] if row["usual_option"] else ""
    label = row["row"] + (" (control)" if row["control"] else "")
    print(f"{label:52}{row['rank'] or '':>5}{values}   {option}", flush=True)


def _mixed(artifact: Artifact, layers: list[LayerData]) -> dict[str, float]:
    """Share of the clusters in use that hold queries and keys, mean over heads and layers."""
    found: dict[str, float] = {}
    for name, centroids in artifact.centroids.items():
        maps = artifact.projections.get(name.rsplit("-", 1)[0])
        if maps is None:
            continue
        shares = []
        for data, projections, centres in zip(layers, maps, centroids, strict=True):
            clusters = Clusters(projections, centres, torch.ones(centres.shape[0], dtype=torch.long))
            shares.append(float(mixed_share(clusters, data.q[:1], data.k[:1], legal_of(data, 0)).mean()))
        found[name] = sum(shares) / len(shares)
    if found:
        print(
            "\nMixed clusters (hold queries and keys) in one instance, a share: "
            + ", ".join(f"{n} {v:.2f}" for n, v in found.items())
        )
    return found


def _served(artifact: Artifact, layers: list[LayerData], items: list[int]) -> dict[SetName, Report]:
    card, reports = artifact.card, {}
    positional, asked = positional_of(card), predicted(artifact)
    names: list[SetName] = ["plan", "pattern"] if has_pattern(artifact.layers) else ["plan"]
    for name in names:
        counted = [
            layer_counts(data, predictor, positional, card.tile_size, name, items, layer)
            for layer, data in zip(asked, layers, strict=True)
            if (predictor := artifact.layers[layer]) is not None
        ]
        reports[name] = report = summarize(counted)
        print(
            f"\nServed predictor ({card.served} ∪ window {card.window_size} ∪ global {card.global_tokens}), set: {name}"
        )
        print("layer" + "".join(f"{measure.replace('_', ' '):>18}" for measure in report.overall))
        for at, layer in enumerate(asked):
            print(f"{layer:5}" + "".join(f"{float(values[at]):18.3f}" for values in report.layers.values()))
        print(" mean" + "".join(f"{value:18.3f}" for value in report.overall.values()))
    return reports


@torch.no_grad()
def _cosines(
    artifact: Artifact, teacher: Teacher, attached: Attached, chunks: list[list[int]]
) -> dict[str, tuple[float, float]]:
    original = load_teacher(artifact.card.teacher)
    vectors: dict[str, list[Tensor]] = {"sparse": [], "dense": [], "original": []}
    for start in range(0, len(chunks), BATCH):
        tokens, mask = batch(teacher, chunks[start : start + BATCH])
        for mode in ("sparse", "dense"):
            with attached.using(mode):
                vectors[mode].append(embed(teacher, tokens, mask))
        vectors["original"].append(embed(original, tokens, mask))
    joined = {name: torch.cat(parts) for name, parts in vectors.items()}
    pairs = (("sparse", "dense"), ("sparse", "original"), ("dense", "original"))
    cosine = {f"{a} to {b}": torch.cosine_similarity(joined[a], joined[b]) for a, b in pairs}
    return {name: (float(value.mean()), float(value.min())) for name, value in cosine.items()}


def _finite(value: Any) -> Any:
    """Plain JSON: None for what is not a number."""
    if isinstance(value, dict):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
