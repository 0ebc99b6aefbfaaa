"""Whether the client of a request is still there: the connection says so, without a task beside each request."""

import asyncio
from collections.abc import Callable
from typing import cast

from starlette.types import Receive, Scope

LEAVING = "sglang_fair.leaving"
"""The extension of a request's scope that `when_client_leaves` uses."""

Callback = Callable[[], None]


def when_client_leaves(scope: Scope, receive: Receive, leave: Callback) -> Callback:
    """Calls `leave` once if the client of a request, whose body has been read, goes away. Calling the result ends that.
    Behind another server than `Listener` it may also be called when the answer has ended."""
    extension = scope.get("extensions", {}).get(LEAVING)
    if extension is not None:
        return cast(Callback, extension["listen"](leave))

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    watching = asyncio.create_task(watch())

    def stop() -> None:
        watching.cancel()

    return stop
