"""Errors as OpenAI's API reports them."""

from collections.abc import Mapping

import msgspec

RETRY_AFTER_S = 1


class ApiError(Exception):
    """An error answer to a client, in OpenAI's shape. The status says whose fault it is."""

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
        """OpenAI's error type for the status."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "service_unavailable_error"

    def body(self) -> bytes:
        """The JSON body."""
        detail = ErrorDetail(self.message, self.type, self.param, self.code or self.status)
        return msgspec.json.encode(ErrorBody(detail))


class ErrorDetail(msgspec.Struct):
    """What is wrong. `param` is the field of the request that is at fault, where one is."""

    message: str
    type: str
    param: str | None
    code: str | int


class ErrorBody(msgspec.Struct):
    """The body of every error answer."""

    error: ErrorDetail


def overloaded(message: str) -> ApiError:
    """429: the client may come back when it has less in flight."""
    return ApiError(429, message, code="overloaded", retry_after_s=RETRY_AFTER_S)


def describe(error: BaseException) -> str:
    """One line that says what went wrong, for logs and messages."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
