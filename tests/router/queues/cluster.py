"""A small cluster in virtual time for tests of placements that hold requests: no sockets, no clock, no KV cache but a
count of tokens.

A worker runs what it was sent by continuous batching: first come, first served while the tokens that it holds and a
part of what its answers are expected to add fit into memory; an iteration prefills a chunk and writes one token of
each answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any, Protocol

from router.placement.contract import Ended, Request
from router.placement.qlm import Qlm
from router.radix import Match
from sglang_fair.common.deadlines import Promise

PREFILL_S, STEP_S, TOKEN_S = 1 / 6_000, 0.02, 1e-4
RESERVED = 0.3
"""Of what running answers are expected to add."""


@dataclass(eq=False)
class Asked:
    """A request, and what became of it."""

    id: str
    client: str
    slo_class: str
    slo_s: float
    at_s: float
    prompt: int
    output: int
    expected: float
    model: str = "a"
    first_s: float | None = None
    sent_s: float | None = None
    tier: int = 0
    left: int = 0
    done: int = 0

    @property
    def is_met(self) -> bool:
        return self.first_s is not None and self.first_s <= self.at_s + self.slo_s

    def request(self) -> Request:
        promise = Promise(self.slo_class, self.slo_s, self.at_s + self.slo_s)
        return Request(
            self.id, self.client, b"", self.prompt, 0, self.expected, model=self.model, promise=promise
        )


@dataclass(eq=False)
class Engine:
    """A worker, also as a placement sees it."""

    name: str
    kv_tokens: int
    chunk_tokens: int
    capacity: float = 1.0
    load: float = 0.0
    dispatched: int = 0
    dispatched_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: float = 0.0
    prefilled_tokens: int = 0
    produced_tokens: int = 0
    overrun_tokens: int = 0
    waiting: list[Asked] = field(default_factory=list)
    running: list[Asked] = field(default_factory=list)
    used: int = 0
    is_busy: bool = False

    def take(self, asked: Asked) -> None:
        asked.left = asked.prompt
        self.waiting.append(asked)
        self.dispatched += 1
        self.dispatched_tokens += asked.prompt
        self.load += 1
        self.prefill_tokens += asked.prompt
        self.decode_tokens += asked.expected

    def iterate(self) -> tuple[float, list[Asked], list[Asked]]:
        """One iteration: seconds, who got a first token, who is done. 0 s: nothing to do."""
        budget, took_s, firsts = self.chunk_tokens, 0.0, []
        reserved = RESERVED * sum(max(0.0, one.expected - one.done) for one in self.running)
        while self.waiting and budget:
            asked = self.waiting[0]
            if (
                self.running
                and self.used + asked.prompt + reserved + RESERVED * asked.expected > self.kv_tokens
            ):
                break
            part = min(budget, asked.left)
            asked.left -= part
            budget -= part
            took_s += part * PREFILL_S
            if not asked.left:
                self.waiting.pop(0)
                self.running.append(asked)
                self.used += asked.prompt
                reserved += RESERVED * asked.expected
                firsts.append(asked)
        done = []
        if self.running:
            took_s += STEP_S + TOKEN_S * len(self.running)
            for one in self.running:
                one.done += 1
                self.overrun_tokens += one.done > one.expected
            self.used += len(self.running)
            self.produced_tokens += len(self.running)
            done = [one for one in self.running if one.done >= one.output]
            self.running = [one for one in self.running if one.done < one.output]
            for one in done:
                self.used -= one.prompt + one.done
        return took_s, firsts, done


class Scheduler(Protocol):
    """What decides."""

    def arrive(self, asked: Asked, engines: Sequence[Engine], now_s: float) -> None: ...

    def next(self, engines: Sequence[Engine], now_s: float) -> tuple[Asked, Engine] | None: ...

    def done(self, asked: Asked, engine: Engine, now_s: float) -> None: ...


class ByQlm:
    """The placement, driven as the router's core does."""

    def __init__(self, qlm: Qlm, engines: Sequence[Engine]) -> None:
        self.qlm, self._asked = qlm, dict[str, Asked]()
        self._at_once: list[tuple[Asked, str]] = []
        self._views = list(engines)
        for engine in engines:
            qlm.worker_up(engine.name)
            qlm.equip(
                engine.name,
                loaded="a",
                kv_tokens=engine.kv_tokens,
                chunk_tokens=engine.chunk_tokens,
                now_s=0.0,
            )
        qlm.taking([engine.name for engine in engines])

    def arrive(self, asked: Asked, engines: Sequence[Engine], now_s: float) -> None:
        request = asked.request()
        name = self.qlm.place(request, Match(), self._views, now_s)
        self._asked[asked.id] = asked
        if name is not None:
            asked.tier = self.qlm.tier(asked.id)
            self.qlm.placed(request, name, Match(), now_s)
            self._at_once.append((asked, name))

    def next(self, engines: Sequence[Engine], now_s: float) -> tuple[Asked, Engine] | None:
        if self._at_once:
            asked, name = self._at_once.pop()
        else:
            found = self.qlm.next(self._views, lambda _: Match(), lambda *_: True, now_s)
            if found is None:
                self.qlm.question(now_s)
                return None
            request, name = found
            asked = self._asked[request.id]
            asked.tier = self.qlm.tier(asked.id)
            self.qlm.placed(request, name, Match(), now_s)
        return asked, next(one for one in engines if one.name == name)

    def done(self, asked: Asked, engine: Engine, now_s: float) -> None:
        assert asked.first_s is not None
        tpot_s = (now_s - asked.first_s) / max(1, asked.done - 1)
        ended = Ended(asked.request(), engine.name, 0, asked.done, "ok", now_s - asked.at_s, tpot_s)
        self.qlm.done(ended, now_s)


