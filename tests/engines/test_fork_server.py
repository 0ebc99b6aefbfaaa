"""The fork server: replicas of their own, and what happens when one of the parties dies."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest

from sglang_fair.cluster.child import Child
from sglang_fair.cluster.plan import Process
from tests.support.live import START_S, Cluster, lives
from tests.support.waiting import wait_until

FAKE_FORK_SERVER = """
import os, signal, socket, subprocess, sys, time
from sglang_fair.common import processes
from sglang_fair.engines import fork_server

def main(argv):
    print("I am", *argv, os.environ["SAID"], flush=True)
    if argv[0] == "sleeps":
        child = subprocess.Popen(["sleep", "600"])
        print("child", child.pid, flush=True)
        child.wait()
    if argv[0] == "asks":
        processes.die_with_supervisor()
        print("asked", flush=True)
        time.sleep(600)
    return int(argv[1])

def slowly(make_session=os.setsid):
    time.sleep(0.5)
    make_session()

def fork_slowly(fork=os.fork):
    pid = fork()
    if pid == 0:
        time.sleep(0.5)
    return pid

if "slowly" in sys.argv:
    os.setsid = slowly
if "forks slowly" in sys.argv:
    os.fork = fork_slowly
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind("\\0" + sys.argv[1])
    listener.listen()
    print("ready to fork replicas", flush=True)
    fork_server.ForkServer(listener, main).run()
