"""Names and colours that pictures and page share: one colour for a row wherever it appears."""

from collections.abc import Sequence
from typing import Any

from training.sweep_fronts import alone, at_sparsity, front, value, whole

Result = dict[str, Any]

# Dark enough on white, told apart by the colour-blind in neighbouring pairs; line styles repeat them.
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#a5aa30", "#8c564b", "#e73f74",
    "#332288", "#666666",
)  # fmt: skip
STYLES = ("-", "--", ":")
DASHES = ("solid", "dash", "dot")
SPARSITY_LABEL = "sparsity (share of the legal pairs that are dropped)"
LABELS = {
    "recall": "recall (share of the gold pairs that are kept)",
    "mass": "attention mass (share of the teacher's probability on kept pairs)",
    "cosine_dense": "mean cosine to the dense entmax model",
    "cosine_original": "mean cosine to the original softmax model",
    "correlation_dense": "correlation of pairwise similarities with the dense entmax model's",
    "correlation_original": "correlation of pairwise similarities with the original's",
    "perplexity": "perplexity at masked tokens",
}


POSITIONAL = (
    "window", "random keys", "random blocks", "longformer", "bigbird", "bigbird blocks", "strided", "fixed", "star",
    "dilated", "block diagonal",
)  # fmt: skip
GROUPS = ("learned", "content, not learned here", "positional", "controls and oracles")


def group(result: Result) -> str:
    """The panel that a family is drawn in."""
    if result["role"] == "learned":
        return GROUPS[0]
    if result["family"] in POSITIONAL:
        return GROUPS[2]
    return GROUPS[1] if result["role"] == "baseline" else GROUPS[3]


def label(result: Result) -> str:
    """A family as legends and tables name it."""
    name = str(result["family"])
    if result["objective"]:
        name = f"{name}, {result['objective']}"
    if result["rank"] is not None:
        name += f" r{result['rank']}"
    return name + (" (plan)" if result["set"] == "plan" else "")


def best_of_rows(families: Sequence[Result], sparsity: float = 0.9) -> list[Result]:
    """For every row (name and role) its best family at this sparsity, best row first."""
    best: dict[tuple[str, str], tuple[float, Result]] = {}
    for result in families:
        recall, _ = at_sparsity(whole(result["points"]), sparsity)
        row = (result["family"], result["role"])
        if row not in best or recall > best[row][0]:
            best[row] = (recall, result)
    return [result for _, result in sorted(best.values(), key=lambda pair: -pair[0])]


def coloured(results: Sequence[Result]) -> list[tuple[Result, str, int]]:
    """(family, colour, number of the line style)."""
    return [(r, COLOURS[at % len(COLOURS)], at // len(COLOURS) % len(STYLES)) for at, r in enumerate(results)]


def front_of(result: Result, measure: str) -> tuple[list[float], list[float]]:
    """The Pareto front, for drawing."""
    line = front(whole(result["points"]), measure)
    return [value(p, "sparsity") for p in line], [value(p, measure) for p in line]


def dominated(result: Result, measure: str) -> tuple[list[float], list[float]]:
    """The other points."""
    on_front = {id(p) for p in front(result["points"], measure)}
    rest = [p for p in result["points"] if id(p) not in on_front and p[measure] is not None]
    return [value(p, "sparsity") for p in rest], [value(p, measure) for p in rest]


def setting_text(point: dict[str, Any] | None) -> str:
    """The parameters of a point in words."""
    if point is None:
        return "–"
    other = (
        "layers",
        "chosen",
        "measured",
        "sparsity",
        "recall",
        "precision",
        "mass",
        "exact_rows",
        "computed_density",
    )
    names = {name: v for name, v in point.items() if name not in other}
    if alone(point):
        names = {name: v for name, v in names.items() if name not in ("window", "global")}
    return ", ".join(f"{name} {v:g}" if isinstance(v, float) else f"{name} {v}" for name, v in names.items())
