"""A replica's error in the shape of the API that was asked.

SGLang 0.5.23 answers some paths with `{"object": "error", "message": …}`, in which OpenAI's clients find no message,
or in plain text; gives Anthropic's clients types that are not Anthropic's; and says of a body that it cannot read at
which line of which of its files that was.
"""

from typing import Any

import msgspec

from router.gateway.errors import ApiError
from router.gateway.request.kinds import Kind, style_of

SOURCE = '\n\n  File "'
"""Begins what SGLang says of its own files, behind what is wrong with the body."""


def refused(kind: Kind, status: int, body: bytes) -> bytes:
    """The error in `body`, with which a replica answered a request of this kind."""
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = body.decode(errors="replace")
    if isinstance(found, dict):
        found = found.get("error", found)
    detail = found if isinstance(found, dict) else {"message": found}
    said, code, param = (detail.get(name) for name in ("message", "code", "param"))
    text = said.partition(SOURCE)[0].strip() if isinstance(said, str) else ""
    code = code if isinstance(code, str) else None
    param = param if isinstance(param, str) else None
    error = ApiError(status, text or f"the replica answered {status}", code=code, param=param)
    return error.body(style_of(kind))
