"""A replica on a node: the body of an actor. It starts the replica's process, passes on what it prints, and says when
it has ended. The process dies with the actor, however that ends.

The actor lives as long as one life of the replica: when that has ended, the fleet has it `leave`, and Ray makes another
one, perhaps on another node. It starts nothing until it is asked where the replica is, so that who asks can wait first.
"""

import asyncio
import contextlib
import os
import sys
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from sglang_fair.cluster.child import Child
from sglang_fair.cluster.on_ray.states import Place
from sglang_fair.cluster.plan import Asked, Process, placed
from sglang_fair.cluster.ports import PortTaken, ReplicaPorts, Reservations, choose_replica

KEPT_LINES = 1_000
"""Of what nobody has fetched yet."""

NEWS_S = 5.0
"""Longest wait for news before an answer without any."""

LEAVES_S = 0.1

Launch = Callable[[Asked, str, ReplicaPorts, str], Process]
"""As `plan.placed`."""

Whereabouts = Callable[[], tuple[str, str]]
"""The address of the node that one is on, as other machines reach it, and its name."""


@dataclass(frozen=True)
class News:
    """Lines that it printed since the last news, and how it ended, if it has."""

    lines: tuple[str, ...]
    seen: int
    """How many lines it has printed in all."""
    ended: str | None = None


class Host:
    """One replica on this node. All methods are called on one event loop, of a thread that lives as long as this."""

    def __init__(
        self,
        asked: Asked,
        environment: Mapping[str, str],
        whereabouts: Whereabouts,
        *,
        loads: bool = False,
        launch: Launch = placed,
    ) -> None:
        """`environment` is added to this node's; `loads` as in `ports.choose_replica`."""
        self._launch = launch
        self._asked = asked
        self._environment = environment
        self._whereabouts = whereabouts
        self._loads = loads
        self._life = uuid.uuid4().hex
        self._reservations: Reservations | None = None
        self._starting: asyncio.Task[tuple[Child, Place]] | None = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._printed = 0
        self._news = asyncio.Event()

    async def place(self) -> Place:
        """Where it is; started, if it was not. Raises OSError, `ports.PortTaken`."""
        return (await self._start())[1]

    async def news(self, seen: int) -> News:
        """What it has printed after the first `seen` lines, and whether it has ended; waits for either."""
        child, _ = await self._start()
        exited = asyncio.create_task(child.exited())
        try:
            if self._printed <= seen and not exited.done():
                self._news.clear()
                told = asyncio.create_task(self._news.wait())
                await asyncio.wait([exited, told], timeout=NEWS_S, return_when=asyncio.FIRST_COMPLETED)
                told.cancel()
            ended = exited.result() if exited.done() else None
            fresh = min(self._printed - seen, len(self._lines))
            return News(tuple(self._lines)[len(self._lines) - fresh :] if fresh else (), self._printed, ended)
        finally:
            exited.cancel()

    async def stop(self) -> None:
        """Stops it, gently at first, and frees its ports."""
        if self._starting is not None:
            with contextlib.suppress(OSError, PortTaken):  # it was never started
                await (await self._start())[0].stop(asyncio.Event())
        if self._reservations is not None:
            self._reservations.close()

    async def leave(self) -> None:
        """Ends this process soon after its answer, as if it had died: so Ray makes another actor."""
        await self.stop()
        asyncio.get_running_loop().call_later(LEAVES_S, os._exit, 1)

    async def _start(self) -> tuple[Child, Place]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._started())
        return await asyncio.shield(self._starting)

    async def _started(self) -> tuple[Child, Place]:
        address, node = self._whereabouts()
        self._reservations = Reservations(address)  # until this process ends
        ports = choose_replica(self._reservations.take, loads=self._loads)
        spec = self._launch(self._asked, address, ports, sys.executable)
        child = await Child.start(replace(spec, env={**self._environment, **spec.env}), self._line)
        assert spec.worker is not None
        return child, Place(spec.worker, node, child.pid, self._life)

    def _line(self, name: str, line: str) -> None:
        self._lines.append(line)
        self._printed += 1
        self._news.set()
