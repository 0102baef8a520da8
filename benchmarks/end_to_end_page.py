"""The tables of `benchmarks.end_to_end`, from its JSON. Ratios are medians over rounds, above 1 = faster."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.paired import PARTS, ratio
from benchmarks.tasks_page import table

Row = dict[str, Any]
ABOUT = ("command", "artifacts", "mass", "text", "rounds", "hardware", "versions")
LONG, GOAL, NEVER_BELOW, ENTMAX_LOSS = 8192, 1.6, 0.97, 1.05


def end_to_end_section(result: Mapping[str, Any]) -> str:
    """Both tables of one run, and what the goals say of them."""
    about = "\n".join(f"- {name}: `{result['about'][name]}`" for name in ABOUT)
    text = "Every row is a mode of one model in the same rounds; density: computed / legal pairs, over all layers; "
    text += "`exact`: of its plan, before repairs."
    parts = ["## Whole models", about, text, "\n".join(f"- {goal}" for goal in _goals(result))]
    for part, quality in (("scoring", "perplexity"), ("embedding", "cosine to `original`")):
        if result[part]:
            parts += [f"### {part.capitalize()}", _table(result[part], quality), _shares(result[part])]
    return "\n\n".join(part for part in parts if part) + "\n"


def beside(rows: Sequence[Row], row: Row, mode: str) -> float:
    """How many times as long a mode takes as the row does: `original`, or `dense` of the row's own attention."""
    return ratio(_find(rows, row, mode)["ms"], row["ms"])


def _find(rows: Sequence[Row], row: Row, mode: str) -> Row:
    return next(
        other
        for other in rows
        if (other["tokens"], other["texts"], other["mode"]) == (row["tokens"], row["texts"], mode)
        and (mode == "original" or other["attention"] == row["attention"])
    )


def _table(rows: Sequence[Row], quality: str) -> str:
    lines = []
    for row in rows:
        rate = 1000 * row["tokens"] * row["texts"] / statistics.median(row["ms"])
        own = "–" if row["mode"] == "original" else f"{beside(rows, row, 'dense'):.2f}"
        ran = ", ".join(f"{count} {path}" for path, count in row["ran"].items())
        facts = [str(row["tokens"]), str(row["texts"]), row["attention"], f"`{row['mode']}`", f"{rate:.0f}"]
        lines.append([*facts, f"{beside(rows, row, 'original'):.2f}", own, f"{row['quality']:.4g}"])
        lines[-1] += [f"{row['density']:.1%}", ran]
    names = ["tokens / s", "`original` / it", "`dense` / it", quality, "density", "layers that ran"]
    return table(["tokens", "texts", "attention", "mode", *names], lines)


def _shares(rows: Sequence[Row]) -> str:
    lines = [
        [str(row["tokens"]), str(row["texts"]), row["attention"], *(f"{row['shares'][part]:.0%}" for part in PARTS)]
        for row in rows
        if "shares" in row
    ]
    text = "Where the time of mode `sparse` goes; rest: all that is not attention, and checks.\n\n"
    return text + table(["tokens", "texts", "attention", *PARTS], lines)


def _goals(result: Mapping[str, Any]) -> Iterator[str]:
    scored, embedded = result["scoring"], result["embedding"]
    for name in dict.fromkeys(row["attention"] for row in scored):
        dense = [row for row in scored if (row["attention"], row["mode"]) == (name, "dense")]
        loss = [row["quality"] / _find(scored, row, "original")["quality"] for row in dense]
        if name != "softmax":
            what = f"{name}, dense: perplexity at most {max(loss):.3f} times that of softmax"
            yield _verdict(what, f"at most {ENTMAX_LOSS}", max(loss) <= ENTMAX_LOSS)
        for mode in ("sparse", "auto"):
            own = [row for row in scored if (row["attention"], row["mode"]) == (name, mode)]
            long = [beside(scored, row, "original") for row in own if row["tokens"] == LONG]
            if long:
                yield _verdict(f"{name} `{mode}`, {LONG} tokens: {long[0]:.2f} times SDPA", f"{GOAL}", long[0] >= GOAL)
            least = min((beside(scored, row, "original") for row in own if row["tokens"] != LONG), default=None)
            if least is not None:
                what = f"{name} `{mode}`, shorter texts: at least {least:.2f} times SDPA"
                yield _verdict(what, f"{NEVER_BELOW}", least >= NEVER_BELOW)
    fast = [beside(embedded, row, "dense") for row in embedded if row["mode"] == "sparse"]
    if fast:
        what = f"embeddings: `sparse` at least {min(fast):.2f} times as fast as `dense`"
        yield _verdict(what, "1", min(fast) >= 1)


def _verdict(what: str, goal: str, met: bool) -> str:
    return f"{what} (goal {goal}): {'met' if met else '**not met**'}"
