"""Errors as OpenAI's API reports them."""

import msgspec


class ApiError(Exception):
    """An answer to the client in OpenAI's error shape: whose fault it is, is in the status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's error type for the status."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "service_unavailable_error"

    def body(self) -> bytes:
        """The JSON body."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code or self.status,
        }
        return msgspec.json.encode({"error": error})
