"""The cluster: what is refused, what is planned, and supervision, with small processes for engines."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.events import WorkerDown, WorkerUp
from sglang_fair.cluster.child import Child, session_members
from sglang_fair.cluster.console import example as example_request
from sglang_fair.cluster.gpus import Gpu, Machine
from sglang_fair.cluster.options import ConfigError, Options
from sglang_fair.cluster.plan import (
    Model,
    Plan,
    Process,
    Role,
    build,
    choose_device,
    gateway_url,
)
from sglang_fair.cluster.ports import Ports, PortTaken, ReplicaPorts, Reservations, is_free
from sglang_fair.cluster.supervisor import RestartRule, StartFailed, Supervisor
from sglang_fair.core.cost import make_cost
from sglang_fair.settings.program import parse
from tests.support import fork_server
from tests.support.live import lives
from tests.support.ports import free_port
from tests.support.waiting import wait_until

LIMIT_S, WHOLE_S = 60.0, 240.0
"""On however busy a machine: for what takes little time, and for a step of a real cluster."""

MACHINE = Machine(cores=2, gpus=(), cuda_build=False, python="python")
GPU_MACHINE = Machine(
    cores=64,
    gpus=tuple(Gpu(str(number), f"GPU-{number}") for number in range(8)),
    cuda_build=True,
    python="python",
)
MODEL = Model(Path("/models/tiny"), "tiny")
PORTS = Ports(
    gateway=8000,
    router=30000,
    replicas=(ReplicaPorts(30001, 30002, 30004), ReplicaPorts(30005, 30006, 30008)),
)


def after(argv: Sequence[str], option: str) -> str:
    """The value of an option on a command line."""
    return argv[list(argv).index(option) + 1]


class TestPorts:
    @given(st.integers(1, 12), st.sets(st.integers(30_000, 30_060)), st.sampled_from([0, 8000]))
    def test_none_is_used_twice_and_none_is_taken(self, replicas: int, taken: set[int], gateway: int) -> None:
        with pytest.MonkeyPatch.context() as patch, contextlib.closing(Reservations("127.0.0.1")) as mine:
            patch.setattr("sglang_fair.cluster.ports.is_free", lambda host, port: port not in taken)
            ports = mine.choose(gateway, replicas, loads=True)
            used = [ports.gateway, ports.router]
            for replica in ports.replicas:
                assert replica.load is not None
                used += [replica.http, replica.kv, replica.kv + 1, replica.rendezvous, replica.load]
            assert len(set(used)) == len(used) == 2 + 5 * replicas
            assert not taken & set(used)
            assert not any(mine.take(port) for port in set(used) - {8000})
            patch.setattr("sglang_fair.cluster.ports.is_free", lambda host, port: False)
            with pytest.raises(PortTaken, match="too few free ports"):
                mine.choose(0, 1)

    def test_a_listening_port_is_not_free(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert not is_free("127.0.0.1", port)
            assert not is_free("", port)
        assert is_free("127.0.0.1", port)

    @pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
    def test_two_clusters_never_reserve_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        of_our_own(monkeypatch)
        first, second = Reservations("127.0.0.1"), Reservations("127.0.0.1")
        try:
            port = first.choose(0, 1).gateway
            assert not second.take(port)
            assert second.choose(0, 1).gateway != port
            first.close()
            assert second.take(port)
        finally:
            first.close()
            second.close()


def of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports where nobody else looks for some: not this machine's clusters, nor other tests."""
    monkeypatch.setattr("sglang_fair.cluster.ports.FIRST_PORT", free_port())


