"""Arithmetic of `benchmarks.load`, and its page docs/load.md.

    python -m benchmarks.load_page [--out docs/load.md]

No figure is written by hand: this reads docs/figures/load.json.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.load_clients import Outcome
from benchmarks.pages import deliver
from benchmarks.paired import ratio
from benchmarks.tasks_page import table

DOCS = Path(__file__).resolve().parent.parent / "docs"
FASTER, CLOSE = 1.3, 1e-4  # the goals
FIGURES = ("requests_per_second", "tokens_per_second", "p50_ms", "p99_ms")
Row = dict[str, Any]


def measured(counted: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """What was answered in a window of so many seconds."""
    good = [one for one in counted if one.status == 200]
    latencies = sorted(1000 * one.seconds for one in good)
    return {
        "requests_per_second": len(good) / seconds,
        "tokens_per_second": sum(one.tokens for one in good) / seconds,
        "p50_ms": percentile(latencies, 50),
        "p99_ms": percentile(latencies, 99),
        "requests": len(good),
    }


def failed(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of all outcomes, warm-up and end included: how many of each status, and what the first failure said."""
    statuses: dict[str, int] = {}
    for one in outcomes:
        statuses[str(one.status)] = statuses.get(str(one.status), 0) + 1
    fault = next((f"{one.status} {one.fault}" for one in outcomes if one.status != 200), "")
    return {"statuses": statuses, "refused": sum(one.refused for one in outcomes), "fault": fault}


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The least of these rising numbers that at least so many percent of them do not exceed; NaN of none."""
    if not ordered:
        return float("nan")
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def summed_up(rounds: Mapping[str, Sequence[Row]]) -> dict[str, Row]:
    """Of every way the medians over rounds, its rounds, and what failed in any of them."""
    found: dict[str, Row] = {}
    for name, rows in rounds.items():
        medians = {figure: statistics.median(row[figure] for row in rows) for figure in FIGURES}
        statuses: dict[str, int] = {}
        for row in rows:
            for status, count in row["statuses"].items():
                statuses[status] = statuses.get(status, 0) + count
        failures = sum(count for status, count in statuses.items() if status != "200")
        refused = sum(row["refused"] for row in rows)
        fault = next((row["fault"] for row in rows if row["fault"]), "")
        found[name] = medians | {"statuses": statuses, "failures": failures, "refused": refused, "fault": fault}
        found[name]["rounds"] = list(rows)
    return found


def rival_of(ways: Mapping[str, Row]) -> str:
    """The form of the plain server that got through the most tokens."""
    return max((name for name in ways if name.startswith("baseline")), key=lambda name: ways[name]["tokens_per_second"])


def throughput_ratio(ways: Mapping[str, Row], name: str, other: str) -> float:
    """How many times the tokens a second of the other: the median of the rounds' ratios."""
    above, below = ([row["tokens_per_second"] for row in ways[way]["rounds"]] for way in (name, other))
    return ratio(above, below)


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """What the goals say of a result, one line each."""
    ways = result["ways"]
    rival = rival_of(ways)
    times, ours, theirs = throughput_ratio(ways, "original", rival), ways["original"], ways[rival]
    refused, failures = (sum(way[what] for way in ways.values()) for what in ("refused", "failures"))
    late = sum(way["statuses"].get("504", 0) for way in ways.values())
    return [
        _verdict(f"`original` / `{rival}`, tokens a second: {times:.2f}", f"at least {FASTER}", times >= FASTER),
        _verdict(
            f"p99 of `original` {ours['p99_ms']:.0f} ms, of `{rival}` {theirs['p99_ms']:.0f} ms",
            "the same or lower",
            ours["p99_ms"] <= theirs["p99_ms"],
        ),
        _verdict(
            f"greatest difference of two embeddings of {result['compared']} pairs: {result['furthest']:.1e}",
            f"at most {CLOSE:.0e}",
            result["furthest"] <= CLOSE,
        ),
        _verdict(f"answers other than 200 and 429: {failures}, 504 among them: {late}", "none", failures == 0),
        f"429, tried again: {refused}",
    ]


def _verdict(what: str, goal: str, reached: bool) -> str:
    return f"{what} (goal: {goal}; {'reached' if reached else '**not reached**'})"


def summary_table(result: Mapping[str, Any]) -> str:
    """One row for every way: medians over rounds, the range of the rounds, and the ratio to the best plain server."""
    ways = result["ways"]
    rival, lines = rival_of(ways), []
    for name, way in ways.items():
        rates = [row["tokens_per_second"] for row in way["rounds"]]
        cores = [statistics.median(row[what] for row in way["rounds"]) for what in ("server_cores", "clients_cores")]
        line = [f"`{name}`", f"{way['tokens_per_second']:.0f}", f"{min(rates):.0f}–{max(rates):.0f}"]
        line += [f"{throughput_ratio(ways, name, rival):.2f}", f"{way['requests_per_second']:.1f}"]
        line += [f"{way['p50_ms']:.0f}", f"{way['p99_ms']:.0f}", *(f"{count:.2f}" for count in cores)]
        lines.append(line)
    names = [
        "tokens / s",
        "rounds",
        f"/ `{rival}`",
        "requests / s",
        "p50 ms",
        "p99 ms",
        "server's cores",
        "clients' cores",
    ]
    return table(["way", *names], lines)


def load_page(result: Mapping[str, Any]) -> str:
    """The whole page."""
    about = "\n".join(f"- {name}: `{value}`" for name, value in result["about"].items())
    goals = "\n".join(f"- {line}" for line in verdicts(result))
    clients = result["about"]["clients"]
    return f"""# Load

{clients} clients on the loopback address, each sending its next text when the last one is answered, to this service
(`original`: the untouched softmax model; `dense`, `sparse`, `auto`: its entmax twin) and to the same model behind a
plain FastAPI + sentence-transformers server (`baseline`; with a lock around the model; and with one core for each
request that is computed). All servers stand ready and take turns; figures are medians over rounds, "rounds" is the
range of them.
Clients and server share the machine: the last columns say how many cores each kept busy.

{about}

{summary_table(result)}

{goals}

`original` and the baselines compute the same numbers, so their ratio is what batching and the rest of the service are
worth. `dense` and `sparse` compute another transform (α-entmax), for which no fused kernel of torch exists.

Written by `python -m benchmarks.load_page` from `docs/figures/load.json`.
"""


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=DOCS / "figures" / "load.json")
    parser.add_argument("--out", type=Path, help="write the page here instead of printing it")
    options = parser.parse_args(arguments)
    return deliver(load_page(json.loads(options.json.read_text(encoding="utf-8"))), options.out)


if __name__ == "__main__":
    main()
