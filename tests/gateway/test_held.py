"""How long a gateway waits for the router: what is held waits while the router lives, for ten minutes and more, and is
placed, refused or given up by its client, and by nothing else. Router core, fleet and links are the real ones;
only the socket between them, and the time, are not."""

import asyncio
import random
import time
import types
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from router import client as client_module
from router.client import RouterGone
from router.core import Router
from router.events import (
    Answer,
    Arrive,
    Difference,
    Done,
    Due,
    Held,
    Place,
    Refuse,
    Table,
    Workers,
    WorkerUp,
    decode_event,
    encode,
)
from router.gateway.routing import links as link_module
from router.gateway.routing.fleet import Fleet
from router.gateway.routing.links import Link, Links
from router.placement import build
from router.throttling import Throttling
from router.wire import HEARTBEAT, HEARTBEAT_ANSWER
from sglang_fair.core.throttle import Rules
from tests.support.budget import examples
from tests.support.virtual_time import VirtualLoop

TIMEOUT_S = 5.0
LONG_S = 900.0
PEER = b"g"
HELD_UP = Due("batch-2", 3600.0, 3600.0)


@dataclass
class Wire:
    """The router's end, without a socket. `loses` says of each message, to and fro, whether it is lost."""

    core: Router
    loses: Callable[[object], bool] = lambda message: False
    heard: list[object] = field(default_factory=list)
    link: "DirectLink | None" = None
    run_name: str = "first"
    is_silent: bool = False

    def send(self, message: bytes) -> None:
        assert self.link is not None
        if message == HEARTBEAT:
            if not self.is_silent:
                self.link.later(HEARTBEAT_ANSWER)
            return
        event = decode_event(message)
        if not self.loses(event):
            self.heard.append(event)
            self.tell(event)

    def answer(self, answer: Answer) -> None:
        assert self.link is not None
        if isinstance(answer, Workers):
            answer = Workers(answer.id, answer.workers, answer.draining, answer.sick, self.run_name)
        if not self.loses(answer):
            self.link.later(encode(answer))

    def tell(self, event: Any) -> None:
        for _, answer in self.core.handle(event, asyncio.get_running_loop().time(), PEER):
            self.answer(answer)

    def asked(self, name: str) -> list[Arrive]:
        return [event for event in self.heard if isinstance(event, Arrive) and event.id == name]

    def restart(self, core: Router) -> None:
        """It knows nothing any more."""
        self.core, self.run_name = core, self.run_name + "+"


class DirectLink(Link):
    """A link without a socket."""

    def __init__(self, wire: Wire, fleet: Fleet) -> None:
        super().__init__("nowhere", TIMEOUT_S, fleet.side())
        self._wire = wire
        wire.link = self

    def start(self) -> None:
        self._beating = asyncio.create_task(self._beat())

    def _send(self, message: bytes) -> bool:
        self._wire.send(message)
        return True

    def later(self, message: bytes) -> None:
        asyncio.get_running_loop().call_later(0.001, self._take, message)


@pytest.fixture
def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    return VirtualLoop


@pytest.fixture(autouse=True)
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = types.SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    for module in (client_module, link_module):
        monkeypatch.setattr(module, "time", patched)


def full(slots: int = 1, **options: Any) -> Router:
    """A router whose only worker takes so many requests at a time."""
    made = Router(build("centralized_dlpm", slots=slots), **options)
    made.handle(WorkerUp("r0", "http://r0", models=("a",), loaded="a"), 0.0)
    return made


@asynccontextmanager
async def gateway(core: Router) -> AsyncIterator[tuple[Wire, Links, Link]]:
    wire, fleet = Wire(core), Fleet(lambda name: True)
    made = DirectLink(wire, fleet)
    made.start()
    await asyncio.sleep(0.1)
    assert made.alive
    assert fleet.workers
    yield wire, Links([made], fleet, Mock()), made
    made.close()


def stand_still(seconds: float) -> None:
    """As a process that is stopped: the time passes, and nobody has done anything."""
    asyncio.get_running_loop()._passing.now_s += seconds  # type: ignore[attr-defined]


def ask(placer: Links, name: str, **more: Any) -> "asyncio.Task[Place | Refuse]":
    return asyncio.create_task(placer.place(Arrive(name, "c", b"", model="a", **more)))


async def test_a_queue_of_a_quarter_of_an_hour() -> None:
    async with gateway(full()) as (wire, placer, _):
        assert isinstance(await ask(placer, "1"), Place)
        waiting = [ask(placer, f"w{number}", due=HELD_UP) for number in range(20)]
        await asyncio.sleep(LONG_S)
        assert not any(task.done() for task in waiting)
        assert all(len(wire.asked(f"w{number}")) == 1 for number in range(20)), "a prompt is sent once"
        placer.end(Done("1"))
        for number, task in enumerate(waiting):
            place = await task
            assert isinstance(place, Place)
            assert place.worker == "r0"
            assert place.due is not None
            assert abs(place.due.left_s - (3600.0 - LONG_S)) < 0.1, "the time in the queue counts"
            placer.end(Done(f"w{number}"))


async def test_a_gateway_that_stood_still_takes_no_router_for_dead() -> None:
    async with gateway(full()) as (_, placer, link):
        await ask(placer, "1")
        second = ask(placer, "2")
        await asyncio.sleep(1.0)
        for _ in range(3):
            stand_still(3 * client_module.SILENT_S)
            assert link.alive
            await asyncio.sleep(1.0)
        assert not second.done()
        placer.end(Done("1"))
        assert (await second).id == "2"


