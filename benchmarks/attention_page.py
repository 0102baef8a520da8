"""The tables of `benchmarks.attention`, from its JSON. Ratios are medians over rounds, above 1 where ours is faster."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.paired import PARTS, exponent, ratio, summed
from benchmarks.tasks_page import table

Row = dict[str, Any]
Rounds = list[float]
SCALING_WAYS = {"sparse": "predict, plan, attend", "dense": "dense 1.5-entmax", "sdpa": "SDPA, softmax"}
RIVALS = {
    "SDPA": "sdpa", "dense entmax": "dense entmax", "entmax package": "package", "FlexAttention": "flex",
    "BigBird": "bigbird",
}  # fmt: skip
LIST_GOALS = {0.05: 11.0, 0.1: 6.0}  # SDPA / entmax over given lists, by density
REAL_GOALS = {4096: 3.0, 8192: 5.0}  # SDPA / ours at mass .95, by length
GOAL_MASS, NEVER_SLOWER, PLAN_SHARE, PLAN_FROM = 0.95, 1.05, 0.2, 2048
GOAL_MIB, GOAL_LENGTH = 4096, 32768
FAR = 1.2  # times our density, from where on that of a rival is said
ABOUT = ("command", "artifacts", "text", "rounds", "hardware", "versions")


def attention_section(result: Mapping[str, Any]) -> str:
    """All tables of one run, those whose part ran."""
    makers: dict[str, Callable[[Sequence[Row]], str]] = {
        "random": _random, "real": _real, "bidirectional": _bidirectional, "scaling": _scaling,
    }  # fmt: skip
    parts = [make(result[part]) for part, make in makers.items() if result.get(part)]
    goals = list(_goals(result))
    about = "\n".join(f"- {name}: `{result['about'][name]}`" for name in ABOUT)
    told = ["### Goals of one layer\n\n" + "\n".join(f"- {goal}" for goal in goals)] if goals else []
    return "\n\n".join(["## Attention of one layer", about, *told, *parts]) + "\n"


def medians(row: Row) -> dict[str, float]:
    """Milliseconds of every way."""
    return {name: statistics.median(found) for name, found in row["ms"].items()}


def line_of(row: Row) -> str:
    """What is printed of a row while the benchmark runs."""
    facts = {name: value for name, value in row.items() if name not in ("ms", "mib", "shares")}
    told = [f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in facts.items()]
    times = ", ".join(f"{name} {ms:.1f}" for name, ms in medians(row).items())
    peaks = [f"{way} {mib['peak']:.0f}" for way, mib in row.get("mib", {}).items()]
    shares = [f"{part} {share:.0%}" for part, share in row.get("shares", {}).items()]
    return "; ".join([", ".join(told), f"ms: {times}", *(", ".join(x) for x in (peaks, shares) if x)])


def _random(rows: Sequence[Row]) -> str:
    lines = [
        [
            str(row["tokens"]), f"{row['density']:.0%}", str(row["tile_size"]),
            *(f"{medians(row)[way]:.1f}" for way in ("sdpa", "softmax", "1.5-entmax")),
            *(f"{ratio(row['ms']['sdpa'], row['ms'][way]):.2f}" for way in ("softmax", "1.5-entmax")),
        ]
        for row in rows
    ]  # fmt: skip
    names = ["SDPA, ms", "softmax, ms", "entmax, ms", "SDPA / softmax", "SDPA / entmax"]
    head = "### Random key lists\n\n12 heads × 64 dims, normal random numbers, bidirectional, plans given.\n\n"
    return head + table(["tokens", "density", "tile", *names], lines)


def ours(rows: Sequence[Row]) -> Rounds:
    """Prediction, plan and attention of these rows together, round by round."""
    return summed([row["ms"][way] for row in rows for way in ("plan", "attend")])


def against(rows: Sequence[Row], way: str) -> float | None:
    """How many times as long a rival takes, over the layers where it was timed; None where it was not."""
    # The dense form of an entmax model is entmax already.
    found = [row for row in rows if _name_in(row, way)]
    return ratio(summed([row["ms"][_name_in(row, way)] for row in found]), ours(found)) if found else None


def _name_in(row: Row, way: str) -> str:
    if way == "dense entmax" and row["attention"] != "softmax":
        return "dense"
    return way if way in row["ms"] else ""


def groups(rows: Sequence[Row]) -> Iterator[tuple[str, int, float, list[Row]]]:
    """(attention, tokens, mass, rows of all layers), softmax first."""
    keys = dict.fromkeys((row["attention"], row["mass"], row["tokens"]) for row in rows)
    for attention, mass, tokens in sorted(keys, key=lambda key: (key[0] != "softmax", *key)):
        wanted = (attention, mass, tokens)
        yield attention, tokens, mass, [r for r in rows if (r["attention"], r["mass"], r["tokens"]) == wanted]


def _real(rows: Sequence[Row]) -> str:
    layers = sorted({row["layer"] for row in rows})
    forms = sorted({f"{row['flex']} at {row['tokens']}" for row in rows if "flex" in row})
    blocks = [(row["tokens"], row["bigbird_density"], row["density"]) for row in rows if "bigbird_density" in row]
    wide = [f"{theirs:.0%} at {tokens}" for tokens, theirs, ours in blocks if theirs > FAR * ours]
    least = f", but for its least ({', '.join(dict.fromkeys(wide))})" if wide else ""
    text = (
        f"### Real queries and keys\n\nOne held-out text of each length, causal; layers {', '.join(map(str, layers))}: "
        "times are means over them, ratios are of their sums. Mass and density as measured there, of the plan. Ours is "
        "prediction, plan and attention. FlexAttention runs the plan's softmax in the first layer, its plan and block "
        f"mask given ({', '.join(forms) or 'not timed'}). BigBird is bidirectional, in blocks of 64, at the nearest "
        f"possible density of all pairs: {f'that of ours{least}' if blocks else 'not timed'}.\n"
    )
    lines, shares = [], []
    for attention, tokens, mass, own in groups(rows):
        ms = [statistics.fmean(medians(row)[way] for row in own) for way in ("plan", "attend")]
        means = [statistics.fmean(row[name] for row in own) for name in ("kept", "density")]
        ran = " ".join(f"{sum(row['ran'] == mode for row in own)} {mode}" for mode in ("sparse", "dense"))
        best = ratio(summed([row["ms"]["dense"] for row in own]), summed([row["ms"]["auto"] for row in own]))
        times = [f"{value:.1f}" for value in (*ms, sum(ms))]
        facts = [attention, f"{mass:g}", str(tokens), str(own[0]["fitted_at"]), f"{means[0]:.3f}", f"{means[1]:.1%}"]
        lines.append([*facts, *times, *(_cell(against(own, way)) for way in RIVALS.values()), ran, f"{best:.2f}"])
        parts = [statistics.fmean(row["shares"][part] for row in own) for part in PARTS]
        shares.append([attention, f"{mass:g}", str(tokens), *(f"{share:.0%}" for share in parts)])
    head = ["attention", "aim", "tokens", "fitted at", "mass", "density", "predict + plan, ms", "attend, ms", "sum, ms"]
    head += [f"{name} / ours" for name in RIVALS] + ["`auto` ran", "dense / `auto`"]
    told = "Where the time goes (rest: checks of what comes in).\n"
    return "\n".join([text, table(head, lines), "", told, table(["attention", "aim", "tokens", *PARTS], shares)])


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _bidirectional(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        ms, cells = row["ms"], [str(row["tokens"]), f"{row['density']:.1%}", f"{medians(row)['plan']:.1f}"]
        for name in ("softmax", "1.5-entmax"):
            own = summed([ms["plan"], ms[name]])
            rivals = [ratio(ms[way], own) for way in ("sdpa", f"dense {name}")]
            cells += [f"{statistics.median(own):.1f}", *(f"{value:.2f}" for value in rivals)]
        lines.append(cells)
    names = [f"{name}{what}" for name in ("softmax", "entmax") for what in (", ms", ": SDPA / ours", ": dense / ours")]
    text = "### A padded batch, random weights, speed only\n\nModernBERT-base's shape (12 heads × 64 dims), four texts "
    filled = ", ".join(f"{n / rows[0]['tokens']:.0%}" for n in rows[0]["lengths"])
    text += f"that fill {filled} of the length; "
    text += "SDPA with the padding mask, dense: this project's, without padding.\n\n"
    return text + table(["tokens", "density", "predict + plan, ms", *names], lines)


def exponents(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Of time, and of the memory that a way needs beside its inputs, by length."""
    lengths = [row["tokens"] for row in rows]
    found = {}
    for way in SCALING_WAYS:
        needed = [max(row["mib"][way]["peak"] - row["mib"][way]["before"], 1.0) for row in rows]  # MiB, as it is read
        found[way] = exponent(lengths, [medians(row)[way] for row in rows]), exponent(lengths, needed)
    return found


