"""What computed each layer of an answer, put together from the batches of a request."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sparsefinder.certificate import Repair


@dataclass(frozen=True)
class RanLayer:
    """What one layer did for a request: its computed density, how many of its passes each path computed, repairs."""

    density: float
    ran: dict[str, int]
    repair: Repair | None


def ran_layer(
    layer: int, density: float, ran: Sequence[Sequence[str]], repairs: Sequence[Sequence[Repair | None]]
) -> RanLayer:
    """One layer of a request; `ran` and `repairs` hold one entry per batch, and in it one per layer."""
    passes = Counter(paths[layer] for paths in ran)
    return RanLayer(density, dict(passes), _joined([done[layer] for done in repairs if done]))


def _joined(repairs: Sequence[Repair | None]) -> Repair | None:
    """What the repairs of several batches did together; None where there was none."""
    done = [asdict(repair) for repair in repairs if repair is not None]
    if not done:
        return None
    most = max(one["most_survivors"] for one in done)
    return Repair(**{name: sum(one[name] for one in done) for name in done[0]} | {"most_survivors": most})
