"""The application: settings in, FastAPI app out."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI

from app import errors, routes, telemetry
from app.audit import Auditor
from app.batching import Queue
from app.drift import DriftWatch
from app.engine import Engine
from app.live_metrics import LiveFigures
from app.middleware import BodyLimit, Envelope
from app.servable import Loader
from app.settings import Settings
from app.telemetry import Telemetry
from app.tracing import make_tracer

# From 2048 tokens on a batch of MiniLM gets no faster on two cores, and on a CPU others wait for it longer.
BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}


def make_engine(settings: Settings, figures: Telemetry, loader: Loader | None = None) -> Engine:
    """An engine that follows the settings, for the real model or another loader.

    Raises:
        ArtifactError: no artifact is named and none is shipped.
    """
    if loader is None:
        # Here, for it takes transformers seconds to import, and tests need none of it.
        from app.model import ModelLoader

        loader = ModelLoader(settings.teacher, settings.device, settings.crossover, settings.head)
    drift = DriftWatch(min(settings.drift_requests, settings.audit_window), settings.drift_margin)
    auditor = Auditor(
        settings.audit_rate, settings.audit_rows, settings.audit_window, figures, drift, audit_ms=settings.audit_ms
    )
    figures.registry.register(LiveFigures(auditor))
    return Engine(
        loader,
        settings.artifact_path(),
        auditor,
        Queue(settings.max_queue_items, settings.max_queue_tokens),
        max_batch_tokens=settings.max_batch_tokens or BATCH_TOKENS[loader.device],
        request_seconds=settings.request_seconds,
        on_worker=lambda: _limit_threads(settings.threads),
    )


def _limit_threads(threads: int) -> None:
    """On the worker thread: torch and numba both keep this number per thread, so both get it there."""
    from sparsefinder.threads import limit_threads  # here, for torch takes a while to import

    limit_threads(threads)


def create_app(
    settings: Settings, engine: Engine | None = None, *, on_failure: Callable[[], None] | None = None
) -> FastAPI:
    """The service. The model loads in the background, so that /livez answers while /readyz still says 503.

    Args:
        settings: what the operator chose.
        engine: another engine than the real one (tests).
        on_failure: called when the first artifact cannot be loaded.

    Raises:
        SparsefinderError: no artifact is there, or tracing is asked for and not installed.
    """
    tracer = make_tracer(settings.otlp_endpoint)
    figures = engine.auditor.figures if engine else Telemetry()
    served = engine or make_engine(settings, figures)

    async def begin() -> None:
        started = time.perf_counter()
        try:
            await served.start()
        except Exception as error:  # noqa: BLE001  (kept in engine.failure, for /readyz and the exit code)
            if served.failure is None:  # the process stops, and so did the loading
                return
            telemetry.log("load_failed", logging.ERROR, error)
            if on_failure:
                on_failure()
            return
        description = served.model.description
        figures.serving(description.artifact, description.version)
        seconds = round(time.perf_counter() - started, 3)
        telemetry.log("ready", artifact=description.artifact, version=description.version, seconds=seconds)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(begin())
        yield
        served.stop()
        await loading
        await served.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

    app = FastAPI(
        lifespan=lifespan,
        openapi_url=None,  # /openapi.json is a route of ours
        redirect_slashes=False,
        # FastAPI's own telemetry records messages of exceptions, which may hold a text; see app.tracing.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.settings, app.state.engine, app.state.telemetry = settings, served, figures
    app.state.tracer, app.state.before = tracer, None  # before: the artifact that a rollback brings back
    app.state.created = int(time.time())
    routes.install(app)
    errors.install(app)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(
        Envelope, figures=figures, tracer=tracer, origins=settings.cors_origins
    )  # added last, so it is the outermost
    return app
