"""What dies, hangs, lies or is cut off, and what its clients notice: real processes, kill -9, SIGSTOP, bad wires.

The engines are stand-ins but for the last tests, so that the right answer of every request is known.
"""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil
import pytest
import zmq
import zmq.asyncio

from tests.support.live import Cluster, command_line
from tests.support.ports import free_port
from tests.support.site import QUANTUM, Seen, Site, read, request
from tests.support.stand_in import make_tokenizer
from tests.support.waiting import eventually, wait_until

pytestmark = pytest.mark.slow

KINDS = ("chat", "completions", "generate")
FAST = ("--health-timeout", "5")
"""For a replica that hangs. One that dies breaks its connections."""
REAL_LENGTH = 1000
REAL_START_S = 500.0
"""For a replica that was killed to serve again, on however busy a machine."""
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


def test_sampled_streams_go_on_elsewhere_and_whole_answers_are_asked_for_again(tokenizer: Path) -> None:
    """All but a stream that asked for a penalty on what its replica alone remembers."""

    async def body(site: Site) -> None:
        await site.hold(HELD)
        sampled, penalized = [Seen() for _ in range(12)], [Seen() for _ in range(6)]
        streams = [
            asyncio.create_task(site.stream(KINDS[n % 3], f"s{n} é", LENGTH, seen, temperature=1))
            for n, seen in enumerate(sampled)
        ]
        others = [
            asyncio.create_task(
                site.stream("completions", f"p{n}", LENGTH, seen, temperature=1, presence_penalty=0.5)
            )
            for n, seen in enumerate(penalized)
        ]
        wholes = [asyncio.create_task(site.whole(f"w{n}", LENGTH)) for n in range(6)]
        await eventually(
            lambda: all(seen.events > 3 for seen in (*sampled, *penalized)), "streams have begun"
        )
        await eventually(lambda: _running(site, 24), "all are at work")
        lost = sum(seen.worker == "r0" for seen in sampled)
        assert 0 < lost < 12
        site.replicas["r0"].kill()
        await site.hold(None, "r1")
        for number, seen in enumerate(await asyncio.gather(*streams)):
            assert (seen.error, seen.ended, seen.finish) == ("", True, ["length"]), (KINDS[number % 3], seen)
            assert seen.completion_tokens == LENGTH
            assert "\ufffd" not in seen.text[:-1], "no character is broken at the border"
        for seen in await asyncio.gather(*others):
            assert seen.ended is not bool(seen.error)
            assert seen.ended is (seen.worker != "r0")
        expected = [(200, site.expected("completions", f"w{n}", LENGTH)) for n in range(6)]
        assert await asyncio.gather(*wholes) == expected
        state = await site.quiet()
        assert state["gateway"]["resumed"] == lost
        assert state["gateway"]["failed"] == sum(bool(seen.error) for seen in penalized)
        assert state["gateway"]["retried"] > 0

    run(Site(tokenizer), body)


def test_replicas_that_die_in_turn(tokenizer: Path) -> None:
    """A stream that has gone on once goes on again."""

    async def body(site: Site) -> None:
        await site.hold(HELD)
        streams = Streams(site)
        await streams.under_way()
        lost = sum(seen.worker == "r0" for _, _, seen in streams.seen)
        site.replicas["r0"].kill()
        await eventually(lambda: _is(site, "r0", "sick"), "the router knows")
        site.replicas["r0"].start()
        await eventually(site.all_up, "it is taken back")
        await eventually(lambda: _works(site, "r1", 12), "all have gone on")
        site.replicas["r1"].kill()
        await streams.end_well()
        state = await site.quiet()
        assert state["counts"]["ended ok"] == 12
        assert state["gateway"]["resumed"] == lost + 12

    run(Site(tokenizer), body)


# -- the router


