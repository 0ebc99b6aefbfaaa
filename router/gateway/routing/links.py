"""The connections to all routers. Where a request goes is decided by its client's router (`routers`), or the next one;
while none answers, by the gateway (`routers.choose`).

Lost reports are found by comparing tables with each router: as soon as one answers, and every `COMPARE_S`. Each
comparison also says which requests the router still holds."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from router.client import RouterClient, RouterGone
from router.events import (
    Answer,
    Arrive,
    Cut,
    Difference,
    Done,
    Due,
    Event,
    Explain,
    Explained,
    Follow,
    Lift,
    Place,
    Progress,
    Query,
    Question,
    Refuse,
    SetLimits,
    Snapshot,
    Swap,
    WorkerDrain,
    Workers,
    WorkerUp,
)
from router.gateway.metrics import Count
from router.gateway.routing.fleet import Fleet, Side
from router.gateway.routing.merged import merged, merged_workers
from sglang_fair.common.curve import Keys

log = logging.getLogger("gateway")

Kind = TypeVar("Kind", bound=Answer)

COMPARE_S = 5.0


class Link(RouterClient):
    """The gateway's end of one router's wire. Every question raises `RouterGone` if there is no answer."""

    def __init__(self, address: str, timeout_s: float, side: Side, keys: Keys | None = None) -> None:
        """`timeout_s` bounds every question that the router does not hold. `side` keeps what the router says about
        workers."""
        super().__init__(address, keys, on_event=self._take_answer, on_beat=self._beaten)
        self.changed: Callable[[], None] = lambda: None
        """Called when clients come to this router from others, or leave it for them."""
        self.cut: Callable[[str], None] = lambda attempt: None
        """Called with the id of a request that the router wants cut off."""
        self.side = side
        self.timeout_s = timeout_s
        self._compared_s = float("-inf")
        self._compared_life = 0
        self._has_refused = False

    def compare(self) -> None:
        """Asks for the workers, and how the tables of requests differ; both sides are told what they lack."""
        self._compared_s, self._compared_life = time.monotonic(), self.lives
        self.tell(Follow(""))
        self.tell(self.side.table(""))

    def _beaten(self, is_alive: bool) -> None:
        now_s = time.monotonic()
        if self.side.answers(now_s) if is_alive else self.side.lost():
            self.changed()
        is_due = now_s - self._compared_s >= COMPARE_S or self._compared_life != self.lives
        if is_alive and (is_due or not self.side.workers):
            self.compare()

    def _take_answer(self, answer: Answer) -> None:
        if isinstance(answer, Workers):
            self._learn(answer)
        elif isinstance(answer, Difference):
            for event in self.side.settle(answer):
                self.tell(event)
            self.ask_again(answer.held)
        elif isinstance(answer, Cut):
            self.cut(answer.id)

    def _learn(self, workers: Workers) -> None:
        if self.side.plans(workers):
            self.changed()
        if self.side.is_refused and not self._has_refused:
            log.error(
                "the router at %s is refused: it plans the replicas' queues, and another one of --router does "
                "already; only one may",
                self.address,
            )
        self._has_refused = self.side.is_refused
        for event in self.side.learn(workers):
            self.tell(event)


class Links:
    """One `Link` to each router: places requests, and reports their ends. Belongs to one event loop."""

    def __init__(self, links: Sequence[Link], fleet: Fleet, count: Count) -> None:
        """`links` are to the routers of `fleet`."""
        self._links = {link.side.router: link for link in links}
        self._fleet = fleet
        self._count = count
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
        await asyncio.sleep(0)

    @property
    def alive(self) -> bool:
        return any(link.alive for link in self._links.values())

    # -- requests

    async def place(self, arrive: Arrive) -> Place | Refuse:
        """The worker for a request, or a router's refusal. The answer may carry another request id.

        Raises `RouterGone` if no router answers and no worker is known that does.
        """
        asked: list[str] = []
        now_s = asyncio.get_running_loop().time
        while (link := self._next(arrive.client, asked)) is not None:
            router = link.side.router
            asked.append(router)
            self._fleet.ask(arrive, router)
            asked_s = now_s()
            try:
                answer: Place | Refuse = await link.ask(arrive, (Place, Refuse), link.timeout_s)
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

    def progress(self, progress: Progress) -> None:
        """Tells the router that counts it how far a request has come."""
        self._tell(self._fleet.teller(progress.id), progress)

    def end(self, done: Done) -> None:
        """A request has ended at its worker, or is not going to be sent to one."""
        self._tell(self._fleet.end(done), done)

    def moved(self, request: str, worker: str) -> str | None:
        """A request in flight is served by another worker than was chosen: it counts there, and if nobody knows that
        one, nowhere. The worker's address, where it is known."""
        router, running = self._fleet.teller(request), self._fleet.moved(request, worker)
        failed = Done(request, outcome="failed")
        if running is None:
            self.end(failed)
            return None
        self._tell(router, failed)
        self._tell(router, running)
        return self._fleet.workers[worker].url

    def _next(self, client: str, asked: Sequence[str]) -> Link | None:
        """To the router that decides for `client`, but for those in `asked`; None if no other one answers."""
        for name in self._fleet.routers.order(client):
            if name not in asked and self._links[name].alive:
                return self._links[name]
        return None

    def _tell(self, router: str | None, event: Event) -> None:
        if router is not None:
            self._links[router].tell(event)

    # -- for operators; all that ask raise `RouterGone` if no router answers

    def order(self, event: WorkerUp | WorkerDrain) -> None:
        """Tells all routers of an operator's wish, those that do not answer as soon as they do."""
        for router in self._fleet.order(event):
            self._links[router].tell(event)

    async def snapshot(self) -> dict[str, object]:
        """The routers' state. Of several it is their sum."""
        return merged([one.state for one in await self._ask_all(Query(""), Snapshot)])

    async def explain(self, request: str, client: str | None) -> tuple[dict[str, object], ...]:
        """What routers remember of a request, by its name or an attempt's id."""
        found = await self._ask_all(Explain("", request, client), Explained)
        return tuple(placement for one in found for placement in one.placements)

    async def workers(self) -> Workers:
        """The workers, as they are after every event told before."""
        return merged_workers(await self._ask_all(Follow(""), Workers))

    async def set_limits(self, rules: bytes) -> Snapshot | Refuse:
        """Replaces the rules of throttling, in JSON, at all routers. The state then, or what the first one has against
        them. Routers that do not answer are told when they do."""
        answers = await self._ask_all(SetLimits("", rules, time.time()), Snapshot, Refuse)
        with contextlib.suppress(RouterGone):
            await self.workers()  # with the limits, for a router that is restarted
        for answer in answers:
            if isinstance(answer, Refuse):
                return answer
        return Snapshot("", merged([one.state for one in answers if isinstance(one, Snapshot)]))

    async def lift(self, client: str) -> bool:
        """Ends the quarantine of a client at all routers; whether it was in one."""
        answers = await self._ask_all(Lift("", client), Snapshot, Refuse)
        return any(isinstance(answer, Snapshot) for answer in answers)

    async def swap(self, worker: str, model: str) -> Snapshot | Refuse:
        """Has a worker load another model: its agent is one router's. The state then, or why that cannot be."""
        answers: list[Snapshot | Refuse] = await self._ask_all(Swap("", worker, model), Snapshot, Refuse)
        return next((answer for answer in answers if isinstance(answer, Snapshot)), answers[0])

    def state(self) -> list[dict[str, object]]:
        counted = self._fleet.counted_by()
        return [
            {"address": name, "state": self._fleet.routers.state(name), "in_flight": counted[name]}
            for name in self._links
        ]

    async def _ask_all(self, question: Question, *kinds: type[Kind]) -> list[Kind]:
        """What the routers answer that do. Raises the first `RouterGone` if none does."""
        living = [link for link in self._links.values() if link.alive]
        if not living:
            raise RouterGone(f"no router answers at {', '.join(self._links)}")
        asking = (link.ask(question, kinds, link.timeout_s) for link in living)
        found = await asyncio.gather(*asking, return_exceptions=True)
        came = [one for one in found if not isinstance(one, BaseException)]
        for error in found:
            if isinstance(error, BaseException) and (not came or not isinstance(error, RouterGone)):
                raise error
        return came

    # -- what changes

    def report_health(self) -> None:
        """Tells each router of the workers whose health it sees differently."""
        for link in self._links.values():
            for event in link.side.health():
                link.tell(event)

    def _routers_changed(self) -> None:
        """Clients go to other routers than before: these take over what is under way."""
        if len(self._links) == 1:
            return
        for link in self._links.values():
            if link.alive:
                for event in link.side.takeover():
                    link.tell(event)
                link.compare()


def _asked_anew(arrive: Arrive, waited_s: float, *, was_let_in: bool) -> Arrive:
    """The question for the next router, in another name: the one that was asked may still place it. What was let in is
    the same call there, and its deadline has come nearer by `waited_s`."""
    due = arrive.due
    if due is not None:
        due = Due.of(due.promise(0.0), waited_s)
    attempt = max(1, arrive.attempt) if was_let_in else arrive.attempt
    return msgspec.structs.replace(arrive, id=uuid.uuid4().hex, attempt=attempt, due=due)
