"""Replicas that are added to a running cluster and drained from it: the control socket, the supervisor, the load."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from router.client import RouterClient
from router.core import Router
from router.events import Arrive, Done, Place, WorkerUp, decode_answer, encode
from router.placement import build as build_placement
from router.shell import Shell
from sglang_fair.cluster import control
from sglang_fair.cluster.control import Control, Refused, Say, ask, own_folder
from sglang_fair.cluster.local import Additions, Local
from sglang_fair.cluster.options import Options
from sglang_fair.cluster.plan import Process, build
from sglang_fair.cluster.ports import Marks, Reservations
from sglang_fair.cluster.supervisor import RestartRule, StartFailed, Supervisor
from sglang_fair.cluster.workers import Workers
from tests.cluster.test_cluster import (
    DIES,
    LIMIT_S,
    MACHINE,
    SERVES,
    Record,
    after,
    cluster,
    of_our_own,
    program,
    until,
)
from tests.cluster.test_cluster import MODEL as TINY
from tests.support.live import lives
from tests.support.ports import free_port


def run(body: Awaitable[None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * LIMIT_S):
            await body

    asyncio.run(main())


# -- the socket


@contextlib.asynccontextmanager
async def controlled(path: Path, handle: control.Handle) -> Any:
    made = Control(path, handle)
    await made.start()
    try:
        yield made
    finally:
        await made.close()
    assert not path.exists()


async def echo(asked: dict[str, Any], say: Say) -> dict[str, Any]:
    if asked["do"] == "refuse":
        raise Refused("no")
    if asked["do"] == "break":
        raise KeyError("broken")
    for number in range(asked["says"]):
        say(f"step {number}")
    return {"asked": asked}


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short name: that of a Unix socket has at most 107 bytes."""
    root = "/tmp" if os.access("/tmp", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fair-", dir=root) as made:
        yield Path(made)


@pytest.fixture
def path(short: Path) -> Path:
    return short / "run" / "8000.sock"


def test_a_request_is_answered_in_lines(path: Path) -> None:
    async def body() -> None:
        async with controlled(path, echo):
            said: list[str] = []
            found = await asyncio.to_thread(ask, path, {"do": "it", "says": 2}, said.append)
            assert (found, said) == ({"asked": {"do": "it", "says": 2}}, ["step 0", "step 1"])
            with pytest.raises(Refused, match=r"^no$"):
                await asyncio.to_thread(ask, path, {"do": "refuse"}, said.append)
            with pytest.raises(Refused, match="KeyError"):
                await asyncio.to_thread(ask, path, {"do": "break"}, said.append)
            assert path.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077 == 0

    run(body())


@pytest.mark.parametrize("line", [b"{\n", b"[1]\n", b"\n", b"\xff\n", b"x" * 100_000 + b"\n"])
def test_what_is_no_request_is_refused(path: Path, line: bytes) -> None:
    async def body() -> None:
        async with controlled(path, echo):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(line)
            assert "not a request" in json.loads(await reader.readline())["error"]
            writer.close()
            assert await asyncio.to_thread(ask, path, {"do": "it", "says": 0}, print)

    run(body())


def test_a_request_whose_sender_has_gone_is_carried_out(path: Path) -> None:
    go_on, done = asyncio.Event(), asyncio.Event()

    async def slow(asked: dict[str, Any], say: Say) -> dict[str, Any]:
        await go_on.wait()
        say("still here")
        done.set()
        return {}

    async def body() -> None:
        async with controlled(path, slow) as made:
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(b'{"do": "it"}\n')
            await until(lambda: made._at_work)
            writer.close()
            await writer.wait_closed()
            go_on.set()
            await done.wait()

    run(body())


def test_a_socket_that_was_left_behind_is_replaced(path: Path) -> None:
    own_folder(path.parent)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))

    async def body() -> None:
        async with controlled(path, echo):
            assert await asyncio.to_thread(ask, path, {"do": "it", "says": 0}, print)

    run(body())


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    with pytest.raises(PermissionError, match="is not this user's alone"):
        own_folder(open_folder)
    link = tmp_path / "link"
    own_folder(tmp_path / "own")
    link.symlink_to(tmp_path / "own")
    with pytest.raises(PermissionError):
        own_folder(link)


# -- what is planned


