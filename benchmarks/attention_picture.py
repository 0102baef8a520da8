"""The picture of the part scaling of `benchmarks.attention`: time and memory by length, on logarithmic axes."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, ScalarFormatter

from benchmarks.attention_page import SCALING_WAYS, Row, exponents, medians

INCHES, DOTS = (9.0, 4.0), 110


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time on the left, peak of memory (inputs and libraries too) on the right, with fitted exponents."""
    lengths, fitted = [row["tokens"] for row in rows], exponents(rows)
    figure, (time, memory) = plt.subplots(1, 2, figsize=INCHES)
    for way, label in SCALING_WAYS.items():
        seconds = [medians(row)[way] / 1000 for row in rows]
        time.plot(lengths, seconds, marker="o", label=f"{label}: exponent {fitted[way][0]:.2f}")
        memory.plot(lengths, [row["mib"][way]["peak"] for row in rows], marker="o", label=label)
    time.set(ylabel="seconds of one layer", title="time")
    memory.set(ylabel="MiB, peak of the process", title="memory")
    for axis in (time, memory):
        axis.set(xlabel="tokens", xscale="log", yscale="log")
        axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        axis.minorticks_off()
        axis.legend(fontsize=8)
    # Peaks span less than a power of ten, where matplotlib's own ticks would name none.
    memory.yaxis.set_major_locator(LogLocator(subs=range(1, 10)))
    memory.yaxis.set_major_formatter(ScalarFormatter())
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS)
    plt.close(figure)
