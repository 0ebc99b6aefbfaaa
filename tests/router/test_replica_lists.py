"""Replicas from a file and a DNS name: who is ready is told, who vanishes drains, and a bad list changes nothing."""

import asyncio
import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from router.__main__ import sources
from router.core import Router
from router.events import Agent, Arrive, Done, Follow, Place, WorkerDrain, Workers, WorkerUp
from router.placement import build
from router.replica_lists import follow, specs
from router.replica_lists.follow import Follower, Source
from router.replica_lists.listing import Listing
from router.wire import pack_tokens
from sglang_fair.settings.commands import BAD_INPUT
from sglang_fair.settings.program import parse
from tests.router.test_shell import Wire
from tests.support.waiting import eventually


def up(name: str, port: int = 1) -> WorkerUp:
    return WorkerUp(name, f"http://h:{port}")


# -- what is told


def test_who_appears_is_told_when_ready_and_who_vanishes_drains() -> None:
    listing = Listing()
    assert listing.found([up("a"), up("b")]) == []
    assert listing.waiting() == [up("a"), up("b")]
    assert listing.ready(up("a")) == [up("a")]
    assert listing.ready(up("a")) == [], "it was told"
    assert listing.found([up("b")]) == [WorkerDrain("a")]
    assert listing.found([up("a"), up("b")]) == []
    assert listing.waiting() == [up("a"), up("b")], "it is probed again"
    assert listing.ready(up("b")) == [up("b")]
    assert listing.found([up("b", 2)]) == [WorkerDrain("b")], "at another address it is another one"
    assert listing.ready(up("b")) == [], "that is not listed any more"
    assert listing.ready(up("b", 2)) == [up("b", 2)]
    faster = WorkerUp("b", "http://h:2", capacity=2.0)
    assert listing.found([faster]) == [faster], "nothing else has changed"


def test_who_vanished_while_the_router_was_away_drains_though_gateways_tell_of_it() -> None:
    listing, core = Listing("file f"), Router(build("round_robin"))
    told = [WorkerUp(name, f"http://h:{port}", listed=tag) for name, port, tag in (
        ("gone", 1, "file f"), ("moved", 2, "file f"), ("stays", 3, "file f"), ("added", 4, ""), ("other", 5, "file g"),
    )]  # fmt: skip
    for one in told:
        core.handle(one, 0.0)

    def workers() -> Workers:
        [(_, answer)] = core.handle(Follow("file f"), 0.0)
        assert isinstance(answer, Workers)
        return answer

    assert list(workers().workers) == sorted(told, key=lambda one: one.worker), "gateways keep who lists it"
    assert listing.lost(workers()) == [], "the list has not been read yet"
    core.handle(Arrive("1", "c", pack_tokens([1]), exclude=("added", "moved", "other", "stays")), 0.0)
    listing.found([up("moved", 9), up("stays", 3)])
    drains = listing.lost(workers())
    assert drains == [WorkerDrain("gone"), WorkerDrain("moved")]
    for drain in drains:
        core.handle(drain, 0.0)
    assert workers().draining == ("gone",), "it has a request"
    assert listing.lost(workers()) == [], "it is drained once"
    core.handle(WorkerUp("gone", "http://h:1"), 0.0)
    assert listing.lost(workers()) == [], "an operator has added it, and it is nobody else's"
    [back] = listing.ready(next(one for one in listing.waiting() if one.worker == "moved"))
    core.handle(back, 0.0)
    assert listing.lost(workers()) == []


def test_a_replica_that_has_loaded_one_of_its_models_is_still_the_one_that_is_listed() -> None:
    listing, core = Listing("f"), Router(build("round_robin"))
    listing.found([WorkerUp("a", "http://h:1", models=("m", "n")), WorkerUp("b", "http://h:2")])
    for one in listing.waiting():
        [told] = listing.ready(one)
        core.handle(told, 0.0)
    core.handle(Agent("q", "a", loaded="n"), 0.0, b"agent")
    [(_, answer)] = core.handle(Follow("f"), 0.0)
    assert isinstance(answer, Workers)
    assert [(up.worker, up.loaded, up.listed) for up in answer.workers] == [("a", "n", "f"), ("b", "", "f")]
    assert listing.lost(answer) == []


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd")))))
def test_after_all_are_ready_the_router_has_those_that_are_listed(
    steps: list[tuple[set[str], set[str]]],
) -> None:
    listing, core = Listing(), Router(build("round_robin"))
    for listed, ready in steps:
        events = listing.found(up(name) for name in sorted(listed))
        for one in listing.waiting():
            if one.worker in ready:
                events += listing.ready(one)
        for event in events:
            core.handle(event, 0.0)
        known = set(core.state()["workers"])  # type: ignore[call-overload]
        assert known <= listed
        assert known >= listed & ready


# -- words


