"""OpenTelemetry: spans of a request, sent to a collector by OTLP over HTTP. Imported only where it is on.

    POST /v1/chat/completions   from its arrival to its outcome
      attempt                   one replica serves it, or should have; one more for each retry and resume
        placement               until the router, or the gateway itself, has named the replica
        first token             of a stream: until the first piece of its answer
        answer                  of a stream: until the last

All are made when the request has ended, of the gateway's own record. So an attribute `sglang_fair.NAME` is what `GET
/explain/ID`, which says more, has under that name; where OpenTelemetry has a name of its own (`http.*`, `gen_ai.*`), it
is there too. No text of a request or an answer is in it. What SGLang's own tracing makes in a replica is below the
attempt, whose context the replica is sent as `traceparent`. Requests of senders who may not ask have none.

The SDK samples, batches in a bounded queue, and sends from a thread of its own; its environment variables hold
(OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_MAX_QUEUE_SIZE, OTEL_RESOURCE_ATTRIBUTES, and so on).
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.gateway.otlp import traces_url
from router.gateway.record import Exchange, Try

CLOSE_S = 0.5
"""How long a gateway that ends waits for the collector."""

OF_CLIENTS = ("opentelemetry.trace.propagation.tracecontext", "opentelemetry.trace.span")
"""Where the SDK logs each bad `traceparent` and `tracestate`, of which anybody can send any number."""

NS = 1_000_000_000

OWN = "sglang_fair."
"""Before the name of an attribute of ours."""
REQUEST = (
    "request", "kind", "client", "outcome", "error", "retries", "resumes", "fallback", "ttft_s", "slo"
)  # fmt: skip
ATTEMPT = ("id", "worker", "matched_tokens", "fallback", "outcome", "reason")
OPERATIONS = {"chat": "chat", "completions": "text_completion", "generate": "text_completion"}
"""OpenTelemetry's names for the kinds of requests."""
FAILED = ("failed", "unplaced", "refused")
"""Outcomes of an attempt that are errors of the gateway's peer."""

_CONTEXT = TraceContextTextMapPropagator()


def otlp(endpoint: str) -> SpanExporter:
    """An exporter to a collector. Raises SettingError if that is no URL."""
    return OTLPSpanExporter(endpoint=traces_url(endpoint))


class Tracing:
    """Begins the spans of requests. Belongs to one event loop."""

    def __init__(self, exporter: SpanExporter) -> None:
        for name in OF_CLIENTS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        service = {SERVICE_NAME: os.environ.get(OTEL_SERVICE_NAME) or "sglang-fair-gateway"}
        resource = Resource.create().merge(Resource(service))
        self._exporter = exporter
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("sglang_fair")

    def begin(self, exchange: Exchange, route: str, headers: Mapping[str, str]) -> "Trace":
        return Trace(self._tracer, exchange, route, headers)

    async def close(self) -> None:
        """Sends what there is, if that can be done soon."""
        # It joins a thread, which may be waiting for a collector, for up to thirty seconds.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        until_s = time.monotonic() + CLOSE_S
        while ending.is_alive() and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        if ending.is_alive():
            self._exporter.shutdown()


class Trace:
    """The spans of one request. Made by `Tracing.begin`."""

    def __init__(self, tracer: Tracer, exchange: Exchange, route: str, headers: Mapping[str, str]) -> None:
        self._tracer = tracer
        self._exchange = exchange
        self._attempts: list[tuple[Try, Span]] = []
        about = {"http.request.method": "POST", "http.route": route, "url.path": route}
        self._root = self._span(
            f"POST {route}", _CONTEXT.extract(headers), exchange.came_s, SpanKind.SERVER, about
        )
        self._context = set_span_in_context(self._root, Context())
        if self._root.is_recording():
            exchange.trace = format_trace_id(self._root.get_span_context().trace_id)

    def attempt(self, one: Try) -> dict[str, str]:
        """An attempt begins. The headers for its replica, by which its spans, if it makes any, are below this one's."""
        context, headers = self._context, dict[str, str]()
        if self._root.is_recording():
            span = self._span("attempt", context, one.asked_s, SpanKind.CLIENT)
            self._attempts.append((one, span))
            context = set_span_in_context(span, context)
        _CONTEXT.inject(headers, context)
        return headers

    def end(self) -> None:
        """The request has ended, and its record says how."""
        if not self._root.is_recording():
            return
        exchange = self._exchange
        ended_s = exchange.came_s if exchange.ended_s is None else exchange.ended_s
        for one, span in self._attempts:
            last_s = ended_s if one.ended_s is None else one.ended_s
            context = set_span_in_context(span, self._context)
            parts = [("placement", one.asked_s, one.placed_s)]
            if one.placed_s is not None and one.first_s is not None:
                parts += [("first token", one.placed_s, one.first_s), ("answer", one.first_s, last_s)]
            for name, began_s, until_s in parts:
                self._span(name, context, began_s).end(self._at_ns(last_s if until_s is None else until_s))
            span.set_attributes(_own(one.shown(last_s), ATTEMPT))
            if one.outcome in FAILED:
                span.set_status(Status(StatusCode.ERROR, one.reason or one.outcome))
            span.end(self._at_ns(last_s))
        self._root.set_attributes(_of_request(exchange))
        if exchange.outcome == "failed":  # what its client did wrong is no error of a server
            self._root.set_status(Status(StatusCode.ERROR, exchange.error or "failed"))
        self._root.end(self._at_ns(ended_s))

    def _span(
        self,
        name: str,
        context: Context,
        began_s: float,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
    ) -> Span:
        return self._tracer.start_span(name, context, kind, attributes, start_time=self._at_ns(began_s))

    def _at_ns(self, time_s: float) -> int:
        """Since the epoch. A machine's clock may be set while a request is served: it is read once."""
        return round((self._exchange.came_at_s + (time_s - self._exchange.came_s)) * NS)


def _of_request(exchange: Exchange) -> dict[str, Any]:
    shown = exchange.shown(exchange.ended_s or exchange.came_s)
    tokens = shown["tokens"]
    known = {
        "http.response.status_code": shown["status"],
        "gen_ai.operation.name": OPERATIONS.get(shown["kind"], shown["kind"]),
        "gen_ai.request.model": shown["model"],
        "gen_ai.usage.input_tokens": tokens["input"],
        "gen_ai.usage.cache_read.input_tokens": tokens["cached"],
        "gen_ai.usage.output_tokens": tokens["output"],
    }
    return {**_flat("", known), **_own(shown, REQUEST)}


def _own(shown: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    return _flat(OWN, {field: shown[field] for field in fields})


def _flat(prefix: str, shown: Mapping[str, Any]) -> dict[str, Any]:
    """What there is, with the names of objects within objects joined by dots."""
    found: dict[str, Any] = {}
    for name, value in shown.items():
        if isinstance(value, Mapping):
            found |= _flat(f"{prefix}{name}.", value)
        elif value is not None and value != "":
            found[prefix + name] = value
    return found
