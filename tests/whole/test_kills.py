"""Processes of a real cluster that die or hang, and what its clients notice."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

import aiohttp
import httpx
import psutil
import pytest

from tests.support.live import Cluster, command_line
from tests.support.site import Seen, read, request
from tests.support.waiting import eventually, wait_until

START_S = 500.0
"""For a replica that was killed to serve again, on however busy a machine."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * START_S)]

KINDS = ("chat", "completions", "generate")
LENGTH = 600


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
    tokens: int = LENGTH,
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
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=START_S)) as http:
            await body(http)

    asyncio.run(main())

    def calm() -> bool:
        with contextlib.suppress(httpx.TransportError):  # something is being started again
            return settled(cluster)
        return False

    wait_until(calm, "everything is up and idle", START_S)


def test_streams_of_a_replica_that_is_killed_go_on_elsewhere(cluster: Cluster, calm: list[Seen]) -> None:
    """Greedy ones with the words that they would have had, sampled ones with as many; text of a model that talks at
    random is full of broken characters."""

    async def body(http: aiohttp.ClientSession) -> None:
        seen, sampled = [Seen() for _ in range(6)], [Seen() for _ in range(3)]
        every = seen + sampled
        resumed = cluster.status()["gateway"]["resumed"]
        asking = asyncio.gather(ask_all(cluster, http, seen), ask_all(cluster, http, sampled, temperature=1))
        await eventually(lambda: all(one.events > 10 for one in every), "all streams are under way")
        victim = latest(sampled).worker
        placed = sum(one.worker == victim for one in every)
        kill(cluster, f"--name {victim}")
        await asking
        for one in every:
            assert (one.error, one.ended, one.finish) == ("", True, ["length"])
            assert one.completion_tokens == LENGTH
        assert [one.text for one in seen] == [one.text for one in calm[:6]]
        # The replica may have been ahead of what its clients had read.
        assert 0 < cluster.status()["gateway"]["resumed"] - resumed <= placed

    run_real(cluster, body)


def test_a_replica_whose_scheduler_hangs_is_given_up_and_taken_back(
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