class TestPlan:
    def test_the_page_asks_where_operators_do(self) -> None:
        page = build(Options(dashboard_port=9002), "cpu", MACHINE, MODEL, PORTS).processes[-1]
        settings = parse("dashboard", page.argv[3:])
        gateway = f"http://127.0.0.1:{PORTS.gateway}"
        assert (page.role, settings.port, settings.gateway) == ("dashboard", 9002, gateway)
        page = build(Options(dashboard_port=9002, admin_port=9001), "cpu", MACHINE, MODEL, PORTS).processes[
            -1
        ]
        assert parse("dashboard", page.argv[3:]).gateway == "http://127.0.0.1:9001"

    def test_the_processes_know_each_other_s_addresses(self) -> None:
        options = Options(
            worker_quantum=500.0,
            client_weights={"gold": 2.0},
            payer="equal",
            policy_options="patience=9",
            placement_options="cache_threshold=0.3, charge=extend",
            identity="api-key",
            gateway_options="max-in-flight=100,body_timeout=2.5",
            cache_share="on",
            extra=("--page-size", "32"),
        )
        plan = build(options, "cpu", MACHINE, MODEL, PORTS)
        names = ["fork-server", "r0", "r1", "router", "gateway"]
        assert [process.name for process in plan.processes] == names
        fork_server, r0, r1, router, gateway = plan.processes
        assert fork_server.argv[:3] == ("python", "-m", "sglang_fair.engines.fork_server")
        assert r0.fork_server == r1.fork_server == fork_server.argv[3]
        assert parse("replica", fork_server.argv[4:]).device == "cpu"
        assert (after(r0.argv, "--port"), after(r1.argv, "--port")) == ("30001", "30005")
        assert (after(r1.argv, "--kv-port"), after(r1.argv, "--nccl-port")) == ("30006", "30008")
        assert json.loads(after(r0.argv, "--client-weights")) == {"gold": 2.0}
        assert (after(r0.argv, "--payer"), after(r0.argv, "--policy-options")) == ("equal", "patience=9")
        behind = " ".join(r0.argv[list(r0.argv).index("--") :])
        assert behind == "-- --log-level info --nccl-port 30004 --page-size 32"
        assert r1.ready == "http://127.0.0.1:30005/ready"
        assert plan.router == after(router.argv, "--bind") == after(gateway.argv, "--router")
        assert router.ready == "router ready"
        assert after(router.argv, "--page-size") == "32"
        assert after(r0.argv, "--cache-share") == "on"
        assert after(router.argv, "--worker-quantum") == "500.0"
        assert after(router.argv, "--quantum") == "2000.0"
        assert "--quantum" not in r0.argv, "the policy has its own"
        told = [router.argv[i + 1] for i, word in enumerate(router.argv) if word == "--parameter"]
        assert told == ["cache_threshold=0.3", 'charge="extend"']
        assert json.loads(after(router.argv, "--client-weights")) == {"gold": 2.0}
        workers = [router.argv[i + 1] for i, word in enumerate(router.argv) if word == "--worker"]
        assert workers[1] == (
            "r1,http=http://127.0.0.1:30005,kv=tcp://127.0.0.1:30006,replay=tcp://127.0.0.1:30007"
        )
        assert after(gateway.argv, "--model-name") == "tiny"
        assert after(gateway.argv, "--tokenizer") == "/models/tiny"
        assert after(gateway.argv, "--identity") == "api-key"
        assert parse("gateway", gateway.argv[3:]).max_in_flight == 100
        assert parse("gateway", gateway.argv[3:]).body_timeout_s == 2.5
        assert gateway.ready == "http://127.0.0.1:8000/health"

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (Options(placement="qlm", policy="slo"), ["evicts=true"]),
            (Options(placement="qlm", policy="slo", placement_options="evicts=false"), ["evicts=false"]),
            (Options(placement="qlm", policy="slo", policy_options="evictions=0"), []),
            (Options(placement="qlm"), []),
            (Options(placement="qlm", policy="sglang:fcfs"), []),
            (Options(policy="slo"), []),
        ],
    )
    def test_a_placement_is_told_whether_replicas_take_requests_back(
        self, options: Options, told: list[str]
    ) -> None:
        (router,) = build(options, "cpu", MACHINE, MODEL, PORTS).of("router")
        assert [router.argv[i + 1] for i, word in enumerate(router.argv) if word == "--parameter"] == told

    @pytest.mark.parametrize(
        ("options", "replica_s", "router_s"),
        [
            (Options(), "--cost linear --extend-weight 1.0 --output-weight 2.0", ("1.0", "2.0")),
            (
                Options(cost="linear:3,4"),
                "--cost linear --extend-weight 3.0 --output-weight 4.0",
                ("3.0", "4.0"),
            ),
            (Options(cost="profiled"), "--cost profiled", ("2.1", "1.0")),
            (
                Options(cost="tiered:512,3"),
                "--cost tiered:threshold=512.0,factor=3.0,extend_weight=1.0,output_weight=2.0",
                ("1.0", "2.0"),
            ),
        ],
    )
    def test_the_cost_reaches_the_replicas_and_its_linear_part_the_router(
        self, options: Options, replica_s: str, router_s: tuple[str, str]
    ) -> None:
        _, r0, _, router, _ = build(options, "cpu", MACHINE, MODEL, PORTS).processes
        words = replica_s.split()
        assert [after(r0.argv, option) for option in words[::2]] == words[1::2]
        assert (after(router.argv, "--extend-weight"), after(router.argv, "--output-weight")) == router_s
        parsed = parse("replica", r0.argv)
        assert make_cost(parsed.cost, parsed.extend_weight, parsed.output_weight) == options.service_cost()

    def test_the_device(self) -> None:
        assert choose_device("auto", MACHINE) == "cpu"
        assert choose_device("auto", GPU_MACHINE) == "cuda"
        assert choose_device("cpu", GPU_MACHINE) == "cpu"
        with pytest.raises(ConfigError, match="no GPU is visible"):
            choose_device("cuda", MACHINE)
        without_kernels = Machine(8, (Gpu("0", "GPU-0"),), False, "python")
        assert choose_device("auto", without_kernels) == "cpu"
        with pytest.raises(ConfigError, match="sglang-fair install cuda"):
            choose_device("cuda", without_kernels)

    def test_where_to_send_requests(self) -> None:
        assert gateway_url("0.0.0.0", 8000) == "http://127.0.0.1:8000"
        assert gateway_url("::1", 8000) == "http://[::1]:8000"
        curl = example_request("http://127.0.0.1:8000").partition("Try it:")[2].partition("Ctrl-C")[0]
        body = subprocess.run(
            ["bash", "-c", "curl() { printf '%s' \"${@: -1}\"; }\n" + curl],
            capture_output=True,
            check=True,
        ).stdout
        assert json.loads(body)["model"] == "default"


