"""Request ids, one JSON line per event, and the figures of /metrics. Nothing here ever sees a text."""

import datetime as dt
import json
import logging
import re
import sys
import time
import traceback
import uuid
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector

from app.layers import RanLayer

LOGGER = logging.getLogger("sparsefinder.app")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
POWERS = tuple(float(2**n) for n in range(17))
DELAYS = (0.0, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FACTS = "sparsefinder.facts"

Scope = MutableMapping[str, Any]


@dataclass
class Facts:
    """What the log line and the figures of one request say; the route fills in what it knows."""

    request_id: str
    task: str | None = None
    attention: str | None = None
    artifact: str | None = None
    items: int | None = None
    tokens: int | None = None
    queue_ms: float | None = None
    inference_ms: float | None = None
    computed_density: float | None = None
    code: str | None = None


def begin(scope: Scope) -> Facts:
    """Facts of a new request; a client's own x-request-id is kept where it is harmless."""
    sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    facts = Facts(sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex)
    scope[_FACTS] = facts
    return facts


def facts_of(scope: Scope) -> Facts:
    """The facts that `begin` made for this request."""
    return cast(Facts, scope[_FACTS])


def request_id(scope: Scope) -> str:
    """The id of this request."""
    return facts_of(scope).request_id


class JsonLines(logging.Formatter):
    """One JSON object per line. Of an exception only its type and where it rose: its text may hold a client's text."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of one record."""
        when = dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            frames = traceback.extract_tb(record.exc_info[2])
            line["exception"] = record.exc_info[0].__name__
            line["where"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-8:]]
        return json.dumps(line, default=str)


