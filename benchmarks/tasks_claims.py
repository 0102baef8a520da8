"""Claims of Wang & E (2024) as rules over the figures of benchmarks/tasks.py."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from training.tasks.kernels import heads_needed

Runs = Mapping[str, dict[str, Any]]
Row = dict[str, Any]

LEARNED = 0.1  # an error that counts as learned
FLOOR_SHARE = 0.9  # of what the best kernel without a look at the token leaves


def claims(runs: Runs) -> list[list[str]]:
    """Claim, figures, "holds" or "does not hold", and the rule; claims without runs are left out."""
    makers: list[Callable[[Runs], Iterator[list[str]]]] = [_fixed, _adaptive, _nested, _points, _decays, _parallel]
    return [line for make in makers for line in make(runs)]


def _rows(runs: Runs, prefix: str) -> list[Row]:
    return [row for name, run in runs.items() if name.startswith(prefix) for row in run["figures"]["rows"]]


def _least(rows: Sequence[Row], **wanted: Any) -> float:
    """The least error among the rows with these properties; infinite where there is none."""
    return min((r["error"] for r in rows if all(r.get(k) == v for k, v in wanted.items())), default=float("inf"))


def _line(claim: str, figures: str, holds: bool, rule: str) -> list[str]:
    return [claim, figures, "holds" if holds else "does not hold", rule]


def _fixed(runs: Runs) -> Iterator[list[str]]:
    if rows := _rows(runs, "memory-fixed"):
        none, dot = _least(rows, product="none"), _least(rows, product="dot")
        figures = f"error without product {none:.3f}, with {dot:.3f}"
        rule = f"without product at most {LEARNED}"
        yield _line("Fixed memories need no dot product (theorem 4.1)", figures, none <= LEARNED, rule)
        log, lin = (_least(rows, product="none", bias=bias) for bias in ("log", "lin"))
        figures = f"without product: log {log:.3f}, lin {lin:.3f}"
        claim = "Both biases serve for short fixed memories (theorem 4.1)"
        yield _line(claim, figures, max(log, lin) <= LEARNED, f"both at most {LEARNED}")


def _adaptive(runs: Runs) -> Iterator[list[str]]:
    rows = _rows(runs, "memory-adaptive")
    if not rows:
        return
    # Each of g lags is right once in g times, so a kernel that does not look explains at most g · (1/g)² of it.
    floor = 1 - 1 / rows[0]["longest_jump"]
    none, dot = (_least(rows, product=name) for name in ("none", "dot"))
    yield _line(
        "One layer without dot product cannot follow an adaptive memory (proposition 5.2)",
        f"error {none:.3f}; the best fixed kernel leaves {floor:.3f}",
        none >= FLOOR_SHARE * floor,
        f"no error below {FLOOR_SHARE * floor:.3f}",
    )
    yield _line(
        "One layer with dot product can (proposition 5.2)",
        f"error {dot:.3f}",
        dot <= floor / 2,
        f"at most half of {floor:.3f}",
    )
    gate, slope = (_least(rows, product=name) for name in ("gate", "slope"))
    yield _line(
        "Something simpler than the dot product does it too (proposition 5.3): one vector a head",
        f"gate {gate:.3f}, slope {slope:.3f}, dot product {dot:.3f}",
        min(gate, slope) <= floor / 2,
        f"one of them at most half of {floor:.3f}",
    )
    yes, no = (_least(rows, product="dot", normalised=flag) for flag in (True, False))
    yield _line(
        "The normalisation of softmax is not needed (theorem 5.1)",
        f"with the product: normalised {yes:.3f}, not normalised {no:.3f}",
        no <= floor / 2,
        f"without it at most half of {floor:.3f}",
    )
    with_it, without = (_least(rows, product="gate", normalised=flag) for flag in (True, False))
    yield _line(
        "… and the gate, a factor of the whole row, works only without it (it cancels)",
        f"gate: normalised {with_it:.3f}, not normalised {without:.3f}",
        without <= floor / 2 <= FLOOR_SHARE * floor <= with_it,
        f"not normalised at most half of {floor:.3f}, normalised above {FLOOR_SHARE * floor:.3f}",
    )


def _nested(runs: Runs) -> Iterator[list[str]]:
    rows = _rows(runs, "memory-nested")
    for longest, depth in sorted({(row["longest_jump"], row["nesting"]) for row in rows}):
        own = [row for row in rows if (row["longest_jump"], row["nesting"]) == (longest, depth)]
        by_layers = {n: _least(own, layers=n, product="dot") for n in sorted({row["layers"] for row in own})}
        enough = [n for n, error in by_layers.items() if error <= LEARNED]
        figures = ", ".join(f"{n} layers {error:.3f}" for n, error in by_layers.items())
        claim = f"Nesting K = {depth} (jumps to {longest}) needs no more than K + 1 = {depth + 1} layers (theorem 5.4)"
        holds = bool(enough) and min(enough) <= depth + 1
        yield _line(claim, f"error with dot product: {figures}", holds, f"error ≤ {LEARNED} with at most K + 1 layers")
        if depth + 1 in by_layers and depth in by_layers:
            claim = f"… and gains from layer K + 1 (K = {depth}, jumps to {longest})"
            better = by_layers[depth + 1] < 0.5 * by_layers[depth]
            figures = f"{depth} layers {by_layers[depth]:.3f}, {depth + 1} layers {by_layers[depth + 1]:.3f}"
            yield _line(claim, figures, better, "K + 1 layers leave less than half the error of K")


def _points(runs: Runs) -> Iterator[list[str]]:
    rows = _rows(runs, "kernels-points")
    if not rows:
        return
    lags, counts = (sorted({row[name] for row in rows}) for name in ("lag", "heads"))
    needed: dict[str, list[int | None]] = {}
    for bias in ("log", "lin"):
        errors = {lag: [_least(rows, bias=bias, lag=lag, heads=h) for h in counts] for lag in lags}
        needed[bias] = [heads_needed(errors[lag], counts, LEARNED) for lag in lags]
    shown = {bias: ", ".join(_number(n, max(counts)) for n in own) for bias, own in needed.items()}
    figures = f"T = {', '.join(map(str, lags))}: log {shown['log']}; lin {shown['lin']} heads"
    grows = all(_grows(own) for own in needed.values())
    rule = f"the heads needed for an error of {LEARNED} never fall with T, and rise"
    yield _line("A longer fixed memory needs more heads (theorem 4.1)", figures, grows, rule)
    log, lin = ([n or 2 * max(counts) for n in needed[bias]] for bias in ("log", "lin"))
    fewer = sum(a < b for a, b in zip(log, lin, strict=True)) > sum(a > b for a, b in zip(log, lin, strict=True))
    claim = "The log bias needs fewer heads than the linear one for long memories (theorem 4.1, rates in T)"
    yield _line(claim, figures, fewer, "log needs fewer heads at more lags than lin does")


def _decays(runs: Runs) -> Iterator[list[str]]:
    for prefix, how in (("kernels-decays", "best of a search"), ("memory-essential", "trained")):
        rows = _rows(runs, prefix)
        for decay, own, other in (("exponential", "lin", "log"), ("polynomial", "log", "lin")):
            kind = [row for row in rows if row["decay"] == decay]
            if not kind:
                continue
            matched = max(_least(kind, rate=r, bias=own, heads=1) for r in {row["rate"] for row in kind})
            unmatched = max(_least(kind, rate=r, bias=other, heads=1) for r in {row["rate"] for row in kind})
            figures = f"one head, worst rate: {own} {matched:.4f}, {other} {unmatched:.4f}"
            claim = f"{decay.capitalize()} kernels suit the {own} bias (section 6; {how})"
            rule = f"{own} at most 0.02 and at most half of {other}"
            yield _line(claim, figures, matched <= min(0.02, unmatched / 2), rule)


def _parallel(runs: Runs) -> Iterator[list[str]]:
    rows = _rows(runs, "memory-parallel")
    if {row["layers"] for row in rows} != {2, 3}:
        return
    heads = sorted({row["heads"] for row in rows})
    shallow, deep = ({h: _least(rows, layers=n, heads=h) for h in heads} for n in (2, 3))
    parts = (
        f"{n} layers: " + ", ".join(f"{h} heads {e:.3f}" for h, e in own.items())
        for n, own in ((2, shallow), (3, deep))
    )
    figures = "; ".join(parts)
    better = sum(deep[few] <= shallow[many] for few, many in pairwise(heads))
    claim = "Depth stands in for heads: 2 memories side by side, M + 1 = 3 layers against 2 (proposition 5.5)"
    rule = "3 layers of H heads leave at most the error of 2 layers of 2 H heads, for every H"
    yield _line(claim, figures, better == len(heads) - 1, rule)
    most = heads[-1]
    claim = "Two layers with enough heads do it as well (theorem 5.1)"
    yield _line(claim, f"2 layers, {most} heads: {shallow[most]:.3f}", shallow[most] <= LEARNED, f"at most {LEARNED}")


def _number(count: int | None, most: int) -> str:
    return f"> {most}" if count is None else str(count)


def _grows(needed: Sequence[int | None]) -> bool:
    values = [n if n is not None else 10**6 for n in needed]
    return values == sorted(values) and values[-1] > values[0]