def test_a_name_gives_a_replica_for_each_address() -> None:
    name = specs.name("r.svc:30000,kv=5557,replay=5558,load=5559,capacity=2,model=m")
    assert name.worker("10.0.0.7") == WorkerUp(
        "10.0.0.7:30000",
        "http://10.0.0.7:30000",
        "tcp://10.0.0.7:5557",
        "tcp://10.0.0.7:5558",
        2.0,
        "tcp://10.0.0.7:5559",
        ("m",),
        "m",
    )
    assert name.worker("fd00::7").url == "http://[fd00::7]:30000"
    assert name.worker("fd00::7").kv == "tcp://[fd00::7]:5557"


@pytest.mark.parametrize(
    "spec",
    ["", "name", "name:", ":1", "name:0", "name:65536", "name:1,kv=tcp://x:1", "name:1,replay=5", "name:1,what=2",
     "name:1,capacity=0", "name:1,kv=1,kv=2"],
)  # fmt: skip
def test_a_bad_name_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"is not NAME:PORT|is no port|of no use|no number|given twice"):
        specs.name(spec)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("r0,http=http://h:1\n\nr1", "line 3: 'r1' is not NAME,http=URL"),
        (",http=http://h:1", "is not NAME,http=URL"),
        ("r0,http=", "is not"),
        ("r0,http=http://x,kv=1", "kv=1 is no ZMQ address"),
        ("r0,http=http://x,replay=tcp://y:1", "of no use"),
        ("r0,http=http://x,what=1", "is not NAME,http=URL"),
        ("r0,http=http://x,http=http://y", "is given twice"),
        ("r0,http=http://h:1\nr0,http=http://h:2", "named twice: r0, r0"),
        ("r0,http=http://h:1,model=m\nr1,http=http://h:2", "say model= of r1 too"),
        ("r0,http=http://", "worker r0: http=http:// is no URL"),
        ("r0,http=http://h:1/v1", "worker r0: http=http://h:1/v1 is no URL"),
        ("r0,http=http://h:1,kv=http://h:2", "worker r0: kv=http://h:2 is no ZMQ address"),
        ("r0,http=http://h:1,load=tcp://h", "worker r0: load=tcp://h is no ZMQ address"),
        ("r0,http=http://h:1,kv=tcp://*:2", "is no ZMQ address"),
        ("r0,http=http://h:1,kv=inproc://router", "is no ZMQ address"),
    ],
)
def test_a_bad_line_is_named(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        specs.lines(text)


@pytest.mark.parametrize(
    "address", ["tcp://10.0.0.7:5557", "tcp://[fd00::7]:1", "tcp://a.b.svc:65535", "ipc:///run/kv"]
)
def test_what_zmq_connects_to_is_an_address(address: str) -> None:
    found = specs.worker(f"r0,http=https://h:1/,kv={address},replay={address},load={address},capacity=2.5")
    assert found == WorkerUp("r0", "https://h:1/", address, address, 2.5, address)


# -- a file


class Heard:
    """A router that is told, and whether it is asked for its workers, so that those that are not listed drain."""

    def __init__(self, source: Source) -> None:
        self.was_asked = False
        self._follower = Follower(source, cast(Any, self), cast(Any, None))

    def listing(self) -> Workers:
        self.was_asked = True
        return Workers("", ())

    def tell(self, event: WorkerDrain) -> None:
        raise AssertionError(event)

    def looks(self, times: int = 1) -> list[str]:
        """What the list has then, in the router's eyes."""
        self.was_asked = False
        for _ in range(times):
            asyncio.run(self._follower.look())
        return [up.worker for up in self._follower._listing.waiting()]


def test_a_file_is_used_when_it_has_settled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "replicas"
    heard = Heard(Source(path))
    with caplog.at_level(logging.WARNING, "router"):
        assert heard.looks(2) == []
        assert len(caplog.records) == 1, "that it is not there is said once"
        path.write_text("# two\nr0,http=http://h:1\nr1,http=http://h:2\n")
        assert heard.looks() == [], "it may be half written"
        assert heard.looks() == ["r0", "r1"]
        caplog.clear()
        path.write_text("r0,http=http://h:1\nr2,ht")
        assert heard.looks(5) == ["r0", "r1"]
        [said] = [one.getMessage() for one in caplog.records]
        assert said.startswith(f"file {path}: line 2: worker r2: fields are KEY=VALUE")
        assert said.endswith(": the replicas of before stay")
        path.write_bytes(b"\xff\xfe")
        assert heard.looks(2) == ["r0", "r1"]
        path.unlink()
        assert heard.looks(2) == ["r0", "r1"], "a file that is gone takes nobody away"
        (tmp_path / "new").write_text("r2,http=http://h:3\n")
        (tmp_path / "new").rename(path)
        assert heard.looks(2) == ["r2"]
        path.write_text("")
        assert heard.looks() == ["r2"], "its writer may have emptied it to write it anew"
        assert heard.looks() == [], "an empty one drains all"


def test_a_file_that_is_half_written_when_a_router_begins_drains_nobody(tmp_path: Path) -> None:
    path = tmp_path / "replicas"
    path.write_text("r0,http=http://r0\n")
    heard, asked = Heard(Source(path)), []
    for text in ("", "r1,http=http://r1\n", "", ""):
        with path.open("a") as file:
            file.write(text)
        heard.looks()
        asked.append(heard.was_asked)
    assert asked == [False, False, False, True], "at the last one it is what was used before"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "what"),
    [("--replicas-file", "r0", "line 1: 'r0' is not"), ("--replicas-dns", "name", "is not NAME:PORT")],
)
def test_the_router_does_not_start_on_a_bad_list(tmp_path: Path, option: str, value: str, what: str) -> None:
    if option == "--replicas-file":
        (tmp_path / "list").write_text(value)
        value = str(tmp_path / "list")
    command = [sys.executable, "-m", "router", "--bind", "tcp://127.0.0.1:*", option, value]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == BAD_INPUT
    assert what in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