def _scaling(rows: Sequence[Row]) -> str:
    lines = [
        [
            str(row["tokens"]), f"{row['density']:.1%}", *(f"{medians(row)[way]:.1f}" for way in SCALING_WAYS),
            *(f"{row['mib'][way]['peak']:.0f}" for way in SCALING_WAYS),
        ]
        for row in rows
    ]  # fmt: skip
    fitted = exponents(rows).values()
    lines.append(["exponent", "", *(f"{time:.2f}" for time, _ in fitted), *(f"{memory:.2f}" for _, memory in fitted)])
    head = [f"{label}, {unit}" for unit in ("ms", "MiB") for label in SCALING_WAYS.values()]
    text = "### Scaling\n\nOne causal layer, 9 heads (3 of keys) × 64 dims, random numbers; a fixed number of keys is "
    text += "predicted for a text's last tiles. Memory: peak of a process of its own, libraries and inputs included; "
    text += "exponents of memory: of what is added to those.\n\n![scaling](figures/attention_scaling.png)\n\n"
    return text + table(["tokens", "density", *head], lines)


def _goals(result: Mapping[str, Any]) -> Iterator[str]:
    for density, goal in LIST_GOALS.items():
        own = [row for row in result.get("random", ()) if row["density"] == density]
        by_tokens = [list(rows) for _, rows in itertools.groupby(own, key=lambda row: row["tokens"])]
        found = [max(ratio(row["ms"]["sdpa"], row["ms"]["1.5-entmax"]) for row in rows) for rows in by_tokens]
        if found:
            what = f"random lists at {density:.0%}, the better tile of each length: SDPA / entmax"
            yield _verdict(f"{what} {min(found):.2f} to {max(found):.2f}", f"{goal:g}", min(found) >= goal)
    for attention, tokens, mass, own in groups(result.get("real", ())):
        if mass == GOAL_MASS and tokens in REAL_GOALS:
            found_ratio, goal = against(own, "sdpa") or 0.0, REAL_GOALS[tokens]
            what = f"{attention} at mass {mass:g}, {tokens} tokens: SDPA / ours {found_ratio:.2f}"
            yield _verdict(what, f"{goal:g}", found_ratio >= goal)
    yield from _never_slower(result.get("real", ()))
    for row in result.get("scaling", ()):
        if row["tokens"] == GOAL_LENGTH:
            peak = row["mib"]["sparse"]["peak"]
            yield _verdict(f"{GOAL_LENGTH} tokens: {peak:.0f} MiB", f"below {GOAL_MIB}", peak < GOAL_MIB)


