"""The page of benchmarks/tasks.py: tables from stored runs, and what they say about the papers' claims.

Nothing is typed by hand: a verdict is a rule over figures, stated beside it; rows whose runs are missing are left out.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.tasks_claims import claims

Runs = Mapping[str, dict[str, Any]]
Row = dict[str, Any]

HEAD = """# Tasks with known answers

Made by `python -m benchmarks.tasks`; figures in [figures/tasks.json](figures/tasks.json). {runs} of {of} runs,
{cpu_minutes} minutes of one CPU core in all, {longest_run_cpu_seconds} s the longest ({machine}; torch {torch},
transformers {transformers}). Every task knows which positions an answer must be read from, so recall has a ground truth
that no teacher blurs.
"""


def make_page(about: Mapping[str, Any], runs: Runs) -> str:
    """The page as Markdown."""
    parts = [
        HEAD.format(**about),
        copy_part(runs),
        teacher_part(runs),
        cross_part(runs),
        claim_part(runs),
        memory_part(runs),
        needle_part(runs),
    ]
    return "\n".join(part for part in parts if part)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, or nothing where it has no row."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    if not lines:
        return ""
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(head), ["---"] * len(head), *lines]) + "\n"


def rows_of(runs: Runs, prefix: str) -> list[Row]:
    """Rows of all runs whose names begin so; a run's dict of rows gets its keys as `name`."""
    found: list[Row] = []
    for name, run in runs.items():
        if name.startswith(prefix):
            rows = run["figures"]["rows"]
            own = [{"name": key, **row} for key, row in rows.items()] if isinstance(rows, dict) else rows
            found += [{"settings": run["settings"], **row} for row in own]
    return found


def copy_part(runs: Runs) -> str:
    """Accuracy of every trained pattern by depth."""
    groups = {"dense": "dense", "thin": "about 1/8 of the pairs", "wide": "about 1/4 of the pairs"}
    trained = [row for row in rows_of(runs, "copy-l") if "group" in row["settings"]]
    depths = sorted({row["settings"]["layers"] for row in trained})
    lines = []
    for group, title in groups.items():
        own = [row for row in trained if row["settings"]["group"] == group]
        for name in dict.fromkeys(row["name"] for row in own):
            at = {row["settings"]["layers"]: row for row in own if row["name"] == name}
            cells = [_copy_cell(at[depth]) if depth in at else "" for depth in depths]
            lines.append([name, title, f"{max(row['density'] for row in at.values()):.1%}", *cells])
    body = table(["pattern", "group", "density", *map(_layers, depths)], lines)
    if not body:
        return ""
    return f"""## Copying `0 s 0 s` (Yun et al., 2020, section 5): trained with the pattern

The second s is masked; position i must read position i − half. A cell is *accuracy* of the symbols (*gold recall* /
*gold reach*): the share of gold pairs that some head of some layer may read directly, and the share that can come
through the layers. No model can name more than gold reach but by chance.

{body}"""


def _layers(depth: int) -> str:
    return f"{depth} layer" + "s" * (depth > 1)


def _copy_cell(row: Row) -> str:
    return f"{row['accuracy']:.1%} ({row['gold_recall']:.2f} / {row['gold_reach']:.2f})"


def teacher_part(runs: Runs) -> str:
    """Patterns put under a trained dense entmax teacher, without further training."""
    rows = rows_of(runs, "copy-l")
    rows = [row for row in rows if "learned" in row["settings"]]
    depths = sorted({row["settings"]["layers"] for row in rows})
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        at = {row["settings"]["layers"]: row for row in rows if row["name"] == name}
        density = ", ".join(sorted({f"{row['density']:.1%}" for row in at.values()}))
        lines.append([name, density, *(_copy_cell(at[d]) if d in at else "" for d in depths)])
    body = table(["pairs", "density", *map(_layers, depths)], lines)
    if not body:
        return ""
    return f"""## The same task: pairs replaced under a trained dense teacher

A dense model is trained under softmax and then 1.5-entmax; its graphs of 16 texts train low-rank maps (per head, a
fixed share of keys per row). On new texts its attention runs on the predicted pairs, or on a fixed pattern, without
further training. Cells as above.

{body}"""


def cross_part(runs: Runs) -> str:
    """Cross-attention of the encoder–decoders."""
    lines = []
    for name, run in runs.items():
        if not name.startswith("cross-"):
            continue
        order, figures = run["settings"]["order"], run["figures"]
        lines.append([order, "all pairs", "100.0%", "1.00", "1.00", f"{figures['dense_accuracy']:.1%}"])
        for pattern, row in figures["rows"].items():
            numbers = [f"{row['density']:.1%}", f"{row['gold_recall']:.2f}", f"{row['every_head']:.2f}"]
            lines.append([order, pattern, *numbers, f"{row['accuracy']:.1%}"])
    body = table(["task", "pairs in cross-attention", "density", "gold recall", "per head", "accuracy"], lines)
    if not body:
        return ""
    return f"""## Cross-attention: an encoder–decoder that copies or reverses

A Marian-shaped model trained here; the source is `START s EOS`. To predict symbol i of n the decoder must read source
position i + 1 (copy) or n − i (reverse). *Gold recall*: some head keeps that pair; *per head*: the mean over heads.
Predicted rows keep a fixed share of the source per target row, by low-rank maps of q and k or by the true scores.

{body}"""