"""


@contextmanager
def fake_fork_server(name: str, *how: str) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(
        [sys.executable, "-c", FAKE_FORK_SERVER, name, *how], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
class TestForkServer:
    @staticmethod
    def spec(fork_server: str, *argv: str) -> Process:
        return Process("r0", "replica", argv, "x", 1.0, 1.0, {"SAID": "hello"}, fork_server=fork_server)

    @staticmethod
    async def started(spec: Process) -> tuple[Child, list[str]]:
        lines: list[str] = []
        return await Child.start(spec, lambda _, line: lines.append(line)), lines

    @pytest.mark.slow
    def test_replicas_have_output_environment_session_and_exit_code_of_their_own(self) -> None:
        name = f"sglang-fair-test/{os.getpid()}/a"

        async def both() -> None:
            (first, said), (second, said_too) = await asyncio.gather(
                self.started(self.spec(name, "one", "3")), self.started(self.spec(name, "two", "0"))
            )
            assert first.pid != second.pid
            assert (await first.exited(), await second.exited()) == ("exit code 3", "exit code 0")
            assert (said, said_too) == (["I am one 3 hello"], ["I am two 0 hello"])

        with fake_fork_server(name):
            asyncio.run(both())

    @pytest.mark.slow
    def test_one_that_is_killed_takes_its_session_along_and_not_its_siblings(self) -> None:
        name = f"sglang-fair-test/{os.getpid()}/b"

        async def killed() -> None:
            first, said = await self.started(self.spec(name, "sleeps", "0"))
            second, _ = await self.started(self.spec(name, "sleeps", "0"))
            await first.saw("child")
            grandchild = int(said[-1].split()[1])
            assert os.getsid(grandchild) == first.pid != os.getsid(os.getpid())
            os.kill(first.pid, signal.SIGKILL)
            assert await first.exited() == "killed by SIGKILL"
            assert not lives(grandchild)
            assert second.running
            await second.stop(asyncio.Event())
            assert not lives(second.pid)

        with fake_fork_server(name):
            asyncio.run(killed())

    @pytest.mark.slow
    def test_a_signal_that_comes_before_a_replica_has_begun_ends_it_and_not_its_siblings(self) -> None:
        name = f"sglang-fair-test/{os.getpid()}/f"

        async def killed() -> None:
            first, _ = await self.started(self.spec(name, "sleeps", "0"))
            await first.saw("child")
            second, _ = await self.started(self.spec(name, "sleeps", "0"))
            os.kill(second.pid, signal.SIGTERM)
            assert await second.exited() == "killed by SIGTERM"
            assert lives(first.pid)
            await first.stop(asyncio.Event())

        with fake_fork_server(name, "forks slowly"):
            asyncio.run(killed())

    @pytest.mark.slow
    @pytest.mark.parametrize("how", [(), ("slowly",)], ids=["its session is there", "not yet"])
    def test_whoever_asked_is_gone(self, how: tuple[str, ...]) -> None:
        name = f"sglang-fair-test/{os.getpid()}/c"
        with fake_fork_server(name, *how), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(f"\0{name}")
            wanted = {"argv": ["sleeps", "0"], "env": {"SAID": "x"}}
            socket.send_fds(connection, [json.dumps(wanted).encode()], [2])
            pid = json.loads(connection.recv(4096))["pid"]
            assert lives(pid)
            connection.close()
            wait_until(lambda: not lives(pid), "the orphan's end")

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_a_fork_server_that_ends_takes_its_replicas_along(self, number: signal.Signals) -> None:
        name = f"sglang-fair-test/{os.getpid()}/d"

        async def orphaned(fork_server: "subprocess.Popen[bytes]") -> None:
            child, _ = await self.started(self.spec(name, "sleeps", "0"))
            await child.saw("child")
            fork_server.send_signal(number)
            assert await child.exited() == "killed by SIGKILL"
            assert not lives(child.pid)

        with fake_fork_server(name) as fork_server:
            asyncio.run(orphaned(fork_server))

    @pytest.mark.slow
    def test_a_replica_ends_with_its_fork_server_even_if_nobody_else_looks(self) -> None:
        name = f"sglang-fair-test/{os.getpid()}/g"
        ours, its = os.pipe()
        with (
            fake_fork_server(name) as server,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
        ):
            connection.connect(f"\0{name}")
            wanted = {"argv": ["asks", "0"], "env": {"SAID": "x"}}
            socket.send_fds(connection, [json.dumps(wanted).encode()], [its])
            os.close(its)
            pid = json.loads(connection.recv(4096))["pid"]
            with os.fdopen(ours) as output:
                assert [output.readline(), output.readline()] == ["I am asks 0 x\n", "asked\n"]
            server.kill()
            wait_until(lambda: not lives(pid), "its end")

    @pytest.mark.slow
    def test_a_fork_server_that_is_still_importing_is_waited_for(self) -> None:
        name = f"sglang-fair-test/{os.getpid()}/e"

        async def early() -> None:
            starting = asyncio.create_task(self.started(self.spec(name, "one", "0")))
            await asyncio.sleep(0.3)
            with fake_fork_server(name):
                child, _ = await starting
                assert await child.exited() == "exit code 0"

        asyncio.run(early())


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_cluster_forks_its_replicas_and_one_that_is_killed_returns() -> None:
    arguments = ("--engine", "emulated", "--gpu", "a10g", "--model", "llama-3.2-3b")
    with Cluster(*arguments, forked=False) as cluster:
        facts = cluster.addresses
        assert facts["emulated"]["gpu"] == "a10g"
        assert "emulated a10g with llama-3.2-3b" in cluster.log.read_text()
        assert psutil.Process(facts["pids"]["r0"]).ppid() == facts["pids"]["fork-server"]
        below = {process.pid for process in psutil.Process(facts["pids"]["cluster"]).children(recursive=True)}
        assert set(facts["pids"].values()) - {facts["pids"]["cluster"]} <= below, "processes have one owner"
        body = {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        ask = f"{cluster.url}/v1/chat/completions"
        first = httpx.post(ask, json=body, timeout=60).json()["choices"][0]["message"]["content"]
        assert [books["policy"] for books in cluster.books()] == ["dlpm", "dlpm"]
        os.kill(facts["pids"]["r0"], signal.SIGKILL)
        wait_until(lambda: "r0 ended: killed by SIGKILL" in cluster.log.read_text(), "the death of r0")
        wait_until(lambda: cluster.log.read_text().count("r0 is ready") == 2, "r0's return", START_S)
        for _ in range(4):
            told = httpx.post(ask, json=body, timeout=60).json()
            assert told["choices"][0]["message"]["content"] == first