def _never_slower(rows: Sequence[Row]) -> Iterator[str]:
    """Sparse and `auto` against the dense form of the same transform, and the share of prediction and plan."""
    found = list(groups(rows))
    for attention in dict.fromkeys(key[0] for key in found):
        own = [group for name, _, _, group in found if name == attention]
        way = "sdpa" if attention == "softmax" else "dense"
        taken = [[ours(group), summed([row["ms"]["auto"] for row in group])] for group in own]
        dense = [summed([row["ms"][way] for row in group]) for group in own]
        worst = [max(ratio(t[i], d) for t, d in zip(taken, dense, strict=True)) for i in range(2)]
        what = f"{attention}, at worst: ours / {way} {worst[0]:.2f}, `auto` / {way} {worst[1]:.2f}"
        yield _verdict(what, f"at most {NEVER_SLOWER}", worst[1] <= NEVER_SLOWER)
    long = [row for row in rows if row["tokens"] >= PLAN_FROM]
    if long:
        most = max(ratio(row["ms"]["plan"], row["ms"]["attend"]) for row in long)
        what = f"prediction and plan / attention, from {PLAN_FROM} tokens on, at most {most:.0%}"
        yield _verdict(what, f"{PLAN_SHARE:.0%}", most <= PLAN_SHARE)


def _verdict(what: str, goal: str, met: bool) -> str:
    return f"{what} (goal {goal}): {'met' if met else '**not met**'}"
