"""SGLang's HTTP application, if this process serves it."""

import json
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Application = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


def server() -> Any:
    """SGLang's module with the application `app`; None in other processes."""
    return sys.modules.get("sglang.srt.entrypoints.http_server")


def wrap(app: Any, middleware: Callable[..., Application], **given: Any) -> None:
    """Puts ASGI middleware in front of the application, which may run already."""
    if app.middleware_stack is None:
        app.add_middleware(middleware, **given)
    else:
        app.middleware_stack = middleware(app.middleware_stack, **given)


async def answer(send: Any, status: int, error: Mapping[str, Any], **headers: str) -> None:
    """Answers with an error as SGLang's have it."""
    body = json.dumps({"object": "error", **error}).encode()
    own = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    lines = [
        (name.replace("_", "-").encode(), text.encode("latin-1", "replace")) for name, text in own.items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})
