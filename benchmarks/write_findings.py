"""Turns a sweep into docs/findings.md: which findings of the paper hold here, and how far one gets beyond it.

    sparsefinder-train sweep --config paper-mlm && sparsefinder-train report
    python -m benchmarks.write_findings runs/sweep/sweep.json runs/report

Every verdict is computed from the figures of the sweep, none is written by hand; two pictures come from the report.
"""

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training.report import markdown
from training.report_style import label, setting_text
from training.sweep_files import read_json
from training.sweep_fronts import SPARSITIES, Point, alone, at_sparsity, value, whole

ROOT = Path(__file__).resolve().parent.parent
MARGIN = 0.02  # of recall: less than this is "on par"
PAPER_RANK = 4
PAPER_OBJECTIVES = ("hinge", "hinge-sum")  # the paper's text, and its authors' sum over each query's pairs

PICTURES = {"recall.png": "Sparsity and recall", "quality.png": "Sparsity and the task"}

Result = dict[str, Any]
Line = list[float]


def anything(_: Point) -> bool:
    return True


def line(result: Result, only: Callable[[Point], bool] = anything) -> Line:
    """Recall at every sparsity of the table."""
    points = [p for p in whole(result["points"]) if only(p)]
    return [at_sparsity(points, s)[0] for s in SPARSITIES]


def pick(
    sweep: Result, name: str, objectives: Sequence[str] = ("",), rank: int | None = None, role: str = ""
) -> list[Result]:
    return [
        r
        for r in sweep["families"]
        if r["family"] == name
        and r["objective"] in objectives
        and (rank is None or r["rank"] == rank)
        and (not role or r["role"] == role)
    ]


def best(results: Sequence[Result], only: Callable[[Point], bool] = anything) -> Line:
    """The best of several families at every sparsity; NaN where there is none."""
    if not results:
        return [float("nan")] * len(SPARSITIES)
    return [float(x) for x in np.nanmax(np.array([line(r, only) for r in results]), 0)]


def wins(first: Line, second: Line, margin: float = 0.0) -> int:
    """At how many sparsities the first is ahead of the second by more than the margin."""
    return sum(a > b + margin for a, b in zip(first, second, strict=True))


def verdict(count: int, of: int) -> str:
    """In words."""
    if count == of:
        return "**holds**"
    return f"**holds in part** ({count} of {of})" if count * 2 > of else f"**does not hold** ({count} of {of})"


def table(rows: dict[str, Line], first: str = "recall at sparsity") -> str:
    heading = [first, *(f"{s:g}" for s in SPARSITIES)]
    return markdown([heading, *([name, *(_number(x) for x in values)] for name, values in rows.items())])


def _number(x: float) -> str:
    return "–" if np.isnan(x) else f"{x:.3f}"


def _signed(x: float) -> str:
    return "–" if np.isnan(x) else f"{x:+.3f}"


def rivals(sweep: Result) -> dict[str, Line]:
    """The methods that the paper compares with."""
    names = ("window", "longformer", "bigbird", "reformer", "routing")
    return {name: best(pick(sweep, name)) for name in names if pick(sweep, name)}


def paper_rows(sweep: Result) -> dict[str, Line]:
    """Sparsefinder as the paper has it: hinge, rank 4."""
    return {
        f"{name}, hinge r{PAPER_RANK}": best(pick(sweep, name, PAPER_OBJECTIVES, PAPER_RANK, "learned"))
        for name in ("distance", "clusters", "quantization")
    }


def dominate(sweep: Result) -> str:
    """Distance and clustering against the methods of others."""
    others, own = rivals(sweep), paper_rows(sweep)
    best_other = [float(np.nanmax(column)) for column in zip(*others.values(), strict=True)]
    newer = {
        f"{name}, logistic r{PAPER_RANK}": best(pick(sweep, name, ("logistic",), PAPER_RANK, "learned"))
        for name in ("distance", "clusters")
    }
    said = []
    for name, values in [*list(own.items())[:2], *newer.items()]:
        said.append(f"- {name} ahead of all of them: {verdict(wins(values, best_other), len(SPARSITIES))}")
    return "\n".join([*said, "", table(own | newer | others)])


