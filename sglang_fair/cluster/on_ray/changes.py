"""`sglang-fair workers list`, `add` and `drain` for a cluster with --ray, as `cluster.workers` has them for one.

A replica that is added takes the place of one that was drained, if there is one, and else asks Ray for a bundle of its
own. The first bundles are one placement group, so the place of a replica that was drained is kept free for the next.
"""

import asyncio
from typing import Any

from sglang_fair.cluster.control import Refused, Say
from sglang_fair.cluster.link import router_workers
from sglang_fair.cluster.models import fewest
from sglang_fair.cluster.on_ray.driver import RayFailed
from sglang_fair.cluster.on_ray.fleet import Crew
from sglang_fair.cluster.on_ray.states import State
from sglang_fair.cluster.on_ray.told import Told
from sglang_fair.cluster.plan import Asked
from sglang_fair.cluster.workers import free_number, has_left, is_at_work, number
from sglang_fair.common.curve import Keys

POLL_S = 0.2
IDLE_CHECKS_S = 30.0
"""How long a replica that the router no longer lists is asked whether it has finished."""

SHOWN = {"asked": "waits", "starts": "starting"}


class Changes:
    """Carries out these requests on one crew. Several may run at a time."""

    def __init__(self, told: Told, crew: Crew) -> None:
        self._told = told
        self._crew = crew
        self._keys = Keys.read_if(told.keys, "gateway")
        self._numbers: set[int] = set()
        """Of replicas that are being added."""

    async def handle(self, asked: dict[str, Any], say: Say) -> dict[str, Any]:
        """One request of `control`. Raises `Refused`."""
        match asked:
            case {"do": "list"}:
                return {"workers": self.rows()}
            case {"do": "add", "model": str(model)}:
                return await self.add(say, model)
            case {"do": "add"}:
                return await self.add(say)
            case {"do": "drain", "name": str(name)}:
                return await self.drain(name, say)
            case {"do": "swap"}:
                raise Refused("replicas on Ray's nodes keep their model: there is no --swap with --ray")
        raise Refused("not a request: list, add or drain a name")

    def rows(self) -> list[dict[str, Any]]:
        """The replicas in the order of their numbers."""
        return [_row(one) for one in sorted(self._crew.fleet, key=lambda one: number(one.asked.name))]

    async def add(self, say: Say, model: str | None = None) -> dict[str, Any]:
        """One more replica, of the model of this name or of the one that the fewest have; returns when it is ready."""
        if not self._crew.fleet.was_up:
            raise Refused("the cluster is not up yet")
        known = await router_workers(self._told.router, keys=self._keys) or {}
        names = [*known, *(one.asked.name for one in self._crew.fleet)]
        chosen = free_number({number(name) for name in names} | self._numbers)
        asked = self._like(model).renamed(f"r{chosen}")
        self._numbers.add(chosen)
        say(f"{asked.name} is being started")
        try:
            await self._crew.add(asked)
        except RayFailed as error:
            raise Refused(str(error)) from None
        finally:
            self._numbers.discard(chosen)
        return _row(self._crew.fleet[asked.name])

    async def drain(self, name: str, say: Say) -> dict[str, Any]:
        """Lets a replica finish, and ends it."""
        fleet = self._crew.fleet
        if name not in fleet:
            raise Refused(f"there is no replica {name[:100]!r}")
        if fleet[name].state == "draining":
            raise Refused(f"{name} is draining")
        if not any(one.state == "up" for one in fleet if one.asked.name != name):
            raise Refused(f"no other replica is up: nothing could be served without {name}")
        row = _row(fleet[name]) | {"state": "stopped"}
        fleet.drain(name)
        self._crew.write()
        try:
            await self._finished(name, row["url"], say)
        except BaseException:
            if name in fleet:
                fleet.stays(name)
                self._crew.write()
            raise
        await self._crew.remove(name)
        return row

    async def _finished(self, name: str, url: str, say: Say) -> None:
        """Returns when the router no longer lists it, and it has no request left."""
        said = None
        while True:
            known = await router_workers(self._told.router, keys=self._keys)
            if known is not None and name not in known:
                break
            waits = "no router answers" if known is None else has_left(known[name])
            if waits != said:
                said = waits
                say(f"{name} is draining: {waits}")
            await asyncio.sleep(POLL_S)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + IDLE_CHECKS_S
        while url and loop.time() < until_s and await is_at_work(url):
            await asyncio.sleep(POLL_S)

    def _like(self, model: str | None) -> Asked:
        kinds = {one.model: one for one in self._told.replicas}
        if model is not None and model not in kinds:
            raise Refused(
                f"there is no model {model[:100]!r} here; there are {', '.join(filter(None, kinds))}"
            )
        has = [one.asked.model for one in self._crew.fleet]
        return kinds[fewest(list(kinds), has) if model is None else model]


def _row(one: State) -> dict[str, Any]:
    place = one.place
    return {
        "name": one.asked.name,
        "url": place.worker.url if place else "",
        "pid": place.pid if place else None,
        "state": SHOWN.get(one.state, one.state),
        "model": one.asked.model,
        "node": place.node if place else "",
    }
