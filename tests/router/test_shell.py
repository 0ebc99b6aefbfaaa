"""The router process over real sockets: a fake replica publishes KV events, a peer asks for placements."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Router
from router.events import (
    Arrive,
    Cleared,
    Done,
    Follow,
    Place,
    Query,
    Refuse,
    Removed,
    Snapshot,
    Stored,
    WorkerDown,
    WorkerDrain,
    WorkerHealth,
    Workers,
    WorkerUp,
    decode_answer,
    encode,
)
from router.placement import build
from router.replicas import Follower
from router.shell import TURN_MS, Shell
from router.wire import (
    HEARTBEAT,
    HEARTBEAT_ANSWER,
    ProtocolError,
    decode_kv_batch,
    encode_sequence,
    namespace,
    pack_tokens,
    unpack_tokens,
)
from tests.support.budget import examples
from tests.support.waiting import wait_until

DEADLINE_S = 60.0
"""For what takes no time, on however busy a machine."""

PAGE = 4


def stored(hashes: list[int], token_ids: list[int], parent: int | None = None, **more: object) -> dict:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": PAGE,
        "lora_id": None,
        "medium": "GPU",
    } | more


def prompt(first: int, pages: int = 3) -> list[int]:
    return list(range(first, first + pages * PAGE))


def stored_prompt(first: int, pages: int = 3) -> dict:
    # Signed, as SGLang's hashes are.
    return stored([-first * 1000 - page for page in range(pages)], prompt(first, pages))


class FakeReplica:
    """SGLang's side of the KV wire: a publisher whose subscriptions can be awaited, and its replay socket."""

    def __init__(self, context: zmq.Context) -> None:
        self._publisher = context.socket(zmq.XPUB)
        self._replay = context.socket(zmq.ROUTER)
        self._stop = context.socket(zmq.PAIR)
        self._stopped = context.socket(zmq.PAIR)
        self._stop.bind(f"inproc://stop-{id(self)}")
        self._stopped.connect(f"inproc://stop-{id(self)}")
        for bound in (self._publisher, self._replay):
            bound.setsockopt(zmq.LINGER, 0)
            bound.bind("tcp://127.0.0.1:*")
        self.kv = self._publisher.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self.kept: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self.sequence = 0
        self.topic = [b"kv"]
        """In front of each number; SGLang before 0.5.22 has none in replays."""
        self.clock = 1.0
        self._thread = threading.Thread(target=self._serve_replay)
        self._thread.start()

    def subscribed(self) -> None:
        """Returns when a subscriber is there: what is published now reaches it."""
        assert self._publisher.poll(DEADLINE_S * 1000), "nobody subscribed"
        self._publisher.recv()

    def publish(self, *events: dict, live: bool = True, keep: bool = True) -> None:
        self.clock += 1
        payload = msgspec.msgpack.encode([self.clock, list(events), 0])
        if keep:
            self.kept.append((self.sequence, payload))
        if live:
            self.send([*self.topic, encode_sequence(self.sequence), payload])
        self.sequence += 1

    def send(self, frames: list[bytes]) -> None:
        self._publisher.send_multipart(frames)

    def restart(self) -> None:
        """A new process behind the same address, as far as its numbers tell."""
        self.kept, self.sequence = [], 0

    def close(self) -> None:
        self._stop.send(b"")
        self._thread.join()
        for each in (self._publisher, self._replay, self._stop, self._stopped):
            each.close(0)

    def _serve_replay(self) -> None:
        poller = zmq.Poller()
        poller.register(self._replay, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while self._stopped not in (ready := dict(poller.poll())):
            assert self._replay in ready
            peer, empty, start = self._replay.recv_multipart()
            assert empty == b""
            first = int.from_bytes(start, "big")
            for sequence, payload in list(self.kept):
                if sequence >= first:
                    self._replay.send_multipart([peer, b"", *self.topic, encode_sequence(sequence), payload])
            self._replay.send_multipart([peer, b"", *self.topic, encode_sequence(-1), b""])
            self.asked.append(first)


class Peer:
    """A gateway or supervisor, one question at a time."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def tell(self, event: object) -> None:
        self.socket.send(encode(event))

    def hear_frames(self) -> list[bytes]:
        assert self.socket.poll(DEADLINE_S * 1000), "no answer"
        return self.socket.recv_multipart()

    def ask_past(self, event: object) -> None:
        """Asks, and reads past whatever came before the answer."""
        self.tell(event)
        while not isinstance(self.hear(), Snapshot):
            pass

    def hear(self) -> object:
        assert self.socket.poll(DEADLINE_S * 1000), "no answer"
        return decode_answer(self.socket.recv())

    def ask(self, event: object) -> object:
        self.tell(event)
        return self.hear()

    def state(self) -> dict:
        answer = self.ask(Query("q"))
        assert isinstance(answer, Snapshot)
        return answer.state

    def kv(self, name: str = "r0") -> dict:
        return self.state()["wire"]["kv"][name]

    def matched(self, token_ids: list[int]) -> tuple[str, int]:
        """Where a prompt would go, and what is believed cached there; leaves nothing in flight."""
        answer = self.ask(Arrive("probe", "c", pack_tokens(token_ids)))
        assert isinstance(answer, Place), answer
        self.tell(Done("probe", outcome="failed"))
        return answer.worker, answer.matched_tokens


class Wire:
    """A shell in a thread, and what talks to it. Its clock goes on when a test says so."""

    def __init__(self, core: Router | None = None, **options: object) -> None:
        self.context = zmq.Context()
        self.now_s = 0.0
        core = core or Router(build("d2lpm"), name="d2lpm", page_size=PAGE, linger_s=0.0)
        self.shell = Shell(core, "tcp://127.0.0.1:*", clock=lambda: self.now_s, **options)
        self.jobs: list[Coroutine[Any, Any, None]] = []
        """What runs beside it."""
        self._thread = threading.Thread(target=lambda: self.shell.run(*self.jobs))
        self._closers: list[Callable[[], None]] = []
        self.peer = self.new_peer()

    def start(self) -> None:
        self._thread.start()

    def runs(self, seconds: float) -> None:
        """So much time passes, in which the router runs. Without this it has stood still."""
        until_s, other = self.now_s + seconds, self.new_peer()
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + TURN_MS / 1e3)
            other.socket.send(HEARTBEAT)
            while other.hear_frames() != [HEARTBEAT_ANSWER]:
                pass

    def new_peer(self) -> Peer:
        made = Peer(self.context, self.shell.endpoint)
        self._closers.append(lambda: made.socket.close(0))
        return made

    def new_replica(self) -> FakeReplica:
        made = FakeReplica(self.context)
        self._closers.append(made.close)
        return made

    def close(self) -> None:
        self.shell.stop()
        if self._thread.ident is not None:
            self._thread.join(DEADLINE_S)
            assert not self._thread.is_alive()
        self.shell.close()
        for close in self._closers:
            close()
        self.context.term()


@contextmanager
def wire(core: Router | None = None, *, start: bool = True, **options: object) -> Iterator[Wire]:
    made = Wire(core, **options)
    try:
        if start:
            made.start()
        yield made
    finally:
        made.close()


def up(name: str, replica: FakeReplica | None = None, *, replay: bool = True) -> WorkerUp:
    url = f"http://127.0.0.1:1/{name}"
    if replica is None:
        return WorkerUp(name, url)
    return WorkerUp(name, url, replica.kv, replica.replay if replay else None)


def test_kv_events_decide_where_a_prefix_is() -> None:
    with wire() as w:
        replicas = {name: w.new_replica() for name in ("r0", "r1")}
        replicas["r1"].publish(stored_prompt(100))
        for name, replica in replicas.items():
            w.peer.tell(up(name, replica))
            replica.subscribed()
        replicas["r1"].publish(stored_prompt(10), stored([5], prompt(900, 1), medium="CPU_PINNED"))
        wait_until(lambda: w.peer.kv("r1")["applied_batches"] == 2, "the batch is applied")
        assert w.peer.matched(prompt(100)) == ("r1", 3 * PAGE), "what was published before is replayed"
        assert w.peer.matched([*prompt(10), 7, 7]) == ("r1", 3 * PAGE)
        assert w.peer.matched(prompt(900, 1))[1] == 0, "host memory is not where a request can start"
        removed = {"type": "BlockRemoved", "block_hashes": [-10_002], "medium": "GPU"}
        replicas["r1"].publish(removed)
        wait_until(lambda: w.peer.matched(prompt(10))[1] == 2 * PAGE, "the last block is removed")
        replicas["r1"].publish({"type": "AllBlocksCleared"})
        wait_until(lambda: w.peer.matched(prompt(10))[1] == 0, "the cache is cleared")
        assert (w.peer.kv("r1")["lost_batches"], w.peer.kv("r1")["restarts"]) == (0, 0)


@pytest.mark.parametrize(("kept", "topic"), [(True, [b"kv"]), (True, []), (False, [b"kv"])])
def test_a_gap_is_healed_by_replay_or_passed_over(kept: bool, topic: list[bytes]) -> None:
    with wire() as w:
        replica = w.new_replica()
        replica.topic = topic
        w.peer.tell(up("r0", replica))
        replica.subscribed()
        wait_until(lambda: replica.asked == [0], "the replay of the beginning")
        replica.publish(stored_prompt(10))
        replica.publish(stored_prompt(100), live=False, keep=kept)
        replica.publish(stored_prompt(1000))
        wait_until(lambda: w.peer.kv()["expected"] == 3, "the stream goes on")
        assert [w.peer.matched(prompt(first))[1] > 0 for first in (10, 100, 1000)] == [True, kept, True]
        kv = w.peer.kv()
        assert (kv["lost_batches"], kv["applied_batches"]) == (not kept, 2 + kept)


def test_a_replay_that_never_answers_is_given_up() -> None:
    with wire(replay_timeout_s=5.0) as w:
        replica, silent = w.new_replica(), w.context.socket(zmq.ROUTER)
        try:
            silent.bind("tcp://127.0.0.1:*")
            w.peer.tell(WorkerUp("r0", "http://x", replica.kv, silent.getsockopt_string(zmq.LAST_ENDPOINT)))
            replica.subscribed()
            wait_until(lambda: "r0" in w.shell._replicas, "it is followed")
            replica.publish(live=False)
            replica.publish(stored_prompt(10))
            wait_until(lambda: 1 in w.shell._replicas["r0"].follower._held, "the second batch is held")
            w.now_s += 5.0
            assert w.peer.kv()["expected"] == 0
            w.now_s += 0.1
            wait_until(lambda: w.peer.kv()["expected"] == 2, "the stream goes on")
            assert w.peer.kv()["lost_batches"] == 1
        finally:
            silent.close(0)


def test_a_replay_socket_connected_to_itself_is_opened_anew() -> None:
    """What TCP can do by accident, a socket that echoes does on purpose; a ROUTER, so that each answer goes to the
    connection that asked, not to one that is being closed."""
    with wire() as w:
        replica, echo = w.new_replica(), w.context.socket(zmq.ROUTER)
        try:
            echo.bind("tcp://127.0.0.1:*")
            w.peer.tell(WorkerUp("r0", "http://x", replica.kv, echo.getsockopt_string(zmq.LAST_ENDPOINT)))
            replica.subscribed()
            replica.publish(live=False)
            replica.publish(stored_prompt(10))
            for _ in range(3):
                assert echo.poll(DEADLINE_S * 1000), "asked again"
                echo.send_multipart(echo.recv_multipart())
            assert echo.poll(DEADLINE_S * 1000)
            asker, *_ = echo.recv_multipart()
            echo.send_multipart([asker, b"", b"kv", encode_sequence(0), replica.kept[0][1]])
            wait_until(lambda: w.peer.kv()["expected"] == 2, "both are applied")
            assert w.peer.kv()["lost_batches"] == 0
        finally:
            echo.close(0)


def test_a_worker_that_goes_and_comes_back_starts_empty() -> None:
    with wire() as w:
        replica = w.new_replica()
        w.peer.tell(up("r0", replica))
        replica.subscribed()
        replica.publish(stored_prompt(10))
        wait_until(lambda: w.peer.kv()["expected"] == 1, "one batch")
        w.peer.ask(Arrive("a", "c", pack_tokens(prompt(10))))
        w.peer.tell(WorkerDown("r0"))
        state = w.peer.state()
        assert (state["in_flight"], state["workers"], state["wire"]["kv"]) == (0, {}, {})
        other = w.new_replica()
        w.peer.tell(up("r0", other))
        other.subscribed()
        assert w.peer.matched(prompt(10)) == ("r0", 0)
        other.publish(stored_prompt(100))
        wait_until(lambda: w.peer.matched(prompt(100))[1] == 3 * PAGE, "the new process is followed")
        w.peer.tell(Done("a"))
        assert w.peer.state()["counts"]["done ignored"] == 1


def test_malformed_frames_are_counted_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    with wire() as w:
        replica = w.new_replica()
        w.peer.tell(up("r0", replica))
        replica.subscribed()
        for _ in range(2):
            w.peer.socket.send(b"\xff\xfe")
            w.peer.socket.send_multipart([b"", b"x", b"y"])
            w.peer.socket.send(
                msgspec.msgpack.encode({"type": "Arrive", "id": "x", "client": "c", "tokens": b"123"})
            )
            w.peer.tell(Stored("r0", (1,), None, b"", 1))
            w.peer.tell(WorkerUp("bad", "http://x", "nonsense"))
        wait_until(lambda: replica.asked == [0], "the replay of the beginning")
        replica.send([b"kv", encode_sequence(0)])
        replica.send([b"kv", b"short", b""])
        replica.send([b"kv", encode_sequence(-7), b""])
        replica.send([b"kv", encode_sequence(0), b"no msgpack"])
        replica.sequence = 1
        replica.publish(
            {"type": "Unheard"},
            stored([1], [1, 2, 3]),
            stored([1], [-1, 2, 3, 4]),
            stored([1], [1, 2, 3, "4"]),
            stored([1], [], block_size=0),
            stored_prompt(10),
        )
        wait_until(lambda: w.peer.kv()["expected"] == 2, "the good batch is applied")
        assert w.peer.matched(prompt(10))[1] == 3 * PAGE
        kv, counts = w.peer.kv(), w.peer.state()["wire"]["counts"]
        assert (kv["unreadable_batches"], kv["skipped_events"], kv["restarts"]) == (1, 5, 0)
        assert counts == {
            "kv frames": 3,
            "peer frames": 2,
            "peer message": 6,
            "worker address": 2,
        }
    said = [record.getMessage() for record in caplog.records if "ignored (said once" in record.getMessage()]
    assert len(said) == len(counts), "one line per kind"


def test_a_gateway_that_falls_silent_holds_nothing() -> None:
    with wire(peer_timeout_s=10.0) as w:
        w.peer.tell(up("r0"))
        other = w.new_peer()
        other.socket.send(HEARTBEAT)
        assert other.socket.poll(DEADLINE_S * 1000)
        assert other.socket.recv() == HEARTBEAT_ANSWER
        other.ask(Arrive("a", "c", b""))
        assert w.peer.ask(Arrive("b", "c", b""))
        w.now_s += 60.0
        assert [w.peer.state()["in_flight"] for _ in range(2)] == [2, 2], "it stood still, as others may have"
        w.runs(10.0)
        assert [w.peer.state()["in_flight"] for _ in range(2)] == [2, 2]
        w.runs(1.0)
        wait_until(lambda: w.peer.state()["in_flight"] == 1, "only the request of the silent gateway is over")
        assert w.peer.state()["wire"]["counts"]["peers lost"] == 1


def test_gateways_hear_of_every_change_of_the_workers() -> None:
    with wire() as w:
        w.peer.socket.send(HEARTBEAT)
        assert w.peer.socket.poll(DEADLINE_S * 1000)
        assert w.peer.socket.recv() == HEARTBEAT_ANSWER
        other = w.new_peer()

        def heard() -> tuple[list[str], tuple[str, ...], tuple[str, ...]]:
            answer = w.peer.hear()
            assert isinstance(answer, Workers)
            return [up.worker for up in answer.workers], answer.draining, answer.sick

        other.tell(up("r0"))
        assert heard() == (["r0"], (), ())
        other.tell(up("r1"))
        assert heard() == (["r0", "r1"], (), ())
        other.tell(up("r1"))  # nothing new
        assert isinstance(other.ask(Arrive("a", "c", b"", exclude=("r1",))), Place)
        other.tell(WorkerHealth("r1", False))
        assert heard() == (["r0", "r1"], (), ("r1",))
        other.tell(WorkerDrain("r0"))
        assert heard() == (["r0", "r1"], ("r0",), ("r1",))
        refused = other.ask(Arrive("b", "c", b""))
        assert isinstance(refused, Refuse)
        assert refused.retry
        assert "drains or does not answer" in refused.reason
        other.tell(Done("a"))
        assert heard() == (["r1"], (), ("r1",))
        other.tell(WorkerHealth("r1", True))
        assert heard() == (["r1"], (), ())
        other.tell(WorkerDrain("r1"))
        assert heard() == ([], (), ())
        runs = {other.ask(Follow("")).router, w.peer.ask(Follow("")).router}
        assert len(runs) == 1
        assert runs != {""}


def test_a_worker_is_sick_while_any_gateway_says_so() -> None:
    with wire(peer_timeout_s=10.0) as w:
        replica = w.new_replica()
        w.peer.tell(up("r0", replica))
        replica.subscribed()
        replica.publish(stored_prompt(10))
        wait_until(lambda: w.peer.kv()["expected"] == 1, "one batch")

        def state() -> str:
            return w.peer.state()["workers"]["r0"]["state"]

        first, second = w.new_peer(), w.new_peer()
        for peer in (first, second):
            peer.socket.send(HEARTBEAT)
            peer.hear_frames()
            peer.tell(WorkerHealth("r0", False))
            peer.ask_past(Query("q"))
        wait_until(lambda: state() == "sick", "both say that it does not answer")
        w.runs(10.0)
        first.tell(WorkerHealth("r0", True))
        first.ask_past(Query("q"))
        assert state() == "sick"
        w.runs(1.0)
        wait_until(lambda: state() == "up", "the second gateway is gone, and with it what it said")
        wait_until(lambda: w.peer.matched(prompt(10))[1] == 3 * PAGE, "the replay has brought its cache back")


def test_any_number_of_placements_that_cannot_be_delivered_are_undone() -> None:
    """Each end frees the slot for the next that waits, and more of them wait than Python recurses."""
    core = Router(build("centralized_dlpm", slots=1), page_size=PAGE, linger_s=0.0)
    with wire(core, start=False) as w:
        w.shell.tell(up("r0"))
        core.handle(Arrive("busy", "c", b""), 0.0, b"somebody")
        for number in range(1100):
            core.handle(Arrive(str(number), "c", b""), 0.0, b"nobody")
        w.shell.tell(Done("busy"), peer=b"somebody")
        state = core.state()
        assert (state["in_flight"], state["waiting"]) == (0, 0)
        assert state["counts"]["ended failed"] == 1100
        w.start()


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_the_process_dies_with_its_parent() -> None:
    parent = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'router', '--bind', 'tcp://127.0.0.1:*'],"
        " stderr=subprocess.PIPE)\n"
        "child.stderr.readline()\n"
        "print(child.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, check=True)
    child = int(done.stdout)

    def gone() -> bool:
        try:
            with open(f"/proc/{child}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] == "Z"  # nobody may be there to reap it
        except OSError:
            return True

    try:
        wait_until(gone, "the router is gone")
    finally:
        if not gone():
            os.kill(child, signal.SIGKILL)


# -- pure parts


def payload(number: int, ts: float | None = None) -> bytes:
    return msgspec.msgpack.encode([float(number) if ts is None else ts, [stored([number], [number] * PAGE)]])


def numbers(events: list) -> list[int | None]:
    return [event.hashes[0] if isinstance(event, Stored) else None for event in events]


def test_an_old_number_with_news_is_a_restart() -> None:
    follower = Follower("r0", can_replay=True)
    follower.asked(0.0)
    for number in range(9):
        follower.replayed(number, payload(number))
    follower.end_of_replay()
    assert follower.live(3, payload(3, ts=100.0), 0.0) == [Cleared("r0")]
    assert (follower.ask_from, follower.reopen) == (0, True)


def test_a_replay_that_ends_early_is_asked_for_again_while_it_makes_progress() -> None:
    follower = Follower("r0", can_replay=True)
    follower.asked(0.0)
    assert follower.live(3, payload(3), 0.0) == []
    assert numbers(follower.replayed(0, payload(0))) == [0]
    assert (follower.end_of_replay(), follower.ask_from) == ([], 1)
    follower.asked(0.0)
    assert numbers(follower.end_of_replay()) == [3]
    assert (follower.ask_from, follower.counts["lost_batches"]) == (None, 2)


def test_without_replay_a_gap_is_lost_at_once() -> None:
    follower = Follower("r0", can_replay=False)
    assert numbers(follower.live(0, payload(0), 0.0) + follower.live(5, payload(5), 0.0)) == [0, 5]
    assert follower.counts["lost_batches"] == 4
    assert follower.ask_from is None


@settings(max_examples=examples(120))
@given(
    times=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    echoes=st.lists(st.none() | st.integers(1, 9), min_size=30, max_size=30),
    delays=st.lists(st.integers(0, 4), min_size=30, max_size=30),
)
def test_whatever_the_stream_loses_or_repeats_each_batch_is_applied_once_in_order(
    times: list[int], echoes: list[int | None], delays: list[int]
) -> None:
    """A replay is served `delay` live batches after it was asked for, with all published by then.

    Batch n comes `times[n]` times, and after it an older one once more where `echoes[n]` says how much older.
    """
    follower = Follower("r0", can_replay=True)
    got: list[int | None] = []
    due: list[tuple[int, int]] = []
    published = 0

    def ask() -> None:
        if follower.ask_from is not None:
            due.append((published + delays[len(due) % len(delays)], follower.ask_from))
            follower.asked(0.0)

    def hear(number: int) -> None:
        got.extend(numbers(follower.live(number, payload(number), 0.0)))
        ask()

    def serve(until: int) -> None:
        while due and due[0][0] <= until:
            _, start = due.pop(0)
            for number in range(start, published):
                got.extend(numbers(follower.replayed(number, payload(number))))
            got.extend(numbers(follower.end_of_replay()))
            ask()

    ask()
    for number, count in enumerate([*times, 1]):
        published = number + 1
        for _ in range(count):
            hear(number)
        back = echoes[number % len(echoes)]
        if back is not None and back <= number:
            hear(number - back)
        serve(number)
    serve(1 << 30)
    assert got == list(range(published))
    assert follower.counts["restarts"] == follower.counts["lost_batches"] == 0


def test_token_ids_are_little_endian_words() -> None:
    assert pack_tokens([1, 0x01020304]) == b"\1\0\0\0\4\3\2\1"
    assert unpack_tokens(pack_tokens([0, 5, (1 << 32) - 1])) == [0, 5, (1 << 32) - 1]
    for bad in ([-1], [1 << 32], ["x"], [None]):
        with pytest.raises(ProtocolError):
            pack_tokens(bad)


def test_events_are_arrays_before_they_are_maps() -> None:
    """As SGLang had them before 0.5.20, with what it had not yet behind what it had."""
    tokens = list(range(8))
    events = [
        ["BlockStored", [1, 2], -9, tokens, PAGE, None],
        ["BlockStored", [1, 2], -9, tokens, PAGE, None, "GPU", {"cache_salt": "s"}, "unheard"],
        ["BlockStored", [1, 2], -9, tokens, PAGE, None, "CPU_PINNED"],
        ["BlockRemoved", [2], "GPU"],
        ["BlockRemoved", [2]],
        ["AllBlocksCleared"],
        ["BlockStored", [1, 2]],
        ["BlockStored", [1, 2], -9, tokens, PAGE, None, "GPU", 7],
        ["Unheard"],
        [[]],
        [],
    ]
    found = decode_kv_batch("r0", msgspec.msgpack.encode([1.0, events, 0]))
    first = Stored("r0", (1, 2), -9, pack_tokens(tokens), PAGE)
    salted = msgspec.structs.replace(first, namespace=namespace(None, "s"))
    assert found.events == (first, salted, *[Removed("r0", (2,))] * 2, Cleared("r0"))
    assert found.skipped == 5


def test_a_batch_keeps_what_separates_prefixes() -> None:
    event = stored([1, 2], list(range(8)), parent=-9, cache_salt="s", lora_name="a")
    found = decode_kv_batch("r0", msgspec.msgpack.encode([1.0, [event], 0])).events
    assert found == (Stored("r0", (1, 2), -9, pack_tokens(range(8)), PAGE, namespace("a", "s")),)
    coming = stored([1], list(range(4)), extra_keys=[["s"], None], session_id="x", unheard=[{}])
    del coming["medium"]
    (root,) = decode_kv_batch("r0", msgspec.msgpack.encode([1.0, [coming], 0, "more"])).events
    assert root.namespace == namespace(None, "s")
    names = [namespace(), namespace("a"), namespace(None, "a"), namespace(None, None, "a")]
    assert names[0] == ""
    assert all(one != two for one, two in pairwise(names))
