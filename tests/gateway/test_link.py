"""How long a gateway waits for the router: a question that is held waits while a router lives, and is never lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from router.core import Router
from router.events import (
    Arrive,
    Difference,
    Done,
    Event,
    Follow,
    Held,
    Place,
    Table,
    Workers,
    WorkerUp,
    decode_event,
    encode,
)
from router.gateway.counters import Counters
from router.gateway.routing import link as link_module
from router.gateway.routing.fleet import Fleet
from router.gateway.routing.link import Link, RouterGone
from router.gateway.routing.links import Links
from router.gateway.routing.placer import Placer
from router.placement import build
from router.wire import HEARTBEAT, HEARTBEAT_ANSWER
from tests.support.waiting import eventually

TIMEOUT_S = 2.0
"""What is held must outlive it."""


class Wire:
    """The router's end of the wire. `core` decides, unless a test takes its answers away."""

    def __init__(self, core: Router | None) -> None:
        self.core = core
        self.heard: list[Event] = []
        self.lose: Callable[[object], bool] = lambda answer: False
        """Whether an answer is lost on its way."""
        self.lives = True
        self._peer = b""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._task = asyncio.create_task(self._serve())

    async def say(self, answer: object) -> None:
        await self._socket.send_multipart([self._peer, encode(answer)])  # type: ignore[arg-type]

    def asked(self, name: str) -> int:
        """How often request `name` has been asked about."""
        return sum(isinstance(event, Arrive) and event.id == name for event in self.heard)

    async def _serve(self) -> None:
        while True:
            self._peer, message = await self._socket.recv_multipart()
            if not self.lives:
                continue
            if message == HEARTBEAT:
                await self._socket.send_multipart([self._peer, HEARTBEAT_ANSWER])
                continue
            event = decode_event(message)
            self.heard.append(event)
            if self.core is not None:
                for _, answer in self.core.handle(event, 0.0, self._peer):
                    if not self.lose(answer):
                        await self.say(answer)
            elif isinstance(event, Follow):
                await self.say(Workers("", (WorkerUp("r0", "http://r0"),)))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close(0)
        self._context.term()


def full() -> Router:
    """A router whose only worker takes one request at a time."""
    made = Router(build("centralized_dlpm", slots=1))
    made.handle(WorkerUp("r0", "http://r0"), 0.0)
    return made


@asynccontextmanager
async def gateway(core: Router | None) -> AsyncIterator[tuple[Wire, Placer, Link]]:
    wire, fleet = Wire(core), Fleet(lambda name: True)
    made = Link(wire.address, TIMEOUT_S, fleet.side())
    await made.start()
    try:
        await eventually(lambda: made.alive and fleet.workers, "the router answers")
        yield wire, Placer(Links([made], fleet), fleet, Counters()), made
    finally:
        await made.close()
        await wire.close()


