"""Where a request goes: the router decides; while it does not answer, the gateway does (`fallback`)."""

import logging
import uuid

import msgspec

from router.events import Arrive, Done, Place, Progress, Refuse
from router.gateway.counters import Counters
from router.gateway.routing.fleet import Fleet
from router.gateway.routing.link import Link, RouterGone

log = logging.getLogger("gateway")


class Placer:
    """Places requests and reports their ends. Belongs to one event loop."""

    def __init__(self, link: Link, fleet: Fleet, counters: Counters) -> None:
        self._link = link
        self._fleet = fleet
        self._counters = counters

    async def place(self, arrive: Arrive) -> Place | Refuse:
        """The worker for a request, or the router's refusal. The answer may carry another request id.

        Raises `RouterGone` if no router answers and no worker is known that does.
        """
        if self._link.alive:
            self._fleet.ask(arrive)
            try:
                answer = await self._link.place(arrive)
            except BaseException as error:
                # The router may have placed it all the same. `Done` goes over the same connection, after the
                # question, so it undoes that.
                self.end(Done(arrive.id, outcome="failed"))
                if not isinstance(error, RouterGone):
                    raise
                log.info("request %s: %s", arrive.id, error)
            else:
                if isinstance(answer, Place):
                    self._fleet.begin(arrive, answer, told=True)
                else:
                    self._fleet.refused(arrive.id)
                return answer
            arrive = msgspec.structs.replace(arrive, id=uuid.uuid4().hex)
        place = self._fleet.place(arrive)
        if place is None:
            raise RouterGone("no router answers, and no replica is known that does")
        self._counters.placed_in_fallback += 1
        self._fleet.begin(arrive, place, told=False)
        return place

    def placed_itself(self, request: str) -> bool:
        """Whether this request, which is in flight, was placed without a router."""
        return self._fleet.placed_itself(request)

    def progress(self, progress: Progress) -> None:
        """Tells the router how far a request has come."""
        self._link.tell(progress)

    def end(self, done: Done) -> None:
        """A request has ended at its worker, or is not going to be sent to one."""
        if self._fleet.end(done):
            self._link.tell(done)
