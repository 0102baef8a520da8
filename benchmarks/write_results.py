"""Turns the figures of `benchmarks.quality` and of a sweep into docs/results.md and into the README's table.

    python -m benchmarks.quality --artifact artifacts/minilm-entmax --json docs/figures/quality.json
    sparsefinder-train sweep --config paper-mlm
    python -m benchmarks.write_results docs/figures/quality.json runs/sweep/sweep.json

No figure is written by hand: this reads the JSON of a run and the artifact's card, and says which command made them.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.speed_page import speed
from benchmarks.write_findings import summary as findings
from sparsefinder.artifact import load
from sparsefinder.shipped import default_artifact

ROOT = Path(__file__).resolve().parent.parent
MARKS = re.compile(r"(<!-- results:begin -->\n).*?(<!-- results:end -->)", re.DOTALL)
SPARSITIES = ("0.5", "0.6", "0.7", "0.8", "0.9", "0.95")
MEASURES = ("sparsity", "recall", "precision", "exact_rows", "mass", "computed_density")


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def recall_table(result: dict[str, Any], rank: int | None = None) -> str:
    """Every row, or those of one rank with the rows that have none."""
    rows = [
        [row["row"] + (" (control)" if row["control"] else ""), str(row["rank"] or ""), *map(number, row["recall"])]
        for row in result["recall"]
        if rank is None or row["rank"] in (rank, None)
    ]
    return table(["predictor", "rank", *SPARSITIES], rows)


def served_table(report: dict[str, Any]) -> str:
    layers = range(len(report["layers"]["recall"]))
    rows = [[str(layer), *(number(report["layers"][name][layer]) for name in MEASURES)] for layer in layers]
    rows.append(["mean", *(number(report["overall"][name]) for name in MEASURES)])
    return table(["layer", *(name.replace("_", " ") for name in MEASURES)], rows)


def teacher_table(training: dict[str, Any]) -> str:
    rows = [
        [name, f"{q['cosine']:.3f}", f"{q['correlation']:.3f}", f"{q['density']:.1%}", str(q["texts"])]
        for name, q in training["held_out"].items()
    ]
    return table(["held-out text", "cosine to the original", "correlation of similarities", "density", "texts"], rows)


def about(result: dict[str, Any]) -> str:
    return "\n".join(f"- {name}: `{value}`" for name, value in result["about"].items())


def cosines(result: dict[str, Any]) -> str:
    rows = [[name, f"{mean:.4f}", f"{least:.4f}"] for name, (mean, least) in result["cosine"].items()]
    return table(["embeddings", "mean cosine", "least"], rows)


def commands(training: dict[str, Any]) -> str:
    """Every stage of the training, the first one first."""
    stages = [training]
    while stages[0]["before"]:
        stages.insert(0, stages[0]["before"])
    return "\n".join(f"{n}. `{stage['command']}` ({stage['minutes']:.0f} minutes)" for n, stage in enumerate(stages, 1))


def document(result: dict[str, Any], training: dict[str, Any], sweep: dict[str, Any]) -> str:
    plan = served_table(result["served"]["plan"])
    mixed = table(["centroids", "mixed"], [[name, f"{value:.2f}"] for name, value in result["mixed_clusters"].items()])
    return f"""# Results

Written by `python -m benchmarks.write_results` from a run of `benchmarks.quality`; no figure is typed by hand.

{about(result)}

## The teacher

{teacher_table(training)}

{commands(training)}

What else was tried is in [decisions](decisions.md).

## Recall at equal sparsity

Mean over instances, heads and layers, on held-out text; one cut per head, chosen on other held-out instances where a
row has options. Set: pattern, for tiles the plan. `–`: some head cannot reach that sparsity.

{recall_table(result)}

## The predictor that is served

Set: plan.

{plan}

{cosines(result)}

## Clusters that hold queries and keys

Share of the clusters in use, mean over heads and layers.

{mixed}

## Findings of the paper

From the whole grid (`sparsefinder-train sweep --config paper-mlm`, {sweep["about"]["instances"]} instances); tables,
protocol and pictures are in [findings](findings.md). Last: recall that loss and cut-off add to hinge with one distance
threshold, at each sparsity. The paper's translation and GLUE comparisons are not covered here.

{findings(sweep)}

{speed(ROOT / "docs" / "figures")}
"""


def readme(result: dict[str, Any], training: dict[str, Any]) -> str:
    overall = result["served"]["plan"]["overall"]
    line = ", ".join(f"{name.replace('_', ' ')} {number(overall[name])}" for name in MEASURES)
    shapes = result["about"]["shapes"]
    return f"""Recall of the teacher's non-zero attention at equal sparsity, rank 8, held-out text ({shapes}):

{recall_table(result, 8)}

What is served ({result["about"]["artifact"]}; [newer versions](artifacts/README.md) with the same weights), set plan:
{line}.

{cosines(result)}

The entmax twin itself, against the original softmax model:

{teacher_table(training)}

Command, hardware, versions and everything per layer: [docs/results.md](docs/results.md).
"""


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("expected two arguments: the JSON files of benchmarks.quality and of a sweep")
    result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    training = dict(load(default_artifact()).card.training["finetune"])
    sweep = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    (ROOT / "docs" / "results.md").write_text(document(result, training, sweep), encoding="utf-8")
    page = ROOT / "README.md"
    text, found = MARKS.subn(
        lambda match: match[1] + readme(result, training) + match[2], page.read_text(encoding="utf-8")
    )
    if not found:
        sys.exit("README.md: expected the marks results:begin and results:end")
    page.write_text(text, encoding="utf-8")
    print("Written: docs/results.md and the table of README.md")


if __name__ == "__main__":
    main()
