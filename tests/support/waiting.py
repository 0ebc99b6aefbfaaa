"""Waiting in tests: for a condition, never for a time. The deadline is for a busy machine and is not what is tested."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

DEADLINE_S = 120.0


async def eventually(check: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of `check`, a function or coroutine function. AssertionError names `what` after the
    deadline. A server that does not answer yet is waited for."""
    end = time.monotonic() + deadline_s
    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            value = check()
            if isinstance(value, Awaitable):
                value = await value
            if value:
                return value
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = DEADLINE_S) -> Any:
    """The same without an event loop, for a plain function."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {limit_s} s: {what}"
        time.sleep(0.005)
    return value