class ByEdf:
    """Earliest deadline first, request by request, of one queue for all workers, with the same window."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, Asked]] = []
        self._held: dict[str, float] = {}

    def arrive(self, asked: Asked, engines: Sequence[Engine], now_s: float) -> None:
        heappush(self._heap, (asked.at_s + asked.slo_s, asked.id, asked))

    def next(self, engines: Sequence[Engine], now_s: float) -> tuple[Asked, Engine] | None:
        for engine in engines:
            held = self._held.get(engine.name, 0.0) + engine.overrun_tokens
            if self._heap and held < engine.kv_tokens + engine.chunk_tokens:
                asked = heappop(self._heap)[2]
                self._held[engine.name] = self._held.get(engine.name, 0.0) + asked.prompt + asked.expected
                return asked, engine
        return None

    def done(self, asked: Asked, engine: Engine, now_s: float) -> None:
        self._held[engine.name] -= asked.prompt + asked.expected


def serve(
    scheduler: Scheduler,
    engines: Sequence[Engine],
    asked: Sequence[Asked],
    watch: Callable[[float], None] = lambda _: None,
) -> None:
    """Until all are over."""
    events: list[tuple[float, int, str, Any]] = []

    def at(time_s: float, kind: str, what: Any) -> None:
        heappush(events, (time_s, len(numbers), kind, what))
        numbers.append(0)

    numbers: list[int] = []
    for one in asked:
        at(one.at_s, "arrives", one)
    while events:
        now_s, _, kind, what = heappop(events)
        if kind == "arrives":
            scheduler.arrive(what, engines, now_s)
        elif kind == "iterates":
            took_s, firsts, done = what.iterate()
            what.is_busy = took_s > 0
            if took_s:
                at(now_s + took_s, "iterated", (what, firsts, done))
            continue
        else:
            engine, firsts, done = what
            for one in firsts:
                one.first_s = now_s
                engine.prefill_tokens -= one.prompt
                engine.prefilled_tokens += one.prompt
            for one in done:
                engine.load -= 1
                engine.decode_tokens -= one.expected
                engine.overrun_tokens -= max(0, one.done - int(one.expected))
                scheduler.done(one, engine, now_s)
            at(now_s, "iterates", engine)
        while (found := scheduler.next(engines, now_s)) is not None:
            one, engine = found
            one.sent_s = now_s
            engine.take(one)
            if not engine.is_busy:
                engine.is_busy = True
                at(now_s, "iterates", engine)
        watch(now_s)


def lengths(rng: Random) -> tuple[int, int]:
    """Of a prompt and an answer, skew as those of chats are."""
    prompt = min(2_048, max(4, int(rng.lognormvariate(4.4, 1.1))))
    return prompt, min(2_048, max(4, int(rng.lognormvariate(5.3, 1.1))))


def attained(asked: Sequence[Asked]) -> float:
    """Which part got its first token in time."""
    return sum(one.is_met for one in asked) / len(asked)