async def test_who_was_let_in_is_not_throttled_after_a_restart() -> None:
    """The router that follows knows nothing of the ten minutes; what it hears is a further attempt at a call."""

    def throttled() -> Router:
        return full(throttling=Throttling("rpm", Rules(user=2)))

    async with gateway(throttled()) as (wire, placer, _):
        await ask(placer, "1")
        second = ask(placer, "2", due=HELD_UP)
        await asyncio.sleep(LONG_S)
        wire.restart(throttled())
        for number in range(2):  # the new router has let as many in as it does in a minute
            wire.core.handle(Arrive(f"x{number}", "c", b"", model="a"), LONG_S, b"other")
        await asyncio.sleep(30.0)
        assert not second.done()
        assert [event.attempt for event in wire.asked("2")] == [0, 1]
        again = wire.asked("2")[-1]
        assert again.due is not None
        assert 3600.0 - LONG_S - 30.0 < again.due.left_s < 3600.0 - LONG_S, (
            "what is left when it is asked again"
        )
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)


async def test_a_router_that_dies_changes_no_deadline() -> None:
    """What the gateway places by itself after ten minutes is due when it was."""
    async with gateway(full()) as (wire, placer, _):
        await ask(placer, "1")
        second = ask(placer, "2", due=HELD_UP)
        await asyncio.sleep(LONG_S)
        wire.loses = lambda message: True
        wire.is_silent = True
        place = await second
        assert isinstance(place, Place)
        assert (place.worker, place.id == "2") == ("r0", False)
        assert place.due is None, "the gateway has not forgotten what it promised"


@pytest.mark.parametrize("held", [False, True])
async def test_a_router_of_before_that_says_nothing_is_given_up(held: bool) -> None:
    """It has no `Held`, and answers only when it has a place. It may follow one that has."""
    async with gateway(full()) as (wire, _, link):
        wire.loses = lambda message: isinstance(message, Held | Place | Difference)
        asking = asyncio.create_task(link.ask(Arrive("1", "c", b""), (Place, Refuse), link.timeout_s))
        await asyncio.sleep(0.5)
        if held:
            link.later(encode(Held("1")))
            await asyncio.sleep(LONG_S)
            assert not asking.done()
            link.later(encode(Difference("", (), ())))
        with pytest.raises(RouterGone, match="no answer from the router within"):
            await asking
        assert len(wire.asked("1")) > 1


async def test_what_is_told_arrives_before_what_is_asked_later() -> None:
    """Ends that are told together with the next question leave before it; those that nobody follows leave all the
    same, also of a link that is being closed."""
    async with gateway(full(slots=100)) as (wire, placer, link):
        wire.heard.clear()
        names = []
        for number in range(20):
            for told in range(number % 3):
                link.tell(Done(f"{number}.{told}"))
                names.append(f"{number}.{told}")
            await ask(placer, f"q{number}")
            names.append(f"q{number}")
        link.tell(Done("alone"))
        await asyncio.sleep(0.1)
        heard = [event.id for event in wire.heard if isinstance(event, Done | Arrive)]
        assert heard == [*names, "alone"]
        link.tell(Done("last"))
    assert wire.heard[-1] == Done("last")


def test_what_was_told_last_leaves_through_a_real_socket() -> None:
    async def main() -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
            port = router.bind_to_random_port("tcp://127.0.0.1")
            link = Link(f"tcp://127.0.0.1:{port}", TIMEOUT_S, Fleet(lambda name: True).side())
            link.start()
            await router.recv_multipart()
            link.tell(Done("last"))
            link.close()
            heard = b""
            while heard in (b"", HEARTBEAT):
                _, heard = await router.recv_multipart()
            assert decode_event(heard) == Done("last")

    with pytest.MonkeyPatch.context() as patch:
        for module in (client_module, link_module):
            patch.setattr(module, "time", time)
        asyncio.run(main())


def _losses(seed: int, part: float) -> Callable[[object], bool]:
    rng = random.Random(seed)
    losable = (Arrive, Held, Place, Refuse, Difference, Table, Done)
    return lambda message: isinstance(message, losable) and rng.random() < part


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32),
    part=st.sampled_from([0.0, 0.1, 0.5]),
    restarts=st.lists(st.floats(1.0, 1.2 * LONG_S), max_size=3),
    leaves=st.sets(st.integers(0, 4)),
    lasts=st.floats(620.0, 1.5 * LONG_S),
)
async def test_whatever_is_lost_who_waits_is_placed_in_the_end(
    seed: int, part: float, restarts: list[float], leaves: set[int], lasts: float
) -> None:
    loop = asyncio.get_running_loop()

    async def waits(number: int) -> None:
        place = await ask(placer, f"w{number}", due=HELD_UP)
        assert isinstance(place, Place), place
        assert part or place.id == f"w{number}", "the router lives, and so it is who decides"
        loop.call_later(1.0, placer.end, Done(place.id))

    async with gateway(full()) as (wire, placer, _):
        assert isinstance(await ask(placer, "1"), Place)
        wire.loses = _losses(seed, part)
        for at_s in restarts:
            loop.call_at(at_s, lambda: wire.restart(full()))
        waiting = [asyncio.create_task(waits(number)) for number in range(5)]
        loop.call_at(lasts, placer.end, Done("1"))
        for number in leaves:
            loop.call_at(lasts / 2, waiting[number].cancel)
        async with asyncio.timeout_at(10 * LONG_S):
            await asyncio.gather(*(task for at, task in enumerate(waiting) if at not in leaves))
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.sleep(2.0)
        state = wire.core.state()
        assert part or state["in_flight"] == state["waiting"] == 0, "who leaves withdraws what is held"
