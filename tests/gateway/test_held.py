"""A queue of ten minutes and more: what the router holds is placed, refused or given up by its client, and by nothing
else. Router core, placer, fleet and link are the real ones; only the socket between them, and the time, are not."""

import asyncio
import random
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Router
from router.events import (
    Answer,
    Arrive,
    Difference,
    Done,
    Due,
    Follow,
    Held,
    Place,
    Refuse,
    Table,
    Workers,
    WorkerUp,
    decode_event,
    encode,
)
from router.gateway.counters import Counters
from router.gateway.routing import link as link_module
from router.gateway.routing.fleet import Fleet
from router.gateway.routing.link import Link
from router.gateway.routing.links import Links
from router.gateway.routing.placer import Placer
from router.placement import build
from router.throttling import Throttling
from router.wire import HEARTBEAT, HEARTBEAT_ANSWER
from sglang_fair.core.throttle import Limits, Rules
from tests.support.budget import examples
from tests.support.virtual_time import run

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
        if self.loses(event):
            return
        self.heard.append(event)
        for _, answer in self.core.handle(event, asyncio.get_running_loop().time(), PEER):
            self.answer(answer)

    def answer(self, answer: Answer) -> None:
        assert self.link is not None
        if isinstance(answer, Workers):
            answer = Workers(answer.id, answer.workers, answer.draining, answer.sick, self.run_name)
        if not self.loses(answer):
            self.link.later(encode(answer))

    def tell(self, event: Any) -> None:
        """Somebody else tells the router something."""
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
        super().__init__("nowhere", 5.0, fleet.side())
        self._wire = wire
        wire.link = self

    async def start(self) -> None:
        self._beating = asyncio.create_task(self._beat())

    def _send(self, message: bytes) -> bool:
        self._wire.send(message)
        return True

    def later(self, message: bytes) -> None:
        asyncio.get_running_loop().call_later(0.001, self._take, [message])


@pytest.fixture(autouse=True)
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = types.SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(link_module, "time", patched)


def full(**options: Any) -> Router:
    """A router whose only worker takes one request at a time."""
    made = Router(build("centralized_dlpm", slots=1), **options)
    made.handle(WorkerUp("r0", "http://r0", models=("a",), loaded="a"), 0.0)
    return made


async def gateway(wire: Wire) -> tuple[Placer, Link]:
    fleet = Fleet(lambda name: True)
    made = DirectLink(wire, fleet)
    await made.start()
    await asyncio.sleep(0.1)
    assert made.alive
    assert fleet.workers
    return Placer(Links([made], fleet), fleet, Counters()), made


def ask(placer: Placer, name: str, **more: Any) -> "asyncio.Task[Place | Refuse]":
    return asyncio.create_task(placer.place(Arrive(name, "c", b"", model="a", **more)))


def test_a_queue_of_a_quarter_of_an_hour() -> None:
    async def main() -> None:
        wire = Wire(full())
        placer, link = await gateway(wire)
        first = await ask(placer, "1")
        assert isinstance(first, Place)
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
        await link.close()

    run(main())


def test_who_was_let_in_is_not_throttled_after_a_restart() -> None:
    """The router that follows knows nothing of the ten minutes; what it hears is a further attempt at a call."""

    async def main() -> None:
        def throttled() -> Router:
            return full(throttling=Throttling("rpm", Rules(Limits(user=2))))

        wire = Wire(throttled())
        placer, link = await gateway(wire)
        await ask(placer, "1")
        second = ask(placer, "2", due=HELD_UP)
        await asyncio.sleep(LONG_S)
        wire.restart(throttled())
        for number in range(2):  # the new router has let as many in as it does in a minute
            wire.core.handle(Arrive(f"x{number}", "c", b"", model="a", may_hold=True), LONG_S, b"other")
        await asyncio.sleep(30.0)
        assert not second.done()
        assert [event.attempt for event in wire.asked("2")] == [0, 1]
        again = wire.asked("2")[-1]
        assert again.due is not None
        assert 3600.0 - LONG_S - 30.0 < again.due.left_s < 3600.0 - LONG_S, (
            "what is left, when it is asked again"
        )
        placer.end(Done("1"))
        for number in range(2):
            wire.core.handle(Done(f"x{number}"), LONG_S + 31.0, b"other")
        wire.tell(Follow(""))
        await asyncio.sleep(10.0)
        await link.close()
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)

    run(main())


def test_a_router_that_dies_changes_no_deadline() -> None:
    """What the gateway places by itself after ten minutes is due when it was."""

    async def main() -> None:
        wire = Wire(full())
        placer, link = await gateway(wire)
        await ask(placer, "1")
        second = ask(placer, "2", due=HELD_UP)
        await asyncio.sleep(LONG_S)
        wire.loses = lambda message: True
        wire.is_silent = True
        place = await second
        assert isinstance(place, Place)
        assert (place.worker, place.id == "2") == ("r0", False)
        assert place.due is None, "the gateway has not forgotten what it promised"
        await link.close()

    run(main())


def _losses(seed: int, part: float) -> Callable[[object], bool]:
    rng = random.Random(seed)
    losable = (Arrive, Held, Place, Refuse, Difference, Table, Done)
    return lambda message: isinstance(message, losable) and rng.random() < part


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32),
    part=st.sampled_from([0.0, 0.1, 0.5]),
    restarts=st.lists(st.floats(1.0, 1.2 * LONG_S), max_size=3),
    leaves=st.sets(st.integers(0, 4)),
    lasts=st.floats(620.0, 1.5 * LONG_S),
)
def test_whatever_is_lost_who_waits_is_placed_in_the_end(
    seed: int, part: float, restarts: list[float], leaves: set[int], lasts: float
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        wire = Wire(full())
        placer, link = await gateway(wire)
        first = await ask(placer, "1")
        assert isinstance(first, Place)
        wire.loses = _losses(seed, part)
        for at_s in restarts:
            loop.call_at(at_s, lambda: wire.restart(full()))
        waiting = {number: ask(placer, f"w{number}", due=HELD_UP) for number in range(5)}
        loop.call_at(lasts, placer.end, Done("1"))
        for number in leaves:
            loop.call_at(lasts / 2, waiting[number].cancel)
        served: set[int] = set()
        while len(served) < len(waiting) - len(leaves):
            done = [
                number
                for number, task in waiting.items()
                if number not in served and task.done() and not task.cancelled()
            ]
            for number in done:
                place = waiting[number].result()
                assert isinstance(place, Place), place
                assert part or place.id == f"w{number}", "the router lives, and so it is who decides"
                served.add(number)
                loop.call_later(1.0, placer.end, Done(place.id))
            await asyncio.sleep(0.5)
            assert loop.time() < 10 * LONG_S, f"who waits: {set(waiting) - served - leaves}"
        await asyncio.gather(*waiting.values(), return_exceptions=True)
        await link.close()

    run(main())
