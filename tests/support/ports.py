"""Ports for tests: free ones, none given twice, and none that another worker of pytest-xdist gives."""

import contextlib
import os
import random
import socket

WORKERS = 10
FIRST, EACH = 19_000, 1_000
"""Below those of clusters, and of outgoing connections, so that a port stays free for a restart."""

_given: set[int] = set()
"""Between being given and being listened on, a port looks free to everybody."""


def free_port(count: int = 1) -> int:
    """The first of `count` adjacent ports that nobody listens on. AssertionError if none is left."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    first = FIRST + worker * EACH
    ports = range(first, first + EACH - count + 1)
    for port in random.SystemRandom().sample(ports, len(ports)):
        wanted = range(port, port + count)
        if _given.intersection(wanted):
            continue
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for each in wanted:
                probe = stack.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", each))
            _given.update(wanted)
            return port
    raise AssertionError(
        f"all ports from {first} to {first + EACH - 1} were given or are in use: {count} more wanted"
    )
