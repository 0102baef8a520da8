"""One model, one worker thread: every forward pass of the process runs there, one batch after the other.

Requests wait as items in a queue (see `batching`); whenever the worker is free, the next batch is formed of what waits,
whoever asked for it. Tokens are made on a second thread, so that reading a text never delays a batch.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from app import telemetry
from app.audit import AUDITED, Auditor, Point, Sample
from app.batching import Item, Queue, Ticket, deliver, finite
from app.errors import ApiError, non_finite
from app.inputs import prepare
from app.layers import ran_layer
from app.schemas import Mode
from app.servable import Answer, Asked, Description, Lane, Loader, Servable
from sparsefinder.errors import SparsefinderError
from sparsefinder.heap import return_freed_memory

Result = TypeVar("Result")

PROBE_TEXT = "The committee will meet on Tuesday, and nobody knows yet what it is going to decide about the old bridge."
PROBE_SECONDS = 5.0
TRIM_SECONDS = 2.0  # between batches memory goes back that often, which takes some milliseconds
RETRY = {"retry-after": "1"}


class Engine:
    """Loads, serves and swaps artifacts. All methods belong to the event loop; the model belongs to the worker."""

    def __init__(
        self,
        loader: Loader,
        folder: Path,
        auditor: Auditor,
        queue: Queue,
        *,
        max_batch_tokens: int,
        request_seconds: float,
        on_worker: Callable[[], None] | None = None,
    ):
        self.loader = loader
        self.folder = folder
        self.auditor = auditor
        self.figures = auditor.figures
        self.queue = queue
        self.max_batch_tokens = max_batch_tokens
        self.request_seconds = request_seconds
        self.failure: BaseException | None = None
        self._model: Servable | None = None
        self._suspect = False
        self._stopping = False
        self._reloading = asyncio.Lock()
        self._pump: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, "sparsefinder-worker", initializer=on_worker)
        self._reader = ThreadPoolExecutor(1, "sparsefinder-reader")
        self.figures.ready.set_function(lambda: float(self._model is not None and not self._suspect))
        self.figures.queue_items.set_function(lambda: queue.items)
        self.figures.queue_tokens.set_function(lambda: queue.tokens)

    @property
    def model(self) -> Servable:
        """The artifact that serves now.

        Raises:
            ApiError: 503 before the first one is loaded.
        """
        if self._model is None:
            reason = "failed to load" if self.failure else "is still loading"
            raise ApiError(503, "not_ready", f"the model {reason}", headers=RETRY)
        return self._model

    async def start(self) -> None:
        """Load the first artifact; a failure is kept in `failure` for whoever asks why nothing serves."""
        try:
            self._take_over(await self._load(self.folder))
        except Exception as error:
            self.failure = None if self._stopping else error
            raise
        self._pump = asyncio.create_task(self._serve_all())

    def stop(self) -> None:
        """Take nothing new from now on; a model that is being loaded is given up after the step that runs."""
        self._stopping = True

    async def close(self) -> None:
        """Finish what waits and runs, then stop the threads."""
        self.stop()
        self.queue.arrived.set()
        if self._pump is not None:
            await self._pump
        for pool in (self._worker, self._reader):
            await asyncio.to_thread(pool.shutdown)

    async def read(self, items: int, work: Callable[[], Result]) -> Result:
        """Run something of the model that is not a forward pass, beside the worker, for so many texts.

        Raises:
            ApiError: 422, 429 and 503 as `ask` does.
        """
        self._require_running()
        self.queue.begin_reading(items)
        try:
            return await self._on(self._reader, work)
        finally:
            self.queue.reading -= items

    async def ask(self, asked: Asked) -> Answer:
        """Compute one request, in batches that it may share with others.

        Raises:
            ApiError: 422 for an input that is blank, too long or no token of this model, or a request larger than the
                queue; 429 where the queue is full; 500 for NaN in the output; 503 before a model is loaded or while the
                process stops; 504 where the answer took longer than `request_seconds`.
        """
        async with self._in_time():
            ids, truncated = await self.read(len(asked.inputs), partial(prepare, asked))
            sample = self.auditor.choose([len(item) for item in ids]) if asked.lane.mode in AUDITED else None
            ticket = Ticket(asked.model, asked.lane, ids, sample)
            self.queue.add(ticket)
            try:
                await ticket.ready
            finally:
                ticket.ready.cancel()  # where the client left or the time is up: its items are dropped
        return _answer(ticket, truncated)

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.request_seconds):
                yield
        except TimeoutError:
            message = f"no answer within {self.request_seconds:g} s; the request was dropped"
            raise ApiError(504, "timeout", message, headers=RETRY) from None

    async def ready(self) -> Description:
        """What serves. After a forward pass that failed, only a new one that succeeds makes the service ready again.

        Raises:
            ApiError: 503 with the reason.
        """
        model = self.model
        if self._suspect:
            try:
                await asyncio.wait_for(self._run(partial(self._probe, model)), PROBE_SECONDS)
                self._suspect = False
            except Exception as error:  # noqa: BLE001  (whatever it is, the model cannot answer)
                reason = "timed out" if isinstance(error, TimeoutError) else f"failed ({type(error).__name__})"
                message = f"the last forward pass failed, and a probe {reason}"
                raise ApiError(503, "not_ready", message, headers=RETRY) from None
        return model.description

    async def reload(self, folder: Path | None, version: str | None = None) -> tuple[Description, Description]:
        """Load an artifact, try it, and let it serve in place of the old one, whose description comes first.

        Raises:
            ApiError: 409 while another reload runs, or where the artifact is broken, incompatible, gives no finite
                answer or has another version than the one asked for; the old one then serves on.
        """
        if self._reloading.locked():
            message = "another reload is running; try again when it has ended"
            raise ApiError(409, "reload_in_progress", message, headers=RETRY)
        async with self._reloading:
            old = self.model.description
            target = folder or self.folder
            try:
                fresh = await self._load(target)
            except ApiError as error:
                if error.status == 503:
                    raise
                raise ApiError(409, "artifact_unusable", f"{target.name}: {error.message}; {_serving(old)}") from None
            except SparsefinderError as error:
                raise ApiError(409, "artifact_unusable", f"{target.name}: {error}; {_serving(old)}") from None
            except Exception as error:  # noqa: BLE001  (a broken artifact must never stop the old one)
                telemetry.log("reload_failed", logging.ERROR, error, folder=target.name)
                message = f"{target.name}: loading it raised {type(error).__name__}; {_serving(old)}"
                raise ApiError(409, "artifact_unusable", message) from None
            found = fresh.description.version
            if version not in (None, found):
                message = f"{target.name}: expected version {version}, got {found}; {_serving(old)}"
                raise ApiError(409, "artifact_changed", message)
            self._take_over(fresh)
            self.folder, self._suspect = target, False
            return old, fresh.description

    def _take_over(self, fresh: Servable) -> None:
        self._model = fresh
        self.auditor.serve(fresh.description.version, fresh.calibration)

    async def _load(self, folder: Path) -> Servable:
        content = await asyncio.to_thread(self.loader.read, folder)
        self._require_running()
        fresh = await self._run(partial(self.loader.build, content))
        for mode in fresh.description.modes:  # compiles every kernel, so that no client waits for that
            self._require_running()
            sample = [Sample(0, (0, 1))] if mode in AUDITED else []
            await self._run(partial(self._probe, fresh, mode, sample))
        return fresh

    def _probe(self, model: Servable, mode: Mode = "sparse", samples: Sequence[Sample] = ()) -> None:
        """On the worker: one forward pass must give finite vectors of the promised size; an audit of it is tried."""
        about = model.description
        task = about.tasks[0]
        done = model.forward(model.tokenize([PROBE_TEXT]), Lane(task, mode), samples)
        output = done.outputs[0]
        if task == "embed" and np.shape(output) != (about.dimensions,):
            raise SparsefinderError(f"probe: expected shape {(about.dimensions,)}, got {np.shape(output)}")
        if not finite(output):
            raise non_finite()
        self.auditor.warm_up(done.audits)

    async def _serve_all(self) -> None:
        """Serve batch after batch, and after each a pause for audits, until the process stops and nothing waits."""
        trimmed = time.monotonic()
        while self.queue or self.auditor.waiting or not self._stopping:
            if not self.queue and not self.auditor.waiting and not self._stopping:
                await self.queue.arrived.wait()
            batch = self.queue.take(self.max_batch_tokens)
            try:
                if batch:
                    await self._serve(batch)
            except Exception as error:  # noqa: BLE001  (a bug here must fail its requests and not stop the loop)
                telemetry.log("batch_lost", logging.ERROR, error)
                for item in batch:
                    item.ticket.fail(error)
            if time.monotonic() > trimmed + TRIM_SECONDS:
                await self._run(return_freed_memory)
                trimmed = time.monotonic()
            if self.auditor.waiting:
                await self._run(self.auditor.work)
                asyncio.get_running_loop().run_in_executor(None, self.auditor.watch)

    async def _serve(self, batch: Sequence[Item]) -> None:
        """Run one batch and answer whom it completes. Where it fails, each request in it is tried alone."""
        first = batch[0].ticket
        wanted = [Sample(place, item.sample.rows) for place, item in enumerate(batch) if item.sample is not None]
        samples = self.auditor.admit(wanted)
        ids = [item.ids for item in batch]
        try:
            forward = partial(first.model.forward, ids, first.lane, samples)
            done, begun, seconds = await self._run(partial(_timed, forward))
        except Exception as error:  # noqa: BLE001  (whatever it is, it must reach its own client and no other)
            self._suspect = True
            await self._serve_apart(batch, error)
            return
        for ticket in {id(item.ticket): item.ticket for item in batch}.values():
            ticket.begun = ticket.begun or begun
        self._suspect = not all(map(finite, done.outputs))
        self.queue.measured(sum(map(len, ids)), seconds)
        self.figures.batch([len(item) for item in ids], first.packs)
        left_out = len(wanted) - len(samples)
        self.auditor.batch_ran(first.arrived, seconds, done.copying_seconds, len(samples), left_out)
        deliver(batch, done, seconds)
        point = Point(first.model.description.version, first.lane.density)
        for sample, layers in zip(samples, done.audits, strict=True):
            if finite(done.outputs[sample.item]):
                self.auditor.offer(point, layers)

    async def _serve_apart(self, batch: Sequence[Item], error: Exception) -> None:
        tickets = {id(item.ticket): item.ticket for item in batch}
        if len(tickets) == 1:
            batch[0].ticket.fail(error)
            return
        telemetry.log("batch_failed", logging.WARNING, error, requests=len(tickets))
        for ticket in tickets.values():
            if not ticket.over:
                await self._serve([item for item in batch if item.ticket is ticket])

    def _require_running(self) -> None:
        if self._stopping:
            raise _stopping()

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await self._on(self._worker, work)

    async def _on(self, pool: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
        try:
            future = pool.submit(work)
        except RuntimeError:
            raise _stopping() from None
        return await asyncio.wrap_future(future)


def _timed(work: Callable[[], Result]) -> tuple[Result, float, float]:
    """On the worker, which a reload may have held until now: what `work` gives, when it began, and its seconds."""
    begun = time.perf_counter()
    result = work()
    return result, begun, time.perf_counter() - begun


def _answer(ticket: Ticket, truncated: tuple[bool, ...]) -> Answer:
    computed: Any = np.asarray(ticket.computed)
    shares = [float(share) for share in computed.mean(1) / ticket.legal]
    begun = ticket.begun or ticket.arrived
    return Answer(
        outputs=tuple(ticket.outputs),
        ids=tuple(ticket.ids),
        truncated=truncated,
        description=ticket.model.description,
        density=float(np.mean(shares)),
        layers=tuple(ran_layer(layer, share, ticket.ran, ticket.repairs) for layer, share in enumerate(shares)),
        queue_ms=(begun - ticket.arrived) * 1000,
        inference_ms=ticket.seconds * 1000,
        lane=ticket.lane,
    )


def _stopping() -> ApiError:
    return ApiError(503, "shutting_down", "the service is stopping", headers=RETRY)


def _serving(old: Description) -> str:
    return f"{old.artifact} {old.version} serves on"
