"""One model, one worker thread: every forward pass of the process runs there, one batch after the other."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from app import telemetry
from app.audit import AuditedLayer, Auditor, Sample
from app.errors import ApiError, non_finite
from app.layers import ran_layer
from app.schemas import Mode
from app.servable import Answer, Counts, Description, Ids, Job, Loader, Servable, Vectors
from sparsefinder.certificate import Repair
from sparsefinder.errors import SparsefinderError

Result = TypeVar("Result")

PROBE_TEXT = "The committee will meet on Tuesday, and nobody knows yet what it is going to decide about the old bridge."
PROBE_SECONDS = 5.0
RETRY = {"retry-after": "1"}


@dataclass
class _Total:
    """Figures of the batches of one request."""

    vectors: list[Vectors | None]
    computed: Counts | int = 0
    legal: int = 0
    seconds: float = 0.0
    ran: list[tuple[str, ...]] = field(default_factory=list)
    repairs: list[tuple[Repair | None, ...]] = field(default_factory=list)
    audits: list[tuple[AuditedLayer, ...]] = field(default_factory=list)


def batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in groups of similar length, longest first; each has at most `max_tokens` padded tokens, or one item."""
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and longest * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return groups


class Engine:
    """Loads, serves and swaps artifacts. All methods belong to the event loop; the model belongs to the worker."""

    def __init__(
        self,
        loader: Loader,
        folder: Path,
        auditor: Auditor,
        *,
        max_batch_tokens: int,
        on_worker: Callable[[], None] | None = None,
    ):
        self.loader = loader
        self.folder = folder
        self.auditor = auditor
        self.max_batch_tokens = max_batch_tokens
        self.failure: BaseException | None = None
        self._model: Servable | None = None
        self._suspect = False
        self._reloading = asyncio.Lock()
        self._later: set[asyncio.Task[None]] = set()
        # The one thread that runs the model. A queue that joins requests into common batches belongs before it.
        self._worker = ThreadPoolExecutor(1, "sparsefinder-worker", initializer=on_worker)

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
            self._model = await self._load(self.folder)
        except Exception as error:
            self.failure = error
            raise

    async def close(self) -> None:
        """Finish what runs, then stop the worker."""
        await asyncio.gather(*self._later, return_exceptions=True)
        await asyncio.to_thread(self._worker.shutdown)

    async def embed(self, job: Job) -> Answer:
        """Embed one request, batch by batch, so that a short request waits for a batch of a long one and not for all.

        Raises:
            ApiError: 422 for an input that is blank, too long or no token of this model; 500 for NaN in the output;
                503 before a model is loaded or while the process stops.
        """
        model = self.model  # the whole request is answered by this one, whatever is loaded meanwhile
        ids, truncated = await self._run(partial(_prepare, model, job))
        lengths = [len(item) for item in ids]
        sample = self.auditor.choose(lengths) if job.mode == "sparse" else None
        total = _Total([None] * len(ids))
        for group in batches(lengths, self.max_batch_tokens):
            here = sample.within(group) if sample else None
            await self._run(partial(self._forward, model, ids, group, job.mode, here, total))
        vectors = np.stack([vector for vector in total.vectors if vector is not None])
        computed = np.asarray(total.computed)
        shares = [float(share) for share in computed.mean(1) / total.legal]
        layers = tuple(ran_layer(layer, share, total.ran, total.repairs) for layer, share in enumerate(shares))
        if total.audits:
            self._after(self._audit(model.description.version, total.audits))
        return Answer(
            vectors, tuple(lengths), truncated, model.description, float(np.mean(shares)), layers, total.seconds * 1000
        )

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

    async def reload(self, folder: Path | None) -> tuple[Description, Description]:
        """Load an artifact, try it, and let it serve in place of the old one, whose description comes first.

        Raises:
            ApiError: 409 while another reload runs, or where the artifact is broken, incompatible or gives no finite
                answer; the old one then serves on.
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
            self._model, self.folder, self._suspect = fresh, target, False
            return old, fresh.description

    async def _load(self, folder: Path) -> Servable:
        content = await asyncio.to_thread(self.loader.read, folder)
        fresh = await self._run(partial(self.loader.build, content))
        for mode in fresh.description.modes:  # compiles every kernel, so that no client waits for that
            await self._run(partial(self._probe, fresh, mode))
        return fresh

    def _probe(self, model: Servable, mode: Mode = "sparse") -> None:
        """On the worker: one forward pass must give finite vectors of the promised size."""
        vectors = model.forward(model.tokenize([PROBE_TEXT]), mode, None).vectors
        if vectors.shape != (1, model.description.dimensions):
            raise SparsefinderError(f"probe: expected shape {(1, model.description.dimensions)}, got {vectors.shape}")
        _require_finite(vectors)

    def _forward(
        self, model: Servable, ids: list[Ids], group: list[int], mode: Mode, sample: Sample | None, total: _Total
    ) -> None:
        """On the worker: one batch into `total`."""
        started = time.perf_counter()
        try:
            done = model.forward([ids[index] for index in group], mode, sample)
            _require_finite(done.vectors)
        except Exception:
            self._suspect = True
            raise
        self._suspect = False
        for index, vector in zip(group, done.vectors, strict=True):
            total.vectors[index] = vector
        total.computed = total.computed + done.computed
        total.legal += done.legal
        total.seconds += time.perf_counter() - started
        total.ran.append(done.ran)
        total.repairs.append(done.repairs)
        if done.audit:
            total.audits.append(done.audit)

    async def _audit(self, version: str, audits: list[tuple[AuditedLayer, ...]]) -> None:
        for layers in audits:
            await self._run(partial(self.auditor.record, version, layers))

    def _after(self, work: Coroutine[Any, Any, None]) -> None:
        """Let `work` run when the answer is on its way; a failure there never reaches a client."""
        task = asyncio.get_running_loop().create_task(work)
        self._later.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._later.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.auditor.failed()
            telemetry.log("audit_failed", logging.ERROR, error)

    async def _run(self, work: Callable[[], Result]) -> Result:
        try:
            future = self._worker.submit(work)
        except RuntimeError:
            raise ApiError(503, "shutting_down", "the service is stopping", headers=RETRY) from None
        return await asyncio.wrap_future(future)


def _serving(old: Description) -> str:
    return f"{old.artifact} {old.version} serves on"


def _require_finite(vectors: Vectors) -> None:
    if not np.isfinite(vectors).all():
        raise non_finite()


def _prepare(model: Servable, job: Job) -> tuple[list[Ids], tuple[bool, ...]]:
    """Checked token ids of a request, and which items were cut."""
    texts = [item for item in job.inputs if isinstance(item, str)]
    ids = model.tokenize(texts) if texts else [list(item) for item in job.inputs if not isinstance(item, str)]
    limit, truncated = model.description.max_tokens, []
    for index, item in enumerate(ids):
        param = "input" if job.single else f"input.{index}"
        _check_ids(model, item, param, from_text=bool(texts))
        truncated.append(len(item) > limit)
        if truncated[-1] and not job.truncate:
            message = f"{param}: expected at most {limit} tokens, got {len(item)}; set truncate to true to cut it"
            raise ApiError(422, "input_too_long", message, param)
    return [model.cut(item) if cut else item for item, cut in zip(ids, truncated, strict=True)], tuple(truncated)


def _check_ids(model: Servable, ids: Ids, param: str, from_text: bool) -> None:
    if from_text:
        if model.blank(ids):
            # One vector for every text that says nothing would look like an answer; OpenAI refuses those as well.
            raise ApiError(422, "empty_input", f"{param}: expected a text with at least one token, got none", param)
        return
    vocabulary = model.description.vocabulary
    bad = next((token for token in ids if not 0 <= token < vocabulary), None)
    if bad is not None:
        shown = bad if abs(bad) < 10**12 else "a larger number"
        message = f"{param}: expected token ids from 0 to {vocabulary - 1}, got {shown}"
        raise ApiError(422, "invalid_token", message, param)
