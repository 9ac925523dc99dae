"""OpenTelemetry spans of requests. Only this module imports OpenTelemetry (`pip install 'kvferry[otel]'`).

A request's span continues the trace of the client's `traceparent`. Each leg is a span below it, whose own `traceparent`
is sent to the instance, so that the instance's spans (vLLM's `--otlp-traces-endpoint`) belong to the same trace.
Without an endpoint nothing is recorded, and the client's headers are forwarded unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kvferry.core.errors import MissingDependency

_NANO = 10**9

RawHeaders = list[tuple[bytes, bytes]]
Attributes = Mapping[str, str | int | float | bool]


class Span(Protocol):
    """One span of a trace. Times are in seconds since the epoch."""

    def child(self, name: str, started: float, attributes: Attributes) -> Span:
        """A child span for a call to another process."""

    def finished_child(self, name: str, started: float, ended: float) -> None:
        """Add a child span that has already ended."""

    def headers(self) -> RawHeaders:
        """The headers that pass the span's context to another process."""

    def end(self, ended: float, attributes: Attributes, error: str = "") -> None:
        """End the span; with an error, if there was one. Later calls change nothing."""


class Tracer(Protocol):
    """Makes a span for each request of a client, and sends it to the collector when it ends."""

    def request(self, name: str, headers: RawHeaders, started: float, attributes: Attributes) -> Span:
        """The span of a client's request, which may continue the client's own trace."""

    def close(self) -> None:
        """Send the remaining spans. May block for some seconds."""


def require_opentelemetry() -> None:
    """Raise `MissingDependency` if spans cannot be sent."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise MissingDependency("--otlp-traces-endpoint", "opentelemetry-sdk", "otel") from error


def make_tracer(endpoint: str | None, service: str) -> Tracer | None:
    """A tracer that sends to an OTLP endpoint over HTTP, such as http://127.0.0.1:4318/v1/traces; None without an
    endpoint. Raises `MissingDependency`."""
    if endpoint is None:
        return None
    require_opentelemetry()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=5)))
    return _OtelTracer(provider)


class _OtelTracer:
    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._tracer = provider, provider.get_tracer("kvferry")
        self._propagator = TraceContextTextMapPropagator()

    def request(self, name: str, headers: RawHeaders, started: float, attributes: Attributes) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        carrier = {
            key.decode("latin-1"): value.decode("latin-1")
            for key, value in headers
            if key in (b"traceparent", b"tracestate")
        }
        context = self._propagator.extract(carrier, context=Context())
        span = self._tracer.start_span(
            name, context, SpanKind.SERVER, dict(attributes), start_time=int(started * _NANO)
        )
        return _OtelSpan(self, span)

    def close(self) -> None:
        self._provider.shutdown()

    def start_child(self, parent: Any, name: str, started: float, attributes: Attributes, *, remote: bool) -> Any:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        kind = SpanKind.CLIENT if remote else SpanKind.INTERNAL
        context = set_span_in_context(parent, Context())
        return self._tracer.start_span(name, context, kind, dict(attributes), start_time=int(started * _NANO))

    def inject(self, span: Any) -> RawHeaders:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span, Context()))
        return [(key.encode(), value.encode()) for key, value in carrier.items()]


class _OtelSpan:
    def __init__(self, tracer: _OtelTracer, span: Any) -> None:
        self._tracer, self._span = tracer, span

    def child(self, name: str, started: float, attributes: Attributes) -> _OtelSpan:
        span = self._tracer.start_child(self._span, name, started, attributes, remote=True)
        return _OtelSpan(self._tracer, span)

    def finished_child(self, name: str, started: float, ended: float) -> None:
        span = self._tracer.start_child(self._span, name, started, {}, remote=False)
        span.end(int(max(started, ended) * _NANO))

    def headers(self) -> RawHeaders:
        return self._tracer.inject(self._span)

    def end(self, ended: float, attributes: Attributes, error: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        if not self._span.is_recording():
            return
        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(int(ended * _NANO))
