"""A replica as a task of a batch system: `python -m sglang_fair.cluster.listed FILE -- ARGUMENTS OF A REPLICA`.

It listens at this machine's address, on ports that are free, and stands in FILE while it is ready. If it ends, it is
started again by the rule of a cluster's supervisor; if it is given up, the task fails. SIGTERM, or a file that --leave
names, takes it from the list, gives routers time to see that, and then lets it finish what it has. Batch systems send
signals to all processes of a task, the replica's too; the file is for those that do.
"""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from sglang_fair.cluster.listed.parts import LOOK_S, OwnPart
from sglang_fair.cluster.plan import Asked, Plan, Process, Worker, placed, written
from sglang_fair.cluster.ports import PortTaken, Reservations, choose_replica
from sglang_fair.cluster.restart import RestartRule
from sglang_fair.cluster.supervisor import StartFailed, Supervisor
from sglang_fair.common.listening import is_loopback
from sglang_fair.settings import program
from sglang_fair.settings.commands import Argument, Mistake, Option, PassedOn, run
from sglang_fair.settings.setting import changed

FAILED = 1
POLL_S = 0.2
LEAVE_S = 5.0
"""A router looks at its list every second, and takes two looks to believe it."""


class Listed:
    """Keeps the replica's part of the list: the `Link` of its supervisor."""

    def __init__(self, part: OwnPart) -> None:
        self._part = part
        self._line: str | None = None
        self._changed = asyncio.Event()
        self._left = False

    def up(self, worker: Worker) -> None:
        """It is ready."""
        if not self._left:
            self._line = written(worker)
            self._changed.set()

    def down(self, worker: Worker) -> None:
        """It is not there."""
        self._line = None
        self._changed.set()

    def drain(self, worker: Worker) -> None:
        """It is to get nothing more."""
        self.down(worker)

    def close(self) -> None:
        """Nothing to end."""

    def leave(self) -> None:
        """It will not be listed again."""
        self._left, self._line = True, None
        self._changed.set()

    async def keep(self) -> None:
        """Writes each change, and looks again every few seconds, until cancelled. Then it is not listed."""
        try:
            while True:
                self._changed.clear()
                await self._write(self._line)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
        finally:
            await self._write(None)

    async def _write(self, line: str | None) -> None:
        try:
            if await asyncio.to_thread(self._part.look, line):
                say("the list is written anew")
        except OSError as error:
            say(f"the list cannot be written: {error}")


class Lines:
    """Prints what a supervisor reports."""

    def __init__(self, worker: Worker, link: Listed) -> None:
        self._worker = worker
        self._link = link

    def line(self, name: str, line: str) -> None:
        """A line of the replica's."""
        say(line)

    def waiting(self, names: Sequence[str], elapsed_s: float, limit_s: float) -> None:
        """It is not ready yet."""

    def is_ready(self, name: str, after_s: float) -> None:
        """It is ready."""
        say(f"{name} is ready at {self._worker.url} after {after_s:.1f} s")

    def died(self, name: str, how: str, tail: Iterable[str]) -> None:
        """It ended by itself."""
        say(f"{name} ended: {how}")

    def say(self, text: str) -> None:
        """Any other line."""
        say(text)

    def up(self, pids: dict[str, int]) -> None:
        """It was ready for the first time."""
        self._link.up(self._worker)


def say(text: str) -> None:
    """Shows a line."""
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)


async def serve(spec: Process, part: OwnPart, leave_file: Path | None) -> int:
    """Until SIGTERM, SIGINT, or until `leave_file` is there; the exit code."""
    assert spec.worker is not None
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    link = Listed(part)
    rule = RestartRule(spares_last=False)  # others of its model are elsewhere, and so may it be
    supervisor = Supervisor(Plan((spec,)), Lines(spec.worker, link), rule=rule, link=link)

    async def leave() -> None:
        link.leave()
        until_s = loop.time() + LEAVE_S
        while supervisor.state(spec.name) == "up" and loop.time() < until_s:
            await asyncio.sleep(POLL_S)
        supervisor.stop()

    def on_signal() -> None:
        if tasks:
            supervisor.stop()
            return
        say("stopping: it is listed no more")
        tasks.add(asyncio.create_task(leave()))

    async def watch(path: Path) -> None:
        while not path.exists():
            await asyncio.sleep(LOOK_S)
        if not tasks:
            on_signal()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    keeping = [asyncio.create_task(link.keep())]
    if leave_file is not None:
        keeping.append(asyncio.create_task(watch(leave_file)))
    try:
        return 0 if await supervisor.run() else FAILED
    except StartFailed as error:
        say(str(error))
        return FAILED
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, *tasks, return_exceptions=True)


def own_address(given: str | None) -> str:
    """The IP address at which other machines reach this one. Raises Mistake."""
    name = given or socket.gethostname()
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise Mistake(f"{name} has no address: {error.strerror}; say --address") from None
    others = sorted(
        (one for one in found if given or not is_loopback(one)), key=lambda one: (":" in one, one)
    )
    if not others:
        raise Mistake(f"{name} is {', '.join(sorted(found))}, which no other machine reaches; say --address")
    return others[0]


def main(
    list_in: Annotated[Path, Argument(metavar="FILE", help="The list, on a disk that routers see.")],
    name: Annotated[str, Option(help="The replica's name, which no other has.")],
    address: Annotated[
        str | None, Option(help="This machine's, as routers reach it; without it, that of its name.")
    ] = None,
    loads: Annotated[
        bool, Option("--loads", help="Say how full it is, for --placement qlm and --throttle oit.")
    ] = False,
    leave: Annotated[Path | None, Option(metavar="FILE", help="Stop once this file is there.")] = None,
    start_timeout: Annotated[float, Option(help="Longest wait for it to be ready, in seconds.")] = 3600.0,
    rest: PassedOn = None,
) -> int:
    """Run a replica and list it in a file while it is ready. Its own arguments follow --."""
    settings = program.parse("replica", rest or [])
    given = {key: value for key, value in changed(settings).items() if key != "extra"}
    asked = Asked(name, given | {"name": name, "extra": settings.extra}, "info", start_timeout)
    host = own_address(address)
    with contextlib.closing(Reservations(host)) as reservations:
        try:
            part = OwnPart(list_in, name)
            ports = choose_replica(reservations.take, loads=loads)
        except (ValueError, PortTaken) as error:
            raise Mistake(str(error)) from None
        return asyncio.run(serve(placed(asked, host, ports, sys.executable), part, leave))


if __name__ == "__main__":
    sys.exit(run(main, "sglang-fair listed replica"))
