"""Which waiting items make the next batch: the oldest one always, with others of its lane and about its length."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.audit import Sample
from app.errors import ApiError, non_finite
from app.servable import Counts, Forward, Ids, Lane, Servable, computes_no_padding
from sparsefinder.certificate import Repair

# The most padding a batch may have. It is computed like text, so little pays for itself; where the model packs its
# texts it costs a little memory only, and the order of arrival can decide alone.
PADDED, PACKED = 0.1, 0.75
RETRY_SECONDS = (1, 60)
# Each further text of a request counts as come so much later, so that who sends thousands lets others between.
SPACING = 0.01  # seconds


@dataclass(eq=False)
class Ticket:
    """One request while its items wait and run, and what its batches have given so far."""

    model: Servable  # the whole request is answered by this one, whatever is loaded meanwhile
    lane: Lane
    ids: list[Ids]
    sample: Sample | None = None
    arrived: float = field(default_factory=time.perf_counter)
    begun: float | None = None
    ready: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    computed: Counts | int = 0
    legal: int = 0
    seconds: float = 0.0
    ran: list[tuple[str, ...]] = field(default_factory=list)
    repairs: list[tuple[Repair | None, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs: list[object] = [None] * len(self.ids)
        self.missing = len(self.ids)

    @property
    def group(self) -> tuple[int, Lane, int | None]:
        """What items of one batch share. Proofs and repairs are counted per batch, so `exact` has its batches alone."""
        return id(self.model), self.lane, id(self) if self.lane.mode == "exact" else None

    @property
    def packs(self) -> bool:
        """Whether its model computes no padding for it."""
        return computes_no_padding(self.model.description, self.lane.task)

    @property
    def over(self) -> bool:
        """Whether nobody waits for it: answered, failed, or given up by its client."""
        return self.ready.done()

    def fail(self, error: BaseException) -> None:
        """Answer the request with an error; its items that still wait are dropped."""
        if not self.over:
            self.ready.set_exception(error)


@dataclass(frozen=True, eq=False)
class Item:
    """One text of a request."""

    ticket: Ticket
    index: int

    @property
    def due(self) -> float:
        """When it counts as arrived."""
        return self.ticket.arrived + self.index * SPACING

    @property
    def ids(self) -> Ids:
        """Its tokens."""
        return self.ticket.ids[self.index]

    @property
    def sample(self) -> Sample | None:
        """What an audit of its request looks at, where that is this item."""
        sample = self.ticket.sample
        return sample if sample is not None and sample.item == self.index else None


def choose(waiting: Sequence[Item], max_tokens: int) -> list[Item]:
    """The next batch of a queue, oldest item first in it.

    The oldest is always taken, so nothing starves. Others of its group follow in the order of arrival where the model
    packs its texts, else by nearness of length; as long as the batch keeps to `max_tokens` computed tokens and to the
    padding it may have.
    """
    first = waiting[0]
    group, length, packs = first.ticket.group, len(first.ids), first.ticket.packs
    others = [item for item in waiting[1:] if item.ticket.group == group]
    if not packs:
        others.sort(key=lambda item: abs(len(item.ids) - length))
    least = 1 - (PACKED if packs else PADDED)
    batch, longest, tokens = [first], length, length
    for item in others:
        size = len(item.ids)
        cells = max(longest, size) * (len(batch) + 1)
        if (tokens + size if packs else cells) <= max_tokens and tokens + size >= least * cells:
            batch.append(item)
            longest, tokens = max(longest, size), tokens + size
    return batch


class Queue:
    """Items that wait, in the order in which they are due, bounded in items and tokens. Belongs to the event loop."""

    def __init__(self, max_items: int, max_tokens: int):
        self.max_items = max_items
        self.max_tokens = max_tokens
        self.reading = 0  # items whose tokens are not known yet
        self.arrived = asyncio.Event()
        self._waiting: list[Item] = []
        self._rate = 1000.0  # tokens a second, before anything was measured

    @property
    def items(self) -> int:
        """How many items wait, those that are being read included."""
        return len(self._waiting) + self.reading

    @property
    def tokens(self) -> int:
        """How many tokens wait."""
        return sum(len(item.ids) for item in self._waiting)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin_reading(self, items: int) -> None:
        """Take places for a request whose tokens are not known yet; `reading` gives them back.

        Raises:
            ApiError: 422 where no queue could ever hold the request, 429 where this one cannot now.
        """
        self._require("items", items, self.items, self.max_items)
        self.reading += items

    def add(self, ticket: Ticket) -> None:
        """Let the items of a request wait.

        Raises:
            ApiError: 422 where no queue could ever hold the request, 429 where this one cannot now.
        """
        self._require("tokens", sum(map(len, ticket.ids)), self.tokens, self.max_tokens)
        self._waiting += [Item(ticket, index) for index in range(len(ticket.ids))]
        self._waiting.sort(key=lambda item: item.due)  # nearly sorted as it is
        self.arrived.set()

    def take(self, max_tokens: int) -> list[Item]:
        """Remove the next batch; empty where nobody waits any more."""
        self._drop_abandoned()
        if not self._waiting:
            self.arrived.clear()
            return []
        batch = choose(self._waiting, max_tokens)
        taken = set(map(id, batch))
        self._waiting = [item for item in self._waiting if id(item) not in taken]
        return batch

    def measured(self, tokens: int, seconds: float) -> None:
        """Learn from a batch how fast the queue empties: what Retry-After promises."""
        self._rate += 0.1 * (tokens / max(seconds, 1e-6) - self._rate)

    def _drop_abandoned(self) -> None:
        self._waiting = [item for item in self._waiting if not item.ticket.over]

    def _require(self, what: str, more: int, there: int, most: int) -> None:
        if more > most:
            message = f"input: expected at most {most} {what} in one request, got {more}"
            raise ApiError(422, "batch_too_large", message, "input")
        if there + more <= most:
            return
        self._drop_abandoned()
        there = self.items if what == "items" else self.tokens
        if there + more > most:
            low, high = RETRY_SECONDS
            wait = min(high, max(low, round(self.tokens / self._rate)))
            message = f"the queue is full: {there} {what} wait, {more} more would exceed {most}; retry in {wait} s"
            raise ApiError(429, "queue_full", message, headers={"retry-after": str(wait)})


def deliver(batch: Sequence[Item], done: Forward, seconds: float) -> None:
    """Put a batch's outputs into its requests; those that are complete now are answered.

    A request with NaN or infinity in an output fails, and no other does.
    """
    seen: dict[int, Ticket] = {}
    for place, item in enumerate(batch):
        ticket = item.ticket
        if not finite(done.outputs[place]):
            ticket.fail(non_finite())
        ticket.outputs[item.index] = done.outputs[place]
        ticket.missing -= 1
        ticket.computed = ticket.computed + done.computed[place]
        ticket.legal += int(done.legal[place])
        seen[id(ticket)] = ticket
    for ticket in seen.values():
        ticket.seconds += seconds
        ticket.ran.append(done.ran)
        ticket.repairs.append(done.repairs)
        if not ticket.missing and not ticket.over:
            ticket.ready.set_result(None)


def finite(output: Any) -> bool:
    """Whether an output holds neither NaN nor infinity."""
    return bool(np.isfinite(output).all()) if isinstance(output, np.ndarray) else bool(output.finite)
