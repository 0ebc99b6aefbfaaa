"""The wheel in an environment that has SGLang, started as SGLang itself is, without our router and gateway: behind
sglang-router, nginx and LiteLLM, each of them real and configured as docs/behind.md says.

One replica stands behind all of them, so it looks for names in all the places that they write.
"""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sglang_fair.common.identity import identify
from sglang_fair.engines import replica as engine
from sglang_fair.models.catalog import find
from tests.support import fronts
from tests.support.fronts import Front, by_key
from tests.support.live import Replica, check_conservation
from tests.support.waiting import eventually, wait_until
from tests.support.wheel import Installed, clean_environment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.machine,
    pytest.mark.slow,
    pytest.mark.xdist_group("tests/whole/test_wheel.py"),  # which installs the wheel too
]

CLIENTS = {"gold": 4, "bronze": 1}
QUANTUM, AT_ONCE, OUTPUT = 50, 2, 8
"""Of the replica: DLPM's, how many requests run; tokens of each answer of a flood."""
PLACES = "x-litellm-user_api_key_user_id,x-tenant-id,x-smg-routing-key,api-key"
MODEL = "llama"
FRONTS = ("nginx", "sglang-router", "sglang-router by key", "litellm")


def key_of(name: str) -> str:
    return identify(by_key(name))


class Launched(Replica):
    """`python -m sglang.launch_server` of the wheel's environment."""

    def __init__(self, installed: Installed) -> None:
        super().__init__(forked=False)
        self._installed = installed

    def _command(self) -> tuple[list[str], dict[str, str]]:
        weights = CLIENTS | {key_of(name): weight for name, weight in CLIENTS.items()}
        options = engine.parse([
            "--device", "cpu", "--model", "tiny", "--served-name", MODEL, "--port", str(self.port),
            "--max-running", str(AT_ONCE), "--policy", "dlpm", "--quantum", str(QUANTUM),
            "--policy-options", "newcomers=0,borrow=0",
            "--client-weights", json.dumps(weights), "--", "--fair-identity", PLACES, "--log-level", "warning",
        ])  # fmt: skip
        words = engine.server_arguments(options, find("tiny"))
        command = [self._installed.python, "-m", "sglang.launch_server", *words]
        elsewhere = {
            "PYTHONSAFEPATH": "1"
        }  # or Python looks for packages where the tests stand, in the checkout
        return command, {**clean_environment(), **engine.environment(options), **elsewhere}


@pytest.fixture(scope="module")
def replica(installed: Installed) -> Iterator[Replica]:
    before = installed.read_from_the_checkout()
    with Launched(installed) as started:
        yield started
    assert installed.read_from_the_checkout() == before, "the wheel is enough"


@pytest.fixture(scope="module")
def running(replica: Replica, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Front | str]]:
    """Each in front of the replica, or why it is not. They start side by side."""
    address = replica.url.removeprefix("http://")

    def folder(name: str) -> Path:
        return tmp_path_factory.mktemp(name)

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        found: dict[str, Any] = {name: pool.submit(fronts.environment, name) for name in fronts.PINNED}
        starts = {"nginx": fronts.why_no_nginx() or fronts.nginx(address, folder("nginx"))}
        for name, start in (("sglang-router", fronts.sglang_router), ("litellm", fronts.litellm)):
            programs = found[name].result()
            is_there = isinstance(programs, Path)
            starts[name] = start(address, folder(name), programs=programs) if is_there else programs
        made = {
            name: one if isinstance(one, str) else pool.submit(stack.enter_context, one)
            for name, one in starts.items()
        }
        yield {name: one if isinstance(one, str) else one.result() for name, one in made.items()}


@pytest.fixture(params=FRONTS)
def front(request: pytest.FixtureRequest, running: dict[str, Front | str]) -> Front:
    name, _, by = str(request.param).partition(" by ")
    made = running[name]
    if isinstance(made, str):
        pytest.skip(made)
    return Front(made.url, by_key, key_of) if by else made


