"""A cluster whose replicas are on two nodes of Ray's: a node and the fleet are killed in turn under load, and at night,
when all programs are those of the wheel, router and gateway, too.
"""

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from sglang_fair.cluster.control import ask, socket_path
from tests.support.budget import is_night
from tests.support.live import EMULATED, Cluster, lives
from tests.support.ray_nodes import RayNodes
from tests.support.streams import Load
from tests.support.waiting import eventually, wait_until
from tests.support.wheel import Installed, clean_environment

pytest.importorskip("ray", reason="Ray is not installed: pip install 'sglang-fair[ray]'")
pytestmark = [pytest.mark.e2e, pytest.mark.machine, pytest.mark.timeout(1200)]

START_S = 300.0
"""Until Ray has noticed that a node is gone, and a replica has started elsewhere; alone, 50 s."""


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest) -> Installed | None:
    return request.getfixturevalue("installed") if is_night() else None


@pytest.fixture(scope="module")
def nodes(wheel: Installed | None) -> Iterator[RayNodes]:
    found = RayNodes(
        2, cpus=2, python=wheel.python if wheel else sys.executable,
        environment=clean_environment() if wheel else os.environ,
    )  # fmt: skip
    yield found
    found.close()


def workers(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """What `sglang-fair workers list` shows, by name."""
    port = urlsplit(cluster.url).port
    assert port is not None
    rows = ask(socket_path(port), {"do": "list"}, lambda text: None, 60.0)["workers"]
    return {row["name"]: row for row in rows}


async def clients_ask_while_the_gateway_is_killed(cluster: Cluster) -> None:
    """The official client tries again when its connection breaks; each of its calls is answered in the end."""
    answered, stops = Counter[int](), asyncio.Event()

    async def asks(number: int) -> None:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=20) as client:
            while not stops.is_set():
                answer = await client.chat.completions.create(
                    model="default", messages=[{"role": "user", "content": f"{number}"}], max_tokens=8
                )
                assert answer.usage is not None
                assert answer.usage.completion_tokens > 0
                answered[number] += 1

    tasks = [asyncio.create_task(asks(number)) for number in range(4)]

    async def each_more(more: int) -> None:
        before = dict(answered)
        await eventually(
            lambda: (
                any(task.done() for task in tasks)
                or all(answered[number] >= before.get(number, 0) + more for number in range(4))
            ),
            "each client is answered",
        )

    await each_more(1)
    os.kill(cluster.addresses["pids"]["gateway"], signal.SIGKILL)
    await each_more(2)
    stops.set()
    await asyncio.gather(*tasks)


def test_a_node_is_killed_under_load_and_its_replica_comes_back_on_the_other(
    nodes: RayNodes, wheel: Installed | None, tmp_path: Path
) -> None:
    of: dict[str, Any] = {"command": (wheel.command,), "environment": clean_environment()} if wheel else {}
    with Cluster("--ray", nodes.address, "--replicas", "2", *EMULATED, folder=tmp_path, **of) as cluster:
        first = workers(cluster)
        assert sorted(urlsplit(row["url"]).hostname or "" for row in first.values()) == [
            "127.0.0.2",
            "127.0.0.3",
        ]
        lost = next(name for name, row in first.items() if urlsplit(row["url"]).hostname == "127.0.0.3")

        async def body() -> None:
            load = Load(cluster.url)
            await load.goes_on()

            def is_busy() -> bool:
                in_flight: int = cluster.status()["workers"][lost]["in_flight"]
                return in_flight > 0

            await eventually(lambda: asyncio.to_thread(is_busy), "the node has requests")
            nodes.kill(1)
            await eventually(lambda: not lives(first[lost]["pid"]), "its replica dies with its actor")
            await load.goes_on()

            def is_back() -> bool:
                row = workers(cluster)[lost]
                known = cluster.status()["workers"].get(lost, {})
                return row["state"] == "up" and first[lost]["url"] != row["url"] == known.get("url")

            await eventually(lambda: asyncio.to_thread(is_back), "its replica is back", START_S)
            await load.goes_on()
            if wheel:
                os.kill(cluster.addresses["pids"]["router"], signal.SIGKILL)
                await load.goes_on()
            await load.stop()
            assert load.outcomes.keys() == {"served"}, load.outcomes
            if wheel:
                await clients_ask_while_the_gateway_is_killed(cluster)

        asyncio.run(body())
        now = workers(cluster)
        assert urlsplit(now[lost]["url"]).hostname == "127.0.0.2"
        assert now[lost]["url"] != first[lost]["url"]
        cluster.addresses["replicas"] = [row["url"] for row in now.values()]

        os.kill(cluster.addresses["pids"]["fleet"], signal.SIGKILL)
        wait_until(
            lambda: not any(lives(row["pid"]) for row in now.values()), "no replica outlives the driver"
        )
    assert not wheel or wheel.read_from_the_checkout() == []
