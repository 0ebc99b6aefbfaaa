"""Replicas on Ray's nodes: what Ray is asked for, and a fleet of small programs of this machine: which are listed, when
they die, move, come and go."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.replica_lists import specs
from sglang_fair.cluster import on_ray, plan
from sglang_fair.cluster.control import Refused
from sglang_fair.cluster.on_ray import Fleet, FleetFailed, FleetSettings, Gone, Place, Ray
from sglang_fair.cluster.options import ConfigError, Options
from sglang_fair.cluster.plan import (
    FleetFiles,
    Ports,
    Replica,
    build,
    placed,
    replicas_for,
)
from sglang_fair.cluster.ports import ReplicaPorts
from sglang_fair.cluster.workers import Workers
from sglang_fair.common.processes import PARENT
from tests.cluster.test_cluster import MACHINE, MODEL
from tests.cluster.test_workers import router_thread
from tests.support.live import lives
from tests.support.ports import free_port
from tests.support.waiting import eventually

FILES = FleetFiles(Path("/run/fleet.json"), Path("/run/replicas"), Path("/run/8000.sock"))
ON_RAY = Options(ray="10.0.0.1:6379", device="cuda", replicas=3)
READY = "all replicas are ready"
PORTS = ReplicaPorts(30_000, 30_001, 30_003, 30_004)


def settings(**more: Any) -> FleetSettings:
    known: dict[str, Any] = {
        "address": "here", "bundle": {}, "wait_s": 1.0, "replicas": (), "loads": False, "listed": "", "control": "",
        "quiet": False, "keys": None, "replica_ca": None, "router": "",
    }  # fmt: skip
    return FleetSettings(**known | more)


def test_the_command_of_a_replica_is_the_same_here_and_on_a_node() -> None:
    options = Options(replicas=2, quantum=77.0, extra=("--mem-fraction-static", "0.5"))
    here = build(options, "cpu", MACHINE, MODEL, Ports(8000, 30_100, (PORTS, PORTS))).of("replica")
    asked = replicas_for(options, "cpu", MACHINE, (MODEL, MODEL))
    there = [placed(one, plan.LOCAL, PORTS, "/there/python") for one in asked]
    assert [one.argv for one in here] == [one.argv[3:] for one in there], "a fork server is no command"
    assert [one.worker for one in here] == [one.worker for one in there]
    assert there[1].argv[:3] == ("/there/python", "-m", "sglang_fair.engines.replica")
    assert placed(asked[0].renamed("r7"), plan.LOCAL, PORTS, "p").worker.worker == "r7"


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::7"])
@pytest.mark.parametrize("extra", [(), ("--ssl-certfile", "cert.pem", "--ssl-keyfile", "key.pem")])
def test_a_replica_says_the_address_of_its_node_where_others_listen(
    host: str, extra: tuple[str, ...]
) -> None:
    (asked,) = replicas_for(replace(ON_RAY, replicas=1, extra=extra), "cuda", MACHINE, (MODEL,))
    process = placed(asked, host, PORTS, "python")
    assert process.worker is not None
    (up,) = specs.lines(specs.written(process.worker))
    at = f"[{host}]" if ":" in host else host
    assert up.url == f"{'https' if extra else 'http'}://{at}:30000"
    assert (up.kv, up.replay, up.load) == (f"tcp://{at}:30001", f"tcp://{at}:30002", f"tcp://{at}:30004")
    arguments = dict(zip(process.argv[3::2], process.argv[4::2], strict=False))
    assert arguments["--host"] == host, "it listens there, and nowhere else"


def test_with_a_fleet_replicas_are_not_in_the_plan_and_the_router_follows_its_list() -> None:
    found = build(ON_RAY, "cuda", MACHINE, MODEL, Ports(8000, 30_100, ()), fleet=FILES)
    assert {one.role for one in found.processes} == {"fleet", "router", "gateway"}
    (router,) = found.of("router")
    assert router.argv[router.argv.index("--replicas-file") + 1] == str(FILES.listed)
    assert "--worker" not in router.argv
    (fleet,) = found.of("fleet")
    assert fleet.argv[-1] == str(FILES.settings)
    assert fleet.lists == ON_RAY.replicas
    assert "fleet" in plan.VITAL, "without it a cluster does not go on"
    on_cpu = build(replace(ON_RAY, device="cpu"), "cpu", MACHINE, MODEL, Ports(8000, 30_100, ()), fleet=FILES)
    assert not on_cpu.of("fork-server"), "what is forked here helps nobody there"


def test_what_a_fleet_is_told_is_what_it_reads() -> None:
    options = replace(ON_RAY, client_weights={"a": 2.0}, extra=("--tp", "2"), quiet_replicas=True)
    asked = replicas_for(options, "cuda", MACHINE, (MODEL,) * 3)
    settings = on_ray.fleet_settings(options, "cuda", asked, FILES, "tcp://127.0.0.1:30100")
    read = msgspec.json.decode(msgspec.json.encode(settings), type=FleetSettings)
    assert read.bundle == {"CPU": 1.0, "GPU": 2.0}
    assert [placed(one, "h", PORTS, "p") for one in read.replicas] == [
        placed(one, "h", PORTS, "p") for one in asked
    ]


@pytest.mark.parametrize(
    ("options", "bundle"),
    [
        (Options(ray="auto"), {"CPU": 1, "GPU": 1}),
        (Options(ray="auto", extra=("--tp", "4", "--pp-size=2")), {"CPU": 1, "GPU": 8}),
        (Options(ray="auto", device="cpu"), {"CPU": 1}),
        (Options(ray="auto", engine="emulated", gpu="h100-80g", model="llama-3.1-8b"), {"CPU": 1}),
        (
            Options(ray="auto", ray_resources="CPU=8,memory=64e9,fast=0.5"),
            {"CPU": 8, "GPU": 1, "memory": 64e9, "fast": 0.5},
        ),
        (Options(ray="auto", engine="cpu", ray_resources="CPU=0,slot=1"), {"slot": 1}),
    ],
)
def test_a_bundle_is_a_gpu_for_each_rank_unless_more_is_said(
    options: Options, bundle: dict[str, float]
) -> None:
    on_ray.check(options)
    wanted = {"auto": options.device, "emulated": "cpu"}.get(options.engine, options.engine)
    assert on_ray.bundle(options, on_ray.device(wanted)) == bundle


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Options(ray_resources="CPU=1"), "--ray-resources is for --ray"),
        (Options(ray="ray://10.0.0.1:10001"), "not Ray Client"),
        (Options(ray="auto", swap="all", models="a=x,b=y"), "--swap is not there with --ray"),
        (Options(ray="auto", scale_up=1, placement="qlm"), "--scale-up is not there with --ray"),
        (Options(ray="auto", ray_resources="CPU=many"), "CPU=many is not an amount"),
        (Options(ray="auto", ray_resources="CPU=-1"), "CPU=-1 is not an amount"),
        (Options(ray="auto", ray_resources="CPU=inf"), "CPU=inf is not an amount"),
        (Options(ray="auto", ray_resources="GPU=1", extra=("--tp", "2")), "2 ranks, each with a GPU"),
    ],
)
def test_what_cannot_be_is_one_line(options: Options, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        on_ray.check(options)
    assert "\n" not in str(raised.value)


def test_replicas_get_what_is_meant_for_them_alone() -> None:
    environment = {
        "SGLANG_FAIR_REPLICA_KEY": "theirs", "SGLANG_FAIR_ADMIN_KEY": "ours", "SGLANG_FAIR_FEEDER_KEY": "ours",
        "SGLANG_USE_X": "1", "HF_TOKEN": "t", "PATH": "/here", "CUDA_VISIBLE_DEVICES": "0", PARENT: "1",
    }  # fmt: skip
    assert on_ray.carried(environment) == {
        "SGLANG_FAIR_REPLICA_KEY": "theirs", "SGLANG_USE_X": "1", "HF_TOKEN": "t"
    }  # fmt: skip


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.0.0.1:port", "127.0.0.1:99999", "no-such-host.invalid:1"]
)
def test_an_address_where_nobody_answers_is_said_at_once(address: str) -> None:
    with pytest.raises(FleetFailed, match=address) as raised:
        Ray(settings(address=address), {})
    assert "\n" not in str(raised.value)


# -- a fleet

SERVES = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"totals": {}}')
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
DIES = "raise SystemExit(3)"


@dataclass
class Node:
    """An actor here, which is made anew as Ray makes actors anew."""

    replica: Replica
    code: Callable[[], str]
    lives: int = 0
    is_gone: bool = False
    killed: bool = False
    process: "subprocess.Popen[bytes] | None" = None
    at: Place | None = None

    async def place(self) -> Place:
        if self.is_gone:
            raise Gone
        if self.process is None or self.process.poll() is not None:
            self.lives += 1
            ports = ReplicaPorts(free_port(), 1, 3)
            spec = placed(self.replica, "127.0.0.1", ports, sys.executable)
            assert spec.worker is not None
            self.process = subprocess.Popen([sys.executable, "-c", self.code(), str(ports.http)])
            self.at = Place(spec.worker, "here", self.process.pid, self.lives > 1)
        assert self.at is not None
        return self.at

    async def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        self.killed = True


@dataclass
class Here:
    """This machine as a cluster with room for so many."""

    room: int
    code: Callable[[], str] = lambda: SERVES
    actors: dict[str, Node] = field(default_factory=dict)

    async def bundles(self, count: int) -> list[Any]:
        if count > self.room:
            raise FleetFailed("no room")
        self.room -= count
        return list(range(count))

    def actor(self, bundle: Any, replica: Replica) -> Node:
        self.actors[replica.name] = Node(replica, lambda: self.code())
        return self.actors[replica.name]


@dataclass
class Run:
    fleet: Fleet
    nodes: Here
    listed_in: Path
    said: list[str]
    task: "asyncio.Task[None]"

    def listed(self) -> dict[str, str]:
        return {up.worker: up.url for up in specs.lines(self.listed_in.read_text())}

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        await eventually(lambda: self.task.done() or condition(), f"{what}: {self.said}", 200)
        assert not self.task.done(), self.said


@contextlib.asynccontextmanager
async def running(tmp_path: Path, nodes: Here, replicas: int = 2) -> AsyncIterator[Run]:
    asked = tuple(
        Replica(f"r{index}", {"name": f"r{index}", "extra": ()}, "info", 200.0) for index in range(replicas)
    )
    said: list[str] = []
    listed = tmp_path / "replicas"
    fleet = Fleet(settings(replicas=asked, listed=str(listed)), nodes, said.append)
    task = asyncio.create_task(fleet.run())
    try:
        yield Run(fleet, nodes, listed, said, task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        processes = [node.process for node in nodes.actors.values() if node.process]
        assert not [process for process in processes if lives(process.pid)], "none is left"
        assert all(node.killed for node in nodes.actors.values())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "LOOK_S", 0.05)


def test_those_that_are_ready_are_listed_and_one_that_dies_or_moves_comes_back(tmp_path: Path) -> None:
    async def body() -> None:
        async with running(tmp_path, Here(2)) as run:
            await run.until(lambda: READY in run.said, "all are ready")
            before, dead = run.listed(), run.nodes.actors["r1"]
            assert before.keys() == {"r0", "r1"}
            dead.is_gone = True
            await run.until(lambda: run.listed().keys() == {"r0"}, "the other one alone is listed")
            assert {row.name: row.state for row in run.fleet.rows()} == {"r0": "up", "r1": "waits"}
            await dead.stop()
            dead.is_gone = False
            await run.until(lambda: run.listed().keys() == {"r0", "r1"}, "it is back")
            assert dead.lives == 2
            assert run.listed()["r1"] != before["r1"]
            assert dead.process is not None
            os.kill(dead.process.pid, signal.SIGKILL)
            await run.until(lambda: dead.lives == 3 and run.listed().keys() == {"r0", "r1"}, "and again")
            assert run.listed()["r0"] == before["r0"], "the other one has not moved"

    asyncio.run(body())


@pytest.mark.parametrize(
    ("nodes", "why"), [(Here(1), "no room"), (Here(2, lambda: DIES), r"r\d ended before all were ready")]
)
def test_what_cannot_start_says_why(tmp_path: Path, nodes: Here, why: str) -> None:
    async def body() -> None:
        async with running(tmp_path, nodes) as run:
            with pytest.raises(FleetFailed, match=why):
                await run.task

    asyncio.run(body())


def test_one_is_added_drained_and_its_place_is_used_again(tmp_path: Path) -> None:
    async def body(router: str) -> None:
        async with running(tmp_path, Here(3)) as run:
            workers, said = Workers(run.fleet, router), list[str]()
            with pytest.raises(Refused, match="not up yet"):
                await workers.handle({"do": "add"}, said.append)
            await run.until(lambda: READY in run.said, "all are ready")
            row = await workers.handle({"do": "add"}, said.append)
            assert (row["name"], row["state"], row["node"]) == ("r2", "up", "here")
            await run.until(lambda: run.listed().get("r2") == row["url"], "it is listed")
            with pytest.raises(Refused, match="no room"):
                await workers.handle({"do": "add"}, said.append)
            gone = await workers.handle({"do": "drain", "name": "r2"}, said.append)
            assert gone["state"] == "stopped"
            assert not lives(gone["pid"])
            assert run.listed().keys() == {"r0", "r1"}
            row = await workers.handle({"do": "add"}, said.append)
            assert row["name"] == "r2", "in the bundle of the one that was drained"
            run.nodes.code = lambda: DIES
            await workers.handle({"do": "drain", "name": "r2"}, said.append)
            with pytest.raises(Refused, match="r2 ended before it was ready"):
                await workers.handle({"do": "add"}, said.append)
            assert [one.name for one in run.fleet.rows()] == ["r0", "r1"]
            with pytest.raises(Refused, match="there is no model"):
                await workers.handle({"do": "add", "model": "b"}, said.append)

    with router_thread() as router:  # it knows r0 and r1, and no list
        asyncio.run(body(router))


def test_a_replicas_lines_are_shown_behind_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(on_ray, "say", said.append)
    text = "(r0 pid=1, ip=10.0.0.7) loads\n(r1 pid=2) Error: no memory\nA node died:\n  much more\n"
    on_ray.Output(quiet=False).write(text)
    assert said == ["r0: loads", "r1: Error: no memory", "A node died:"]
    said.clear()
    on_ray.Output(quiet=True).write(text)
    assert said == ["r1: Error: no memory", "A node died:"]