def test_requests_are_served_while_the_router_is_dead_and_counted_when_it_is_back(tokenizer: Path) -> None:
    async def body(site: Site) -> None:
        streams = Streams(site)
        await streams.under_way(2)
        site.router.kill()
        await eventually(lambda: _fallback(site), "the gateway misses the router")
        answers = await asyncio.gather(*(site.whole(f"w{n}", 5, client=f"c{n}") for n in range(12)))
        assert answers == [(200, site.expected("completions", f"w{n}", 5)) for n in range(12)]
        more = Streams(site)
        await more.under_way(2)
        for replica in site.replicas.values():
            replica.pause()  # or streams would end while the router starts
        site.router.start()

        async def all_are_counted() -> bool:
            state = await site.state()
            under_way = sum(not task.done() for task in (*streams.tasks, *more.tasks))
            return state["in_flight"] == state.get("counts", {}).get("taken over", 0) == under_way > 0

        await eventually(all_are_counted, "it counts what is in flight")
        state = await site.state()
        assert sum(worker["in_flight"] for worker in state["workers"].values()) == state["in_flight"]
        for replica in site.replicas.values():
            replica.go_on()
        await streams.end_well()
        await more.end_well()
        taken_over, state = state["in_flight"], await site.quiet()
        assert state["counts"]["ended ok"] == taken_over
        assert not state["gateway"]["failed"]

    run(Site(tokenizer, step_s=0.15, gateway_options=("--health-timeout", "120")), body)


def test_a_router_that_hangs(tokenizer: Path) -> None:
    async def body(site: Site) -> None:
        site.router.pause()
        streams = Streams(site)
        await streams.end_well()
        assert (await site.state())["gateway"]["placed in fallback"] == 12
        site.router.go_on()
        await site.quiet()
        assert (await site.whole("w", 5))[0] == 200

    run(Site(tokenizer), body)


HOLDS = ("--placement", "centralized_dlpm", "--parameter", "slots=1")
"""The router holds all but two of the requests at two replicas."""

IMPATIENT = ("--router-timeout", "2")
"""Far less than a held request waits here."""


def test_what_the_router_holds_waits_for_it_and_not_for_a_time(tokenizer: Path) -> None:
    async def body(site: Site) -> None:
        streams = Streams(site)
        await streams.end_well()
        state = await site.quiet()
        assert state["gateway"]["placed in fallback"] == 0
        assert state["counts"]["placed"] == state["counts"]["ended ok"] == 12

    run(Site(tokenizer, router_options=HOLDS, gateway_options=IMPATIENT), body)


@pytest.mark.parametrize("fault", ["kill", "kill and start", "pause"])
def test_a_router_that_dies_does_not_keep_what_it_holds(tokenizer: Path, fault: str) -> None:
    async def body(site: Site) -> None:
        await site.hold(HELD)
        streams = Streams(site)
        await eventually(lambda: _waiting(site, 10), "the router holds all but two")
        if fault == "pause":
            site.router.pause()
        else:
            site.router.kill()
        if fault == "kill and start":
            site.router.start()
        await site.hold(None)
        await streams.end_well()
        if fault != "kill":
            site.router.go_on()
            await site.quiet()

    run(Site(tokenizer, router_options=HOLDS, gateway_options=IMPATIENT), body)


def test_a_replica_dies_while_the_router_holds_requests(tokenizer: Path) -> None:
    """What it had waits in turn for the other one."""

    async def body(site: Site) -> None:
        await site.hold(HELD)
        streams = Streams(site)
        await eventually(lambda: _waiting(site, 10), "the router holds all but two")
        await eventually(lambda: sum(seen.events > 3 for _, _, seen in streams.seen) == 2, "two have begun")
        site.replicas["r0"].kill()
        await site.hold(None, "r1")
        await streams.end_well()
        state = await site.quiet()
        assert state["gateway"]["placed in fallback"] == 0
        assert state["gateway"]["resumed"] == 1

    run(Site(tokenizer, router_options=HOLDS, gateway_options=IMPATIENT), body)


def test_no_order_of_starting_matters(tokenizer: Path) -> None:
    async def body(site: Site) -> None:
        site.gateways[0].start()
        await eventually(lambda: site.http.get(site.gateway_urls[0] + "/health"), "the gateway listens")
        assert (await site.whole("w", 3))[0] == 503
        site.router.start()
        await eventually(lambda: _state_is(site, "fallback", False), "the router answers")
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

    run(Site(tokenizer, gateways=2, router_options=("--peer-timeout", "5"), gateway_options=FAST), body)


