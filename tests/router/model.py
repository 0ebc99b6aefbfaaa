"""A model of the router's parties: gateways and what they believe, workers and who calls them sick, and where each
request is. `say` hands an event to the router and checks each answer, all counts and the whole state against it."""

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from router.core import Router
from router.events import (
    Arrive,
    Difference,
    Done,
    Due,
    Event,
    Held,
    PeerGone,
    Place,
    Progress,
    Refuse,
    Running,
    Table,
    WorkerDown,
    WorkerDrain,
    WorkerHealth,
    WorkerUp,
)
from router.placement import build, parameters
from tests.support.tree_check import check

PEERS = (b"g", b"h", b"i")
WORKERS = ("w0", "w1", "w2", "w3")
STEPS = {
    "ask": 40, "again": 5, "progress": 7, "done": 18, "leave": 3, "unknown": 1, "running": 3,
    "gone": 2, "down": 2, "up": 6, "drain": 2, "health": 6, "compare": 4, "restart": 1,
}  # fmt: skip

COUNTED = (
    "arrived", "placed", "refused", "asked again", "given up", "taken over", "running ignored", "progress ignored",
    "done ignored", "lost with their worker", "lost with their peer", "ended ok",
    "ended failed", "ended aborted", "output_tokens",
)  # fmt: skip


@dataclass
class Machine:
    """A worker that the router knows."""

    url: str
    is_draining: bool = False
    accusers: set[bytes] = field(default_factory=set)

    @property
    def state(self) -> str:
        return "draining" if self.is_draining else "sick" if self.accusers else "up"


@dataclass
class Flight:
    peer: bytes
    worker: str
    output_tokens: int = 0