def run(body: Callable[[Wire, Placer, Link], Awaitable[None]], core: Router | None) -> None:
    async def main() -> None:
        async with gateway(core) as made:
            await body(*made)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons come fast, and a machine that is busy for a while is no dead router."""
    monkeypatch.setattr(link_module, "COMPARE_S", 0.1)
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(link_module, "ASK_AGAIN_S", 0.3)
    monkeypatch.setattr(link_module, "SILENT_S", TIMEOUT_S)


def ask(placer: Placer, name: str) -> "asyncio.Task[object]":
    return asyncio.create_task(placer.place(Arrive(name, "c", b"")))


async def compared(wire: Wire, times: int) -> None:
    """That many more comparisons have come."""
    tables = sum(isinstance(event, Table) for event in wire.heard) + times
    await eventually(lambda: sum(isinstance(e, Table) for e in wire.heard) >= tables, "comparisons")


def test_what_is_held_waits_while_the_router_lives() -> None:
    async def body(wire: Wire, placer: Placer, link: Link) -> None:
        assert await ask(placer, "1") == Place("1", "r0", "http://r0", 0)
        second = ask(placer, "2")
        await eventually(lambda: "2" in link._waiting and link._waiting["2"].is_held, "it is held")
        asked = wire.asked("2")
        await asyncio.sleep(1.5 * TIMEOUT_S)
        await compared(wire, 5)
        assert not second.done()
        assert wire.asked("2") == asked, "what is held is not asked again: it may be long"
        placer.end(Done("1"))
        assert await second == Place("2", "r0", "http://r0", 0)

    run(body, full())


def test_a_gateway_that_stood_still_takes_no_router_for_dead() -> None:
    async def body(wire: Wire, placer: Placer, link: Link) -> None:
        await ask(placer, "1")
        second = ask(placer, "2")
        await eventually(lambda: "2" in link._waiting and link._waiting["2"].is_held, "it is held")
        for _ in range(3):
            time.sleep(1.5 * TIMEOUT_S)  # the loop, and with it the router's end, stand still
            assert link.alive
            await compared(wire, 1)
        assert not second.done()
        placer.end(Done("1"))
        assert await second == Place("2", "r0", "http://r0", 0)

    run(body, full())


def test_a_router_that_dies_does_not_keep_what_it_held() -> None:
    async def body(wire: Wire, placer: Placer, link: Link) -> None:
        await ask(placer, "1")
        second = ask(placer, "2")
        await eventually(lambda: wire.asked("2"), "it is asked")
        wire.lives = False
        placed = await second
        assert isinstance(placed, Place)
        assert (placed.worker, placed.id == "2") == ("r0", False), "the gateway has placed it by itself"

    run(body, full())


def test_a_router_that_was_started_anew_is_asked_again() -> None:
    async def body(wire: Wire, placer: Placer, link: Link) -> None:
        await ask(placer, "1")
        second = ask(placer, "2")
        await eventually(lambda: "2" in link._waiting and link._waiting["2"].is_held, "it is held")
        asked, wire.core = wire.asked("2"), full()
        await eventually(lambda: wire.asked("2") > asked, "it is asked again")
        await eventually(lambda: wire.core and wire.core.state()["waiting"] == 1, "it is held again")
        placer.end(Done("1"))
        assert await second == Place("2", "r0", "http://r0", 0)

    run(body, full())


@pytest.mark.parametrize("lost", [Held, Place])
def test_an_answer_that_was_lost_is_asked_for(lost: type) -> None:
    async def body(wire: Wire, placer: Placer, link: Link) -> None:
        await ask(placer, "1")
        losses = 0

        def lose(answer: object) -> bool:
            nonlocal losses
            losses += isinstance(answer, lost)
            return isinstance(answer, lost) and losses == 1

        wire.lose = lose
        second = ask(placer, "2")
        await eventually(lambda: wire.asked("2"), "it is asked")
        placer.end(Done("1"))
        assert await second == Place("2", "r0", "http://r0", 0)
        assert wire.core is not None
        assert wire.core.state()["in_flight"] == 1

    run(body, full())


def test_a_client_that_leaves_withdraws_what_is_held() -> None:
    async def body(wire: Wire, placer: Placer, link: Link) -> None:
        await ask(placer, "1")
        second = ask(placer, "2")
        core = wire.core
        assert core is not None
        await eventually(lambda: core.state()["waiting"] == 1, "it waits")
        await compared(wire, 1)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await eventually(lambda: core.state()["waiting"] == 0, "it waits no more")

    run(body, full())


def test_a_router_of_before_that_says_nothing_is_given_up() -> None:
    """It has no `Held`, and answers only when it has a place."""

    async def body(wire: Wire, placer: Placer, link: Link) -> None:
        with pytest.raises(RouterGone, match="no answer from the router within"):
            await link.place(Arrive("1", "c", b""))
        assert wire.asked("1") > 1

    run(body, None)


def test_a_router_of_before_that_follows_one_that_held_is_given_up() -> None:
    async def body(wire: Wire, placer: Placer, link: Link) -> None:
        asking = asyncio.create_task(link.place(Arrive("1", "c", b"")))
        await eventually(lambda: wire.asked("1"), "it is asked")
        await wire.say(Held("1"))
        await asyncio.sleep(1.5 * TIMEOUT_S)
        assert not asking.done()
        await wire.say(Difference("", (), ()))
        with pytest.raises(RouterGone):
            await asking

    run(body, None)


def test_what_is_told_arrives_before_what_is_asked_later() -> None:
    """Ends that are told together with the next question leave before it; those that nobody follows leave all the
    same, also of a link that is being closed."""

    async def body(wire: Wire, placer: Placer, link: Link) -> None:
        for number in range(20):
            for told in range(number % 3):
                link.tell(Done(f"{number}.{told}"))
            await placer.place(Arrive(f"q{number}", "c", b""))
        link.tell(Done("alone"))
        names = [f"{number}.{told}" for number in range(20) for told in range(number % 3)]

        def of(event: Event) -> str:
            return event.id if isinstance(event, Done | Arrive) else ""

        await eventually(lambda: "alone" in map(of, wire.heard), "it was told")
        heard = [of(event) for event in wire.heard]
        for name in names:
            assert heard.index(name) < heard.index(f"q{name.split('.')[0]}")
        assert [name for name in heard if name in names] == names
        link.tell(Done("last"))
        await link.close()
        await eventually(lambda: "last" in map(of, wire.heard), "it was told before the end")

    core = Router(build("centralized_dlpm", slots=100))
    core.handle(WorkerUp("r0", "http://r0"), 0.0)
    run(body, core)