def test_a_further_replica_is_planned_like_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    of_our_own(monkeypatch)
    options = Options(quantum=77.0, payer="equal", extra=("--page-size", "32"))
    with contextlib.closing(Reservations("127.0.0.1")) as reservations:
        ports = reservations.choose(0, 2)
        plan = build(options, "cpu", MACHINE, TINY, ports)
        more = Additions(options, "cpu", TINY, ports, reservations, Marks("gpu-test"), lambda: MACHINE)
        r1, (r2, _) = plan.of("replica")[1], more.plan(2)
        own = {"--name", "--port", "--kv-port", "--nccl-port"}
        assert [word for word in r2.argv if word not in after_all(r2, own)] == [
            word for word in r1.argv if word not in after_all(r1, own)
        ]
        assert (r2.name, r2.worker and r2.worker.worker, after(r2.argv, "--name")) == ("r2", "r2", "r2")
        used = {ports.gateway, ports.router}
        used |= {port for one in ports.replicas for port in (one.http, one.kv, one.kv + 1, one.rendezvous)}
        new = {int(after(r2.argv, "--port")), int(after(r2.argv, "--kv-port"))}
        assert not used & new
        more.freed(r2)
        assert int(after(more.plan(5)[0].argv, "--port")) in new, "its ports are free again"


def after_all(spec: Process, options: set[str]) -> set[str]:
    return {after(spec.argv, option) for option in options}


# -- the supervisor


@contextlib.contextmanager
def router_thread() -> Iterator[str]:
    """A real router that knows r0 and r1."""
    shell = Shell(Router(build_placement("round_robin"), name="round_robin"), "tcp://127.0.0.1:*")
    for name in ("r0", "r1"):
        shell.tell(WorkerUp(name, "http://x"))
    thread = threading.Thread(target=shell.run)
    thread.start()
    try:
        yield shell.endpoint
    finally:
        shell.stop()
        thread.join()
        shell.close()


@dataclass
class Changed:
    """A supervised cluster of small processes, and what may be done to it."""

    supervisor: Supervisor
    record: Record
    workers: Workers
    freed: list[str]
    said: list[str]
    next_code: str = SERVES

    async def add(self) -> dict[str, Any]:
        return await self.workers.handle({"do": "add"}, self.said.append)

    async def drain(self, name: str) -> dict[str, Any]:
        return await self.workers.handle({"do": "drain", "name": name}, self.said.append)

    def states(self) -> dict[str, str]:
        return {row.name: row.state for row in self.workers.rows()}


@contextlib.contextmanager
def placed_request(endpoint: str) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A gateway's socket, and where the router has placed its request q0."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as gateway:
        gateway.setsockopt(zmq.LINGER, 0)
        gateway.connect(endpoint)
        gateway.send(encode(Arrive("q0", "c", b"")))
        placed = decode_answer(gateway.recv())
        assert isinstance(placed, Place)
        yield gateway, placed.worker


def changing(body: Callable[[Changed, str], Awaitable[None]]) -> None:
    """Runs `body` beside a supervisor of r0, r1, a router and a gateway; none is left."""

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            endpoint = stack.enter_context(router_thread())
            link = await stack.enter_async_context(RouterClient(endpoint, beats=False))
            plan = replace(cluster(program("r0", SERVES), program("r1", SERVES)), router=endpoint)
            record, up, freed = Record(), asyncio.Event(), []
            record.when_up = up.set
            supervisor = Supervisor(plan, record, rule=RestartRule(first_delay_s=0.01), link=link)
            crew = Local(
                supervisor,
                link,
                lambda number, model, has: (program(f"r{number}", made.next_code), None),
                lambda spec: freed.append(spec.name),
            )
            workers = Workers(crew, endpoint)
            made = Changed(supervisor, record, workers, freed, [])
            running = asyncio.create_task(supervisor.run())
            with pytest.raises(Refused, match="not up yet"):
                await made.add()
            await up.wait()
            freed.clear()
            try:
                await body(made, endpoint)
            finally:
                pids = list(supervisor.pids.values())
                supervisor.stop()
                assert await asyncio.wait_for(running, LIMIT_S)
                assert not any(map(lives, pids))

    run(main())


def test_an_added_replica_is_kept_and_a_drained_one_is_stopped() -> None:
    async def body(made: Changed, _: str) -> None:
        assert made.states() == {"r0": "up", "r1": "up"}
        row = await made.add()
        assert (row["name"], row["state"], row["pid"]) == ("r2", "up", made.supervisor.pids["r2"])
        psutil.Process(row["pid"]).kill()
        await until(lambda: made.states()["r2"] == "up" and made.supervisor.pids["r2"] != row["pid"])
        assert made.record.deaths == [("r2", "killed by SIGKILL")]
        pid = made.supervisor.pids["r0"]
        assert (await made.drain("r0"))["state"] == "stopped"
        assert not lives(pid)
        assert (made.states(), made.freed) == ({"r1": "up", "r2": "up"}, ["r0"])
        [router] = made.supervisor.plan.of("router")
        assert [word[:2] for at, word in enumerate(router.argv) if router.argv[at - 1] == "--worker"] == [
            "r1",
            "r2",
        ]
        assert (await made.add())["name"] == "r0", "the lowest number that is free"
        assert len(made.record.deaths) == 1, "nobody who was stopped has died"

    changing(body)


