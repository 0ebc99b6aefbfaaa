"""What is leased and sent, and what follows from an answer. No clock, no store, no socket: it is told what there is,
and returns what is to be done.

The items of a batch for one model are a *part*. Of all parts of a model together so many are leased at a time as its
*window* allows; what is leased is sent at once, and waits at the router like any other request. A window begins with
`FIRST`, each answer widens it by one, and each refusal (503) leaves half of what is in flight; so does a client's own
limit (429) with what that client may have in flight. `most` bounds them.

Who is next: of the clients that have something to send, the one with the fewest items in flight, then the one that has
waited longest; of its parts the one whose window ends first. So a client's thousand batches send no more at a time
than another's single one. What replicas do with them is the policy's, as with any request of that client.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from router.batches import lines
from router.batches.model import Ending, Item, Part, StoredBatch, class_of, window_s
from router.feeder.answers import Again, Answer, judge

FIRST = 64
MOST_BYTES = 64 << 20
"""Of the requests in flight, together, besides one that is longer."""
MOST_UNWRITTEN = 4096
"""Results that wait for the store; while there are more, nothing is sent."""

Key = tuple[str, str]
"""A part: batch and model."""


@dataclass(frozen=True, slots=True)
class Send:
    """Have a gateway answer an item; say with `answered` what it says."""

    part: Key
    item: Item
    client: str
    endpoint: str
    slo_class: str
    due_s: float
    """When its window ends."""
    stands_for: int
    """Items of the part that wait in the store, shared out over those that are leased, and itself."""


@dataclass(frozen=True, slots=True)
class Write:
    """Keep this result."""

    ending: Ending


@dataclass(frozen=True, slots=True)
class Wait:
    """Send it again, so much later."""

    after_s: float
    tries: int | None
    """That are to be kept, if they have changed."""


@dataclass(frozen=True, slots=True)
class Release:
    """It waits in the store again."""


class Window:
    """How many may be in flight."""

    def __init__(self, first: int, most: int) -> None:
        self.limit, self._most = min(first, most), most

    def answered(self) -> None:
        """One more."""
        self.limit = min(self._most, self.limit + 1)

    def refused(self, in_flight: int) -> None:
        """So many are left."""
        self.limit = max(1, in_flight // 2)


@dataclass(slots=True)
class _Part:
    """What is known of a part."""

    batch: StoredBatch
    slo_class: str
    waiting: int = 0
    leased: int = 0
    """By all feeders."""
    in_flight: dict[int, Item] = field(default_factory=dict)
    """Sent from here, by key."""


class Feeder:
    """The parts of all open batches. Single-threaded; `now_s` is Unix time and may jump."""

    def __init__(self, classes: Mapping[str, float], most_in_flight: int) -> None:
        """`classes` are seconds to the first token; `most_in_flight` is for each model."""
        self._classes = classes
        self._most = most_in_flight
        self._parts: dict[Key, _Part] = {}
        self._closing: set[str] = set()
        self._windows: dict[str, Window] = {}
        """By model."""
        self._caps: dict[str, Window] = {}
        """Of clients that were refused for their limits."""
        self._held_until_s: dict[tuple[str, str], float] = {}
        """("model", …) or ("client", …) that is sent nothing."""
        self._in_flight: Counter[str] = Counter()
        """By client."""
        self._served: dict[str, int] = {}
        """When each client was last given a turn, by the count of turns."""
        self._turns = 0
        self._bytes = 0
        self.unwritten = 0

    # -- what there is

    def look(
        self, batches: Sequence[StoredBatch], parts: Iterable[Part], now_s: float
    ) -> tuple[list[int], list[str]]:
        """The open batches, and what is left of those in progress. The keys of items that are to be taken back, and
        the batches that are to be closed; say with `closed` when that is done."""
        known = {batch.id: batch for batch in batches if not _must_close(batch, now_s)}
        left = {(one.batch, one.model): one for one in parts if one.batch in known}
        gone = [key for name in self._parts.keys() - left.keys() for key in self._drop(name)]
        for name, part in left.items():
            batch = known[part.batch]
            slo_class = class_of(window_s(batch.window), self._classes)
            mine = self._parts.setdefault(name, _Part(batch, slo_class))
            mine.waiting, mine.leased = part.left - part.leased, part.leased
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

    # -- what is sent

    def wanted(self, now_s: float) -> tuple[dict[Key, int], int]:
        """How many items of each part are to be leased, and the most bytes of them together; say with `leased` what
        came of it."""
        if self.unwritten >= MOST_UNWRITTEN or self._bytes >= MOST_BYTES:
            return {}, 0
        wanted: Counter[Key] = Counter()
        models: dict[str, list[Key]] = {}
        for key in self._parts:
            models.setdefault(key[1], []).append(key)
        for model, keys in models.items():
            room = self._window(model).limit - sum(len(self._parts[key].in_flight) for key in keys)
            if room > 0 and not self._is_held("model", model, now_s):
                self._share(room, keys, wanted, now_s)
        return dict(wanted), MOST_BYTES - self._bytes

    def leased(
        self, wanted: Mapping[Key, int], found: Iterable[tuple[str, Item]]
    ) -> tuple[list[Send], list[int]]:
        """What is to be sent, and keys that are to be released: nothing of their batch is sent any more."""
        taken: Counter[Key] = Counter()
        mine: list[tuple[Key, _Part, Item]] = []
        lost: list[int] = []
        for batch, item in found:
            name = batch, item.model
            part = self._parts.get(name)
            if part is None:
                lost.append(item.key)
                continue
            taken[name] += 1
            part.in_flight[item.key] = item
            self._bytes += len(item.body)
            self._in_flight[part.batch.client] += 1
            self._turns += 1
            self._served[part.batch.client] = self._turns
            mine.append((name, part, item))
        for name in wanted:
            if (part := self._parts.get(name)) is not None:
                part.waiting = max(0, part.waiting - taken[name]) if taken[name] else 0  # until the next look
                part.leased += taken[name]
        return [
            Send(
                name, item, part.batch.client, part.batch.endpoint, part.slo_class, part.batch.expires_s,
                1 + part.waiting // part.leased,
            )
            for name, part, item in mine
        ], lost  # fmt: skip

    def _share(self, room: int, keys: Iterable[Key], wanted: Counter[Key], now_s: float) -> None:
        """Gives out the room of one model."""
        of: dict[str, list[Key]] = {}
        for key in sorted(keys, key=lambda key: (self._parts[key].batch.expires_s, key), reverse=True):
            client = self._parts[key].batch.client
            if self._parts[key].waiting and not self._is_held("client", client, now_s):
                of.setdefault(client, []).append(key)
        counts = Counter({client: self._in_flight[client] for client in of})
        turns = [(counts[client], self._served.get(client, 0), client) for client in of]
        heapify(turns)
        while room > 0 and turns:
            count, served, client = turns[0]
            mine = of[client]
            cap = self._caps.get(client)
            while mine and wanted[mine[-1]] >= self._parts[mine[-1]].waiting:
                mine.pop()
            if not mine or (cap is not None and count >= cap.limit):
                heappop(turns)
                continue
            wanted[mine[-1]] += 1
            room -= 1
            heapreplace(turns, (count + 1, served, client))

    # -- what comes back

    def answered(self, send: Send, answer: Answer, tries: int, now_s: float) -> Write | Wait | Release:
        """What follows from the answer to an item, which was tried so often before."""
        verdict = judge(answer, tries + 1)
        model, client = send.part[1], send.client
        if isinstance(verdict, Again) and verdict.holds in ("", "all"):
            return Wait(verdict.after_s, tries + 1 if verdict.counts else None)
        self._land(send.part, send.item.key)
        if isinstance(verdict, Again):
            held = (verdict.holds, model if verdict.holds == "model" else client)
            self._held_until_s[held] = now_s + verdict.after_s
            if verdict.holds == "model":
                of = [len(one.in_flight) for (_, name), one in self._parts.items() if name == model]
                self._window(model).refused(sum(of))
            else:
                self._caps.setdefault(client, Window(self._most, self._most)).refused(self._in_flight[client])
            return Release()
        self._window(model).answered()
        if client in self._caps:
            self._caps[client].answered()
        self.unwritten += 1
        return Write(_ending(send.part[0], send.item, answer, verdict.is_ok, verdict.status))

    # -- inside

    def _window(self, model: str) -> Window:
        if model not in self._windows:
            self._windows[model] = Window(FIRST, self._most)
        return self._windows[model]

    def _is_held(self, kind: str, name: str, now_s: float) -> bool:
        until_s = self._held_until_s.get((kind, name))
        if until_s is not None and until_s <= now_s:
            del self._held_until_s[kind, name]
        return until_s is not None and until_s > now_s

    def _drop(self, name: Key) -> list[int]:
        """Of this part nothing more is sent."""
        keys, client = list(self._parts[name].in_flight), self._parts[name].batch.client
        for key in keys:
            self._land(name, key)
        del self._parts[name]
        if all(one.batch.client != client for one in self._parts.values()):
            for known in (self._served, self._caps, self._in_flight):
                known.pop(client, None)
            self._held_until_s.pop(("client", client), None)
        return keys

    def _land(self, name: Key, key: int) -> None:
        part = self._parts.get(name)
        if part is not None and (item := part.in_flight.pop(key, None)) is not None:
            self._bytes -= len(item.body)
            self._in_flight[part.batch.client] -= 1


def _must_close(batch: StoredBatch, now_s: float) -> bool:
    return bool(batch.closing) or now_s >= batch.expires_s


def _ending(batch: str, item: Item, answer: Answer, is_ok: bool, status: int) -> Ending:
    try:
        line = lines.answered(batch, item.number, item.custom_id, status, answer.request_id, answer.body)
    except ValueError:
        message = f"the answer with status {status} was no JSON"
        line, is_ok = lines.unanswered(batch, item.number, item.custom_id, "bad_answer", message), False
    return Ending(batch, item.number, is_ok, line)
