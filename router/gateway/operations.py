"""What can be asked of a gateway, once: routes, checks of queries and the OpenAPI document are made from it.

An `Operation` is a method and a path with the types of what is sent and answered. A module of routes declares its
operations beside the handlers, and `router.gateway.openapi` collects them.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.gateway.checks import check
from router.gateway.errors import ErrorBody

Handler = Callable[[Request], Awaitable[Response]]
Query = TypeVar("Query", bound=msgspec.Struct)

JSON = "application/json"


class Nothing(msgspec.Struct):
    """No parameters."""


class AnyId(msgspec.Struct):
    """A path with a name in it that may be anything."""

    id: str


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

    def route(self, handler: Handler, middleware: Sequence[Middleware] | None = None) -> Route:
        """Where it is served."""
        path = self.path.replace("}", ":path}") if self.has_slashes else self.path
        return Route(path, handler, methods=[self.method], middleware=middleware)

    def asked(self, request: Request, kind: type[Query]) -> Query:
        """The query of a request, which must be of this operation's type. Raises `ApiError` 400."""
        assert kind is self.query
        return check(dict(request.query_params), kind, strict=False)

    @property
    def types(self) -> tuple[Any, ...]:
        """All that the document must know of."""
        bodies = () if self.body is None else (self.body,)
        answers = () if self.answer is None else (self.answer,)
        others = (kind for _, kind in self.others.values())
        return (*bodies, *answers, *self.content.values(), *others, self.error)