def test_a_replica_finishes_before_it_is_stopped() -> None:
    async def body(made: Changed, endpoint: str) -> None:
        with placed_request(endpoint) as (gateway, worker):
            draining = asyncio.create_task(made.drain(worker))
            await until(lambda: any("1 requests under way" in text for text in made.said))
            assert made.states()[worker] == "draining"
            gateway.send(encode(Arrive("q1", "c", b"")))
            other = decode_answer(gateway.recv())
            assert isinstance(other, Place)
            assert other.worker != worker
            with pytest.raises(Refused, match=f"{worker} is draining"):
                await made.drain(worker)
            with pytest.raises(Refused, match="no other replica is up"):
                await made.drain(other.worker)
            assert not draining.done()
            gateway.send(encode(Done("q0")))
            assert (await draining)["state"] == "stopped"
            gateway.send(encode(Done("q1")))

    changing(body)


def test_what_cannot_be_changed() -> None:
    async def body(made: Changed, _: str) -> None:
        with pytest.raises(Refused, match="there is no replica 'r9'"):
            await made.drain("r9")
        with pytest.raises(Refused, match="there is no replica 'gateway'"):
            await made.drain("gateway")
        for wrong in ({}, {"do": "stop"}, {"do": "drain"}, {"do": "drain", "name": 1}):
            with pytest.raises(Refused, match="not a request"):
                await made.workers.handle(wrong, print)
        made.next_code = DIES
        with pytest.raises(Refused, match="r2 ended before it was ready: exit code 3"):
            await made.add()
        assert (made.states(), made.freed) == ({"r0": "up", "r1": "up"}, ["r2"])
        assert "r2" not in made.supervisor.pids

    changing(body)


def test_a_replica_that_dies_while_it_drains_is_not_started_again() -> None:
    async def body(made: Changed, endpoint: str) -> None:
        with placed_request(endpoint) as (_, worker):
            draining = asyncio.create_task(made.drain(worker))
            await until(lambda: made.said)
            psutil.Process(made.supervisor.pids[worker]).kill()
            await draining  # though no gateway says that its request has ended
            assert worker not in made.states()
            assert made.record.ready.count(worker) == 1

    changing(body)


def test_the_end_of_the_cluster_ends_an_addition() -> None:
    async def body(made: Changed, _: str) -> None:
        made.next_code = "import time; print('slow', flush=True); time.sleep(60)"
        adding = asyncio.create_task(made.add())
        await until(lambda: ("r2", "slow") in made.record.lines)
        assert made.states()["r2"] == "starting"
        pid = made.supervisor.pids["r2"]
        made.supervisor.stop()
        await asyncio.wait([adding])
        assert adding.cancelled() or isinstance(adding.exception(), Refused)
        await until(lambda: not lives(pid))
        with pytest.raises(StartFailed, match="being stopped"):
            await made.supervisor.add(program("r3", SERVES))

    changing(body)


# -- the commands


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_fair.cli", "workers", *arguments],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
    )


@pytest.mark.slow
def test_a_running_cluster_is_changed_by_commands(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    port = free_port()

    async def said(*arguments: str) -> str:
        done = await asyncio.to_thread(command, *arguments, "--cluster", f"http://127.0.0.1:{port}")
        assert done.returncode == 0, done
        return done.stdout

    async def body(made: Changed, _: str) -> None:
        async with controlled(control.socket_path(port), made.workers.handle):
            assert (await said("add")).startswith("r2 is up")
            assert await said("drain", "r0") == "r0 has finished and is stopped\n"
            rows = json.loads(await said("list", "--json"))
            assert {row["name"]: row["state"] for row in rows} == {"r1": "up", "r2": "up"}

    changing(body)


@pytest.mark.slow
def test_without_a_cluster_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    said = command("list", "--cluster", "http://127.0.0.1:8123")
    assert said.returncode == 1
    assert said.stderr.startswith("sglang-fair: no cluster answers at ")
    said = command("add", "--cluster", "localhost")
    assert said.returncode == 2
    assert "--cluster must be the address of a gateway" in said.stderr