def window_is_hard(sweep: Result) -> str:
    """How many methods of others stay within the margin of the window, or below it."""
    others = rivals(sweep)
    base = others.pop("window")
    total = len(others) * len(SPARSITIES)
    level = total - sum(wins(values, base, MARGIN) for values in others.values())
    ahead = [f"{name} by at most {max(a - b for a, b in zip(v, base, strict=True)):.3f}" for name, v in others.items()]
    return (
        f"Comparisons (method × sparsity) in which the window alone is at least on par (within {MARGIN}): "
        f"{level} of {total}: {verdict(level, total)}. Largest lead over the window: {', '.join(ahead)}."
    )


def quantization_is_window(sweep: Result) -> str:
    base, values = best(pick(sweep, "window")), paper_rows(sweep)[f"quantization, hinge r{PAPER_RANK}"]
    gaps = [a - b for a, b in zip(values, base, strict=True)]
    level = sum(abs(gap) <= MARGIN for gap in gaps)
    return (
        f"Quantization minus window, in recall at {', '.join(f'{s:g}' for s in SPARSITIES)}: "
        f"{', '.join(_signed(gap) for gap in gaps)}. Within {MARGIN}: {verdict(level, len(gaps))}."
    )


def own_points(sweep: Result, name: str, **chosen: Any) -> list[Point]:
    """The points of a family by itself, over its grid."""
    return [
        p
        for r in pick(sweep, name)
        for p in r["points"]
        if alone(p) and all(p.get(key) == setting for key, setting in chosen.items())
    ]


def mean_of(points: Sequence[Point], measure: str) -> float:
    return float(np.mean([value(p, measure) for p in points])) if points else float("nan")


def reformer_is_dense(sweep: Result) -> str:
    groups = {
        "reformer": own_points(sweep, "reformer", rounds=1),
        "lsh, separate": own_points(sweep, "lsh, separate", rounds=1),
        "routing": own_points(sweep, "routing"),
    }
    figures = {name: (mean_of(p, "sparsity"), mean_of(p, "recall")) for name, p in groups.items()}
    sparsity, recall = figures["reformer"]
    # Over one grid of bucket numbers; Routing drops tokens, hashing keys apart drops the diagonal.
    rest = list(figures.values())[1:]
    count = sum(recall > r for _, r in rest) + sum(sparsity < s for s, _ in rest)
    said = "; ".join(f"{name}: sparsity {s:.3f}, recall {r:.3f}" for name, (s, r) in figures.items())
    return (
        f"Mean over the same numbers of buckets, by themselves: {said}. "
        f"Higher recall and lower sparsity than both: {verdict(count, 4)}."
    )


def routing_is_next(sweep: Result) -> str:
    others = rivals(sweep)
    own = others.pop("routing")
    best_other = [float(np.nanmax(column)) for column in zip(*others.values(), strict=True)]
    count = wins(own, best_other, -MARGIN)
    return (
        f"Routing ahead of the other methods of others, or within {MARGIN} of the best of them: "
        f"{verdict(count, len(own))}."
    )


def reached(result: Result, sparsity: float) -> bool:
    """Whether the family by itself has a point that dense."""
    return any(value(p, "sparsity") <= sparsity for p in result["points"] if alone(p))


def random_is_worst(sweep: Result) -> str:
    """Where a family's grid does not reach down to a sparsity, it is not compared there."""
    rows = [r for r in sweep["families"] if r["role"] != "oracle" and r["family"] != "window"]
    random = [r for r in rows if r["family"] in ("random keys", "random blocks")]
    others = [r for r in rows if r not in random]
    own, lowest, names = [], [], []
    for at, s in enumerate(SPARSITIES):
        own.append(max((line(r, alone)[at] for r in random if reached(r, s)), default=float("nan")))
        found = min(((line(r, alone)[at], label(r)) for r in others if reached(r, s)), default=(float("nan"), ""))
        lowest.append(found[0])
        names.append(found[1])
    count = sum(a <= b for a, b in zip(own, lowest, strict=True))
    beaten = sorted({name for a, b, name in zip(own, lowest, names, strict=True) if a > b})
    more = f" Worse than random somewhere: {', '.join(beaten)}." if beaten else ""
    rows_of = {"random keys or blocks": own, "the lowest other family": lowest}
    return f"Each family by itself, random lowest: {verdict(count, len(own))}.{more}\n\n{table(rows_of)}"