# -- the fleet changes


def test_replicas_come_and_go_and_no_request_fails(tokenizer: Path) -> None:
    async def body(site: Site) -> None:
        stopping = asyncio.Event()
        failures: list[Any] = []
        served = 0

        async def load(client: int) -> None:
            nonlocal served
            while not stopping.is_set():
                prompt = f"p{client} {served}"
                seen = await site.stream("generate", prompt, 20, Seen(), client=f"c{client}")
                served += 1
                if seen.error or seen.text != site.expected("generate", prompt, 20):
                    failures.append(seen)

        loads = [asyncio.create_task(load(client)) for client in range(6)]
        await eventually(lambda: served >= 12, "the load runs")
        admin = site.gateway_urls[0] + "/workers"
        added = site.add_replica("r2")
        async with site.http.post(admin, json={"url": site.urls["r2"]}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "worker_not_ready")
        added.start()
        await eventually(lambda: site.answers(f"{site.urls['r2']}/ready"), "r2 is ready")
        async with site.http.post(admin, json={"url": site.urls["r2"]}) as response:
            assert (response.status, (await response.json())["name"]) == (201, "r2")
        await eventually(lambda: _worked(site, "r2"), "r2 gets requests")
        async with site.http.delete(f"{admin}/r0") as response:
            assert response.status == 200
            assert (await response.json())["state"] in ("draining", "gone")
        await eventually(lambda: _gone(site, "r0"), "r0 is drained")
        requests = (await site.work("r0"))["requests"]
        assert (await site.work("r0"))["running"] == 0
        site.replicas["r0"].kill()
        async with site.http.delete(f"{admin}/r0") as response:
            assert response.status == 404
        before = served
        await eventually(lambda: served > before + 12, "the load goes on")
        site.replicas["r0"].start()
        await eventually(lambda: site.answers(f"{site.urls['r0']}/ready"), "r0 is back")
        async with site.http.post(admin, json={"url": site.urls["r0"], "name": "r0"}) as response:
            assert response.status == 201
        await eventually(lambda: _worked(site, "r0"), "r0 gets requests again")
        stopping.set()
        await asyncio.gather(*loads)
        assert failures == []
        assert requests > 0
        state = await site.quiet()
        assert {state["gateway"][name] for name in ("failed", "retried", "resumed")} == {0}

    run(Site(tokenizer, step_s=0.005), body)


# -- wires

MOST_ROUNDS = 20
"""Of streams, until the wire has been bad often enough: what crosses it while they last is up to the machine."""


class BadTcp:
    """Between gateway and replica: what the replica answers is cut after so many bytes, or comes in drops."""

    def __init__(self, target: str) -> None:
        self.cut_after: int | None = None
        self.drops = False
        self.cuts = 0
        self._target = target.removeprefix("http://").split(":")
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        port = free_port()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        return f"http://127.0.0.1:{port}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        up_reader, up_writer = await asyncio.open_connection(self._target[0], int(self._target[1]))
        forward = asyncio.create_task(_pump(reader, up_writer))
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._back(up_reader, writer)
        finally:
            forward.cancel()
            await asyncio.gather(forward, return_exceptions=True)
            for one in (writer, up_writer):
                one.close()
                with contextlib.suppress(OSError):
                    await one.wait_closed()
            self._serving.discard(task)

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        while data := await reader.read(64 if self.drops else 65536):
            if (
                self.cut_after is not None
                and b"event-stream" not in data
                and passed + len(data) > self.cut_after
            ):
                writer.write(data[: max(0, self.cut_after - passed)])
                self.cuts += 1
                return
            passed += len(data)
            writer.write(data)
            await writer.drain()
            if self.drops:
                await asyncio.sleep(0)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


