"""A batch under a session of load: the real feeder (`router.feeder.core`), a store in memory, and the cluster's router.

The feeder looks at its store and takes turns as its shell does, and what it sends is a request of the batch's client
like any other. Modelled are the store, in which everything is written at once, and the gateway, as in `cluster`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from router.batches.model import Item, StoredBatch, window_s
from router.events import TOKEN_BYTES
from router.feeder.answers import Again, Answer
from router.feeder.core import Feeder, Send
from router.feeder.shell import LOOK_S, TURN_S
from sglang_fair.common.deadlines import DEFAULT_CLASSES
from sglang_fair.settings.table import Feeding as Settings
from sglang_fair.sim.replica import SimRequest
from workloads.clients import Client
from workloads.records import Records
from workloads.session import Ending, Plan, Request
from workloads.simulation.cluster import Cluster, Flight
from workloads.simulation.run import Simulation
from workloads.simulation.site import Site

BATCH, MODEL = "batch", ""
"""The batch's client, and the model of its lines."""
WINDOW = "24h"


class Line(NamedTuple):
    """Of a batch: a prompt, packed, and the length of its answer."""

    prompt: bytes
    output_tokens: int


class Answered(NamedTuple):
    """A line that has its result."""

    t_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Feed:
    """A batch, and how it is sent. `lines` may be made when they are asked for."""

    lines: Sequence[Line]
    most_in_flight: int = Settings.batch_in_flight
    token_s: float | None = None
    """As `Feeder` has them."""
    from_s: float = 0.0
    until_s: float = inf
    """When lines are sent."""


class Feeding:
    """Sends one batch to a cluster. `over` is to be called with each of its flights that has ended."""

    def __init__(self, cluster: Cluster, feed: Feed) -> None:
        self.answered: list[Answered] = []
        self._cluster = cluster
        self._feed = feed
        self._core = Feeder(DEFAULT_CLASSES, feed.most_in_flight, feed.token_s)
        self._next = 0
        self._released: list[Item] = []
        self._is_due = False

    def begin(self) -> None:
        self._cluster.every(LOOK_S, self._look, int(self._feed.from_s / LOOK_S))

    def over(self, flight: Flight, ending: Ending) -> None:
        send, now_s = flight.owner, self._cluster.now_s
        prompt_tokens = len(send.item.body) // TOKEN_BYTES
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": ending.output_tokens}
        body = json.dumps({"usage": usage}).encode()
        answer = Answer(ending.status or 502, body, took_s=now_s - flight.sent_s)
        match self._core.answered(send, answer, send.item.tries, now_s):
            case Again(after_s):
                self._cluster.at(now_s + after_s, self._send, send)
            case None:
                self._released.append(send.item)
            case _:
                self._core.unwritten -= 1
                self.answered.append(Answered(now_s, prompt_tokens, ending.output_tokens))
        if not self._is_due:
            self._is_due = True
            self._cluster.at(now_s + TURN_S, self._turn_due, None)

    # ---- what the shell does

    def _look(self, number: int) -> None:
        left = len(self._feed.lines) - len(self.answered)
        batch = StoredBatch(
            id=f"batch_{0:032x}",
            endpoint="/v1/completions",
            input_file_id="",
            completion_window=WINDOW,
            status="in_progress",
            created_at=0,
            expires_at=window_s(WINDOW),
            client=BATCH,
            left={MODEL: left} if left else {},
        )
        self._core.look([batch], {(batch.id, MODEL): len(self._core.keys)}, self._cluster.now_s)
        self._turn()

    def _turn_due(self, _: None) -> None:
        self._is_due = False
        self._turn()

    def _turn(self) -> None:
        if self._cluster.now_s >= self._feed.until_s:
            return
        wanted, _ = self._core.wanted(self._cluster.now_s)
        for (batch, model), count in wanted.items():
            found = [(batch, self._lease()) for _ in range(min(count, self._waiting))]
            for send in self._core.leased({(batch, model): count}, found)[0]:
                self._send(send)

    @property
    def _waiting(self) -> int:
        return len(self._feed.lines) - self._next + len(self._released)

    def _lease(self) -> Item:
        if self._released:
            return self._released.pop()
        self._next += 1
        line = self._feed.lines[self._next - 1]
        return Item(self._next, str(line.output_tokens), MODEL, line.prompt, key=self._next)

    def _send(self, send: Send) -> None:
        output_tokens = int(send.item.custom_id)
        name = f"line {send.item.number} {self._cluster.scheduled}"
        asked = SimRequest(
            name, BATCH, send.item.body, output_tokens, output_tokens, expected_output_tokens=output_tokens
        )
        self._cluster.send(asked, send)


class Fed(Simulation):
    """A session of load with a batch under it: `feeding`, where there is one."""

    def __init__(
        self,
        site: Site,
        clients: Sequence[Client],
        plan: Plan,
        records: Records,
        *,
        seed: str = "0",
        feed: Feed | None = None,
    ) -> None:
        super().__init__(site, clients, plan, records, seed=seed)
        self.feeding = None if feed is None else Feeding(self.cluster, feed)

    def run(self) -> None:
        if self.feeding is not None:
            self.feeding.begin()
        super().run()

    def _over(self, flight: Flight, ending: Ending) -> None:
        if self.feeding is None or isinstance(flight.owner, Request):
            super()._over(flight, ending)
        else:
            self.feeding.over(flight, ending)
