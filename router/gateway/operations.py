"""What can be asked of a gateway, once: routes, checks of queries and the OpenAPI document are made from it.

An `Operation` is a method and a path with the types of what is sent and answered. It stands before the method that
answers it; `routes_of` an object serves them, and `router.gateway.openapi` describes them.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.client import RouterGone
from router.gateway.errors import RETRY_AFTER_S, ApiError, ErrorBody, check

Handler = Callable[[Request], Awaitable[Response]]
Answering = Callable[[Any, Request], Awaitable[msgspec.Struct | Response]]
Query = TypeVar("Query", bound=msgspec.Struct)

JSON = "application/json"


class Nothing(msgspec.Struct):
    """No parameters."""


class AnyId(msgspec.Struct):
    """A path with a name in it that may be anything."""

    id: str


def json_response(content: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type=JSON)


async def read_body(request: Request, most_bytes: int = 4096) -> bytes:
    """A body of at most `most_bytes`. Raises `ApiError`."""
    raw = b""
    async for piece in request.stream():
        raw += piece
        if len(raw) > most_bytes:
            raise ApiError(413, f"the body is larger than {most_bytes} bytes", code="body_too_large")
    return raw


def numbered(least: int, most: int) -> Meta:
    """The rule of a number in a query."""
    return Meta(
        ge=least, le=most, extra={"must": f"be a number from {least} to {most}", "code": "invalid_limit"}
    )


@dataclass(frozen=True)
class Operation:
    """One method of one path. All types are msgspec's."""

    method: str
    path: str
    summary: str
    answer: Any = None
    """The type of what is answered, in JSON; None: `content` has it, or there is none."""
    errors: Sequence[int] = ()
    status: int = 200
    body: Any = None
    query: type[msgspec.Struct] = Nothing
    where: type[msgspec.Struct] = Nothing
    """The parameters in the path."""
    headers: type[msgspec.Struct] = Nothing
    sent: str = JSON
    """The type of the body's content."""
    content: Mapping[str, Any] = field(default_factory=dict)
    """Answers that are not JSON, or not only: type of content, and type."""
    answer_headers: Sequence[str] = ()
    described: str = ""
    """What the answer is; "": as the summary says."""
    others: Mapping[int, tuple[str, Any]] = field(default_factory=dict)
    """Answers with further statuses: what they say, and their types."""
    error: Any = ErrorBody
    """The type of errors."""
    has_slashes: bool = False
    """What is in the path may hold slashes."""

    def __call__(self, answering: Answering) -> Answering:
        """As a decorator: this method of an object answers it, with a type to be encoded or a whole response."""
        vars(answering).setdefault("operations", []).insert(0, self)
        return answering

    def route(self, handler: Handler, middleware: Sequence[Middleware] | None = None) -> Route:
        path = self.path.replace("}", ":path}") if self.has_slashes else self.path
        return Route(path, handler, methods=[self.method], middleware=middleware)

    def asked(self, request: Request, kind: type[Query]) -> Query:
        """The query of a request, which must be of this operation's type. Raises `ApiError` 400."""
        assert kind is self.query
        return check(dict(request.query_params), kind, strict=False)

    @property
    def types(self) -> tuple[Any, ...]:
        bodies = () if self.body is None else (self.body,)
        answers = () if self.answer is None else (self.answer,)
        others = (kind for _, kind in self.others.values())
        return (*bodies, *answers, *self.content.values(), *others, self.error)


def operations_of(kind: type) -> Iterator[Operation]:
    for method in vars(kind).values():
        yield from getattr(method, "operations", ())


def routes_of(
    owner: object,
    check: Callable[[Request], None] = lambda request: None,
    middleware: Sequence[Middleware] | None = None,
) -> list[Route]:
    """The routes that methods of `owner` answer. They raise `ApiError`, as `check` does for senders who may not ask."""

    def handler(operation: Operation, answering: Callable[[Request], Awaitable[Any]]) -> Handler:
        async def handle(request: Request) -> Response:
            check(request)
            try:
                found = await answering(request)
            except RouterGone as error:
                raise ApiError(
                    503, str(error), code="router_unavailable", retry_after_s=RETRY_AFTER_S
                ) from error
            return found if isinstance(found, Response) else json_response(found, operation.status)

        return handle

    return [
        operation.route(handler(operation, getattr(owner, name)), middleware)
        for name, method in vars(type(owner)).items()
        for operation in getattr(method, "operations", ())
    ]
