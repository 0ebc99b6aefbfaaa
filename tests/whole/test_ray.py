"""A cluster whose replicas are on two nodes of Ray's: a node, the router and the fleet die in turn under load."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from sglang_fair.cluster.control import ask, socket_path
from tests.support.live import EMULATED, Cluster, lives, living
from tests.support.ports import free_port
from tests.support.waiting import eventually, wait_until

OBJECT_STORE_BYTES = 80_000_000
"""About the least that Ray takes; nothing is stored there."""

SOON = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}
"""A node that is gone is missed in 2 s in place of 15."""

STARTED = "Ray runtime started."


class RayNodes:
    """The nodes at 127.0.0.2, 127.0.0.3 and so on, the first one the head; each has `cpus` CPUs, whatever is there."""

    def __init__(self, count: int, cpus: int) -> None:
        # The paths of sockets are below it, and must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.address = f"127.0.0.2:{free_port()}"
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._family: list[psutil.Process] = []
        port = self.address.partition(":")[2]
        for index in range(count):
            log = self._folder / f"node{index}.log"
            role = (
                ("--head", f"--port={port}", f"--temp-dir={self._folder}", "--include-dashboard=false",
                 "--disable-usage-stats", "--dashboard-port=0")
                if index == 0
                else (f"--address={self.address}",)
            )  # fmt: skip
            command = [
                sys.executable, "-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address=127.0.0.{index + 2}",
                f"--num-cpus={cpus}", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}",
                "--min-worker-port=0", "--max-worker-port=0", "--block",
            ]  # fmt: skip
            with log.open("wb") as output:
                node = subprocess.Popen(
                    command, stdout=output, stderr=output, start_new_session=True, cwd=self._folder,
                    env={**os.environ, **SOON, "RAY_USAGE_STATS_ENABLED": "0"},
                )  # fmt: skip
            self._nodes.append(node)
            wait_until(
                lambda log=log, node=node: STARTED in log.read_text() or node.poll() is not None,
                "a node of Ray's",
            )
            assert node.poll() is None, log.read_text()

    def kill(self, index: int) -> None:
        """SIGKILL to a node's raylet, as if its machine were gone."""
        self._remember()
        node = psutil.Process(self._nodes[index].pid)
        raylet = next(child for child in node.children() if child.name() == "raylet")
        raylet.kill()

    def close(self) -> None:
        """Ends all of them; what does not end is killed."""
        self._remember()
        for node in reversed(self._nodes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(node.pid, signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not living(self._family), "the end of Ray", 15)
        for process in living(self._family):
            process.kill()
        for node in self._nodes:
            node.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _remember(self) -> None:
        for node in self._nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(node.pid)
                self._family += [process, *process.children(recursive=True)]


pytest.importorskip("ray", reason="Ray is not installed: pip install 'sglang-fair[ray]'")
pytestmark = [pytest.mark.e2e, pytest.mark.machine, pytest.mark.timeout(1200)]

START_S = 300.0
"""Until Ray has noticed that a node is gone, and a replica has started elsewhere; alone, 50 s."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    found = RayNodes(2, cpus=2)
    yield found
    found.close()


def workers(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """What `sglang-fair workers list` shows, by name."""
    port = urlsplit(cluster.url).port
    assert port is not None
    rows = ask(socket_path(port), {"do": "list"}, lambda text: None, 60.0)["workers"]
    return {row["name"]: row for row in rows}


CLIENTS = 8
OUTPUT_TOKENS = 100


class Load:
    """Each client asks, again and again, for a stream of tokens."""

    def __init__(self, url: str) -> None:
        self._url, self._stops = url, False
        self.outcomes: Counter[str] = Counter()
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(CLIENTS)]

    async def _ask(self, number: int) -> None:
        body = {
            "model": "default", "prompt": f"client {number} " * 40, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with aiohttp.ClientSession(headers={"x-fair-client": f"client {number}"}) as session:
            while not self._stops:
                async with session.post(f"{self._url}/v1/completions", json=body) as response:
                    text = (await response.read()).decode()
                is_whole = (
                    text.endswith("data: [DONE]\n\n") and f'"completion_tokens":{OUTPUT_TOKENS}' in text
                )
                is_served = response.status == 200 and is_whole
                self.outcomes["served" if is_served else text[-300:]] += 1
                await asyncio.sleep(0 if is_served else 0.2)

    async def goes_on(self) -> None:
        before = self.outcomes.total()
        await eventually(lambda: self.outcomes.total() > before + CLIENTS, "requests are served")

    async def stop(self) -> None:
        self._stops = True
        await asyncio.gather(*self._tasks)


def test_a_node_is_killed_under_load_and_its_replica_comes_back_on_the_other(
    nodes: RayNodes, tmp_path: Path
) -> None:
    with Cluster("--ray", nodes.address, "--replicas", "2", *EMULATED, folder=tmp_path) as cluster:
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
            os.kill(cluster.addresses["pids"]["router"], signal.SIGKILL)
            await load.goes_on()
            await load.stop()
            assert load.outcomes.keys() == {"served"}, load.outcomes

        asyncio.run(body())
        now = workers(cluster)
        assert urlsplit(now[lost]["url"]).hostname == "127.0.0.2"
        assert now[lost]["url"] != first[lost]["url"]
        cluster.addresses["replicas"] = [row["url"] for row in now.values()]

        os.kill(cluster.addresses["pids"]["fleet"], signal.SIGKILL)
        wait_until(
            lambda: not any(lives(row["pid"]) for row in now.values()), "no replica outlives the driver"
        )
