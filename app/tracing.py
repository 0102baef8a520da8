"""OpenTelemetry, where an operator asks for it: a span per request, with its wait and its forward passes inside.

Nothing of OpenTelemetry is imported before `make_tracer` is called. No span holds a text or a path that a client chose.
"""

import time
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from app.telemetry import METHODS, Facts, Scope
from sparsefinder.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
# A collector that does not answer may delay a stop by about this much, and no more.
EXPORT_SECONDS = 3
_SPAN = "sparsefinder.span"


class Tracer:
    """Makes the spans of one app."""

    def __init__(self, provider: "TracerProvider"):
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._provider = provider
        self._tracer = provider.get_tracer("sparsefinder.app")

    def begin(self, scope: Scope) -> None:
        """Start the span of a request, below the client's own where its header `traceparent` names one."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(
            _method(scope), self._propagator.extract(headers), kind=self._trace.SpanKind.SERVER
        )
        scope[_SPAN] = span

    def computed(self, scope: Scope, queue_ms: float, inference_ms: float) -> None:
        """Two children, counted back from now: when the answer is ready, the forward passes have just ended.

        A long request runs in several batches, perhaps with others' between them: `inference` is as long as its own.
        """
        within = self._trace.set_span_in_context(scope[_SPAN])
        end = time.time_ns()
        begun = end - _ns(inference_ms)
        self._child("queue", within, begun - _ns(queue_ms), begun)
        self._child("inference", within, begun, end)

    def finish(self, scope: Scope, status: int, facts: Facts) -> None:
        """End the span of a request with what is known of it by now."""
        span: Span = scope[_SPAN]
        route = getattr(scope.get("route"), "path", "unmatched")
        span.update_name(f"{_method(scope)} {route}")
        known = {f"sparsefinder.{name}": value for name, value in asdict(facts).items() if value is not None}
        named = {"http.request.method": _method(scope), "http.route": route, "http.response.status_code": status}
        span.set_attributes(named | known)
        if status >= 500:
            span.set_attribute("error.type", facts.code or str(status))
            span.set_status(self._trace.StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Send what is still here, then stop."""
        self._provider.shutdown()

    def _child(self, name: str, within: "Context", start: int, end: int) -> None:
        self._tracer.start_span(name, within, start_time=start).end(end)


def make_tracer(endpoint: str | None) -> Tracer | None:
    """A tracer that sends to an OTLP collector over HTTP; None without an endpoint.

    Raises:
        ConfigError: an endpoint is set, and the extra `tracing` is not installed.
    """
    if endpoint is None:
        return None
    missing = [name for name in MODULES if not _found(name)]
    if missing:
        extra = "pip install 'sparsefinder[tracing]'"
        raise ConfigError(f"otlp_endpoint: expected the extra `tracing` ({extra}), found no {', '.join(missing)}")
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    import sparsefinder

    about = {"service.name": "sparsefinder", "service.version": sparsefinder.__version__}
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
    return Tracer(provider)


def _exporter(endpoint: str) -> "SpanExporter":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)


def _found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is missing as well
        return False


def _method(scope: Scope) -> str:
    method: Any = scope["method"]
    return str(method) if method in METHODS else "HTTP"


def _ns(milliseconds: float) -> int:
    return int(milliseconds * 1e6)