class Model:
    """What is known of each request: `believed` by gateways, whom messages do not reach, and by the router that it is
    in flight, or that it waits (for none of those it excludes)."""

    def __init__(self, placement: str, **values: object) -> None:
        known = parameters(placement)
        values = {"slots": 4, "kv_tokens": 300, "chunk_tokens": 60, "ahead": 600.0} | values
        self.placement, self.values = placement, {name: one for name, one in values.items() if name in known}
        self.is_holding = build(placement).holds
        self.now_s, self.number, self.held = 0.0, 0, 0
        self.believed: dict[str, tuple[bytes, Arrive]] = {}
        self.choices: list[tuple[str, str]] = []
        self.restart()

    def restart(self) -> None:
        self.router = Router(
            build(self.placement, **self.values), name=self.placement, page_size=4, max_tree_tokens=2000
        )
        self.machines: dict[str, Machine] = {}
        self.flights: dict[str, Flight] = {}
        self.waiting: dict[str, tuple[bytes, tuple[str, ...]]] = {}
        self.counts: Counter[str] = Counter()
        for worker in WORKERS[:3]:
            self.say(WorkerUp(worker, f"http://{worker}"))

    def taking(self, exclude: tuple[str, ...] = ()) -> set[str]:
        return {name for name, one in self.machines.items() if one.state == "up"} - set(exclude)

    # -- one event

    def say(self, event: Event, peer: bytes = PEERS[0], *, is_lost: bool = False) -> None:
        """`is_lost`: its answers are."""
        expected = self._expect(event, peer)
        answers = 0
        for to, answer in self.router.handle(event, self.now_s, peer):
            if isinstance(answer, Difference):
                assert answer.held == expected.held
                assert [sorted(part) for part in (answer.missing, answer.unsettled)] == [
                    sorted(part) for part in (expected.missing, expected.unsettled)
                ]
                continue
            is_direct = isinstance(event, Arrive) and answer.id == event.id
            answers += is_direct
            self._take(to, answer, expected, is_direct, is_lost)
        assert answers == isinstance(event, Arrive), "each question has one answer"
        self.check()

    def _expect(self, event: Event, peer: bytes) -> Any:
        """Takes up what an event means; what is answered, where that is all there is to it."""
        match event:
            case Arrive(id=name):
                self.counts["arrived"] += 1
                return self._asked(event, peer)
            case Running(id=name, worker=worker):
                is_new = worker in self.machines and name not in self.flights
                self.counts["taken over" if is_new else "running ignored"] += 1
                if is_new:
                    self.counts["given up"] += self.waiting.pop(name, None) is not None
                    self.flights[name] = Flight(peer, worker, event.output_tokens)
            case Progress(name, output_tokens):
                if name in self.flights:
                    self.flights[name].output_tokens = max(self.flights[name].output_tokens, output_tokens)
                else:
                    self.counts["progress ignored"] += 1
            case Done(name):
                if name in self.flights:
                    self._end(name, event.outcome, event.output_tokens)
                elif self.waiting.pop(name, None):
                    self.counts["given up"] += 1
                else:
                    self.counts["done ignored"] += 1
            case PeerGone():
                for name in [name for name, (asker, _) in self.waiting.items() if asker == peer]:
                    self.counts["given up"] += bool(self.waiting.pop(name))
                for name in self._of(peer):
                    self.counts["lost with their peer"] += 1
                    self._end(name, "aborted")
                for machine in self.machines.values():
                    machine.accusers.discard(peer)
            case Table(name, requests):
                held = {name for name, (asker, _) in self.waiting.items() if asker == peer}
                known = self.flights.keys() | self.waiting.keys()
                return Difference(
                    name,
                    tuple(one for one in requests if one not in known),
                    tuple({*self._of(peer), *held} - set(requests)),
                    tuple(one for one in requests if one in held),
                )
            case WorkerUp(name, url):
                if name in self.machines and self.machines[name].url != url:
                    self._gone(name)
                self.machines.setdefault(name, Machine(url)).is_draining = False
            case WorkerDown(name) if name in self.machines:
                self._gone(name)
            case WorkerDrain(name) if name in self.machines:
                self.machines[name].is_draining = True
                self._drained(name)
            case WorkerHealth(name, ok) if name in self.machines:
                accusers = self.machines[name].accusers
                (accusers.discard if ok else accusers.add)(peer)
        return None

    def _asked(self, event: Arrive, peer: bytes) -> Place | Refuse | Held | None:
        name, flight, waiting = event.id, self.flights.get(event.id), self.waiting.get(event.id)
        if (flight and flight.peer != peer) or (waiting and waiting[0] != peer):
            self.counts["refused"] += 1
            return Refuse(name, "a request with this id is in flight from another gateway", retry=False)
        if flight:
            self.counts["asked again"] += 1
            if flight.worker in self.taking(event.exclude):
                return Place(name, flight.worker, "", 0)
            self._end(name, "failed")
        elif waiting and waiting[1] == event.exclude:
            self.counts["asked again"] += 1
            return Held(name)
        elif waiting:
            self.counts["given up"] += 1
        self.waiting[name] = peer, event.exclude
        return None

    def _of(self, peer: bytes) -> list[str]:
        return [name for name, flight in self.flights.items() if flight.peer == peer]

    def _end(self, name: str, outcome: str, output_tokens: int = 0, *, drains: bool = True) -> None:
        flight = self.flights.pop(name)
        self.counts[f"ended {outcome}"] += 1
        self.counts["output_tokens"] += max(flight.output_tokens, output_tokens)
        if drains:
            self._drained(flight.worker)

    def _drained(self, worker: str) -> None:
        if self.machines[worker].is_draining and not self.in_flight(worker):
            self._gone(worker)

    def in_flight(self, worker: str) -> int:
        return sum(flight.worker == worker for flight in self.flights.values())

    def _gone(self, worker: str) -> None:
        for name, flight in list(self.flights.items()):
            if flight.worker == worker:
                self.counts["lost with their worker"] += 1
                self._end(name, "failed", drains=False)
        del self.machines[worker]

    def _take(self, to: bytes, answer: Any, expected: Any, is_direct: bool, is_lost: bool) -> None:
        if expected is not None and is_direct:
            assert type(answer) is type(expected)
            assert not isinstance(answer, Refuse) or answer == expected
            assert not isinstance(answer, Place) or answer.worker == expected.worker
            return
        peer, exclude = self.waiting[answer.id]
        assert to == peer
        match answer:
            case Place(worker=worker):
                assert worker in self.taking(exclude)
                assert answer.url == self.machines[worker].url
                del self.waiting[answer.id]
                self.flights[answer.id] = Flight(peer, worker)
                self.counts["placed"] += 1
                self.choices.append((answer.id, worker))
            case Refuse():
                assert answer.retry
                assert not self.taking(exclude)
                del self.waiting[answer.id]
                self.counts["refused"] += 1
                self.counts["given up"] += not is_direct
                if not is_lost:
                    self.believed.pop(answer.id, None)
            case Held():
                assert self.is_holding
                self.held += 1

    def check(self) -> None:
        check(self.router.tree)
        state: Any = self.router.state()
        assert {name: state["counts"].get(name, 0) for name in COUNTED} == {
            name: self.counts[name] for name in COUNTED
        }
        assert state["in_flight"] == len(self.flights)
        assert state["waiting"] == len(self.waiting)
        assert {name: one["state"] for name, one in state["workers"].items()} == {
            name: machine.state for name, machine in self.machines.items()
        }
        for name, one in state["workers"].items():
            in_flight = self.in_flight(name)
            assert one["in_flight"] == in_flight
            assert one["prefill_tokens"] >= 0
            assert in_flight <= one["decode_tokens"] + 0.1 <= 200 * in_flight + 0.1
            if not in_flight:
                assert [one["prefill_tokens"], one["decode_tokens"]] == [0, 0]
        assert [self.router.requests_of(peer) for peer in PEERS] == [len(self._of(peer)) for peer in PEERS]
        assert all(self.taking(exclude) for _, exclude in self.waiting.values()), "none waits for nobody"
        assert self.flights or not self.waiting, "none waits where all are idle"

    # -- any events

    def walk(self, seed: int, steps: int) -> "Model":
        rng = Random(seed)
        for kind in rng.choices([*STEPS], [*STEPS.values()], k=steps):
            self.now_s += 1.0
            self.step(kind, rng)
        self.settle()
        return self

    def step(self, kind: str, rng: Random) -> None:
        peer, worker, is_lost = rng.choice(PEERS), rng.choice(WORKERS), rng.random() < 0.1
        own = [name for name, (asker, _) in self.believed.items() if asker == peer]
        name = rng.choice(own or ["?"])
        match kind:
            case "ask":
                self.number += 1
                self.ask(self._request(f"{self.number:08x}", rng), peer, is_lost=is_lost)
            case "again" if self.believed:
                name = rng.choice([*self.believed])
                asker, request = self.believed[name]
                if name in self.flights or name in self.waiting:
                    asker = rng.choice(PEERS)
                if rng.random() < 0.3:
                    request = self._request(name, rng)
                self.ask(request, asker, is_lost=is_lost)
            case "progress":
                self.say(Progress(name, rng.randrange(1, 30)), peer)
            case "done":
                name = rng.choice([one for one in own if one in self.flights] or ["?"])
                self.end(name, rng, is_lost)
            case "leave":
                self.end(name, rng, is_lost)
            case "unknown":
                self.say(Done(f"{rng.randrange(1 + self.number):08x}"), peer)
            case "running" if own and name not in self.waiting:
                self.say(Running(name, "c1", b"", worker=worker, output_tokens=rng.randrange(9)), peer)
            case "gone":
                self.say(PeerGone(), peer)
            case "down":
                self.say(WorkerDown(worker))
            case "up":
                url = f"http://{worker}" + rng.choice(["", "", "", "/elsewhere"])
                self.say(WorkerUp(worker, url, capacity=rng.choice([1.0, 2.0])))
            case "drain":
                self.say(WorkerDrain(worker))
            case "health":
                self.say(WorkerHealth(worker, rng.random() < 0.7), peer)
            case "compare":
                self.compare(peer)
            case "restart":
                self.restart()

    def ask(self, request: Arrive, peer: bytes, *, is_lost: bool = False) -> None:
        if request.id not in self.believed or self.believed[request.id][0] == peer:
            self.believed[request.id] = peer, request
        self.say(request, peer, is_lost=is_lost)

    def end(self, name: str, rng: Random, is_lost: bool) -> None:
        self.believed.pop(name, None)
        if not is_lost:
            outcome = rng.choice(["ok", "ok", "aborted", "failed"])
            ttft_s = rng.random()
            self.say(Done(name, rng.randrange(40), None, outcome, ttft_s=ttft_s, tpot_s=ttft_s / 10))

    def compare(self, peer: bytes) -> None:
        """A gateway ends what it does not know of, and asks again for what the router does not."""
        own = tuple(name for name, (asker, _) in self.believed.items() if asker == peer)
        found = self._expect(Table("t", own), peer)
        self.say(Table("t", own), peer)
        for name in found.unsettled:
            self.say(Done(name, outcome="aborted"), peer)
        for name in found.missing:
            if name in self.believed:
                self.ask(self.believed[name][1], peer)

    def settle(self) -> None:
        """After a comparison each request has its answer or waits; then all end, and nothing is left."""
        for peer in PEERS:
            self.compare(peer)
        assert self.believed.keys() == self.flights.keys() | self.waiting.keys()
        while self.flights:
            for name in list(self.flights):
                del self.believed[name]
                self.say(Done(name, 1))

    def _request(self, name: str, rng: Random) -> Arrive:
        """One of few clients with shared prefixes."""
        client = rng.randrange(5)
        tokens = [client] * 4 * rng.randrange(6) + [rng.randrange(3) for _ in range(rng.randrange(8))]
        slo_s = rng.choice([0.0, 1.0, 60.0])
        return Arrive(
            name,
            f"c{client}",
            np.asarray(tokens, "<u4").tobytes(),
            rng.choice([0, 20]),
            exclude=tuple(worker for worker in WORKERS if rng.random() < 0.15),
            due=Due("k", slo_s, slo_s) if slo_s else None,
            interaction=rng.choice(["", "i", "j"]),
        )