def needle_part(runs: Runs) -> str:
    """Whether the hidden number is found, by artifact, length and way to attend."""
    rows = rows_of(runs, "needle-")
    parts = []
    for name in dict.fromkeys(row["settings"]["run"] for row in rows):
        own = [row for row in rows if row["settings"]["run"] == name]
        parts.append(f"Artifact of `{name}`:\n\n{_needles(own)}")
    if not parts:
        return ""
    told = "\n\n".join(parts)
    return f"""## Needle: a number hidden in long text

A causal teacher is asked for a number that stands once in the text, at several depths. A cell is the share of texts in
which every token of the number is the model's first choice (log-probability of the number, gold recall: share of heads
whose plan lets the answer read the number, computed density). Fixed patterns compute at least as much as the predicted.

{told}"""


def _needles(rows: list[dict[str, Any]]) -> str:
    lengths, lines = sorted({row["settings"]["tokens"] for row in rows}), []
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = []
        for length in lengths:
            own = [row for row in rows if row["name"] == name and row["settings"]["tokens"] == length]
            found, said, recall, computed = (
                sum(row[key] for row in own) / max(len(own), 1)
                for key in ("found", "log_probability", "recall", "computed")
            )
            sparse = "" if math.isnan(recall) else f", {recall:.2f}, {computed:.1%}"
            cells.append(f"{found:.0%} ({said:.1f}{sparse})" if own else "")
        lines.append([name, *cells])
    return table(["pairs", *(f"{length} tokens" for length in lengths)], lines)


def claim_part(runs: Runs) -> str:
    """Claims of Wang & E, figures, verdicts."""
    body = table(["claim", "figures", "here", "rule"], claims(runs))
    if not body:
        return ""
    return f"""## Memories (Wang & E, 2024): what the paper says, and what is seen here

*error*: mean squared error over the target's variance on unseen sequences, the least over seeds (0 perfect, 1 the
mean). The paper proves what *can* be represented; what gradient descent did not find here does not refute it.

{body}"""


def memory_part(runs: Runs) -> str:
    """All errors behind the claims."""
    parts: list[str] = []
    kinds: list[tuple[str, str, Callable[[Row], str]]] = [
        ("memory-fixed", "Fixed memories, `y = x(t−1) x(t−3)`, one layer", lambda row: ""),
        ("memory-adaptive", "Adaptive memory, `y = x(t−g(x(t)))`, attention and a linear readout", lambda row: ""),
        ("memory-nested", "Nested memories", _nested_name),
        ("memory-parallel", "Three memories side by side", lambda row: ""),
        ("memory-essential", "Convolutions, trained", _decay_name),
        ("kernels-decays", "Convolutions, best of a search over rates", _decay_name),
        ("kernels-points", "A single memory, best of a search over rates", lambda row: f"T = {row['lag']}"),
    ]
    for prefix, title, name in kinds:
        rows = rows_of(runs, prefix)
        if rows:
            parts.append(f"### {title}\n\n{_wide(rows, name)}")
    return "## All errors\n\n" + "\n".join(parts) if parts else ""


def _nested_name(row: Row) -> str:
    return f"K = {row['nesting']}, jumps to {row['longest_jump']}"


def _decay_name(row: Row) -> str:
    return f"{row['decay']} {row['rate']:g}"


def _wide(rows: Sequence[Row], name: Callable[[Row], str]) -> str:
    """Rows by what is computed and its form, a column for each number of layers and heads."""

    def form(row: Row) -> tuple[str, str]:
        normal = {True: ", normalised", False: ", not normalised", None: ""}[row.get("normalised")]
        return name(row), f"{row.get('product', 'no')} product, {row['bias']}{normal}"

    def size(row: Row) -> tuple[int, int]:
        return row.get("layers", 1), row["heads"]

    sizes = sorted({size(row) for row in rows})
    forms = list(dict.fromkeys(form(row) for row in rows))
    at = {(form(row), size(row)): row["error"] for row in rows}
    lines = [[*f, *(f"{at[f, s]:.3f}" if (f, s) in at else "" for s in sizes)] for f in forms]
    return table(["task", "attention", *(f"{_layers(layers)}, {heads} heads" for layers, heads in sizes)], lines)
