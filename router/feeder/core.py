"""What is sent when, and what follows from an answer. No clock, no store, no socket: it is told what there is, and
returns what is to be done.

The store says which batches are open and what is left of them (`look`). The items of a batch for one model are a
*part*; of each part a few are loaded at a time. An item is in one place: loaded, in flight, put off, or its result is
being written. What is in none of these is in the store alone, and is loaded again; so after a death nothing has to be
remembered.

Who is next, where nobody asks: of the clients that have something to send, the one with the fewest items in flight,
then the one that has waited longest; of its parts the one whose window ends first. So a client's thousand
batches send no more at a time than another's single one. What replicas do with them is the policy's, as with any
request of that client.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec

from router.batches import lines
from router.batches.model import Ending, Item, Part, StoredBatch, class_of, window_s
from router.events import BacklogRow, Due
from router.feeder.answers import Again, Answer, judge
from router.feeder.pace import Pace

LOADED = 64
LOADED_BYTES = 8 << 20
"""Most of one part in memory, besides what is in flight."""
MOST_UNWRITTEN = 4096
"""Results that wait for the store; while there are more, nothing is sent."""
MOST_IN_FLIGHT = 4096
Key = tuple[str, str]
"""A part: batch and model."""


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch items of a part; answer with `loaded`."""

    key: Key
    after: int
    limit: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send an item to a gateway; answer with `answered`, unless it is taken back by `Abort`."""

    key: Key
    item: Item
    client: str
    endpoint: str
    slo_class: str
    due_s: float
    """When its window ends."""
    stands_for: int
    """Items of the part that are as far as this one or not sent at all, shared out over those that are sent."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Take back what was sent."""

    key: Key
    number: int