def configure_logging(level: str) -> None:
    """Send every record of this process, uvicorn's included, to stdout as JSON lines."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("sparsefinder", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())


def log(event: str, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    """Write one event; fields are numbers, names and codes."""
    kept = {name: value for name, value in fields.items() if value is not None}
    exc_info = (type(error), error, error.__traceback__) if error is not None else None
    LOGGER.log(level, event, extra={"fields": kept}, exc_info=exc_info)


class Telemetry:
    """The figures of one app, in a registry of its own so that two apps in one process never share a counter."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        name, modes = "sparsefinder_", ["attention"]
        self.requests = Counter(name + "requests", "Answers.", ["route", "method", "status"], registry=registry)
        self.errors = Counter(name + "errors", "Error answers by code.", ["code"], registry=registry)
        self.seconds = Histogram(
            name + "request_seconds", "Time to answer.", ["route"], buckets=SECONDS, registry=registry
        )
        self.running = Gauge(name + "requests_running", "Requests that are being answered.", registry=registry)
        self.inference = Histogram(
            name + "inference_seconds", "Forward passes of one request.", modes, buckets=SECONDS, registry=registry
        )
        self.density = Histogram(
            name + "computed_density",
            "Computed / legal pairs of one request.",
            modes,
            buckets=SHARES,
            registry=registry,
        )
        self.tokens = Counter(name + "tokens", "Tokens read.", modes, registry=registry)
        self.items = Counter(name + "items", "Texts computed.", ["task", *modes], registry=registry)
        self.queue_items = Gauge(name + "queue_items", "Texts that wait.", registry=registry)
        self.queue_tokens = Gauge(name + "queue_tokens", "Tokens that wait.", registry=registry)
        self.queued = Histogram(
            name + "queue_seconds", "Time from known tokens to the first batch.", buckets=SECONDS, registry=registry
        )
        self.batch_items = Histogram(
            name + "batch_items", "Texts of one batch.", buckets=POWERS[:11], registry=registry
        )
        self.batch_tokens = Histogram(name + "batch_tokens", "Tokens of one batch.", buckets=POWERS, registry=registry)
        self.batch_padding = Histogram(
            name + "batch_padding", "Padding / tokens computed of one batch.", buckets=SHARES, registry=registry
        )
        self.layers = Counter(
            name + "layer_passes",
            "Layers of the batches of each request, by what computed them.",
            [*modes, "ran"],
            registry=registry,
        )
        self.exact_rows = Counter(
            name + "exact_rows", "Rows of exact answers over layers and heads.", ["outcome"], registry=registry
        )
        self.exact_pairs = Counter(
            name + "exact_pairs", "Pairs beside the plan: scored for the proof, added.", ["kind"], registry=registry
        )
        self.truncated = Counter(name + "truncated_items", "Texts cut on the client's demand.", registry=registry)
        self.audited_requests = Counter(
            name + "audited_requests", "Audited requests at the served point.", registry=registry
        )
        self.audited_rows = Counter(name + "audited_rows", "Audited rows over layers and heads.", registry=registry)
        self.audited_gold = Counter(name + "audited_gold_pairs", "True pairs of the audited rows.", registry=registry)
        self.audited_kept = Counter(name + "audited_kept_gold_pairs", "Those the plan had kept.", registry=registry)
        self.audit_seconds = Counter(name + "audit_seconds", "Time spent on audits.", registry=registry)
        self.audit_delay = Histogram(
            name + "audit_delay_seconds", "How long audits held up one batch.", buckets=DELAYS, registry=registry
        )
        self.audits_dropped = Counter(
            name + "audits_dropped", "Audits for which no room or time was left.", registry=registry
        )
        self.audits_waiting = Gauge(name + "audits_waiting", "Audits that are not finished.", registry=registry)
        self.audits_waiting_bytes = Gauge(name + "audits_waiting_bytes", "What those hold.", registry=registry)
        self.audit_failures = Counter(name + "audit_failures", "Audits that raised.", registry=registry)
        self.reloads = Counter(name + "reloads", "Artifact reloads.", ["result"], registry=registry)
        # Alerts look for an increase, and there is none where the first one makes the series.
        for code in ("non_finite_output", "timeout"):
            self.errors.labels(code)
        self.reloads.labels("artifact_unusable")
        self.ready = Gauge(
            name + "ready",
            "1 where a model is loaded and its last forward pass, or a probe since, succeeded.",
            registry=registry,
        )
        labels = ["name", "version"]
        self.artifact = Gauge(name + "artifact_info", "The artifact that serves.", labels, registry=registry)

    def finish(self, scope: Scope, status: int, started: float) -> None:
        """Count and log one finished request."""
        facts, seconds = facts_of(scope), time.perf_counter() - started
        # The template and never the path itself: a path is the client's own words, and labels must stay few.
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.requests.labels(route, method, str(status)).inc()
        self.seconds.labels(route).observe(seconds)
        if facts.code is not None:
            self.errors.labels(facts.code).inc()
        expected = facts.code in ("not_ready", "shutting_down")  # balancers and clients ask all the time
        level = logging.ERROR if status >= 500 and not expected else logging.INFO
        log("request", level, route=route, method=method, status=status, ms=round(seconds * 1000, 3), **asdict(facts))

    def batch(self, lengths: Sequence[int], packed: bool) -> None:
        """Count one forward pass over items of these lengths, whose padding was computed unless they were packed."""
        tokens = sum(lengths)
        cells = tokens if packed else max(lengths) * len(lengths)
        self.batch_items.observe(len(lengths))
        self.batch_tokens.observe(tokens)
        self.batch_padding.observe(1 - tokens / cells)

    def answered(self, facts: Facts, truncated: int) -> None:
        """Count what one request read and computed."""
        mode = facts.attention
        self.tokens.labels(mode).inc(facts.tokens or 0)
        self.items.labels(facts.task, mode).inc(facts.items or 0)
        self.truncated.inc(truncated)
        self.queued.observe((facts.queue_ms or 0.0) / 1000)
        self.inference.labels(mode).observe((facts.inference_ms or 0.0) / 1000)
        self.density.labels(mode).observe(facts.computed_density or 0.0)

    def computed(self, mode: str, layers: Sequence[RanLayer]) -> None:
        """Count what ran in each layer, and what mode `exact` proved and repaired."""
        for layer in layers:
            for ran, passes in layer.ran.items():
                self.layers.labels(mode, ran).inc(passes)
            if layer.repair is not None:
                for outcome in ("proven", "repaired"):
                    self.exact_rows.labels(outcome).inc(getattr(layer.repair, outcome))
                self.exact_rows.labels("all").inc(layer.repair.rows)
                for kind in ("survivors", "added"):
                    self.exact_pairs.labels(kind).inc(getattr(layer.repair, kind))

    def serving(self, name: str, version: str) -> None:
        """Name the artifact that serves now, and only that one."""
        self.artifact.clear()
        self.artifact.labels(name, version).set(1)