def test_truncated_and_slow_streams(tokenizer: Path) -> None:
    async def body(site: Site) -> None:
        wire = BadTcp(site.urls["r0"])
        site.urls["r0"], direct = await wire.start(), site.urls["r0"]
        try:
            site.router.command = [one.replace(direct, site.urls["r0"]) for one in site.router.command]
            await site.start()
            wire.drops = True
            streams = Streams(site)
            await streams.end_well()
            wire.drops = False
            for cut in itertools.islice(itertools.cycle((700, 1501, 4002)), MOST_ROUNDS):
                wire.cut_after = cut  # in the middle of an event
                streams = Streams(site)
                await streams.end_well()
                resumed = (await site.quiet())["gateway"]["resumed"]
                if cut == 4002 and min(wire.cuts, resumed) > 3:
                    break
            assert wire.cuts > 3
            assert resumed > 3
        finally:
            await wire.close()

    run(Site(tokenizer, step_s=0.002), body, start=False)


class BadZmq:
    """Between gateways and router: loses and repeats messages in both directions, a fifth of each."""

    def __init__(self, target: str, seed: int) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.lost = self.repeated = 0
        self._target = target
        self._rng = random.Random(seed)
        self._context = zmq.asyncio.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind(self.address)
        self._behind: dict[bytes, zmq.asyncio.Socket] = {}
        self._tasks = [asyncio.create_task(self._forward())]

    async def _forward(self) -> None:
        while True:
            peer, message = await self._front.recv_multipart()
            if peer not in self._behind:
                behind = self._behind[peer] = self._context.socket(zmq.DEALER)
                behind.setsockopt(zmq.IDENTITY, peer)
                behind.connect(self._target)
                self._tasks.append(asyncio.create_task(self._back(peer, behind)))
            for _ in range(self._times()):
                await self._behind[peer].send(message)

    async def _back(self, peer: bytes, behind: zmq.asyncio.Socket) -> None:
        while True:
            message = await behind.recv()
            for _ in range(self._times()):
                await self._front.send_multipart([peer, message])

    def _times(self) -> int:
        times = self._rng.choices((0, 1, 2), (1, 3, 1))[0]
        self.lost += times == 0
        self.repeated += times == 2
        return times

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in (self._front, *self._behind.values()):
            one.close(0)
        self._context.term()


@contextlib.asynccontextmanager
async def bad_zmq(target: str, seed: int) -> AsyncIterator[BadZmq]:
    wire = BadZmq(target, seed)
    try:
        yield wire
    finally:
        await wire.close()


def test_lost_and_repeated_messages_to_the_router(tokenizer: Path) -> None:
    async def body(site: Site) -> None:
        async with bad_zmq(site.router_address, seed=7) as wire:
            gateway = site.gateways[0]
            gateway.command = [one.replace(site.router_address, wire.address) for one in gateway.command]
            await site.start()
            for number in range(MOST_ROUNDS):
                streams = Streams(site)
                await streams.end_well()
                if number >= 3 and min(wire.lost, wire.repeated) > 20:
                    break
            state = await site.quiet()
            assert wire.lost > 20
            assert wire.repeated > 20
            assert not state["gateway"]["failed"]
            assert state["counts"]["ended ok"] > 0, "some were placed by the router"

    run(Site(tokenizer, step_s=0.001), body, start=False)


# -- looking


async def _is(site: Site, worker: str, state: str) -> bool:
    return (await site.state())["workers"][worker]["state"] == state


async def _waiting(site: Site, number: int) -> bool:
    return (await site.state())["waiting"] == number


async def _gone(site: Site, worker: str) -> bool:
    return worker not in (await site.state())["workers"]


async def _worked(site: Site, worker: str) -> bool:
    return (await site.work(worker))["requests"] > 0


async def _works(site: Site, worker: str, number: int) -> bool:
    return (await site.work(worker))["running"] == number


async def _idle(site: Site, worker: str) -> bool:
    return await _works(site, worker, 0)


async def _running(site: Site, number: int) -> bool:
    return sum([(await site.work(name))["running"] for name in site.replicas]) == number


async def _state_is(site: Site, name: str, value: object) -> bool:
    return (await site.state())["gateway"][name] == value


async def _fallback(site: Site) -> bool:
    return await _state_is(site, "fallback", True)


