"""Follows the actors of a fleet: lists replicas that are ready, has those that end started again, adds and drains.

The list is a file that routers follow (`router.replica_lists`): it is renamed into place, and has those alone that have
answered from here that they are ready.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from pathlib import Path

from sglang_fair.cluster.console import TROUBLE
from sglang_fair.cluster.on_ray.driver import Actor, Cloud, Gone, HostFailed, RayFailed, Room
from sglang_fair.cluster.on_ray.states import Fleet, Place
from sglang_fair.cluster.on_ray.told import Told
from sglang_fair.cluster.plan import FLEET_GRACE_S, FLEET_READY, Asked, written
from sglang_fair.cluster.supervisor import answers_200
from sglang_fair.common.tls import authorities

RETRY_S = 1.0
POLL_S = 0.2
MISSED_S = 5.0
"""How long an actor may be silent before its replica is listed no more. Gateways notice by themselves that one is dead;
a link between Ray's nodes that hangs for a moment is no reason to send its requests elsewhere."""

STOP_S = FLEET_GRACE_S - 5.0
TAIL_LINES = 30


class FleetFailed(RuntimeError):
    """The fleet cannot start or go on; the text is one line."""


class Crew:
    """The replicas of one cluster. `say` shows a line. ValueError for authorities that cannot be read."""

    def __init__(self, told: Told, cloud: Cloud, say: Callable[[str], None]) -> None:
        self._told = told
        self._cloud = cloud
        self._say = say
        self._tls = authorities(told.replica_ca)
        self.fleet = Fleet()
        self._actors: dict[str, Actor] = {}
        self._rooms: dict[str, tuple[Room, int]] = {}
        self._free: list[tuple[Room, int]] = []
        """Bundles whose replica was drained."""
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._tails: dict[str, deque[str]] = {}
        self._seen: dict[str, int] = {}
        self._why = "no replica is left"
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Until it is cancelled. Raises `FleetFailed` and `RayFailed`."""
        self.write()
        replicas = self._told.replicas
        self._say(f"asks Ray at {self._told.address} for room for {len(replicas)} replicas")
        try:
            room = await self._cloud.room(len(replicas))
            for index, asked in enumerate(replicas):
                self._begin(asked, room, index)
            while True:
                await self._look()
        finally:
            await self._end()

    async def add(self, asked: Asked) -> None:
        """One more replica; returns when it is ready. Raises `RayFailed`, also if it ends before."""
        room, index = self._free.pop() if self._free else (await self._cloud.room(1), 0)
        self._begin(asked, room, index)
        try:
            while (state := self.fleet[asked.name]).state != "up":
                if state.deaths.early:
                    raise RayFailed(self._why)
                await asyncio.sleep(POLL_S)
        except BaseException:
            await self.remove(asked.name)
            raise

    async def remove(self, name: str) -> None:
        """Ends a replica for good, and keeps its bundle for the next."""
        if (keeper := self._keepers.pop(name, None)) is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        self.fleet.forget(name)
        self.write()
        actor = self._actors.pop(name)
        with contextlib.suppress(TimeoutError, Gone, HostFailed, RayFailed):
            async with asyncio.timeout(STOP_S):
                await actor.stop()
        actor.kill()
        self._free.append(self._rooms.pop(name))

    async def _look(self) -> None:
        """Waits for a change. Raises what has ended a keeper."""
        changed = asyncio.create_task(self._changed.wait())
        await asyncio.wait([changed, *self._keepers.values()], return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        self._changed.clear()
        for name, keeper in list(self._keepers.items()):
            if keeper.done():
                del self._keepers[name]
                keeper.result()
        if self.fleet.is_lost():
            raise FleetFailed(self._why)

    def _begin(self, asked: Asked, room: Room, index: int) -> None:
        self.fleet.ask(asked)
        self._rooms[asked.name] = room, index
        self._actors[asked.name] = room.actor(index, asked)
        self._tails[asked.name] = deque(maxlen=TAIL_LINES)
        self._keepers[asked.name] = asyncio.create_task(self._keep(asked.name))
        self._changed.set()

    async def _keep(self, name: str) -> None:
        """Follows a replica through its lives. Returns when it is given up."""
        last: Place | None = None
        while True:
            try:
                place = await self._placed(name, last)
                if self.fleet[name].place is None:
                    self._say(f"{name} starts on {_at(place)}, process {place.pid}: {place.worker.url}")
                    self.fleet.starts(name, place)
                if last is None or place.life != last.life:
                    self._seen[name] = 0
                last = place
                how = await self._watch(name, place)
            except HostFailed as error:
                how = str(error)
            if how is None:
                continue
            if self._told.quiet:
                for line in self._tails[name]:
                    self._say(f"{name}: {line}")
            said = f"{name} ended{f' on {_at(last)}' if last else ''}: {how}"
            self._why = f"{said}: {self._tails[name][-1]}" if self._tails[name] else said
            self._say(said)
            delay_s = self.fleet.ended(name, _now_s())
            self.write()
            with contextlib.suppress(Gone, HostFailed):
                await self._actors[name].leave()
            if delay_s is None:
                self._say(f"{name} is given up")
                self._changed.set()
                return
            self._say(f"{name} is started again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)

    async def _placed(self, name: str, last: Place | None) -> Place:
        """Where it is, once Ray has an actor for it. If that takes longer than a moment, it is listed no more."""
        since_s, waits = _now_s(), False
        while True:
            try:
                place = await self._actors[name].place()
                if last is not None and place.life != last.life and self.fleet[name].place is not None:
                    self._is_lost(name, last)
                return place
            except Gone:
                if not waits and _now_s() - since_s >= MISSED_S:
                    waits = True
                    self._is_lost(name, last)
            await asyncio.sleep(RETRY_S)

    def _is_lost(self, name: str, last: Place | None) -> None:
        self.fleet.lost(name)
        self.write()
        where = f" from {_at(last)}" if last else ""
        self._say(f"{name} is gone{where}; Ray starts it again where there is room")

    async def _watch(self, name: str, place: Place) -> str | None:
        """Follows one life of it. How it ended; None: its actor does not answer."""
        asked, actor = self.fleet[name].asked, self._actors[name]
        is_up, began_s = self.fleet[name].up_s is not None, _now_s()
        ready = asyncio.create_task(answers_200(f"{place.worker.url}/ready", self._tls))
        asking = asyncio.create_task(actor.news(self._seen[name]))
        try:
            while True:
                left_s = None if is_up else max(0.0, began_s + asked.ready_timeout_s - _now_s())
                await asyncio.wait(
                    [asking] if is_up else [asking, ready],
                    timeout=left_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if asking.done():
                    news = asking.result()
                    for line in news.lines:
                        self._show(name, line)
                    if news.ended is not None:
                        return news.ended
                    self._seen[name] = news.seen
                    asking = asyncio.create_task(actor.news(news.seen))
                if ready.done() and not is_up:
                    ready.result()
                    is_up = True
                    self._is_up(name, place, _now_s() - began_s)
                elif left_s == 0.0:
                    return f"not ready after {asked.ready_timeout_s:.0f} s (--start-timeout)"
        except Gone:
            return None
        finally:
            for task in (ready, asking):
                task.cancel()
            await asyncio.gather(ready, asking, return_exceptions=True)

    def _is_up(self, name: str, place: Place, after_s: float) -> None:
        was_up = self.fleet.was_up
        self.fleet.is_ready(name, _now_s())
        self.write()
        self._say(f"{name} is ready on {_at(place)} after {after_s:.1f} s")
        if self.fleet.was_up and not was_up:
            self._say(FLEET_READY)
        self._changed.set()

    def _show(self, name: str, line: str) -> None:
        self._tails[name].append(line)
        if not self._told.quiet or TROUBLE.search(line):
            self._say(f"{name}: {line}")

    def write(self) -> None:
        """Lists those that may get requests."""
        path = Path(self._told.listed)
        beside = path.with_name(f".{path.name}")
        beside.write_text("".join(f"{written(worker)}\n" for worker in self.fleet.listed()))
        beside.replace(path)

    async def _end(self) -> None:
        """Nothing of it is left in the cluster."""
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await asyncio.gather(
                    *(actor.stop() for actor in self._actors.values()), return_exceptions=True
                )
        for actor in self._actors.values():
            actor.kill()
        for room in {room for room, _ in (*self._rooms.values(), *self._free)}:
            room.give_back()


def _at(place: Place) -> str:
    return f"node {place.node}"


def _now_s() -> float:
    return asyncio.get_running_loop().time()
