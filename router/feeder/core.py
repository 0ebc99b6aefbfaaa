"""What is leased and sent, and what follows from an answer. No clock, no store, no socket.

The items of a batch for one model are a *part*. Of all parts of a model together so many are leased at a time as its
*gate* allows; what is leased is sent at once, and waits at the router like any other request. A model's gate begins
with `FIRST`, each answer widens it by one, and each refusal (503) leaves half of what is in flight; so does a client's
own limit (429) with what that client may have in flight.

Who is next: of the clients that have something to send, the one with the fewest items in flight, then the one that has
waited longest; of its parts the one whose window ends first. So a client's thousand batches send no more at a time
than another's single one. What replicas do with them is the policy's, as with any request of that client.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import NamedTuple

from router.batches import lines
from router.batches.model import Ending, Item, StoredBatch, class_of, window_s
from router.feeder.answers import Again, Answer, judge
from router.feeder.pace import Pace

FIRST = 64
MOST_BYTES = 64 << 20
"""Of the requests in flight, together, besides one that is longer."""
MOST_UNWRITTEN = 4096
"""Results that wait for the store; while there are more, nothing is sent."""

Key = tuple[str, str]
"""A part: batch and model."""


class Send(NamedTuple):
    """Have a gateway answer an item; `Feeder.answered` is to have the answer."""

    batch: StoredBatch
    item: Item
    slo_class: str
    stands_for: int
    """Items of the part that wait in the store, shared out over those that are leased, and itself."""


@dataclass(slots=True)
class _Gate:
    """What may be in flight of a model, or of a client."""

    limit: float = inf
    most: float = inf
    in_flight: int = 0
    closed_until_s: float = 0.0
    served: int = 0
    """When it last had a turn, by the count of turns."""
    pace: Pace | None = None

    def room(self, now_s: float) -> float:
        return 0 if now_s < self.closed_until_s else self.limit - self.in_flight

    def answered(self, answer: Answer) -> None:
        """One of those that were in flight, and is not any more."""
        if self.pace is None:
            self.limit = min(self.most, self.limit + 1)
        else:
            self.limit = min(self.most, self.pace.limit(self.limit, self.in_flight + 1, answer))

    def refused(self, until_s: float) -> None:
        self.limit, self.closed_until_s = max(1, self.in_flight // 2), until_s


@dataclass(slots=True)
class _Part:
    batch: StoredBatch
    slo_class: str
    waiting: int = 0
    leased: int = 0
    """By all feeders."""
    in_flight: dict[int, Item] = field(default_factory=dict)
    """Sent from here, by key."""


class Feeder:
    """The parts of all open batches. Single-threaded; `now_s` is Unix time and may jump."""

    def __init__(
        self, classes: Mapping[str, float], most_in_flight: int, token_s: float | None = None
    ) -> None:
        """`classes` are seconds to the first token; `most_in_flight` is for each model; `token_s`: see `Pace`."""
        self._classes = classes
        self._most = most_in_flight
        self._token_s = token_s
        self._parts: dict[Key, _Part] = {}
        self._closing: set[str] = set()
        self._models: dict[str, _Gate] = {}
        self._clients: dict[str, _Gate] = {}
        self._turns = 0
        self._bytes = 0
        self.unwritten = 0

    def look(
        self, batches: Sequence[StoredBatch], leased: Mapping[Key, int], now_s: float
    ) -> tuple[list[int], list[str]]:
        """The open batches, and how many of their items are leased. The keys of items that are to be taken back, and
        the batches that are to be closed; `closed` is to be called when that is done."""
        known = {one.id: one for one in batches if not one.closing and now_s < one.expires_at}
        left = {
            (one.id, model): count
            for one in known.values()
            if one.status == "in_progress"
            for model, count in one.left.items()
        }
        gone = [key for name in self._parts.keys() - left.keys() for key in self._drop(name)]
        for name, count in left.items():
            if name not in self._parts:
                batch = known[name[0]]
                slo_class = class_of(window_s(batch.completion_window), self._classes)
                self._parts[name] = _Part(batch, slo_class)
                self._clients.setdefault(batch.client, _Gate())
                if name[1] not in self._models:
                    self._models[name[1]] = self._gate()
            part = self._parts[name]
            part.leased = leased.get(name, 0)
            part.waiting = count - part.leased
        close = [one.id for one in batches if one.id not in known and one.id not in self._closing]
        self._closing.update(close)
        return gone, close

    def closed(self, batch: str) -> None:
        """It is over, or could not be closed; then the next look has it closed again."""
        self._closing.discard(batch)

    @property
    def keys(self) -> set[int]:
        """Of all that is in flight."""
        return {key for part in self._parts.values() for key in part.in_flight}

    def wanted(self, now_s: float) -> tuple[dict[Key, int], int]:
        """How many items of each part are to be leased, and the most bytes of them together; `leased` is to have what
        came of it."""
        wanted: Counter[Key] = Counter()
        if self.unwritten >= MOST_UNWRITTEN or self._bytes >= MOST_BYTES:
            return wanted, 0
        of: dict[str, dict[str, list[Key]]] = {}
        for key, part in sorted(self._parts.items(), key=lambda one: (-one[1].batch.expires_at, one[0])):
            if part.waiting and self._clients[part.batch.client].room(now_s) > 0:
                of.setdefault(key[1], {}).setdefault(part.batch.client, []).append(key)
        for model, clients in of.items():
            self._share(self._models[model].room(now_s), clients, wanted)
        return wanted, MOST_BYTES - self._bytes

    def _share(self, room: float, clients: Mapping[str, list[Key]], wanted: Counter[Key]) -> None:
        """Gives out the room of one model. Of a client's parts the last one is next."""
        turns = [(self._clients[one].in_flight, self._clients[one].served, one) for one in clients]
        heapify(turns)
        while room > 0 and turns:
            count, served, client = turns[0]
            mine = clients[client]
            while mine and wanted[mine[-1]] >= self._parts[mine[-1]].waiting:
                mine.pop()
            if not mine or count >= self._clients[client].limit:
                heappop(turns)
                continue
            wanted[mine[-1]] += 1
            room -= 1
            heapreplace(turns, (count + 1, served, client))

    def leased(
        self, wanted: Mapping[Key, int], found: Sequence[tuple[str, Item]]
    ) -> tuple[list[Send], list[int]]:
        """What is to be sent, and keys that are to be released: nothing of their batch is sent any more."""
        taken = Counter((batch, item.model) for batch, item in found)
        for name in wanted:
            if (part := self._parts.get(name)) is not None:
                part.waiting = max(0, part.waiting - taken[name]) if taken[name] else 0  # until the next look
                part.leased += taken[name]
        sends, lost = [], []
        for batch, item in found:
            part = self._parts.get((batch, item.model))
            if part is None:
                lost.append(item.key)
                continue
            part.in_flight[item.key] = item
            self._bytes += len(item.body)
            self._models[item.model].in_flight += 1
            client = self._clients[part.batch.client]
            client.in_flight += 1
            self._turns += 1
            client.served = self._turns
            sends.append(Send(part.batch, item, part.slo_class, 1 + part.waiting // part.leased))
        return sends, lost

    def answered(self, send: Send, answer: Answer, tries: int, now_s: float) -> Ending | Again | None:
        """What follows from the answer to an item, which was tried so often before: a result that is to be kept, or
        that it is sent again later. None: it is to wait in the store again."""
        verdict = judge(answer, tries + 1)
        if isinstance(verdict, Again) and verdict.holds in ("", "all"):
            return verdict
        batch, item = send.batch, send.item
        self._land((batch.id, item.model), item.key)
        model, client = self._models[item.model], self._clients.get(batch.client, _Gate())
        if isinstance(verdict, Again):
            (model if verdict.holds == "model" else client).refused(now_s + verdict.after_s)
            return None
        model.answered(answer)
        client.answered(answer)
        self.unwritten += 1
        try:
            line = lines.answered(batch.id, item, verdict.status, answer.request_id, answer.body)
        except ValueError:
            message = f"the answer with status {verdict.status} was no JSON"
            return Ending(
                batch.id, item.number, False, lines.unanswered(batch.id, item, "bad_answer", message)
            )
        return Ending(batch.id, item.number, verdict.is_ok, line)

    def _gate(self) -> _Gate:
        """Of a model."""
        if self._token_s is None:
            return _Gate(min(FIRST, self._most), self._most)
        return _Gate(1, self._most, pace=Pace(self._token_s))

    def _drop(self, name: Key) -> list[int]:
        """Of this part nothing more is sent."""
        keys, client = list(self._parts[name].in_flight), self._parts[name].batch.client
        for key in keys:
            self._land(name, key)
        del self._parts[name]
        if all(one.batch.client != client for one in self._parts.values()):
            del self._clients[client]
        return keys

    def _land(self, name: Key, key: int) -> None:
        part = self._parts.get(name)
        if part is not None and (item := part.in_flight.pop(key, None)) is not None:
            self._bytes -= len(item.body)
            self._models[name[1]].in_flight -= 1
            self._clients[part.batch.client].in_flight -= 1
