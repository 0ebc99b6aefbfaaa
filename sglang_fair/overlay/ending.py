"""How a server ends: within a time.

At SIGTERM SGLang answers the requests that it has, ends its schedulers, and then asks its HTTP server to stop. That one
waits for its connections without end: a client that sends half a request, or opens a connection at that moment and
polls on it, would keep the process alive until it is killed.
"""

from collections.abc import Callable
from typing import Any

CONNECTIONS_S = 5
"""Time for connections to end when nothing is left to be answered."""


def configure(original: Callable[..., None], config: Any, *args: Any, **kwargs: Any) -> None:
    """Around the making of uvicorn's configuration."""
    original(config, *args, **({"timeout_graceful_shutdown": CONNECTIONS_S} | kwargs))