# -- a router that follows it


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "PROBE_EVERY_S", 0.05)


@contextlib.contextmanager
def router_of(path: Path) -> Iterator[Wire]:
    wire = Wire(Router(build("round_robin"), name="round_robin", page_size=4, linger_s=0.0))
    try:
        wire.jobs.append(follow.follow([Source(path, 0.05)], wire.shell))
        wire.start()
        yield wire
    finally:
        wire.close()


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(body())  # type: ignore[arg-type]


class FakeReplica:
    """Says whether it is ready."""

    def __init__(self) -> None:
        self.status = 200
        self.probes = 0

    async def ready(self, _: web.Request) -> web.Response:
        self.probes += 1
        return web.Response(status=self.status)

    async def start(self) -> str:
        """Its URL."""
        app = web.Application()
        app.add_routes([web.get("/ready", self.ready)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()


def test_a_router_follows_a_file_and_loses_no_request(tmp_path: Path, quick: None) -> None:
    path = tmp_path / "replicas"

    async def body() -> None:
        replicas = {name: FakeReplica() for name in ("r0", "r1")}
        urls = {name: await replica.start() for name, replica in replicas.items()}

        def write(*names: str) -> None:
            path.with_suffix(".new").write_text("".join(f"{name},http={urls[name]}\n" for name in names))
            os.replace(path.with_suffix(".new"), path)

        with router_of(path) as wire:

            async def states() -> dict[str, str]:
                found = await asyncio.to_thread(wire.peer.state)
                return {name: worker["state"] for name, worker in found["workers"].items()}

            async def has(**expected: str) -> bool:
                return await states() == expected

            replicas["r1"].status = 503
            write("r0", "r1")
            await eventually(lambda: has(r0="up"), "the one that is ready is there")
            await eventually(lambda: replicas["r1"].probes > 2, "the other one is probed")
            assert await has(r0="up")
            place = wire.peer.ask(Arrive("1", "c", pack_tokens([1])))
            assert isinstance(place, Place)
            assert place.worker == "r0"
            replicas["r1"].status = 200
            await eventually(lambda: has(r0="up", r1="up"), "it is ready")
            write("r1")
            await eventually(
                lambda: has(r0="draining", r1="up"), "the one that vanished finishes its request"
            )
            for number in range(4):
                place = wire.peer.ask(Arrive(f"n{number}", "c", pack_tokens([1])))
                assert isinstance(place, Place)
                assert place.worker == "r1", "it gets no new ones"
            wire.peer.tell(Done("1"))
            await eventually(lambda: has(r1="up"), "it is forgotten")
            write("r0", "r1")
            await eventually(lambda: has(r0="up", r1="up"), "it is back")
            wire.peer.tell(WorkerUp("old", "http://old", listed=f"file {path}"))
            wire.peer.tell(WorkerUp("r9", "http://r9"))
            await eventually(
                lambda: has(r0="up", r1="up", r9="up"), "who is told of and listed no more is forgotten"
            )
        for replica in replicas.values():
            await replica.close()

    run(body)


# -- a name


def test_a_name_is_followed_by_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] | None = None
    """None: the name server does not answer."""

    async def getaddrinfo(_: object, host: str, port: int, **kind: object) -> list[tuple[Any, ...]]:
        assert (host, port) == ("r.svc", 8000)
        if not found:
            raise socket.gaierror(
                socket.EAI_NONAME if found is not None else socket.EAI_AGAIN, "no addresses"
            )
        return [(None, None, None, "", (address, port)) for address in found]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", getaddrinfo)
    settings = ["--bind", "tcp://x", "--replicas-dns", "r.svc:8000,kv=9000", "--replicas-every", "0.5"]
    [name] = sources(parse("router", settings))
    assert name.every_s == 0.5
    heard = Heard(name)
    assert heard.looks(2) == []
    found = []
    assert heard.looks(2) == [], "a name without addresses is nobody"
    found = ["127.0.0.2", "::1"]
    assert heard.looks() == [], "it may be half told"
    assert heard.looks() == ["127.0.0.2:8000", "::1:8000"], "both kinds of addresses are replicas"
    for broken in (None, []):
        found = broken
        assert heard.looks(3) == ["127.0.0.2:8000", "::1:8000"], "a name server that fails takes nobody away"
    found = ["127.0.0.3"]
    assert heard.looks(2) == ["127.0.0.3:8000"]
