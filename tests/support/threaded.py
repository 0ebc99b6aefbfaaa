"""A small server in a thread, for programs that run in the test's own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def served(app: web.Application) -> Iterator[str]:
    """Its URL, for as long as it runs."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    runner = web.AppRunner(app, handler_cancellation=True)

    async def up() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    def work() -> None:
        loop.run_until_complete(up())
        loop.call_soon(ready.set)  # in `run_forever`, which a stop before it would not end
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(60)
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