def asks(front: Front, client: str, tokens: int, number: int = 0, **more: Any) -> dict[str, Any]:
    """Arguments of a POST."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{client} {number}"}],
        "max_tokens": tokens,
    }
    url = f"{front.url}/v1/chat/completions"
    return {"url": url, "json": body | {"ignore_eos": True} | more, "headers": dict(front.headers(client))}


def book(replica: Replica, client: str) -> dict[str, Any]:
    """Of one that may not have come yet."""
    nothing = dict.fromkeys(("service", "output_tokens", "waiting", "running", "requests"), 0)
    found: dict[str, Any] = replica.fair()["clients"].get(client, nothing)
    return found


def test_clients_are_told_apart_whatever_else_they_say(front: Front, replica: Replica) -> None:
    """By header or body, of another name or of a weight."""
    said = {front.forged: "forged", "x-fair-client": "forged", "x-fair-weight": "99.0@99"}
    before = {client: book(replica, front.client(client)) for client in CLIENTS}

    async def scenario() -> None:
        async with aiohttp.ClientSession() as http:
            for tokens, client in enumerate(CLIENTS, start=3):
                asked = asks(front, client, tokens, user="forged")
                asked["headers"] = said | asked["headers"]
                async with http.post(**asked) as answer:
                    assert answer.status == 200, await answer.text()
                    assert (await answer.json())["usage"]["completion_tokens"] == tokens

    asyncio.run(scenario())
    after = {client: book(replica, front.client(client)) for client in CLIENTS}
    for tokens, (client, weight) in enumerate(CLIENTS.items(), start=3):
        assert after[client]["output_tokens"] - before[client]["output_tokens"] == tokens
        assert after[client]["weight"] == weight
    assert "forged" not in replica.fair()["clients"]


def test_a_stream_comes_as_it_is_made_and_one_that_nobody_reads_ends(front: Front, replica: Replica) -> None:
    client, most = front.client("gold"), 4_000
    before = book(replica, client)

    async def scenario() -> None:
        async with (
            aiohttp.ClientSession() as http,
            http.post(**asks(front, "gold", most, stream=True)) as answer,
        ):
            assert answer.status == 200
            lines = [await answer.content.readline() for _ in range(3)]
            assert lines[0].startswith(b"data: {"), lines
            assert (await asyncio.to_thread(book, replica, client))["running"] == 1, "it is not at its end"

    asyncio.run(scenario())
    wait_until(lambda: book(replica, client)["running"] == 0, "the end of what nobody reads")
    assert book(replica, client)["output_tokens"] - before["output_tokens"] < most


def test_a_flood_gets_its_share_within_the_bound(front: Front, replica: Replica) -> None:
    """All wait before the first is admitted, those of the one first. Until one has nothing left that waits, what they
    were served, over their weights, differs by the bound at most."""
    asked = {"gold": 80, "bronze": 40}
    seen, prompts = [0.0], [0]

    def waiting(count: int) -> bool:
        return bool(replica.fair()["totals"]["waiting"] == count)

    def watch() -> None:
        """Notes the difference while both wait."""
        start = {client: book(replica, front.client(client))["service"] for client in CLIENTS}
        while True:
            books = replica.fair()
            each = {client: books["clients"][front.client(client)] for client in CLIENTS}
            if not all(one["waiting"] for one in each.values()):
                return
            served = {
                client: (each[client]["service"] - start[client]) / CLIENTS[client] for client in CLIENTS
            }
            seen.append(served["gold"] - served["bronze"])

    async def scenario() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def post(client: str, number: int) -> int:
                async with http.post(**asks(front, client, OUTPUT, number)) as answer:
                    prompts.append((await answer.json())["usage"]["prompt_tokens"])
                    return answer.status

            blockers = [
                asyncio.create_task(replica.ask("blocker", [9] * 8, 10_000, session=http)) for _ in range(2)
            ]
            await eventually(lambda: replica.fair()["totals"]["running"] == 2, "requests that run")
            answers, came = [], 0
            for client, count in asked.items():
                answers += [asyncio.create_task(post(client, number)) for number in range(count)]
                came += count
                await asyncio.to_thread(wait_until, lambda came=came: waiting(came), f"{client}'s requests")
            for blocker in blockers:
                blocker.cancel()
            await asyncio.to_thread(watch)
            assert await asyncio.gather(*answers) == [200] * came

    asyncio.run(scenario())
    # Theorem 4.1, of these requests: the bound in the books also knows the long ones that all waited behind.
    bound = 2 * (max(prompts) + AT_ONCE * 2 * OUTPUT + QUANTUM)
    assert max(seen) - min(seen) <= bound, seen
    check_conservation(replica.fair())
