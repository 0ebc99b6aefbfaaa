"""After random traffic through real replicas, the router's tree is what their radix caches hold, block by block."""

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import aiohttp
import pytest

from router.core import Router
from router.events import Action, Event, Workers, WorkerUp
from router.placement import build
from router.shell import Shell
from router.wire import namespace
from sglang_fair.models.catalog import find
from sglang_fair.overlay import releases
from tests.support.live import Replica
from tests.support.ports import free_port
from tests.support.site import Process
from tests.support.tree_check import check, holdings
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

Prefix = tuple[str, tuple[int, ...]]
PAGES = {"r0": 1, "r1": 16}
POOL_TOKENS = 3072
REQUESTS = 160
AT_ONCE = 8
KEYS = ({"extra_key": "k"}, {"cache_salt": "s", "extra_key": "k"}) if releases.has("0.5.23") else ()
APART: tuple[dict[str, str], ...] = ({}, {"cache_salt": "s"}, *KEYS)
"""What keeps one client's prefixes from another's."""


class Watched:
    """A router whose tree can be looked at from another thread."""

    def __init__(self, page_tokens: int) -> None:
        self._router = Router(build("d2lpm", worker_quantum=500.0), page_size=page_tokens)
        self._lock = threading.Lock()

    def handle(self, event: Event, now_s: float, peer: bytes = b"") -> list[Action]:
        with self._lock:
            return self._router.handle(event, now_s, peer)

    def question(self, now_s: float) -> None:
        """It plans nothing."""

    def listing(self) -> Workers:
        with self._lock:
            return self._router.listing()

    def requests_of(self, peer: bytes) -> int:
        with self._lock:
            return self._router.requests_of(peer)

    def holds(self, worker: str, page_tokens: int) -> set[Prefix]:
        """Every prefix of whole blocks that the tree says `worker` has; the tree is in order."""
        with self._lock:
            check(self._router.tree)
            return prefixes(holdings(self._router.tree, worker), page_tokens)

    def state(self) -> dict[str, Any]:
        with self._lock:
            return self._router.state()


def prefixes(longest: set[Prefix], page_tokens: int) -> set[Prefix]:
    return {
        (name, tokens[:end])
        for name, tokens in longest
        for end in range(page_tokens, len(tokens) + 1, page_tokens)
    }


def cached(replica: Replica, page_tokens: int) -> set[Prefix]:
    """The same, as the replica's own radix cache has it."""
    books = replica.fair()
    longest = {(namespace(None, salt, key), tuple(tokens)) for salt, key, tokens in books["cache"]}
    found = prefixes(longest, page_tokens)
    assert len(found) * page_tokens == books["cached_tokens"], "something is cached that nobody has asked for"
    return found


@contextmanager
def routing(page_tokens: int, replicas: dict[str, Replica]) -> Iterator[tuple[Watched, str]]:
    """A router that follows these replicas, and its address."""
    watched = Watched(page_tokens)
    shell = Shell(watched, "tcp://127.0.0.1:*")
    for name, replica in replicas.items():
        assert replica.kv_port is not None
        kv, replay = (f"tcp://127.0.0.1:{replica.kv_port + offset}" for offset in (0, 1))
        shell.tell(WorkerUp(name, replica.url, kv, replay))
    thread = threading.Thread(target=shell.run)
    thread.start()
    try:
        yield watched, shell.endpoint
    finally:
        shell.stop()
        thread.join()
        shell.close()


@contextmanager
def gateway(router: str) -> Iterator[str]:
    port = free_port()
    made = Process(
        "gateway", "router.gateway", "--port", str(port), "--router", router, "--model-name", "tiny",
        "--tokenizer", find("tiny").path,
    )  # fmt: skip
    made.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        made.close()


def bodies(seed: int) -> list[dict[str, Any]]:
    """Prompts that share prefixes and branch off them at any depth, apart by salts and keys; some answers are long."""
    rng = random.Random(seed)
    roots = [[rng.randrange(250) for _ in range(400)] for _ in range(6)]
    made = []
    for _ in range(REQUESTS):
        tokens = rng.choice(roots)[: rng.randrange(1, 400)] + [
            rng.randrange(250) for _ in range(rng.randrange(1, 200))
        ]
        body: dict[str, Any] = {"input_ids": tokens, "stream": rng.random() < 0.5}
        body["sampling_params"] = {
            "max_new_tokens": rng.choice((1, 3, 40)),
            "ignore_eos": True,
            "temperature": 0,
        }
        made.append(body | rng.choice(APART))
    return made


async def drive(url: str, seed: int) -> None:
    """Four clients; one request in eight is hung up on."""
    rng, room = random.Random(seed), asyncio.Semaphore(AT_ONCE)

    async def one(http: aiohttp.ClientSession, number: int, body: dict[str, Any], leaves: bool) -> None:
        async with (
            room,
            http.post(f"{url}/generate", json=body, headers={"x-fair-client": f"c{number % 4}"}) as got,
        ):
            assert got.status == 200
            if not leaves:
                await got.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(
            *(one(http, n, body, rng.random() < 0.125) for n, body in enumerate(bodies(seed)))
        )


async def serves(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(f"{url}/status") as got:
                    if (await got.json())["gateway"]["workers"] == len(PAGES):
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


def differences(watched: Watched, replicas: dict[str, Replica]) -> dict[str, Any]:
    """Namespace and length of the prefixes that only one of the two has; empty when they are equal."""
    found = {}
    for name, replica in replicas.items():
        ours, theirs = watched.holds(name, PAGES[name]), cached(replica, PAGES[name])
        if ours != theirs:
            told = {"tree": ours - theirs, "cache": theirs - ours}
            found[name] = {
                where: sorted((ns, len(tokens)) for ns, tokens in only)[:9] for where, only in told.items()
            }
    return found


@pytest.mark.timeout(600)
def test_the_tree_is_what_the_replicas_cache() -> None:
    made = {
        name: Replica(
            "--page-size", str(page), "--kv-tokens", str(POOL_TOKENS), "--max-running", "8", "--name", name,
            kv_events=True, module="tests.support.dumping_replica",
        )
        for name, page in PAGES.items()
    }  # fmt: skip
    with ExitStack() as stack:
        replicas = {name: stack.enter_context(replica) for name, replica in made.items()}
        router, address = stack.enter_context(routing(1, replicas))
        blocks = {"r1": replicas["r1"]}
        of_blocks, _ = stack.enter_context(routing(PAGES["r1"], blocks))
        url = stack.enter_context(gateway(address))
        asyncio.run(serves(url))
        asyncio.run(drive(url, 1))

        def quiet() -> bool:
            books = [replica.fair()["totals"] for replica in replicas.values()]
            return router.state()["in_flight"] == 0 and not any(
                one["waiting"] + one["running"] for one in books
            )

        wait_until(quiet, "an idle site")
        late, _ = stack.enter_context(routing(1, replicas))
        for watched, followed in ((router, replicas), (of_blocks, blocks), (late, replicas)):
            wait_until(lambda w=watched, f=followed: not differences(w, f), "the tree to be what is cached")
        for name in PAGES:
            state = router.state()["workers"][name]
            assert state["dispatched"] > REQUESTS / 4
            assert state["dispatched_tokens"] > 2 * POOL_TOKENS, "nothing had to be evicted"
        names = {ns for name, page in PAGES.items() for ns, _ in router.holds(name, page)}
        assert len(names) == len(APART), "some salt or key was never cached"
        tree = router.state()["tree"]
        assert (tree["unknown_parents"], tree["unknown_removes"], tree["misfits"]) == (0, 0, 0)
