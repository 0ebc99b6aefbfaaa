"""OpenTelemetry: one tree of spans for a request, sent to a collector by OTLP over HTTP. Imported only where it is on.

The gateway makes all spans of a request, once it has ended: it asks router and replica for their records, as `GET
/explain/ID` does (`spans`). So a span says what an explanation says, the scheduler of a replica has nothing to send and
no library in its process, and all times are by one clock. What SGLang's own tracing makes in a replica is below the
span of the attempt, whose context the replica is sent as `traceparent`.

Cost: off, nothing. A request that is not sampled costs a look at its `traceparent`. One that is costs a question to
the router and one to the replica, after its end and beside everything else: `MOST_ASKED` at a time, and of at most
`MOST_ENDING` that have ended; of what is beyond, the gateway says what it knows itself. Spans are sent by a thread of
the SDK, in batches, out of a bounded queue; what does not fit is dropped, and nobody waits.

OpenTelemetry's own environment variables hold: OTEL_TRACES_SAMPLER (by default all that no caller has decided about),
OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_MAX_QUEUE_SIZE, OTEL_RESOURCE_ATTRIBUTES, and so on.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
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
from router.gateway.record import Exchange, Try, shown_try
from router.gateway.spans import (
    GATEWAY,
    REPLICA,
    ROUTER,
    Child,
    Told,
    below,
    error_of_attempt,
    error_of_request,
    is_settled,
    of_attempt,
    of_request,
)

log = logging.getLogger("gateway")

MOST_ENDING = 256
"""Requests that have ended and whose spans are not made yet."""

MOST_ASKED = 8
"""Of these, those for which router and replicas are asked at a time."""

MOST_UNKNOWN = 10
"""A second, of those who may not ask: as many as they like may come, and push nobody out of the queue."""

AGAIN_S = (0.1, 0.4, 1.5)
"""Pauses before a replica is asked again that was not done with a request: one whose client has left, say."""

CLOSE_S = 0.5
"""How long a gateway that ends waits for answers, then for the collector, then for the thread that speaks to it."""

EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
SILENCED = (
    EXPORTER_LOG,
    "opentelemetry.sdk._shared_internal",  # the queue is full
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",  # of a `tracestate`
)
"""Where the SDK would log each batch that fails, and each bad header that a client sends: we count them."""

NS = 1_000_000_000

_CONTEXT = TraceContextTextMapPropagator()

Explain = Callable[[Exchange], Awaitable[Sequence[Told]]]


class Delivery(SpanExporter):
    """Another exporter, whose failures are counted, and logged once until it succeeds again."""

    def __init__(self, exporter: SpanExporter, where: str) -> None:
        """`where` is the collector's address, for the log."""
        self.sent = self.failed = 0
        self._exporter = exporter
        self._where = where
        self._fails = self._is_shut = False
        self._reason = ""
        for name in SILENCED:
            logging.getLogger(name).addFilter(self._swallow)

    def export(self, batch: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends some spans, or fails to."""
        try:
            result = SpanExportResult.FAILURE if self._is_shut else self._exporter.export(batch)
        except Exception as error:  # it is called in a loop that must go on
            self._reason, result = f"{type(error).__name__}: {error}", SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self.sent += len(batch)
            if self._fails:
                log.info("spans are delivered to %s again", self._where)
            self._fails = False
            return result
        self.failed += len(batch)
        if not self._fails and not self._is_shut:
            self._fails = True
            log.warning(
                "spans cannot be delivered to %s and are dropped until they can; requests go on (said once): %s",
                self._where,
                self._reason,
            )
        return result

    def shutdown(self) -> None:
        """Gives up what is being sent."""
        if not self._is_shut:
            self._is_shut = True
            self._exporter.shutdown()

    def close(self) -> None:
        """Lets the SDK's own logs through again."""
        for name in SILENCED:
            logging.getLogger(name).removeFilter(self._swallow)

    def _swallow(self, record: logging.LogRecord) -> bool:
        if record.name == EXPORTER_LOG:
            self._reason = record.getMessage()
        return False


def otlp(endpoint: str) -> Delivery:
    """An exporter to a collector. Raises SettingError if that is no URL."""
    url = traces_url(endpoint)
    return Delivery(OTLPSpanExporter(endpoint=url), urlsplit(url).netloc.rpartition("@")[2])


class Tracing:
    """Makes the spans of requests. Belongs to one event loop."""

    def __init__(self, delivery: Delivery, explain: Explain) -> None:
        """`explain` asks router and replicas about the attempts at a request."""
        self._delivery = delivery
        self._explain = explain
        self._processor = BatchSpanProcessor(delivery)
        resource = Resource.create()
        own = os.environ.get(OTEL_SERVICE_NAME) or "sglang-fair-gateway"
        self.root = self._tracer(resource, own, None)
        """Of the gateway's own spans; it decides which requests are sampled."""
        self.below: Mapping[str, Tracer] = {
            GATEWAY: self._tracer(resource, own, ALWAYS_ON),
            ROUTER: self._tracer(resource, "sglang-fair-router", ALWAYS_ON),
            REPLICA: self._tracer(resource, "sglang-fair-replica", ALWAYS_ON),
        }
        """Of what is below them, by service."""
        self._made = self._unexplained = self._unknown = 0
        self._second, self._in_second = 0, 0
        """Of the gateway's clock, and spans of unknown senders in it."""
        self._asking = asyncio.Semaphore(MOST_ASKED)
        self._ending: set[asyncio.Task[None]] = set()
        self._has_complained = False

    def _tracer(self, resource: Resource, service: str, sampler: Sampler | None) -> Tracer:
        provider = TracerProvider(
            sampler=sampler,
            resource=resource.merge(Resource({SERVICE_NAME: service})),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        return provider.get_tracer("sglang_fair")

    def begin(self, exchange: Exchange, route: str, headers: Mapping[str, str]) -> "Trace":
        """A request has come, to the path `route`."""
        return Trace(self, exchange, route, headers)

    def end(self, trace: "Trace") -> None:
        """A sampled request has ended. Returns at once."""
        if not (trace.exchange.is_entered or self._has_room_for_unknown(trace.exchange)):
            self._unknown += 1
        elif not trace.attempts:
            self._finish(trace, [])
        elif len(self._ending) >= MOST_ENDING:
            self._unexplained += 1
            self._finish(trace, None)
        else:
            task = asyncio.create_task(self._ask_and_finish(trace))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Sends what there is, if that can be done soon."""
        if self._ending:
            _, late = await asyncio.wait(self._ending, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        # It joins a thread, which may be waiting for a collector: nobody waits for longer than this.
        ending = threading.Thread(target=self._processor.shutdown, daemon=True)
        ending.start()
        for _ in range(2):
            until_s = time.monotonic() + CLOSE_S
            while ending.is_alive() and time.monotonic() < until_s:
                await asyncio.sleep(0.01)
            self._delivery.shutdown()
        self._delivery.close()

    def state(self) -> dict[str, int]:
        """Spans that were made, sent, and given up by now; requests of which only the gateway's spans are; requests of
        unknown senders that got none."""
        return {
            "made": self._made,
            "sent": self._delivery.sent,
            "failed": self._delivery.failed,
            "unexplained": self._unexplained,
            "unknown": self._unknown,
        }

    async def _ask_and_finish(self, trace: "Trace") -> None:
        told: Sequence[Told] | None = None
        try:
            for pause_s in (0.0, *AGAIN_S):
                await asyncio.sleep(pause_s)
                async with self._asking:
                    told = await self._explain(trace.exchange)
                if is_settled(told):
                    break
        except Exception:
            self.complain("a request's record could not be asked for")
        finally:
            self._unexplained += told is None
            self._finish(trace, told)

    def _has_room_for_unknown(self, exchange: Exchange) -> bool:
        second = int(exchange.ended_s or 0)
        if second != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        return self._in_second <= MOST_UNKNOWN

    def _finish(self, trace: "Trace", told: Sequence[Told] | None) -> None:
        self._made += trace.finish(told, self.below)

    def complain(self, what: str) -> None:
        """Logs an error that is being handled, but only the first."""
        if not self._has_complained:
            self._has_complained = True
            log.exception("%s (said once); requests go on", what)


class Trace:
    """The spans of one request, while it lasts."""

    def __init__(self, tracing: Tracing, exchange: Exchange, route: str, headers: Mapping[str, str]) -> None:
        self.exchange = exchange
        self.attempts: list[tuple[Try, Span]] = []
        self._tracing = tracing
        self._span = tracing.root.start_span(
            f"POST {route}",
            _CONTEXT.extract(headers),
            SpanKind.SERVER,
            {"http.request.method": "POST", "http.route": route, "url.path": route},
            start_time=self._at_ns(exchange.came_s),
        )
        self._context = set_span_in_context(self._span, Context())
        if self._span.is_recording():
            exchange.trace = format_trace_id(self._span.get_span_context().trace_id)

    def attempt(self, one: Try) -> dict[str, str]:
        """An attempt begins. The headers for its replica, by which its spans, if it makes any, are below this one's."""
        context, headers = self._context, dict[str, str]()
        if self._span.is_recording():
            span = self._tracing.below[GATEWAY].start_span(
                "attempt", context, SpanKind.CLIENT, start_time=self._at_ns(one.asked_s)
            )
            self.attempts.append((one, span))
            context = set_span_in_context(span, context)
        _CONTEXT.inject(headers, context)
        return headers

    def end(self) -> None:
        """The request has ended, and its record says how."""
        if self._span.is_recording():
            self._tracing.end(self)

    def finish(self, told: Sequence[Told] | None, tracers: Mapping[str, Tracer]) -> int:
        """Makes all spans; how many. `told` is None if nobody was asked."""
        made = 1
        exchange = self.exchange
        ended_s = exchange.came_s if exchange.ended_s is None else exchange.ended_s
        for number, (one, span) in enumerate(self.attempts):
            known = None if told is None else told[number]
            context = set_span_in_context(span, self._context)
            children: list[Child] = []
            try:
                children.extend(below(one, known))
            except Exception:  # what a replica of another kind calls a record; the placement is there
                self._tracing.complain("a request's record could not be read")
            for each in children:
                child = tracers[each.service].start_span(
                    each.name, context, attributes=each.attributes, start_time=self._at_ns(each.began_s)
                )
                child.end(self._at_ns(each.ended_s))
            span.set_attributes(of_attempt(one, shown_try(one, ended_s), known))
            _fail(span, error_of_attempt(one))
            span.end(self._at_ns(ended_s if one.ended_s is None else one.ended_s))
            made += 1 + len(children)
        self._span.set_attributes(of_request(exchange))
        _fail(self._span, error_of_request(exchange))
        self._span.end(self._at_ns(ended_s))
        return made

    def _at_ns(self, time_s: float) -> int:
        """Since the epoch. A machine's clock may be set while a request is served: it is read once."""
        return round((self.exchange.came_at_s + (time_s - self.exchange.came_s)) * NS)


def _fail(span: Span, error: str | None) -> None:
    if error is not None:
        span.set_status(Status(StatusCode.ERROR, error))
