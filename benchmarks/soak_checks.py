"""What must hold of a soak, and its figures."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import theilslopes

from benchmarks.soak_clients import DEADLINE, Reply

MOST_MIB_PER_MINUTE = 1.0
CYCLE = 20.0  # seconds between two reloads of a long run
MOST_THREADS = 64
HURRY = 0.5  # seconds before SIGTERM in which a request may still lie unread in a socket that is closed then
NO_ANSWER = {"ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected", "BrokenPipeError"}


@dataclass(frozen=True)
class Interval:
    """When an artifact may answer: from the start of its reload to the end of the next one (None: still)."""

    name: str
    start: float
    end: float | None


@dataclass(frozen=True)
class Sample:
    """Memory and threads of the service at one moment, and the least memory that was seen since the sample before."""

    time: float
    mib: float
    threads: int
    least: float


@dataclass(frozen=True)
class Soaked:
    """Everything that was seen. Times are seconds of one clock; `warm`: when the warm-up ended, `stopped`: SIGTERM."""

    begin: float
    warm: float
    stopped: float
    replies: tuple[Reply, ...]
    last: tuple[Reply, ...]
    reloads: tuple[Reply, ...]
    intervals: tuple[Interval, ...]
    samples: tuple[Sample, ...]
    exit_code: int
    stop_seconds: float
    exceptions: int
    long: bool


@dataclass(frozen=True)
class Check:
    """One thing that must hold, whether it does, and what was found."""

    what: str
    holds: bool
    found: str


def checks(soaked: Soaked) -> list[Check]:
    """Everything that must hold."""
    before = [reply for reply in soaked.replies if reply.started < soaked.stopped - HURRY]
    after = [reply for reply in soaked.replies if reply.started >= soaked.stopped - HURRY]
    faults = [reply for reply in before if reply.fault]
    lost = [reply for reply in after if reply.fault and reply.fault not in NO_ANSWER and reply.status != 503]
    strangers = [reply for reply in soaked.replies if reply.served and not served_then(reply, soaked.intervals)]
    slowest = max((reply.ended - reply.started for reply in [*soaked.replies, *soaked.last]), default=math.nan)
    good = [reply for reply in soaked.replies if reply.status == 200]
    slope, most = memory_slope(soaked), max((sample.threads for sample in soaked.samples), default=0)
    return [
        Check("good requests were answered", bool(good), f"{len(good)} answers"),
        Check("every request has its answer", not faults, _first(faults)),
        Check("around SIGTERM: answered or refused", not lost, _first(lost)),
        Check("what ran at SIGTERM was answered", _answered(soaked.last), _first(soaked.last)),
        Check("answers are of artifacts that served then", not strangers, _first(strangers)),
        Check("nothing hung", slowest < DEADLINE, f"slowest {slowest:.1f} s"),
        Check(
            "good reloads taken, broken refused",
            bool(soaked.reloads) and _clean(soaked.reloads),
            _first(soaked.reloads),
        ),
        Check(f"memory slope, at most {MOST_MIB_PER_MINUTE:g} MiB a minute", *_memory(soaked, slope)),
        Check(f"threads, at most {MOST_THREADS}", 0 < most <= MOST_THREADS, str(most)),
        Check("no exception in the log", soaked.exceptions == 0, str(soaked.exceptions)),
        Check("exit code 0", soaked.exit_code == 0, f"{soaked.exit_code} after {soaked.stop_seconds:.1f} s"),
    ]


def served_then(reply: Reply, intervals: Sequence[Interval]) -> bool:
    """Whether the artifact that answered may have served at some moment of the request."""
    return any(
        one.name == reply.served and one.start <= reply.ended and (one.end is None or reply.started <= one.end)
        for one in intervals
    )


def memory_slope(soaked: Soaked, peaks: bool = False) -> float:
    """MiB a minute after the warm-up: the median of the slopes between the least of every 20 s (Theil and Sen).

    Each of them holds a reload, during which there are two models, and free memory goes back every other second,
    between two batches: what leaks is what the least does not lose again. peaks: of all samples as they are instead.
    """
    warm = [one for one in soaked.samples if soaked.warm <= one.time < soaked.stopped]
    points = [(one.time, one.mib) for one in warm]
    if not peaks:
        least: dict[float, float] = {}
        for one in warm:
            begin = (one.time - soaked.warm) // CYCLE * CYCLE
            least[begin] = min(one.least, least.get(begin, math.inf))
        points = list(least.items())
    if len(points) < 2:
        return math.nan
    return 60 * float(theilslopes([mib for _, mib in points], [time for time, _ in points]).slope)


def summary(soaked: Soaked) -> dict[str, Any]:
    """Figures for people and for the JSON."""
    kinds: dict[str, Counter[str]] = {}
    for reply in [*soaked.replies, *soaked.reloads, *soaked.last]:
        after = reply.started >= soaked.stopped and reply.kind != "last"
        kinds.setdefault("after SIGTERM" if after else reply.kind, Counter())[str(reply.status)] += 1
    seconds = sorted(reply.ended - reply.started for reply in soaked.replies if reply.status == 200)
    warm = [sample.mib for sample in soaked.samples if sample.time >= soaked.warm] or [math.nan]
    return {
        "requests": {kind: dict(counts) for kind, counts in sorted(kinds.items())},
        "median_seconds": round(statistics.median(seconds), 3) if seconds else None,
        "slowest_seconds": round(seconds[-1], 3) if seconds else None,
        "memory_mib": {"start": _mib(soaked, 0), "after_warm_up": warm[0], "end": warm[-1], "most": max(warm)},
        "memory_mib_per_minute": memory_slope(soaked),
        "memory_mib_per_minute_with_peaks": memory_slope(soaked, peaks=True),
        "memory_each_second": [round(sample.mib, 1) for sample in soaked.samples],
        "memory_least_of_each_second": [round(sample.least, 1) for sample in soaked.samples],
        "threads": max((sample.threads for sample in soaked.samples), default=0),
        "stop_seconds": round(soaked.stop_seconds, 2),
        "exit_code": soaked.exit_code,
    }


def _mib(soaked: Soaked, place: int) -> float | None:
    return soaked.samples[place].mib if soaked.samples else None


def _memory(soaked: Soaked, slope: float) -> tuple[bool, str]:
    if not soaked.long:
        return True, f"{slope:+.2f} (only said: too short to tell)"
    return slope <= MOST_MIB_PER_MINUTE, f"{slope:+.2f}"


def _answered(replies: Sequence[Reply]) -> bool:
    return bool(replies) and all(reply.status == 200 for reply in replies) and _clean(replies)


def _clean(replies: Sequence[Reply]) -> bool:
    return not any(reply.fault for reply in replies)


def _first(replies: Sequence[Reply]) -> str:
    """How many, and the first that has a fault."""
    fault = next((f", {reply.kind}: {reply.fault}" for reply in replies if reply.fault), "")
    return f"{len(replies)}{fault}"
