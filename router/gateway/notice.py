"""SIGTERM in two steps: first load balancers are told, then the server stops.

From the signal on /readyz says 503, and everything is served as before. After the notice the signal goes to whoever had
it before, which is uvicorn: it accepts nothing more and lets open requests end. A second SIGTERM goes there at once.
"""

import asyncio
import signal
from collections.abc import Callable
from types import FrameType

from router.gateway.gateway import Gateway

Handler = Callable[[int, FrameType | None], object]


def give(gateway: Gateway, notice_s: float) -> None:
    """Takes SIGTERM over from whoever handles it now. Call it in the main thread, in the running loop."""
    before = signal.getsignal(signal.SIGTERM)
    if not callable(before):
        return
    stop: Handler = before
    loop = asyncio.get_running_loop()

    def end(number: int, frame: FrameType | None) -> None:
        if gateway.is_ending:
            stop(number, frame)
            return
        gateway.is_ending = True
        loop.call_soon_threadsafe(loop.call_later, notice_s, stop, number, None)

    signal.signal(signal.SIGTERM, end)
