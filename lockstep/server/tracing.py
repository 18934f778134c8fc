"""OpenTelemetry traces: a span a request, and below it queue, prefill and decode.

An extra (`pip install '.[otel]'`), off without an endpoint. Attribute names follow
OpenTelemetry's conventions for HTTP and for generative AI. No span carries text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.config import ConfigError
from lockstep.server.calls import Call

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

SERVICE = "lockstep"


class Tracer:
    """Makes spans and sends them in the background.

    Args:
        endpoint: base address of an OTLP receiver over HTTP, e.g. "http://localhost:4318".
        exporter: in place of one for `endpoint`.

    Raises:
        ConfigError: the extra is not installed.
    """

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"otlp_endpoint needs {error.name}: pip install '.[otel]' in Lockstep's folder"
            ) from None
        self._api = trace
        # `create` also reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, which win.
        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
        if exporter is None:
            exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lockstep.server")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, call: Call, headers: Mapping[bytes, bytes]) -> None:
        """Open the span of an HTTP request, below the client's if it sent a `traceparent`."""
        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        call.trace = self._tracer.start_span(
            f"{call.method} {call.path}",
            context=self._propagator.extract(carrier),
            kind=self._api.SpanKind.SERVER,
            start_time=_epoch(call.began),
            attributes={
                "http.request.method": call.method,
                "url.path": call.path,
                "client.address": call.client,
                "lockstep.request_id": call.id,
            },
        )

    def end(self, call: Call) -> None:
        """Close it, with what is known by now."""
        span = _span(call)
        if span is None:
            return
        if call.route:
            span.update_name(f"{call.method} {call.route}")
            span.set_attribute("http.route", call.route)
        span.set_attribute("http.response.status_code", call.status)
        if call.error:
            span.set_attribute("error.type", call.error)
        if call.status >= 500:
            span.set_status(self._api.StatusCode.ERROR)
        span.end()

    def phases(
        self, call: Call, times: Mapping[str, tuple[float, float]], facts: Mapping[str, str | int]
    ) -> None:
        """Spans of what the engine did for the call, after the fact.

        Args:
            times: from a phase's name to its beginning and end on the monotonic clock.
            facts: attributes of each.
        """
        parent = _span(call)
        if parent is None:
            return
        context = self._api.set_span_in_context(parent)
        for name, (begin, end) in times.items():
            span = self._tracer.start_span(
                name, context=context, start_time=_epoch(begin), attributes=dict(facts)
            )
            span.end(_epoch(end))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _span(call: Call) -> Span | None:
    span: Span | None = call.trace  # type: ignore[assignment]
    return span


def _epoch(monotonic: float) -> int:
    """Nanoseconds since 1970 of a time on the monotonic clock."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)