async def _counts(site: Site, name: str, number: int) -> bool:
    return (await site.state()).get("counts", {}).get(name, 0) >= number


# -- the real engine


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


@pytest.fixture(scope="module")
def calm(cluster: Cluster) -> list[Seen]:
    """Greedy streams that nothing disturbs."""
    seen = [Seen() for _ in range(9)]
    run_real(cluster, lambda http: ask_all(cluster, http, seen))
    return seen


async def ask_all(
    cluster: Cluster,
    http: aiohttp.ClientSession,
    seen: list[Seen],
    tokens: int = REAL_LENGTH,
    *,
    temperature: float = 0,
) -> None:
    """A stream for each of `seen`, of all kinds, to the last of its tokens."""

    async def one(number: int) -> None:
        path, body = request(KINDS[number % 3], f"prompt {number}", tokens, temperature)
        body.get("sampling_params", body)["ignore_eos"] = True
        async with http.post(cluster.url + path, json=body) as response:
            seen[number].worker = response.headers["x-fair-worker"]
            async for line in response.content:
                if line.startswith(b"data: "):
                    read(seen[number], line[6:].strip())

    await asyncio.gather(*(one(number) for number in range(len(seen))))


def latest(seen: Sequence[Seen]) -> Seen:
    """The stream that has the most before it. On a busy machine others may have ended when the last one begins."""
    return min(seen, key=lambda one: one.events)


def process_of(cluster: Cluster, words: str, below: str = "") -> psutil.Process:
    """The process whose command line has these words; with `below`, its descendant whose has those."""
    found = next(process for process in cluster.processes() if words in command_line(process))
    if below:
        family = found.children(recursive=True)
        found = next(process for process in family if below in command_line(process))
    return found


def kill(cluster: Cluster, words: str) -> None:
    """kill -9 of the process whose command line has these words, and of all its children at once."""
    root = process_of(cluster, words)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _real_state(cluster: Cluster, worker: str) -> str:
    state: str = cluster.status()["workers"][worker]["state"]
    return state


def settled(cluster: Cluster) -> bool:
    """All is up, and nothing is in flight anywhere."""
    state = cluster.status()
    books = cluster.books()
    return (
        not state["gateway"]["fallback"]
        and not state["gateway"]["sick"]
        and len(state["workers"]) == 2
        and state["in_flight"] == 0
        and not any(one["totals"]["running"] + one["totals"]["waiting"] for one in books)
        and all(one["conservation"]["ok"] for one in books)
    )


def run_real(cluster: Cluster, body: Callable[[aiohttp.ClientSession], Awaitable[None]]) -> None:
    async def main() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REAL_START_S)) as http:
            await body(http)

    asyncio.run(main())

    def calm() -> bool:
        with contextlib.suppress(httpx.TransportError):  # something is being started again
            return settled(cluster)
        return False

    wait_until(calm, "everything is up and idle", REAL_START_S)


@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.timeout(3 * REAL_START_S)
def test_streams_of_a_real_replica_that_is_killed_go_on_elsewhere(cluster: Cluster, calm: list[Seen]) -> None:
    async def body(http: aiohttp.ClientSession) -> None:
        seen = [Seen() for _ in range(9)]
        resumed = cluster.status()["gateway"]["resumed"]
        asking = asyncio.create_task(ask_all(cluster, http, seen))
        await eventually(lambda: all(one.events > 10 for one in seen), "all streams are under way")
        victim = latest(seen).worker
        placed = sum(one.worker == victim for one in seen)
        kill(cluster, f"--name {victim}")
        await asking
        for before, after in zip(calm, seen, strict=True):
            assert (after.error, after.ended, after.finish) == ("", True, ["length"])
            assert after.completion_tokens == REAL_LENGTH
            assert after.text == before.text
        # The replica may have been ahead of what its clients had read.
        assert 0 < cluster.status()["gateway"]["resumed"] - resumed <= placed

    run_real(cluster, body)


