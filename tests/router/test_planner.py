"""The planner as a process, over real sockets: it answers, dies, hangs and comes back, and the router goes on."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import uuid4

import pytest
import zmq

from router.claims import Claims
from router.core import Router
from router.events import (
    Arrive,
    Done,
    Held,
    Place,
    Planner,
    Query,
    Replan,
    Snapshot,
    WorkerDown,
    WorkerUp,
    decode_answer,
    encode,
)
from router.placement import build
from router.planner.__main__ import main
from router.planner.link import Link
from router.shell import Shell
from router.wire import HEARTBEAT
from tests.support.planned_queues import Queues, small
from tests.support.waiting import wait_until

DEADLINE_S = 60.0


class Site:
    """A router in a thread, with queues that are late when a test says so."""

    def __init__(self, peer_timeout_s: float, core: Router | None = None) -> None:
        self.queues = Queues()
        self.queues.replans.every_s = 0.05
        self.core = core or Router(self.queues, name="queues")
        self.shell = Shell(self.core, "tcp://127.0.0.1:*", peer_timeout_s=peer_timeout_s)
        self.url = f"http://{uuid4().hex}"  # that no other test's router plans for
        self.shell.tell(WorkerUp("a", self.url, kv_tokens=400, chunk_tokens=100))
        self._thread = threading.Thread(target=self.shell.run)
        self._thread.start()
        self._planners: list[subprocess.Popen[bytes]] = []
        self._context = zmq.Context()
        self._peer = self._context.socket(zmq.DEALER)
        self._peer.setsockopt(zmq.LINGER, 0)
        self._peer.connect(self.shell.endpoint)

    def planner(self) -> subprocess.Popen[bytes]:
        made = subprocess.Popen([sys.executable, "-m", "router.planner", "--router", self.shell.endpoint])
        self._planners.append(made)
        return made

    def whole(self) -> dict:
        self._peer.send(encode(Query("q")))
        answer = hear(self._peer)
        assert isinstance(answer, Snapshot)
        return answer.state

    def state(self) -> dict:
        return self.whole()["planner"]

    def counts(self) -> dict:
        return self.state()["counts"]

    def until_up(self, is_up: bool = True) -> None:
        wait_until(
            lambda: self.state()["up"] == is_up, "the planner to be there" if is_up else "it to be gone"
        )

    def until_planned(self) -> None:
        before = len(self.queues.applied)
        wait_until(lambda: len(self.queues.applied) > before, "a plan")

    def close(self) -> None:
        self._peer.close()
        self._context.term()
        self.shell.stop()
        self._thread.join(DEADLINE_S)
        self.shell.close()
        for planner in self._planners:
            planner.kill()
            planner.wait()


@contextmanager
def site(peer_timeout_s: float = 60.0, core: Router | None = None) -> Iterator[Site]:
    made = Site(peer_timeout_s, core)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def gateway(address: str) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        yield socket


def hear(socket: "zmq.Socket[bytes]") -> object:
    assert socket.poll(DEADLINE_S * 1000), "no answer"
    return decode_answer(socket.recv())


def served(site: Site, socket: "zmq.Socket[bytes]", name: str) -> None:
    """A request comes, waits and is placed."""
    socket.send(encode(Arrive(name, "c", b"", may_hold=True)))
    assert hear(socket) == Held(name)
    site.queues.let_go += 1
    placed = hear(socket)
    assert isinstance(placed, Place)
    assert placed.id == name
    socket.send(encode(Done(name)))


@pytest.mark.slow
def test_a_planner_answers_dies_and_comes_back() -> None:
    with site() as one, gateway(one.shell.endpoint) as socket:
        first = one.planner()
        one.until_up()
        one.queues.is_late = True
        one.until_planned()
        served(one, socket, "1")
        first.kill()
        first.wait()
        # A question that cannot be sent says at once that it is gone, long before its time is over.
        one.until_up(False)
        for number in range(20):
            served(one, socket, f"dead {number}")
        one.planner()
        one.until_up()
        one.until_planned()
        assert one.counts()["gone"] == 1
        served(one, socket, "2")


@pytest.mark.slow
def test_one_that_is_stopped_delays_nobody_and_is_taken_for_dead() -> None:
    with site(peer_timeout_s=1.5) as one, gateway(one.shell.endpoint) as socket:
        planner = one.planner()
        one.until_up()
        planner.send_signal(signal.SIGSTOP)
        one.queues.is_late = True
        for number in range(20):
            served(one, socket, f"stopped {number}")
        one.until_up(False)
        assert one.queues.attended == [True, False]
        served(one, socket, "without")
        planner.send_signal(signal.SIGCONT)
        one.until_up()
        one.until_planned()


def test_a_planner_to_which_nothing_can_be_sent_is_gone_at_once() -> None:
    """By a clock that stands still: not because it is silent."""
    queues = Queues()
    shell = Shell(Router(queues, name="queues"), "tcp://127.0.0.1:*", clock=lambda: 0.0)
    thread = threading.Thread(target=shell.run)
    thread.start()
    try:
        with gateway(shell.endpoint) as socket:
            socket.send(HEARTBEAT)
            socket.send(encode(Planner("me")))
            wait_until(lambda: queues.attended == [True], "the planner")
        queues.is_late = True
        queues.replans.every_s = 1e-9
        with gateway(shell.endpoint) as socket:
            while queues.attended == [True]:
                queues.replans.restart()
                socket.send(encode(Query("q")))
                hear(socket)
        assert queues.attended == [True, False]
    finally:
        shell.stop()
        thread.join(DEADLINE_S)
        shell.close()


@pytest.mark.slow
def test_it_finds_a_router_that_is_started_again() -> None:
    first = Site(60.0)
    planner = first.planner()
    first.until_up()
    address = first.shell.endpoint
    first._peer.close()
    first._context.term()
    first.shell.stop()
    first._thread.join(DEADLINE_S)
    first.shell.close()
    core = Router(Queues(), name="queues")
    shell = wait_until(lambda: bound(core, address), "the address to be free again")
    thread = threading.Thread(target=shell.run)
    thread.start()
    try:
        wait_until(lambda: core.state()["planner"]["up"], "the planner to find it")
    finally:
        shell.stop()
        thread.join(DEADLINE_S)
        shell.close()
        planner.kill()
        planner.wait()


def bound(core: Router, address: str) -> Shell | None:
    with suppress(zmq.ZMQError):
        return Shell(core, address)
    return None


def test_nonsense_of_a_router_is_survived(caplog: pytest.LogCaptureFixture) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind("tcp://127.0.0.1:*")
        link = Link(router.getsockopt_string(zmq.LAST_ENDPOINT))
        thread = threading.Thread(target=link.run, daemon=True)
        thread.start()
        try:
            assert router.poll(DEADLINE_S * 1000)
            peer, _ = router.recv_multipart()
            queues = Queues()
            queues.attend(True, 0.0)
            queues.is_late = True
            asked = queues.question(0.0)
            assert asked is not None
            for nonsense in (b"\xc1", b"\0\0", os.urandom(1000), encode(Replan(*asked))[:-9]):
                router.send_multipart([peer, nonsense])
            router.send_multipart([peer, b"two", b"frames"])
            router.send_multipart([peer, encode(Replan(*asked))])
            while True:
                assert router.poll(DEADLINE_S * 1000), "no plan"
                frames = router.recv_multipart()
                if b"Plan" in frames[1] and b"Planner" not in frames[1]:
                    break
        finally:
            link.stop()
            thread.join(DEADLINE_S)
            link.close()
    assert [one.getMessage() for one in caplog.records if "ignored" in one.getMessage()] != []


def test_one_router_plans_for_a_replica() -> None:
    with site() as one:
        other = Shell(Router(Queues(), name="queues"), "tcp://127.0.0.1:*")
        unplanned = Shell(Router(build("d2lpm"), name="d2lpm"), "tcp://127.0.0.1:*")
        try:
            for shell in (other, unplanned):
                shell.tell(WorkerUp("b", one.url))
                shell.tell(WorkerUp("c", f"http://{uuid4().hex}"))
            assert sorted(other._router.state()["workers"]) == ["c"]
            assert other.state()["counts"] == {"planned elsewhere": 1}
            assert sorted(unplanned._router.state()["workers"]) == ["b", "c"]
            one.shell.tell(WorkerDown("a"))
            other.tell(WorkerUp("b", one.url))
            assert sorted(other._router.state()["workers"]) == ["b", "c"]
        finally:
            other.close()
            unplanned.close()


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("http://127.0.0.1:30000", True),
        ("http://localhost:30000/", True),
        ("http://[::1]:30000", True),
        ("https://127.0.0.1:30000", True),
        ("http://127.0.0.1:30001", False),
        ("http://10.0.0.1:30000", False),
        ("http://" + "x" * 500, False),
        ("http://[", False),
    ],
)
def test_a_replica_has_one_name_whatever_it_is_called(url: str, same: bool) -> None:
    first, second = Claims(), Claims()
    try:
        assert first.take("http://127.0.0.1:30000")
        assert first.take("http://127.0.0.1:30000")
        assert second.take(url) == (not same)
        first.keep(())
        assert second.take(url)
    finally:
        first.close()
        second.close()


@pytest.mark.slow
def test_a_second_router_that_plans_does_not_start() -> None:
    with site() as one:
        command = [
            sys.executable, "-m", "router", "--bind", "tcp://127.0.0.1:*", "--placement", "qlm",
            "--worker", f"r0,http={one.url}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"sglang-fair router: --placement qlm: r0 at {one.url}: another router of this machine orders its queue, and "
        "only one may\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--router", "here"], "--router must be an address as tcp://127.0.0.1:9000, not 'here'"),
        (["--router", "what://x"], "--router what://x: Protocol not supported"),
        (["--router", "tcp://127.0.0.1:1", "--solver", "magic"], "unknown --solver 'magic'"),
        ([], "--router is missing"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--outlive-parent"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sglang-fair planner: {said}")
    assert error.count("\n") == 1


def test_what_is_due_while_workers_are_compared_ends_no_router() -> None:
    """A question for the planner is due at each look at the clock."""
    queues, clock = Queues(), itertools.count()
    queues.question = lambda now_s: (int(now_s), small(int(now_s)))
    core = Router(queues, name="queues")
    shell = Shell(core, "tcp://127.0.0.1:*", clock=lambda: float(next(clock)))
    shell._send = lambda peer, message: True
    try:
        shell.tell(Planner("me"), b"a planner")
        shell.tell(WorkerUp("a", f"http://{uuid4().hex}"))
        shell.tell(WorkerUp("b", f"http://{uuid4().hex}"))
        assert sorted(core.state()["workers"]) == ["a", "b"]
    finally:
        shell.close()
