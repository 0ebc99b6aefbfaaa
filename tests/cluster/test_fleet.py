"""A crew of replicas that are small programs of this machine: who is listed, when they die, move, come and go."""

import asyncio
import contextlib
import os
import signal
import textwrap
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from router.replica_lists import specs
from sglang_fair.cluster.control import Refused
from sglang_fair.cluster.on_ray import fleet
from sglang_fair.cluster.on_ray.changes import Changes
from sglang_fair.cluster.on_ray.driver import Gone, RayFailed
from sglang_fair.cluster.on_ray.fleet import Crew, FleetFailed
from sglang_fair.cluster.on_ray.host import Host, News
from sglang_fair.cluster.on_ray.states import Place
from sglang_fair.cluster.on_ray.told import Told
from sglang_fair.cluster.plan import FLEET_READY, Asked, Process, placed
from sglang_fair.cluster.ports import ReplicaPorts
from tests.cluster.test_cluster import of_our_own as of_our_own
from tests.cluster.test_workers import router_thread
from tests.support.live import lives
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def own_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    of_our_own(monkeypatch)


SERVES = """
    import http.server, sys
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"totals": {}}')
        def log_message(self, *_):
            pass
    print("serves", flush=True)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
DIES = "print('I have a reason', flush=True); raise SystemExit(3)"


@dataclass
class Node:
    """An actor here: a `Host` at a time, which is made anew as Ray makes actors anew."""

    asked: Asked
    code: Callable[[], str]
    lives: int = 0
    is_gone: bool = False
    killed: bool = False
    host: Host = field(init=False)

    def __post_init__(self) -> None:
        self.made_anew()

    def made_anew(self) -> None:
        self.lives += 1
        self.host = Host(self.asked, {}, lambda: ("127.0.0.1", "here"), launch=self.launch)

    def launch(self, asked: Asked, host: str, ports: ReplicaPorts, python: str) -> Process:
        spec = placed(asked, host, ports, python)
        return replace(
            spec, argv=(python, "-c", textwrap.dedent(self.code()), str(ports.http)), stop_grace_s=1.0
        )

    async def place(self) -> Place:
        return await self.reached(self.host.place())

    async def news(self, seen: int) -> News:
        return await self.reached(self.host.news(seen))

    async def reached(self, asking: Any) -> Any:
        task = asyncio.ensure_future(asking)
        while not task.done() and not self.is_gone:
            await asyncio.wait([task], timeout=0.02)
        if self.is_gone:
            task.cancel()
            raise Gone
        return task.result()

    async def stop(self) -> None:
        await self.host.stop()

    async def leave(self) -> None:
        await self.host.stop()
        self.made_anew()

    def kill(self) -> None:
        self.killed = True


@dataclass
class Here:
    """This machine as a cluster with room for so many."""

    bundles: int
    code: Callable[[], str] = lambda: SERVES
    nodes: dict[str, Node] = field(default_factory=dict)
    given_back: int = 0

    async def room(self, count: int) -> "Here":
        if count > self.bundles:
            raise RayFailed("no room")
        self.bundles -= count
        return self

    def actor(self, index: int, asked: Asked) -> Node:
        self.nodes[asked.name] = Node(asked, lambda: self.code())
        return self.nodes[asked.name]

    def give_back(self) -> None:
        self.given_back += 1

    __hash__ = object.__hash__


@dataclass
class Run:
    crew: Crew
    cloud: Here
    told: Told
    said: list[str]
    task: "asyncio.Task[None]"

    def listed(self) -> dict[str, str]:
        return {up.worker: up.url for up in specs.lines(Path(self.told.listed).read_text())}

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        await eventually(lambda: self.task.done() or condition(), f"{what}: {self.said}", 30)
        assert not self.task.done(), self.said


@contextlib.asynccontextmanager
async def crew(tmp_path: Path, cloud: Here, replicas: int = 2, router: str = "") -> AsyncIterator[Run]:
    asked = tuple(
        Asked(f"r{index}", {"name": f"r{index}", "extra": ()}, "info", 20.0) for index in range(replicas)
    )
    told = Told(
        address="here", bundle={}, wait_s=1, replicas=asked, loads=False, listed=str(tmp_path / "replicas"),
        control="", quiet=False, keys=None, replica_ca=None, router=router,
    )  # fmt: skip
    said: list[str] = []
    made = Crew(told, cloud, said.append)
    task = asyncio.create_task(made.run())
    try:
        yield Run(made, cloud, told, said, task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        places = [one.place for one in made.fleet if one.place]
        assert not [place for place in places if lives(place.pid)], "none is left"
        assert all(node.killed for node in cloud.nodes.values())


def test_those_that_are_ready_are_listed_and_one_that_dies_comes_back(tmp_path: Path) -> None:
    async def body() -> None:
        async with crew(tmp_path, Here(2)) as run:
            await run.until(lambda: FLEET_READY in run.said, "all are ready")
            assert run.listed().keys() == {"r0", "r1"}
            first = run.crew.fleet["r1"].place
            assert first is not None
            os.kill(first.pid, signal.SIGKILL)
            await run.until(lambda: run.listed().keys() == {"r0"}, "the other one alone is listed")
            await run.until(lambda: run.listed().keys() == {"r0", "r1"}, "it is back")
            second = run.crew.fleet["r1"].place
            assert second is not None
            assert second.life != first.life
            assert run.cloud.nodes["r1"].lives == 2, "its actor ended with it"
        assert run.cloud.given_back == 1

    asyncio.run(body())


def test_one_whose_node_is_gone_is_listed_where_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "MISSED_S", 0.1)
    monkeypatch.setattr(fleet, "RETRY_S", 0.05)

    async def body() -> None:
        async with crew(tmp_path, Here(2)) as run:
            await run.until(lambda: FLEET_READY in run.said, "all are ready")
            node, before = run.cloud.nodes["r0"], run.listed()
            node.is_gone = True
            await run.until(lambda: run.listed().keys() == {"r1"}, "it is listed no more")
            await node.host.stop()
            node.made_anew()
            node.is_gone = False
            await run.until(lambda: run.listed().keys() == {"r0", "r1"}, "it is back")
            assert run.listed()["r1"] == before["r1"], "nobody else has moved"
            assert run.crew.fleet["r0"].deaths.early == 0

    asyncio.run(body())


def test_a_link_that_hangs_for_a_moment_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RETRY_S", 0.05)

    async def body() -> None:
        async with crew(tmp_path, Here(2)) as run:
            await run.until(lambda: FLEET_READY in run.said, "all are ready")
            place = run.crew.fleet["r0"].place
            node = run.cloud.nodes["r0"]
            node.is_gone = True
            for _ in range(10):
                await asyncio.sleep(0.02)
            node.is_gone = False
            os.kill(run.crew.fleet["r1"].place.pid, signal.SIGKILL)  # type: ignore[union-attr]
            await run.until(lambda: run.listed().keys() == {"r0"}, "the other one's death is seen")
            assert run.crew.fleet["r0"].place == place
            assert not [line for line in run.said if "is gone" in line]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("cloud", "why"),
    [(Here(1), "no room"), (Here(2, lambda: DIES), r"r\d ended on node here: exit code 3: I have a reason")],
)
def test_what_cannot_start_says_why(tmp_path: Path, cloud: Here, why: str) -> None:
    async def body() -> None:
        async with crew(tmp_path, cloud) as run:
            with pytest.raises((RayFailed, FleetFailed), match=why):
                await run.task

    asyncio.run(body())


def test_one_is_added_drained_and_its_place_is_used_again(tmp_path: Path) -> None:
    async def body(router: str) -> None:
        async with crew(tmp_path, Here(3), router=router) as run:
            changes, said = Changes(run.told, run.crew), list[str]()
            with pytest.raises(Refused, match="not up yet"):
                await changes.handle({"do": "add"}, said.append)
            await run.until(lambda: FLEET_READY in run.said, "all are ready")
            row = await changes.handle({"do": "add"}, said.append)
            assert (row["name"], row["state"]) == ("r2", "up")
            assert run.listed()["r2"] == row["url"]
            with pytest.raises(Refused, match="no room"):
                await changes.handle({"do": "add"}, said.append)
            gone = await changes.handle({"do": "drain", "name": "r2"}, said.append)
            assert gone["state"] == "stopped"
            assert not lives(gone["pid"])
            assert run.listed().keys() == {"r0", "r1"}
            row = await changes.handle({"do": "add"}, said.append)
            assert row["name"] == "r2", "in the bundle of the one that was drained"
            run.cloud.code = lambda: DIES
            await changes.handle({"do": "drain", "name": "r2"}, said.append)
            with pytest.raises(Refused, match="I have a reason"):
                await changes.handle({"do": "add"}, said.append)
            assert [one["name"] for one in changes.rows()] == ["r0", "r1"]
            for asked, why in (
                ({"do": "drain", "name": "r9"}, "there is no replica"),
                ({"do": "swap", "name": "r0", "model": "a"}, "there is no --swap"),
                ({"do": "add", "model": "b"}, "there is no model"),
                ({"do": "what"}, "not a request"),
            ):
                with pytest.raises(Refused, match=why):
                    await changes.handle(asked, said.append)

    with router_thread() as router:  # it knows r0 and r1, and no list
        asyncio.run(body(router))


def test_the_last_one_is_not_drained(tmp_path: Path) -> None:
    async def body(router: str) -> None:
        async with crew(tmp_path, Here(1), replicas=1, router=router) as run:
            await run.until(lambda: FLEET_READY in run.said, "it is ready")
            with pytest.raises(Refused, match="nothing could be served without r0"):
                await Changes(run.told, run.crew).handle({"do": "drain", "name": "r0"}, run.said.append)

    with router_thread() as router:
        asyncio.run(body(router))