@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.timeout(3 * REAL_START_S)
def test_sampled_streams_of_a_real_replica_that_is_killed_go_on_elsewhere(cluster: Cluster) -> None:
    """Of a model that talks at random: its text is full of broken characters."""

    async def body(http: aiohttp.ClientSession) -> None:
        seen = [Seen() for _ in range(9)]
        resumed = cluster.status()["gateway"]["resumed"]
        asking = asyncio.create_task(ask_all(cluster, http, seen, temperature=1))
        await eventually(lambda: all(one.events > 10 for one in seen), "all streams are under way")
        victim = latest(seen).worker
        kill(cluster, f"--name {victim}")
        await asking
        for one in seen:
            assert (one.error, one.ended, one.finish) == ("", True, ["length"])
            assert one.completion_tokens == REAL_LENGTH
        assert cluster.status()["gateway"]["resumed"] > resumed

    run_real(cluster, body)


@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.timeout(3 * REAL_START_S)
def test_a_real_replica_whose_scheduler_hangs_is_given_up_and_taken_back(
    cluster: Cluster, calm: list[Seen]
) -> None:
    """Its server answers all the while."""

    async def body(http: aiohttp.ClientSession) -> None:
        seen = [Seen() for _ in range(9)]
        asking = asyncio.create_task(ask_all(cluster, http, seen))
        await eventually(lambda: all(one.events > 10 for one in seen), "all streams are under way")
        victim = latest(seen).worker
        scheduler = process_of(cluster, f"--name {victim}", "sglang::scheduler")
        scheduler.suspend()
        try:
            await asking
            for before, after in zip(calm, seen, strict=True):
                assert (after.error, after.ended, after.text) == ("", True, before.text)
            await eventually(lambda: _real_state(cluster, victim) == "sick", "the router knows")
            url = cluster.status()["workers"][victim]["url"]
            assert httpx.get(f"{url}/ready", timeout=60).status_code == 200
            more = [Seen() for _ in range(6)]
            await ask_all(cluster, http, more, 20)
            assert victim not in {one.worker for one in more}
        finally:
            scheduler.resume()
        await eventually(lambda: _real_state(cluster, victim) == "up", "it is taken back")
        again = [Seen() for _ in range(9)]
        await ask_all(cluster, http, again, 20)
        assert victim in {one.worker for one in again}

    run_real(cluster, body)


@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.timeout(3 * REAL_START_S)
def test_a_real_router_that_is_killed_is_missed_by_nobody(cluster: Cluster) -> None:
    async def body(http: aiohttp.ClientSession) -> None:
        seen, more = [Seen() for _ in range(6)], [Seen() for _ in range(6)]
        fallback = cluster.status()["gateway"]["placed in fallback"]
        asking = asyncio.create_task(ask_all(cluster, http, seen))
        await eventually(lambda: all(one.events > 10 for one in seen), "all streams are under way")
        kill(cluster, "-m router ")
        await ask_all(cluster, http, more, 20)
        await asking
        assert all((one.error, one.ended) == ("", True) for one in (*seen, *more))
        assert cluster.status()["gateway"]["placed in fallback"] > fallback

    run_real(cluster, body)
    wait_until(
        lambda: cluster.status()["tree"]["nodes"] > 1, "the replay brings back what the replicas cache"
    )


@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.timeout(3 * REAL_START_S)
def test_nobody_works_for_a_real_gateway_that_is_gone(cluster: Cluster) -> None:
    async def body(http: aiohttp.ClientSession) -> None:
        seen = [Seen() for _ in range(6)]
        before = sum(one["totals"]["output_tokens"] for one in cluster.books())
        asking = asyncio.create_task(ask_all(cluster, http, seen, 2000))
        await eventually(lambda: all(one.events > 10 for one in seen), "all streams are under way")
        kill(cluster, "-m router.gateway")
        with pytest.raises(aiohttp.ClientError):
            await asking

        def idle() -> bool:
            return not any(one["totals"]["running"] + one["totals"]["waiting"] for one in cluster.books())

        wait_until(idle, "the replicas have stopped")
        served = sum(one["totals"]["output_tokens"] for one in cluster.books()) - before
        assert served < 6 * 2000

    run_real(cluster, body)
