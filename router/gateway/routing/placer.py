"""Where a request goes: its client's router decides, or the next one; while none answers, the gateway does."""

import asyncio
import logging
import uuid

import msgspec

from router.client import RouterGone
from router.events import Arrive, Done, Due, Place, Progress, Refuse
from router.gateway.metrics import Count
from router.gateway.routing.fleet import Fleet
from router.gateway.routing.links import Links

log = logging.getLogger("gateway")


class Placer:
    """Places requests and reports their ends. Belongs to one event loop."""

    def __init__(self, links: Links, fleet: Fleet, count: Count) -> None:
        self._links = links
        self._fleet = fleet
        self._count = count

    async def place(self, arrive: Arrive) -> Place | Refuse:
        """The worker for a request, or a router's refusal. The answer may carry another request id.

        Raises `RouterGone` if no router answers and no worker is known that does.
        """
        asked: list[str] = []
        now_s = asyncio.get_running_loop().time
        while (link := self._links.next(arrive.client, asked)) is not None:
            router = link.side.router
            asked.append(router)
            self._fleet.ask(arrive, router)
            asked_s = now_s()
            try:
                answer = await link.place(arrive)
            except BaseException as error:
                # The router may have placed it all the same. `Done` goes over the same connection, after the
                # question, so it undoes that.
                self.end(Done(arrive.id, outcome="failed"))
                if not isinstance(error, RouterGone):
                    raise
                log.info("request %s: %s", arrive.id, error)
                arrive = _asked_anew(arrive, now_s() - asked_s, was_let_in=error.was_held)
                continue
            if isinstance(answer, Place):
                self._fleet.begin(arrive, answer, router)
            else:
                self._fleet.refused(arrive.id)
            return answer
        place = self._fleet.place(arrive)
        if place is None:
            raise RouterGone("no router answers, and no replica is known that does")
        self._count("fallback_placements_total")
        self._fleet.begin(arrive, place, None)
        return place

    def placed_itself(self, request: str) -> bool:
        return self._fleet.placed_itself(request)

    def progress(self, progress: Progress) -> None:
        self._links.tell(self._fleet.teller(progress.id), progress)

    def end(self, done: Done) -> None:
        self._links.tell(self._fleet.end(done), done)


def _asked_anew(arrive: Arrive, waited_s: float, *, was_let_in: bool) -> Arrive:
    """The question for the next router, in another name: the one that was asked may still place it. What was let in is
    the same call there, and its deadline has come nearer by `waited_s`."""
    due = arrive.due
    if due is not None:
        due = Due.of(due.promise(0.0), waited_s)
    attempt = max(1, arrive.attempt) if was_let_in else arrive.attempt
    return msgspec.structs.replace(arrive, id=uuid.uuid4().hex, attempt=attempt, due=due)