@dataclass(frozen=True, slots=True)
class Write:
    """Keep this result of an item for `model`; answer with `written`."""

    ending: Ending
    model: str


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep how often an item was tried: whoever feeds it after a restart goes on from there."""

    batch: str
    number: int
    tries: int


@dataclass(frozen=True, slots=True)
class Close:
    """End what is left of a batch without answers."""

    batch: str


Action = Load | Send | Abort | Write | Keep | Close


@dataclass(slots=True)
class _Part:
    """What is known of a part."""

    key: Key
    batch: StoredBatch
    slo_class: str
    left: int
    mean_bytes: float
    prompt_tokens: float
    output_tokens: float
    """Means of what is left."""
    after: int = 0
    """All before it were loaded."""
    is_loading: bool = False
    is_at_end: bool = False
    ready: deque[Item] = field(default_factory=deque)
    put_off: list[tuple[float, int, Item]] = field(default_factory=list)
    in_flight: dict[int, Item] = field(default_factory=dict)
    unwritten: set[int] = field(default_factory=set)

    @property
    def waiting(self) -> int:
        """Items that can be sent."""
        return max(0, self.left - len(self.in_flight) - len(self.unwritten) - len(self.put_off))

    @property
    def held(self) -> int:
        """Items that are somewhere here."""
        return len(self.ready) + len(self.put_off) + len(self.in_flight) + len(self.unwritten)


class Feeder:
    """The parts of all open batches. Single-threaded; `now_s` is Unix time and may jump."""

    def __init__(self, classes: Mapping[str, float], most_in_flight: int) -> None:
        """`classes` are seconds to the first token; `most_in_flight` is for each replica."""
        self._classes = classes
        self._most_in_flight = most_in_flight
        self._parts: dict[Key, _Part] = {}
        self._closing: set[str] = set()
        self._paces: dict[str, Pace] = {}
        self._replicas: Mapping[str, int] = {}
        self._in_flight: dict[str, int] = {}
        """By client."""
        self._served: dict[str, int] = {}
        """When each client was last given a turn, by the count of turns."""
        self._turns = 0
        self._unwritten = 0
        self._wait_until_s = 0.0
        self._model_waits: dict[str, float] = {}
        self._client_waits: dict[str, float] = {}
        self._caps: dict[str, int] = {}
        """Of clients that were refused for their limits: how many may be in flight. Halved by each refusal, one more
        with each answer."""

    # -- what there is

    def look(self, batches: Sequence[StoredBatch], parts: Iterable[Part], now_s: float) -> list[Action]:
        """The open batches, and what is left of those in progress."""
        actions: list[Action] = []
        known = {batch.id: batch for batch in batches}
        left = {(part.batch, part.model): part for part in parts}
        for key in [key for key in self._parts if key not in left]:
            actions += self._drop(key)
        for key, part in left.items():
            batch = known.get(part.batch)
            if batch is not None and not self._must_close(batch, now_s):
                self._learn(key, batch, part)
        for batch in batches:
            if self._must_close(batch, now_s) and batch.id not in self._closing:
                self._closing.add(batch.id)
                for key in [key for key in self._parts if key[0] == batch.id]:
                    actions += self._drop(key)
                actions.append(Close(batch.id))
        return actions + self.send(now_s)

    def replicas(self, by_model: Mapping[str, int]) -> None:
        """How many replicas have each model; "" are those of a cluster that has one model only."""
        self._replicas = dict(by_model)

    def loaded(self, load: Load, items: Sequence[Item], now_s: float) -> list[Action]:
        """What `load` has found."""
        part = self._parts.get(load.key)
        if part is None or not part.is_loading:
            return []
        part.is_loading = False
        part.is_at_end = len(items) < load.limit
        if not items and not load.after:
            part.left = 0  # until the next look
        for item in items:
            part.after = item.number
            part.ready.append(item)
        return self.send(now_s)

    def not_loaded(self, load: Load) -> None:
        """The store could not answer."""
        part = self._parts.get(load.key)
        if part is not None:
            part.is_loading = False

    # -- what is sent

    def send(self, now_s: float) -> list[Action]:
        """All that may be sent now."""
        actions: list[Action] = []
        if now_s < self._wait_until_s:
            return actions
        for part in self._parts.values():
            while part.put_off and part.put_off[0][0] <= now_s:
                part.ready.appendleft(heappop(part.put_off)[2])
        by_model: dict[str, list[_Part]] = {}
        for part in self._parts.values():
            by_model.setdefault(part.key[1], []).append(part)
        for model, parts in by_model.items():
            if self._model_waits.get(model, 0.0) > now_s:
                continue
            actions += self._send_of(model, parts, now_s)
        return actions

    def _start(self, part: _Part) -> Send:
        """The next item goes."""
        item = part.ready.popleft()
        part.in_flight[item.number] = item
        client = part.batch.client
        self._in_flight[client] = self._in_flight.get(client, 0) + 1
        self._turns += 1
        self._served[client] = self._turns
        due_s, stands_for = part.batch.expires_s, 1 + part.waiting // len(part.in_flight)
        return Send(part.key, item, client, part.batch.endpoint, part.slo_class, due_s, stands_for)

    def _is_capped(self, client: str) -> bool:
        return self._in_flight.get(client, 0) >= self._caps.get(client, MOST_IN_FLIGHT)

    def _send_of(self, model: str, parts: list[_Part], now_s: float) -> list[Action]:
        actions: list[Action] = []
        pace, replicas = self._pace(model), self._replicas_of(model)
        room = pace.limit * replicas - sum(len(part.in_flight) for part in parts)
        while room > 0 and self._may_send():
            part = self._next(parts, now_s, actions)
            if part is None:
                break
            actions.append(self._start(part))
            room -= 1
        pace.tick(now_s, replicas, is_full=room <= 0 and any(part.ready for part in parts))
        return actions

    def _next(self, parts: list[_Part], now_s: float, actions: list[Action]) -> _Part | None:
        """Whose turn it is; what has to be loaded for that is put to `actions`."""
        best, best_rank = None, None
        for part in parts:
            client = part.batch.client
            if self._client_waits.get(client, 0.0) > now_s or self._is_capped(client):
                continue
            if len(part.ready) <= LOADED // 4:
                actions += self._load(part)
            if not part.ready:
                continue
            rank = (
                self._in_flight.get(client, 0),
                self._served.get(client, 0),
                part.batch.expires_s,
                part.batch.created_s,
                part.key,
            )
            if best_rank is None or rank < best_rank:
                best, best_rank = part, rank
        return best

    def _load(self, part: _Part) -> list[Action]:
        if part.is_loading:
            return []
        if part.is_at_end:
            if part.held or not part.left:
                return []
            part.after, part.is_at_end = 0, False  # what the store still has, nobody has here: begin anew
        part.is_loading = True
        limit = max(1, min(LOADED, int(LOADED_BYTES / max(1.0, part.mean_bytes))))
        return [Load(part.key, part.after, limit)]

    def _may_send(self) -> bool:
        return self._unwritten < MOST_UNWRITTEN and sum(self._in_flight.values()) < MOST_IN_FLIGHT

    # -- what comes back

    def answered(self, send: Send, answer: Answer, tokens: int, now_s: float) -> list[Action]:
        """The answer to an item, which has taken so many tokens."""
        part = self._parts.get(send.key)
        item = None if part is None else part.in_flight.get(send.item.number)
        if part is None or item is None:
            return []
        tries = item.tries + 1
        verdict = judge(answer, tries)
        pace = self._pace(send.key[1])
        self._land(part, item.number)
        if isinstance(verdict, Again):
            actions: list[Action] = []
            if verdict.counts:
                item = msgspec.structs.replace(item, tries=tries)
                actions.append(Keep(send.key[0], item.number, tries))
            if verdict.holds in ("all", "model"):
                pace.trouble()
            if verdict.holds == "all":
                self._wait_until_s = now_s + verdict.after_s
            elif verdict.holds == "model":
                self._model_waits[send.key[1]] = now_s + verdict.after_s
            elif verdict.holds == "client":
                self._client_waits[send.client] = now_s + verdict.after_s
                self._caps[send.client] = max(1, self._in_flight.get(send.client, 0) // 2)
            heappush(part.put_off, (now_s + verdict.after_s, item.number, item))
            return actions + self.send(now_s)
        pace.answered(tokens)
        if send.client in self._caps:
            self._caps[send.client] += 1
        part.unwritten.add(item.number)
        self._unwritten += 1
        ending = _ending(send.key[0], item, answer, verdict.is_ok, verdict.status)
        return [Write(ending, send.key[1]), *self.send(now_s)]

    def written(
        self, endings: Iterable[Ending], models: Mapping[tuple[str, int], str], now_s: float
    ) -> list[Action]:
        """The store has these results; `models` says of which part each is."""
        for ending in endings:
            self._unwritten -= 1
            part = self._parts.get((ending.batch, models[ending.batch, ending.number]))
            if part is not None:
                part.unwritten.discard(ending.number)
                part.left -= 1
        return self.send(now_s)

    def closed(self, batch: str) -> None:
        """It is over, or could not be closed; then the next look has it closed again."""
        self._closing.discard(batch)

    # -- what others are told

    def backlog(self, now_s: float, most: int) -> list[BacklogRow]:
        """A row for each part, at most `most`: those whose windows end first."""
        parts = sorted(self._parts.values(), key=lambda part: (part.batch.expires_s, part.key))[:most]
        return [
            BacklogRow(
                group="/".join(part.key),
                client=part.batch.client,
                model=part.key[1],
                due=Due(
                    part.slo_class,
                    float(max(1, window_s(part.batch.window))),
                    part.batch.expires_s - now_s,
                ),
                waiting=part.waiting,
                running=len(part.in_flight),
                prompt_tokens=part.prompt_tokens,
                output_tokens=part.output_tokens,
            )
            for part in parts
        ]

    @property
    def in_flight(self) -> int:
        """Items that were sent and are not answered."""
        return sum(self._in_flight.values())

    def limits(self) -> dict[str, int]:
        """How many items each replica of a model may have."""
        return {model: pace.limit for model, pace in self._paces.items()}

    # -- inside

    def _must_close(self, batch: StoredBatch, now_s: float) -> bool:
        return bool(batch.closing) or now_s >= batch.expires_s

    def _learn(self, key: Key, batch: StoredBatch, part: Part) -> None:
        known = self._parts.get(key)
        if known is None:
            slo_class = class_of(window_s(batch.window), self._classes)
            known = self._parts[key] = _Part(key, batch, slo_class, 0, 0.0, 0.0, 0.0)
        known.left = part.left
        known.prompt_tokens = part.prompt_tokens / part.left
        known.output_tokens = part.output_tokens / part.left
        known.mean_bytes = known.prompt_tokens * lines.CHARS_PER_TOKEN

    def _drop(self, key: Key) -> list[Action]:
        """Of this part nothing more is sent."""
        part = self._parts.pop(key)
        aborts: list[Action] = [Abort(key, number) for number in part.in_flight]
        for number in list(part.in_flight):
            self._land(part, number)
        self._forget(part.batch.client)
        return aborts

    def _land(self, part: _Part, number: int) -> None:
        del part.in_flight[number]
        client = part.batch.client
        self._in_flight[client] -= 1
        if not self._in_flight[client]:
            del self._in_flight[client]

    def _forget(self, client: str) -> None:
        """If nothing of it is left."""
        if all(one.batch.client != client for one in self._parts.values()):
            for known in (self._served, self._caps, self._client_waits):
                known.pop(client, None)

    def _pace(self, model: str) -> Pace:
        if model not in self._paces:
            self._paces[model] = Pace(self._most_in_flight)
        return self._paces[model]

    def _replicas_of(self, model: str) -> int:
        return self._replicas.get(model, self._replicas.get("", 0))


def _ending(batch: str, item: Item, answer: Answer, is_ok: bool, status: int) -> Ending:
    try:
        line = lines.answered(batch, item.number, item.custom_id, status, answer.request_id, answer.body)
    except ValueError:
        message = f"the answer with status {status} was no JSON"
        line, is_ok = lines.unanswered(batch, item.number, item.custom_id, "bad_answer", message), False
    return Ending(batch, item.number, is_ok, line)