def test_waits_double_with_each_early_death_up_to_the_longest() -> None:
    waits = [RestartRule().delay_s(early) for early in (0, 1, 2, 3, 7, 8, 10_000)]
    assert waits == [0.5, 0.5, 1.0, 2.0, 30.0, 30.0, 30.0]


class Record:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.ready: list[str] = []
        self.deaths: list[tuple[str, str]] = []
        self.tails: list[list[str]] = []
        self.said: list[str] = []
        self.pids: dict[str, int] = {}
        self.when_up: Callable[[], None] = lambda: None

    def line(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def waiting(self, names: Sequence[str], elapsed_s: float, limit_s: float) -> None:
        assert names

    def is_ready(self, name: str, after_s: float) -> None:
        self.ready.append(name)

    def died(self, name: str, how: str, tail: Iterable[str]) -> None:
        self.deaths.append((name, how))
        self.tails.append(list(tail))

    def say(self, text: str) -> None:
        self.said.append(text)

    def up(self, pids: dict[str, int]) -> None:
        self.pids = pids
        self.when_up()


class Told:
    """A link to a router that is not there."""

    def __init__(self) -> None:
        self.news: list[str] = []
        self.replicas: list[str] = []

    async def known(self) -> list[str]:
        """Each time one replica more."""
        self.replicas.append(f"r{len(self.replicas)}")
        return self.replicas

    def tell(self, event: WorkerUp | WorkerDown) -> None:
        self.news.append(f"{event.worker} {'up' if isinstance(event, WorkerUp) else 'down'}")


SERVES = """
    import signal, sys, time
    def end(*_):
        print("bye", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    print("ready", flush=True)
    time.sleep(60)
"""

IS_STUBBORN = """
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grandchild = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('grandchild', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-S", "-c", grandchild], stdout=subprocess.PIPE)
    print(child.stdout.readline().decode(), "ready", sep="", flush=True)
    time.sleep(60)
"""

DIES = "import sys; print('I have a reason', flush=True); sys.exit(3)"
DIES_SOON = "import time; print('ready', flush=True); time.sleep(0.1)"


def program(
    name: str, code: str, role: Role = "replica", *, timeout_s: float = LIMIT_S, grace_s: float = LIMIT_S
) -> Process:
    return Process(
        name=name,
        role=role,
        argv=(sys.executable, "-S", "-c", textwrap.dedent(code)),
        ready="ready",
        ready_timeout_s=timeout_s,
        stop_grace_s=grace_s,
        worker=WorkerUp(name, "http://127.0.0.1:1", "tcp://k", "tcp://p") if role == "replica" else None,
    )


def cluster(*replicas: Process) -> Plan:
    return Plan((*replicas, program("router", SERVES, "router"), program("gateway", SERVES, "gateway")))


def supervise(
    plan: Plan,
    when_up: Callable[[Supervisor, Record], object] | None = None,
    *,
    rule: RestartRule | None = None,
    link: Told | None = None,
) -> tuple[bool | StartFailed, Record]:
    """Runs a plan; `when_up` may return a coroutine to be run beside it. Whatever happens, none is left."""

    async def run() -> tuple[bool | StartFailed, Record]:
        record, beside = Record(), []
        supervisor = Supervisor(plan, record, rule=rule or RestartRule(first_delay_s=0.01), link=link)
        if link is not None:
            supervisor.known = link.known

        def up() -> None:
            made = when_up(supervisor, record) if when_up else supervisor.stop()
            if asyncio.iscoroutine(made):
                beside.append(asyncio.create_task(made))
                beside[-1].add_done_callback(lambda task: task.exception() and supervisor.stop())

        record.when_up = up
        try:
            outcome: bool | StartFailed = await asyncio.wait_for(supervisor.run(), 2 * LIMIT_S)
        except StartFailed as error:
            outcome = error
        for task in beside:
            await task
        for pid in supervisor.pids.values():
            assert not list(session_members(pid))
        return outcome, record

    return asyncio.run(run())


async def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


class TestSupervisor:
    def test_starts_in_order_and_stops_in_order(self) -> None:
        outcome, record = supervise(cluster(program("r0", SERVES), program("r1", SERVES)))
        assert outcome is True
        assert record.ready[-1] == "gateway"
        assert set(record.pids) == {"r0", "r1", "router", "gateway"}
        farewells = [name for name, line in record.lines if line == "bye"]
        assert farewells[0] == "gateway"
        assert sorted(farewells[1:]) == ["r0", "r1", "router"]
        assert not record.deaths
        assert not record.said

    def test_no_gateway_before_the_router_has_read_the_list_of_a_fleet(self) -> None:
        link = Told()
        fleet = replace(program("fleet", SERVES, "fleet"), lists=3)
        outcome, record = supervise(cluster(fleet), lambda supervisor, _: supervisor.stop(), link=link)
        assert outcome is True
        assert len(link.replicas) == 3
        assert record.ready.index("fleet") < record.ready.index("gateway")

    def test_the_stubborn_are_killed_with_their_children(self) -> None:
        outcome, record = supervise(cluster(program("r0", IS_STUBBORN, grace_s=0.2)))
        assert outcome is True
        assert ("r0", "grandchild") in record.lines
        assert record.said == ["r0 was killed: it had not ended in time"]

    def test_a_second_stop_kills_at_once(self) -> None:
        async def twice(supervisor: Supervisor) -> None:
            supervisor.stop()
            await asyncio.sleep(0.1)
            supervisor.stop()

        plan = cluster(program("r0", IS_STUBBORN, grace_s=1e6))
        outcome, _ = supervise(plan, lambda supervisor, _: twice(supervisor))
        assert outcome is True

    def test_a_death_at_the_start_ends_the_attempt(self) -> None:
        outcome, record = supervise(cluster(program("r0", SERVES), program("r1", DIES)))
        assert str(outcome) == "r1 ended before it was ready: exit code 3"
        assert record.deaths == [("r1", "exit code 3")]
        assert record.tails == [["I have a reason"]]
        assert not record.pids

    def test_a_program_that_is_not_there(self) -> None:
        missing = Process("r0", "replica", ("/no/such/program",), "ready", 1, 1)
        outcome, _ = supervise(cluster(missing))
        assert str(outcome).startswith("r0 cannot be started: ")

    def test_a_stop_during_the_start(self) -> None:
        async def run() -> None:
            record = Record()
            plan = cluster(program("r0", "import time; print('slow', flush=True); time.sleep(60)"))
            supervisor = Supervisor(plan, record)
            running = asyncio.create_task(supervisor.run())
            await until(lambda: ("r0", "slow") in record.lines)
            supervisor.stop()
            assert await asyncio.wait_for(running, LIMIT_S) is True
            assert not supervisor.was_up
            assert not any(list(session_members(pid)) for pid in supervisor.pids.values())

        asyncio.run(run())

    def test_a_dead_replica_is_started_again_once_what_it_left_is_gone_and_the_router_is_told(self) -> None:
        link = Told()

        async def kill(supervisor: Supervisor, record: Record) -> None:
            before = record.pids["r0"]
            orphans = [p.pid for p in psutil.Process(before).children()]
            assert orphans
            os.kill(before, signal.SIGKILL)
            await until(lambda: record.ready.count("r0") == 2)
            assert not any(lives(pid) for pid in orphans)
            await until(lambda: link.news[-1:] == ["r0 up"])
            assert supervisor.pids["r0"] != before
            supervisor.stop()

        plan = cluster(program("r0", IS_STUBBORN, grace_s=0.1), program("r1", SERVES))
        outcome, record = supervise(plan, kill, link=link)
        assert outcome is True
        assert record.deaths == [("r0", "killed by SIGKILL")]
        assert link.news == ["r0 down", "r0 up"]

    def test_a_new_router_is_told_who_is_down(self, tmp_path: Path) -> None:
        link, gate = Told(), tmp_path / "gate"
        second_time_waits = f"""
            import pathlib, time
            gate = pathlib.Path({str(gate)!r})
            if gate.exists():
                time.sleep(60)
            print("ready", flush=True)
            time.sleep(60)
        """

        async def kill(supervisor: Supervisor, record: Record) -> None:
            gate.touch()
            os.kill(record.pids["r0"], signal.SIGKILL)
            await until(lambda: link.news == ["r0 down"])
            os.kill(record.pids["router"], signal.SIGKILL)
            await until(lambda: record.ready.count("router") == 2)
            await until(lambda: link.news == ["r0 down", "r0 down"])
            supervisor.stop()

        plan = cluster(program("r0", second_time_waits, grace_s=0.1), program("r1", SERVES))
        assert supervise(plan, kill, link=link)[0] is True

    def test_a_router_returns_while_a_replica_is_being_added(self, monkeypatch: pytest.MonkeyPatch) -> None:
        start, go_on, link = Child.start, asyncio.Event(), Told()

        async def slow(spec: Process, on_line: Callable[[str, str], None], inherited: Sequence[int]) -> Child:
            if spec.name == "r9":
                await go_on.wait()
            return await start(spec, on_line, inherited)

        async def add(supervisor: Supervisor, record: Record) -> None:
            adding = asyncio.create_task(supervisor.add(program("r9", SERVES)))
            await until(lambda: len(supervisor.plan.of("replica")) == 2)
            os.kill(record.pids["router"], signal.SIGKILL)
            await until(lambda: record.ready.count("router") == 2)
            await until(lambda: link.news == ["r9 down"])
            go_on.set()
            await adding
            assert link.news == ["r9 down", "r9 up"]
            supervisor.stop()

        monkeypatch.setattr(Child, "start", slow)
        assert supervise(cluster(program("r0", SERVES)), add, link=link)[0] is True

    @pytest.mark.parametrize("role", ["replica", "dashboard"])
    @pytest.mark.parametrize("is_ready_again", [True, False])
    def test_one_that_the_cluster_can_do_without_is_started_for_ever(
        self, role: Role, is_ready_again: bool, tmp_path: Path
    ) -> None:
        dies = f"""
            import pathlib, sys, time
            once = pathlib.Path({str(tmp_path / "once")!r})
            if once.exists() and not {is_ready_again}:
                sys.exit(9)
            once.touch()
            print("ready", flush=True)
            time.sleep(0.1)
            sys.exit(9)
        """

        async def watch(supervisor: Supervisor, record: Record) -> None:
            await until(lambda: len(record.deaths) == 4)
            assert supervisor.state("gateway") == "up"
            supervisor.stop()

        rule = RestartRule(first_delay_s=0.01, longest_delay_s=0.02, give_up_after=2)
        assert supervise(cluster(program("x", dies, role)), watch, rule=rule)[0] is True

    @pytest.mark.parametrize("role", ["router", "gateway"])
    def test_without_router_or_gateway_it_ends(self, role: Role) -> None:
        processes = [
            program(one, DIES_SOON if one == role else SERVES, one)
            for one in ("replica", "router", "gateway")
        ]
        outcome, record = supervise(
            Plan(tuple(processes)), lambda *_: None, rule=RestartRule(first_delay_s=0.01, give_up_after=2)
        )
        assert outcome is False
        assert record.said[-1].startswith(f"{role} is given up: it died 2 times in a row within")

    def test_long_lines_and_progress_bars(self) -> None:
        talks = """
            import sys, time
            print("x" * 5_000)
            sys.stdout.buffer.write(b"10%\\r50%\\r100%\\r\\n\\xff\\n\\n")
            print("y" * 300_000)
            print("ready", flush=True)
            time.sleep(60)
        """
        outcome, record = supervise(cluster(program("r0", talks, grace_s=0.1)))
        assert outcome is True
        lines = [line for name, line in record.lines if name == "r0"]
        assert lines[0] == "x" * 2_000 + " … (3000 more characters)"
        assert lines[1:3] == ["100%", "\N{REPLACEMENT CHARACTER}"]
        assert lines[3].endswith("(298000 more characters)")

    def test_a_session_that_is_gone_is_not_killed_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its id may be another's by then."""
        killed: list[int] = []

        async def kill(session: int) -> bool:
            killed.append(session)
            return len(killed) == 2

        async def run() -> None:
            child = await Child.start(program("r0", "pass"), lambda *_: None)
            for _ in range(3):
                await child.exited()
                assert await child.stop(asyncio.Event())
            assert killed == [child.pid] * 2, "once more where something was left"

        monkeypatch.setattr("sglang_fair.cluster.child.kill_session", kill)
        asyncio.run(run())


def completed(gateway: str) -> str:
    """The model of a completion of four tokens."""
    body = {"model": "default", "prompt": "hello", "max_tokens": 4}
    answer = httpx.post(f"{gateway}/v1/completions", json=body, timeout=WHOLE_S)
    return answer.raise_for_status().json()["model"]


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_a_whole_cluster_survives_a_dead_scheduler_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sglang-fair cluster --json` in a script's background, where SIGINT is ignored until the cluster takes it."""
    monkeypatch.delenv(fork_server.PREFIX)
    log = tmp_path / "log"
    ignores = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")
    command = [*ignores, sys.executable, "-m", "sglang_fair.cli", "cluster"]
    with log.open("w") as errors:
        running = subprocess.Popen(
            [*command, "--replicas", "1", "--device", "cpu", "--model", "tiny", "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    with running:
        try:
            assert running.stdout is not None
            facts = json.loads(running.stdout.readline() or "null")
            assert facts, log.read_text()[-3000:]
            assert completed(facts["gateway"]) == "tiny"
            scheduler = next(
                process
                for process in psutil.Process(facts["pids"]["r0"]).children()
                if "scheduler" in " ".join(process.cmdline())
            )
            scheduler.kill()
            wait_until(lambda: "r0 ended:" in log.read_text(), "its death is seen", WHOLE_S)
            wait_until(lambda: log.read_text().count("r0 is ready") == 2, "it is back", WHOLE_S)
            assert completed(facts["gateway"]) == "tiny"
            sessions = [pid for name, pid in facts["pids"].items() if name not in ("cluster", "r0")]
            sessions += [process.pid for process in psutil.Process(running.pid).children()]
            running.send_signal(signal.SIGINT)
            assert running.wait(WHOLE_S) == 0
            assert not any(list(session_members(session)) for session in sessions)
        finally:
            running.kill()
