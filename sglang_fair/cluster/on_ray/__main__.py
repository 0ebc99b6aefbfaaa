"""The fleet as a process: `python -m sglang_fair.cluster.on_ray FILE`, which a cluster with --ray starts.

FILE is a `Told`. Exit code 0 after SIGTERM, 1 if it could not go on; then its last line says why.
"""

import asyncio
import contextlib
import io
import os
import signal
import sys
from pathlib import Path

from sglang_fair.cluster.control import Control
from sglang_fair.cluster.on_ray.changes import Changes
from sglang_fair.cluster.on_ray.driver import Ray, RayFailed
from sglang_fair.cluster.on_ray.fleet import Crew, FleetFailed
from sglang_fair.cluster.on_ray.told import Told, carried
from sglang_fair.common.processes import die_with_parent


class Unindented(io.TextIOBase):
    """Passes on lines that are not indented. Ray prints what happens to its nodes, each time with many lines of a log
    below."""

    def write(self, text: str) -> int:
        """What is left of `text`."""
        for line in text.splitlines():
            if line.strip() and not line.startswith(" "):
                say(line)
        return len(text)


def say(text: str) -> None:
    """Shows a line."""
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.__stdout__, flush=True)


async def serve(told: Told, ray: Ray) -> None:
    """Until SIGTERM or SIGINT. Raises `FleetFailed`, `RayFailed`."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    crew = Crew(told, ray, say)
    control = Control(Path(told.control), Changes(told, crew).handle)
    try:
        await control.start()
    except OSError as error:
        say(f"replicas cannot be added or drained here: {error}")
    running = asyncio.create_task(crew.run())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    await control.close()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def main(arguments: list[str]) -> int:
    """The exit code."""
    die_with_parent()
    told = Told.decode(Path(arguments[0]).read_bytes())
    try:
        ray = Ray(told.address, told.bundle, told.wait_s, told.loads, carried(os.environ))
        with contextlib.closing(ray), contextlib.redirect_stdout(Unindented()):
            asyncio.run(serve(told, ray))
    except (RayFailed, FleetFailed, ValueError) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
