"""Errors as OpenAI's API reports them, and as Anthropic's does; and what is wrong with what a client sent.

A field's `Meta(extra=...)` may say how the sentence about it ends: `must` what it must be, `missing` what is wrong
where it is left out, `code` the error's code.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from starlette.responses import Response

from sglang_fair.common.deadlines import EXPIRED, EXPIRED_CODE, EXPIRED_STATUS

RETRY_AFTER_S = 1

Style = Literal["openai", "anthropic"]
"""The shape of an error."""

ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "request_timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; all others are `api_error`."""


class ApiError(Exception):
    """An error answer to a client. The status says whose fault it is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        """Of the answer."""
        if retry_after_s is not None:
            self.headers["retry-after"] = str(retry_after_s)

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "service_unavailable_error"

    def body(self, style: Style = "openai") -> bytes:
        if style == "anthropic":
            kind = ANTHROPIC_TYPES.get(self.status, "api_error")
            return msgspec.json.encode(AnthropicErrorBody(AnthropicDetail(kind, self.message)))
        detail = ErrorDetail(self.message, self.type, self.param, self.code or self.status)
        return msgspec.json.encode(ErrorBody(detail))

    def answer(self, style: Style = "openai", headers: Mapping[str, str] | None = None) -> Response:
        """The whole answer; `headers` are those of any answer."""
        sent = {**(headers or {}), **self.headers}
        return Response(self.body(style), self.status, sent, "application/json")


class ErrorDetail(msgspec.Struct):
    """What is wrong. `param` is the field of the request that is at fault, where one is."""

    message: str
    type: str
    param: str | None
    code: str | int


class ErrorBody(msgspec.Struct):
    """The body of every error answer, but of Anthropic's API."""

    error: ErrorDetail


class AnthropicDetail(msgspec.Struct):
    """What is wrong, in Anthropic's words."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct):
    """The body of every error answer of Anthropic's API."""

    error: AnthropicDetail
    type: Literal["error"] = "error"


SOURCE = '\n\n  File "'
"""Begins what SGLang says of its own files, behind what is wrong with the body."""


def of_replica(status: int, body: bytes) -> ApiError:
    """The error in `body`, with which a replica answered.

    SGLang 0.5.23 answers some paths with `{"object": "error", "message": …}`, in which OpenAI's clients find no
    message, or in plain text; gives Anthropic's clients types that are not Anthropic's; and says of a body that it
    cannot read at which line of which of its files that was.
    """
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = body.decode(errors="replace")
    if isinstance(found, dict):
        found = found.get("error", found)
    detail = found if isinstance(found, dict) else {"message": found}
    message, code, param = (
        one if isinstance(one := detail.get(name), str) else None for name in ("message", "code", "param")
    )
    text = (message or "").partition(SOURCE)[0].strip() or f"the replica answered {status}"
    return ApiError(status, text, code=code, param=param)


def overloaded(message: str) -> ApiError:
    """429: the client may come back when it has less in flight."""
    return ApiError(429, message, code="overloaded", retry_after_s=RETRY_AFTER_S)


def expired() -> ApiError:
    """504: it has waited for longer than its sender wants to."""
    return ApiError(EXPIRED_STATUS, EXPIRED, code=EXPIRED_CODE)


def describe(error: BaseException) -> str:
    """One line that says what went wrong, for logs and messages."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


AnyType = TypeVar("AnyType", bound=msgspec.Struct)

_MISSING = re.compile(r"missing required field `(\w+)`")
_FIELD = re.compile(r"\.(\w+)[^.]*`$")
_WRONG_TYPE = re.compile(r"Expected `(\w+)[^`]*`, got `(\w+)`")


def check(value: Any, kind: type[AnyType], *, strict: bool = True) -> AnyType:
    """The fields of `value` that `kind` has; without `strict` from texts, as a query has them. Raises `ApiError` 400,
    which names the first that is wrong."""
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind) from error


@cache
def _rules(kind: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    """By field, those of types within it too."""
    found: dict[str, dict[str, Any]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for inner in _structs(hint):
            found = _rules(inner) | found
        for meta in getattr(hint, "__metadata__", ()):
            found |= {name: meta.extra} if meta.extra else {}
    return found


def _structs(hint: Any) -> list[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    return [one for part in get_args(hint) for one in _structs(part)]


def _refusal(error: str, kind: type[msgspec.Struct]) -> ApiError:
    missing, field = _MISSING.search(error), _FIELD.search(error)
    found = missing or field
    if found is None:
        return ApiError(400, error)
    name = found[1]
    rule = _rules(kind).get(name, {})
    types = _WRONG_TYPE.search(error)
    if missing and "missing" in rule:
        problem = rule["missing"]
    elif "must" in rule:
        problem = f"must {rule['must']}"
    elif types is not None:
        problem = f"must be of type {types[1]}, not {types[2]}"
    else:
        problem = error
    return ApiError(400, f"`{name}` {problem}", code=rule.get("code"), param=name)
