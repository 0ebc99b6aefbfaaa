"""The connections to all routers. What is asked about a client goes to the router that decides for it (`routers`)."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from router.client import RouterGone
from router.events import Event, Lift, Refuse, Snapshot, Swap, WorkerDrain, Workers, WorkerUp
from router.gateway.routing.fleet import Fleet
from router.gateway.routing.link import Link
from router.gateway.routing.merged import merged, merged_workers

Told = TypeVar("Told")


class Links:
    """One `Link` to each router. Belongs to one event loop."""

    def __init__(self, links: Sequence[Link], fleet: Fleet) -> None:
        """`links` are to the routers of `fleet`."""
        self._links = {link.side.router: link for link in links}
        self._fleet = fleet
        for link in links:
            link.changed = self._routers_changed

    async def start(self) -> None:
        """Connects in the background, whether or not routers are there yet."""
        for link in self._links.values():
            link.start()

    async def close(self) -> None:
        """Closes all; messages sent just before still leave."""
        for link in self._links.values():
            link.close()

    @property
    def alive(self) -> bool:
        return any(link.alive for link in self._links.values())

    def next(self, client: str, asked: Sequence[str]) -> Link | None:
        """To the router that decides for `client`, but for those in `asked`; None if no other one answers."""
        for name in self._fleet.routers.order(client):
            if name not in asked and self._links[name].alive:
                return self._links[name]
        return None

    def tell(self, router: str | None, event: Event) -> None:
        """Sends an event that needs no answer to one router. It is dropped if there is no connection."""
        if router is not None:
            self._links[router].tell(event)

    def order(self, event: WorkerUp | WorkerDrain) -> None:
        """Tells all routers of an operator's wish, those that do not answer as soon as they do."""
        for router in self._fleet.order(event):
            self._links[router].tell(event)

    def report_health(self) -> None:
        """Tells each router of the workers whose health it sees differently."""
        for link in self._links.values():
            for event in link.side.health():
                link.tell(event)

    async def snapshot(self) -> dict[str, object]:
        """The routers' state. Of several it is their sum. Raises `RouterGone` if none answers."""
        return merged(await self._of_all(lambda link: link.snapshot()))

    async def explain(self, request: str, client: str | None) -> tuple[dict[str, object], ...]:
        """What routers remember of a request, by its name or an attempt's id. Raises `RouterGone` if none answers."""
        found = await self._of_all(lambda link: link.explain(request, client))
        return tuple(placement for placements in found for placement in placements)

    async def set_limits(self, rules: bytes) -> Snapshot | Refuse:
        """Replaces the rules of throttling, in JSON, at all routers. The state then, or what the first one has against
        them. Routers that do not answer are told when they do. Raises `RouterGone` if none answers."""
        at_s = time.time()
        answers = await self._of_all(lambda link: link.set_limits(rules, at_s))
        for answer in answers:
            if isinstance(answer, Refuse):
                return answer
        return Snapshot("", merged([one.state for one in answers if isinstance(one, Snapshot)]))

    async def lift(self, client: str) -> bool:
        """Ends the quarantine of a client at all routers; whether it was in one. Raises `RouterGone` if none
        answers."""
        answers = await self._of_all(lambda link: link.order(Lift("", client)))
        return any(isinstance(answer, Snapshot) for answer in answers)

    async def swap(self, worker: str, model: str) -> Snapshot | Refuse:
        """Has a worker load another model: its agent is one router's. The state then, or why that cannot be. Raises
        `RouterGone` if none answers."""
        answers = await self._of_all(lambda link: link.order(Swap("", worker, model)))
        return next((answer for answer in answers if isinstance(answer, Snapshot)), answers[0])

    async def workers(self) -> Workers:
        """The workers, as they are after every event told before. Raises `RouterGone` if no router answers."""
        return merged_workers(await self._of_all(lambda link: link.workers()))

    def state(self) -> list[dict[str, object]]:
        counted = self._fleet.counted_by()
        return [
            {"address": name, "state": self._fleet.routers.state(name), "in_flight": counted[name]}
            for name in self._links
        ]

    async def _of_all(self, ask: Callable[[Link], Coroutine[Any, Any, Told]]) -> list[Told]:
        """What the routers answer that do. Raises the first `RouterGone` if none does."""
        living = [link for link in self._links.values() if link.alive]
        if not living:
            raise RouterGone(f"no router answers at {', '.join(self._links)}")
        found = await asyncio.gather(*map(ask, living), return_exceptions=True)
        came = [one for one in found if not isinstance(one, BaseException)]
        for error in found:
            if isinstance(error, BaseException) and (not came or not isinstance(error, RouterGone)):
                raise error
        return came

    def _routers_changed(self) -> None:
        """Clients go to other routers than before: these take over what is under way."""
        if len(self._links) == 1:
            return
        for link in self._links.values():
            if link.alive:
                for event in link.side.takeover():
                    link.tell(event)
                link.compare()