def spare_is_free(sweep: Result) -> str:
    found = []
    for name in ("distance", "clusters"):
        for r in pick(sweep, name, (*PAPER_OBJECTIVES, "logistic"), None, "learned"):
            point = at_sparsity(whole(r["points"]), 0.9)[1]
            if point is not None:
                found.append((label(r), 1 - value(point, "precision"), value(point, "mass")))
    count = sum(spare > 0.5 for _, spare, _ in found)
    said = "; ".join(f"{name}: {spare:.0%} spare, mass {mass:.3f}" for name, spare, mass in found)
    return (
        f"Kept pairs whose weight is zero, at sparsity .9: {said}. "
        f"More than half of what is kept: {verdict(count, len(found))}."
    )


def beyond(sweep: Result) -> str:
    parts = []
    for rank in sorted(
        {r["rank"] for r in sweep["families"] if r["role"] == "learned" and r["objective"] == "logistic"}
    ):
        base = best(pick(sweep, "distance", PAPER_OBJECTIVES, rank, "learned"))
        rows = {
            "logistic, one distance threshold": best(pick(sweep, "distance", ("logistic",), rank, "learned")),
            "logistic (bilinear), threshold": best(pick(sweep, "score", ("bilinear",), rank)),
            "hinge, per-row budget": best(pick(sweep, "budget", PAPER_OBJECTIVES, rank)),
            "logistic, per-row budget": best(pick(sweep, "budget", ("logistic",), rank)),
            "logistic (bilinear), per-row budget": best(pick(sweep, "budget", ("bilinear",), rank)),
            "listwise tiles (plan)": best(pick(sweep, "tiles", ("listwise",), rank)),
        }
        heading = [f"rank {rank}", *(f"{s:g}" for s in SPARSITIES)]
        lines = [["hinge, distance threshold", *(_number(x) for x in base)]]
        lines += [[name, *(_signed(a - b) for a, b in zip(values, base, strict=True))] for name, values in rows.items()]
        parts.append(markdown([heading, *lines]))
    return "\n\n".join(parts)


def against_all(sweep: Result) -> str:
    """The best learned family against everything that is no oracle, and against the oracle."""
    rivals_of = [r for r in sweep["families"] if r["role"] in ("baseline", "control")]
    said, at = [], SPARSITIES.index(0.9)
    oracles = {kind: line(pick(sweep, f"true score, {kind}")[0])[at] for kind in ("budget", "threshold")}
    for rank in sorted(
        {r["rank"] for r in sweep["families"] if r["role"] == "learned" and r["objective"] == "logistic"}
    ):
        learned = best([r for r in sweep["families"] if r["role"] == "learned" and r["rank"] == rank])
        others = {label(r): line(r) for r in rivals_of if (r["rank"] or 0) <= rank}
        count = sum(all(a > v[k] for v in others.values()) for k, a in enumerate(learned))
        beaten = sorted({n for k, a in enumerate(learned) for n, v in others.items() if v[k] >= a})
        more = f" Ahead somewhere: {', '.join(beaten)}." if beaten else ""
        higher = {label(r): line(r) for r in rivals_of if (r["rank"] or 0) > rank}
        above = sorted({n for k, a in enumerate(learned) for n, v in higher.items() if v[k] >= a})
        more += f" Of a higher rank and ahead somewhere: {', '.join(above)}." if above else ""
        shares = " and ".join(f"{learned[at] / x:.1%} by {kind} ({x:.3f})" for kind, x in oracles.items())
        said.append(
            f"- rank {rank}: best learned family ahead of all baselines and controls up to that rank: "
            f"{verdict(count, len(SPARSITIES))}.{more} At sparsity .9 its recall is {learned[at]:.3f}; of the oracles "
            f"that cut the true score it has {shares}."
        )
    return "\n".join(said)


