"""What dies or hangs, and what its clients notice: real processes, kill -9, SIGSTOP.

The engines are stand-ins, so that the right answer of every request is known.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.site import QUANTUM, Seen, Site
from tests.support.stand_in import make_tokenizer
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

KINDS = ("chat", "completions", "generate")
FAST = ("--health-timeout", "3")
"""For a replica that hangs. One that dies breaks its connections."""
LENGTH = 60
HELD = 20
"""So many tokens streams have at most until their replicas are told to go on."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run(site: Site, body: Callable[[Site], Awaitable[None]], *, start: bool = True) -> None:
    async def main() -> None:
        async with site:
            if start:
                await site.start()
            await body(site)

    asyncio.run(main())


class Streams:
    """Twelve greedy streams of all kinds under way, four a kind, of three clients."""

    def __init__(self, site: Site, gateway: int = 0) -> None:
        self.site = site
        self.seen: list[tuple[str, str, Seen]] = []
        self.tasks: list[asyncio.Task[Seen]] = []
        for number in range(12):
            kind, prompt, seen = KINDS[number % 3], f"prompt {number}", Seen()
            self.seen.append((kind, prompt, seen))
            ask = site.stream(kind, prompt, LENGTH, seen, client=f"c{number % 3}", gateway=gateway)
            self.tasks.append(asyncio.create_task(ask))

    async def under_way(self, events: int = 8) -> None:
        await eventually(lambda: all(s.events >= events for _, _, s in self.seen), "all streams have begun")

    async def end_well(self) -> None:
        """Each client has read its whole answer, once."""
        await asyncio.gather(*self.tasks)
        for kind, prompt, seen in self.seen:
            assert (seen.status, seen.error, seen.ended) == (200, "", True), seen
            assert seen.text == self.site.expected(kind, prompt, LENGTH)
            assert seen.finish == ["length"]
            assert seen.completion_tokens == LENGTH


def charged(state: dict[str, Any]) -> float:
    """What all clients together were charged."""
    return sum(QUANTUM - credit for row in state["deficits"].values() for credit in row.values())


# -- replicas


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_streams_of_a_replica_that_dies_or_hangs_go_on_elsewhere(tokenizer: Path, fault: str) -> None:
    async def body(site: Site) -> None:
        await site.hold(HELD)
        streams = Streams(site)
        await streams.under_way()
        lost = sum(seen.worker == "r0" for _, _, seen in streams.seen)
        assert 0 < lost < 12
        getattr(site.replicas["r0"], fault)()
        await site.hold(None, "r1")
        await streams.end_well()
        state = await site.quiet()
        assert state["gateway"]["resumed"] == lost
        assert state["counts"]["ended aborted"] == lost
        assert state["counts"]["ended ok"] == 12
        counts = state["counts"]
        assert charged(state) == counts["input_tokens"] + 2 * counts["output_tokens"]
        assert counts["output_tokens"] >= 12 * LENGTH
        await eventually(lambda: _is(site, "r0", "sick"), "the router knows")
        before = (await site.state())["workers"]["r0"]["dispatched"]
        assert [await site.whole(f"new {n}", 3) for n in range(4)] == [
            (200, site.expected("completions", f"new {n}", 3)) for n in range(4)
        ]
        assert (await site.state())["workers"]["r0"]["dispatched"] == before
        site.replicas["r0"].start() if fault == "kill" else site.replicas["r0"].go_on()
        await eventually(site.all_up, "it is taken back")
        assert {(await site.whole(f"more {n}", 3))[0] for n in range(8)} == {200}
        assert (await site.quiet())["workers"]["r0"]["dispatched"] > before
        if fault == "pause":
            await eventually(lambda: _idle(site, "r0"), "it works for nobody who has left")

    run(Site(tokenizer, gateway_options=FAST if fault == "pause" else ()), body)


# -- the router


def test_requests_are_served_while_the_router_is_dead_and_counted_when_it_is_back(tokenizer: Path) -> None:
    async def body(site: Site) -> None:
        await site.hold(HELD)
        streams = Streams(site)
        await streams.under_way(2)
        site.router.kill()
        await eventually(lambda: _fallback_is(site, True), "the gateway misses the router")
        answers = await asyncio.gather(*(site.whole(f"w{n}", 5, client=f"c{n}") for n in range(12)))
        assert answers == [(200, site.expected("completions", f"w{n}", 5)) for n in range(12)]
        more = Streams(site)
        await more.under_way(2)
        site.router.start()

        async def all_are_counted() -> bool:
            state = await site.state()
            return state["in_flight"] == state.get("counts", {}).get("taken over", 0) == 24

        await eventually(all_are_counted, "it counts what is in flight")
        state = await site.state()
        assert sum(worker["in_flight"] for worker in state["workers"].values()) == state["in_flight"]
        await site.hold(None)
        await streams.end_well()
        await more.end_well()
        state = await site.quiet()
        assert state["counts"]["ended ok"] == 24
        assert not state["gateway"]["failed"]

    run(Site(tokenizer, gateway_options=("--health-timeout", "120")), body)


def test_no_order_of_starting_matters(tokenizer: Path) -> None:
    async def body(site: Site) -> None:
        site.gateways[0].start()
        await eventually(lambda: site.http.get(site.gateway_urls[0] + "/health"), "the gateway listens")
        assert (await site.whole("w", 3))[0] == 503
        site.router.start()
        await eventually(lambda: _fallback_is(site, False), "the router answers")
        for process in site.replicas.values():
            process.start()
        await site.ready()
        streams = Streams(site)
        await streams.end_well()
        await site.quiet()

    run(Site(tokenizer, step_s=0.001), body, start=False)


# -- gateways


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_nobody_works_for_a_gateway_that_is_gone(tokenizer: Path, fault: str) -> None:
    async def body(site: Site) -> None:
        await site.hold(HELD)
        streams, others = Streams(site, gateway=0), Streams(site, gateway=1)
        await streams.under_way()
        await others.under_way()
        getattr(site.gateways[0], fault)()
        if fault == "kill":
            assert all(
                isinstance(one, Exception)
                for one in await asyncio.gather(*streams.tasks, return_exceptions=True)
            )
            await eventually(lambda: _running(site, 12), "the replicas work for the other gateway only")
        await site.hold(None)
        await others.end_well()
        state = await site.quiet(gateway=1)
        assert state["counts"]["ended ok"] == 12
        assert state["counts"]["ended aborted"] == 12
        charges = charged(state)
        if fault == "pause":
            site.gateways[0].go_on()
            await streams.end_well()
        await eventually(lambda: _running(site, 0), "the replicas have stopped")
        if fault == "kill":
            work = [(await site.work(name))["output_tokens"] for name in site.replicas]
            assert sum(work) <= 12 * (HELD + LENGTH)
            await asyncio.sleep(10 * site.step_s)
            assert [(await site.work(name))["output_tokens"] for name in site.replicas] == work
            assert charged(await site.state(1)) == charges, "nothing is charged after"

    run(Site(tokenizer, gateways=2, router_options=("--peer-timeout", "3"), gateway_options=FAST), body)


# -- looking


async def _is(site: Site, worker: str, state: str) -> bool:
    return (await site.state())["workers"][worker]["state"] == state


async def _idle(site: Site, worker: str) -> bool:
    return (await site.work(worker))["running"] == 0


async def _running(site: Site, number: int) -> bool:
    return sum([(await site.work(name))["running"] for name in site.replicas]) == number


async def _fallback_is(site: Site, value: bool) -> bool:
    return (await site.state())["gateway"]["fallback"] is value
