"""A collector of OpenTelemetry on this machine: it takes spans by OTLP over HTTP and keeps them.

And a tree of spans, whoever took them.
"""

import http.server
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.sdk.trace import ReadableSpan


@dataclass(frozen=True)
class Node:
    """A span."""

    trace: str
    id: str
    parent: str
    name: str
    service: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    failed: bool
    kind: str
    children: list["Node"] = field(default_factory=list, compare=False)

    def below(self, name: str) -> list["Node"]:
        """The children of this name, in the order in which they began."""
        return [child for child in self.children if child.name == name]

    def names(self) -> list[Any]:
        """Its name and those of its children: a tree to look at."""
        return [self.name, *(child.names() for child in self.children)]


def tree(nodes: Iterable[Node], parent: str = "") -> Node:
    """The root of the one tree that these spans are. AssertionError if they are not, or if a span does not lie within
    its parent's. `parent` is whose child the root is."""
    found = sorted(nodes, key=lambda node: (node.began_ns, node.ended_ns))
    by_id = {node.id: node for node in found}
    assert len(by_id) == len(found), "no id is given twice"
    assert len({node.trace for node in found}) == 1
    roots = [node for node in found if node.parent == parent]
    assert len(roots) == 1, [node.name for node in found]
    for node in found:
        assert node.began_ns <= node.ended_ns, node
        if node is not roots[0]:
            above = by_id[node.parent]
            assert above.began_ns <= node.began_ns, (above, node)
            assert node.ended_ns <= above.ended_ns, (above, node)
            above.children.append(node)
    return roots[0]


def node_of(span: ReadableSpan) -> Node:
    """A span of the SDK."""
    assert span.context is not None
    return Node(
        f"{span.context.trace_id:032x}",
        f"{span.context.span_id:016x}",
        "" if span.parent is None else f"{span.parent.span_id:016x}",
        span.name,
        str(span.resource.attributes["service.name"]),
        span.start_time or 0,
        span.end_time or 0,
        {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in (span.attributes or {}).items()
        },
        not span.status.is_ok and not span.status.is_unset,
        span.kind.name,
    )


class Collector:
    """A context manager. `nodes` are the spans that have come, `headers` those of the latest post."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.headers: dict[str, str] = {}
        self.path = ""
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.path, collector.headers = self.path, dict(self.headers)
                collector.nodes += _nodes(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> "Collector":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def of(self, trace: str) -> list[Node]:
        """The spans of one trace."""
        return [node for node in self.nodes if node.trace == trace]


def _nodes(request: ExportTraceServiceRequest) -> Iterable[Node]:
    for each in request.resource_spans:
        service = _attributes(each.resource.attributes)["service.name"]
        for scope in each.scope_spans:
            for span in scope.spans:
                yield Node(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    service,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _attributes(span.attributes),
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                )


def _attributes(pairs: Sequence[Any]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind or "string_value")