def task(sweep: Result) -> str:
    points = [p for p in sweep["quality"] if p["cosine_dense"] is not None]
    if len(points) < 3:
        return "Not measured in this sweep."
    recall, mass, cosine = (np.array([p[name] for p in points]) for name in ("recall", "mass", "cosine_dense"))
    ranks = [np.argsort(np.argsort(x)) for x in (recall, mass, cosine)]
    by_recall, by_mass = (float(np.corrcoef(ranks[k], ranks[2])[0, 1]) for k in (0, 1))
    rows = [["family", "setting", "sparsity", "recall", "mass", "cosine to dense", "correlation", "cosine to original"]]
    for p in sorted(points, key=lambda p: -p["cosine_dense"]):
        name = label({"set": "pattern", **p})
        names = ("sparsity", "recall", "mass", "cosine_dense", "correlation_dense", "cosine_original")
        plain = {
            k: v
            for k, v in p.items()
            if k not in (*names, "family", "objective", "rank", "role", "correlation_original")
        }
        rows.append([name, setting_text(plain), *(_number(float(p[n]) if p[n] is not None else np.nan) for n in names)])
    return (
        f"Rank correlation over {len(points)} settings of the cosine to the dense model with recall {by_recall:.2f}, "
        f"with attention mass {by_mass:.2f}: methods with a high recall do better at the task: "
        f"{verdict(int(by_recall > 0.5), 1)}.\n\n{markdown(rows)}"
    )


SECTIONS: dict[str, Callable[[Result], str]] = {
    "Distance and clustering dominate": dominate,
    "A window alone is a hard baseline": window_is_hard,
    "Quantization does about as well as a window": quantization_is_window,
    "Reformer has high recall and low sparsity": reformer_is_dense,
    "Routing comes next": routing_is_next,
    "Random patterns are worst (Yun et al., 2020)": random_is_worst,
    "Most spare pairs get zero weight": spare_is_free,
    "High recall means a good task score": task,
    "Beyond the paper: what loss and cut-off add to hinge with one distance threshold": beyond,
    "Learned against everything else": against_all,
}


def on_fewer(sweep: Result) -> str:
    """Which families were not measured on every instance."""
    groups: dict[int, list[str]] = {}
    for r in sweep["families"]:
        if r["instances"] < sweep["about"]["instances"]:
            groups.setdefault(r["instances"], []).append(label(r))
    if not groups:
        return "Every family was measured on every instance."
    said = "\n".join(f"- {count}: {'; '.join(names)}" for count, names in sorted(groups.items(), reverse=True))
    return (
        f"Families that must be asked anew for every instance and setting were measured on fewer instances:\n\n{said}"
    )


def summary(sweep: Result) -> str:
    """What docs/results.md says: the lines with a verdict, and how far one gets beyond the paper."""
    lines = []
    for title, section in SECTIONS.items():
        said = [line.removeprefix("- ") for line in section(sweep).splitlines() if "**" in line]
        lines += [f"- {title}: {line}" for line in said]
    return "\n".join(lines) + "\n\n" + beyond(sweep)


def document(sweep: Result) -> str:
    about = "\n".join(f"- {name.replace('_', ' ')}: `{x}`" for name, x in sweep["about"].items())
    parts = [
        "# Findings",
        "Written by `python -m benchmarks.write_findings` from the JSON of `sparsefinder-train sweep`; figures and "
        "verdicts are computed, none is typed by hand. Recall at a stated sparsity: one setting for all heads and "
        "layers, with window and global tokens where they help, chosen on one half of the instances and read off the "
        "other.",
        on_fewer(sweep),
        about,
        *(f"![{title}](figures/{name})" for name, title in PICTURES.items()),
    ]
    for title, section in SECTIONS.items():
        parts += [f"## {title}", section(sweep)]
    parts += [
        "## Not covered",
        "The paper's translation (BLEU on IWSLT) and GLUE comparisons: no translation model, no such data and no "
        "fine-tuned classifiers are here. Its masked-language-model perplexity has [a page of its own](fill_mask.md).",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("expected the JSON file of a sweep, and the folder of its report")
    sweep, report = Path(sys.argv[1]), Path(sys.argv[2])
    for name in PICTURES:
        shutil.copyfile(report / name, ROOT / "docs" / "figures" / name)
    out = ROOT / "docs" / "findings.md"
    out.write_text(document(read_json(sweep)), encoding="utf-8")
    print(f"Written: {out}")


if __name__ == "__main__":
    main()
