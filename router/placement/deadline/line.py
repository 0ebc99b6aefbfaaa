"""What waits for one model: which request is next, and how much is due when.

    order    each client's requests by the time at which a first token is due, in steps of a tenth of the promised time,
             in a step the least work first; those that would miss anyway apart. Clients within their share (tier 0) by
             their first request, in time or hopeless; those ahead of it (tier 1) by how far. A client's tier is judged
             when its turn comes, without a look at its requests
    buckets  of those in time, count and tokens by due time, as wide as an eighth of the time that was left or less. So
             a look (`models`) takes as long with 400,000 requests as with 40. They are counted in the tier that they
             had when they came, behind all that their client had waiting

A change costs O(log waiting).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, floor, frexp, inf

from router.placement.contract import Request
from router.placement.shares import Shares
from sglang_fair.core.heap import LazyHeap

STEPS, BUCKETS, LEAST_LEFT_S = 10, 8, 1.0
NEAR, NEAR_PART = 16, 0.05
"""So many of those that are due within this part of the promised time are equally urgent: least work decides."""
SPREAD_S, SLICES = 3_600.0, 8
"""Work that is promised its first token in this time or a longer one is spread over what is left: as much in each of so
many slices. So a day's batch is neither free until its last hour nor in the way of a chat."""
CHANGED = 4
"""Clients that come within their share with one event, at most."""
RECENT_S = 60.0
"""Over which arrivals are counted."""

Due = tuple[float, float, float, float]
"""When it is due, how many requests, their tokens, and those of their prompts."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits, `left_s` before it is due when it came. Of its `key` less goes first."""

    request: Request
    number: int
    slo_s: float
    due_s: float
    left_s: float
    cost: float
    tier: int
    is_late: bool = False
    tokens: float = field(init=False)
    """Of its prompt and its expected answer."""
    key: tuple[float, float, int] = field(init=False)
    bucket: tuple[bool, float, int] = field(init=False)
    """Where it is counted: whether that is spread, its width and number."""

    def __post_init__(self) -> None:
        self.tokens = self.request.input_tokens + self.request.expected_output_tokens
        step_s = self.slo_s / STEPS
        self.key = floor(self.due_s / step_s) * step_s, self.tokens, self.number
        width_s = 2.0 ** (frexp(max(LEAST_LEFT_S, self.left_s) / BUCKETS)[1] - 1)
        self.bucket = self.slo_s >= SPREAD_S, width_s, floor(self.due_s / width_s)

    @property
    def slo_class(self) -> str:
        """By which it was promised; "": nothing was."""
        return self.request.promise.slo_class if self.request.promise is not None else ""


@dataclass(slots=True)
class Asked:
    """Requests that were promised the same time: how many come a second, and their tokens."""

    count: float = 0.0
    tokens: float = 0.0
    last_s: float = -inf

    def came(self, tokens: float, now_s: float) -> None:
        """One more."""
        part = exp((self.last_s - now_s) / RECENT_S)
        self.count, self.tokens, self.last_s = 1 + part * self.count, tokens + part * self.tokens, now_s

    def per_s(self, now_s: float) -> tuple[float, float]:
        """Requests and tokens."""
        part = exp((self.last_s - now_s) / RECENT_S) / RECENT_S
        return self.count * part, self.tokens * part


@dataclass(slots=True, eq=False)
class _Queue:
    """What one client has waiting, in time and hopeless."""

    tier: int = 0
    heaps: tuple[LazyHeap[str], LazyHeap[str]] = field(default_factory=lambda: (LazyHeap(), LazyHeap()))


@dataclass(slots=True, eq=False)
class Line:
    """`fed_s`: when one was sent last, or began to wait where none did. `mean_s`, `slowest_s`: time at a replica."""

    shares: Shares
    items: dict[str, Waiting] = field(default_factory=dict)
    fed_s: float = -inf
    mean_s: float = 0.0
    slowest_s: float = 0.0
    asked: dict[float, Asked] = field(default_factory=dict)
    """By promised time."""
    kv_tokens: float = 0.0
    """Of the cache beside this model, as a replica had it last."""
    left_s: float | None = None
    """Since when no replica has it, if one had."""
    absence_s: float = 0.0
    """How long that was, the last time."""
    tokens: float = 0.0
    """Of all that wait."""
    counts: Counter[tuple[str, int, bool]] = field(default_factory=Counter)
    """What waits, by class, tier and whether it is hopeless."""
    hopeless: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Requests, tokens and prompt tokens of those of tier 0 that would miss anyway."""
    _queues: dict[str, _Queue] = field(default_factory=dict)
    _heads: tuple[LazyHeap[str], LazyHeap[str]] = field(default_factory=lambda: (LazyHeap(), LazyHeap()))
    """Clients of tier 0 by the key of their first request, in time and hopeless."""
    _ahead: LazyHeap[str] = field(default_factory=LazyHeap)
    """Those of tier 1, by start."""
    _buckets: tuple[dict[tuple[bool, float, int], list[float]], ...] = field(default_factory=lambda: ({}, {}))

    def put(self, one: Waiting) -> bool:
        """It waits. Whether it is the first of its order."""
        self.items[one.request.id] = one
        self._count(one, 1)
        queue = self._queues.get(one.request.client)
        if queue is None:
            queue = self._queues[one.request.client] = _Queue()
        return self._enter(queue, one)

    def remove(self, one: Waiting) -> None:
        """It waits no more."""
        del self.items[one.request.id]
        self._count(one, -1)
        queue = self._queues[one.request.client]
        self._withdraw(queue, one)
        if not (len(queue.heaps[0]) or len(queue.heaps[1])):
            self._ahead.discard(one.request.client)
            del self._queues[one.request.client]

    def miss(self, one: Waiting) -> None:
        """It would miss its deadline: it is hopeless, in its client's tier."""
        queue = self._queues[one.request.client]
        self._withdraw(queue, one)
        self._count(one, -1)
        one.is_late, one.tier = True, queue.tier
        self._count(one, 1)
        self._enter(queue, one)

    def judge(self, client: str) -> int:
        """The tier of a client that waits here, as it is now."""
        queue, tier = self._queues[client], int(self.shares.is_ahead(client))
        if tier:
            self._ahead.put(client, (self.shares.start(client), client))
        if tier != queue.tier:
            queue.tier = tier
            if not tier:
                self._ahead.discard(client)
            for heads, heap in zip(self._heads, queue.heaps, strict=True):
                if (first := heap.first()) is None or tier:
                    heads.discard(client)
                else:
                    heads.put(client, heap.key(first))
        return tier

    def settle(self) -> None:
        """Clients come within their share, a few at a time: each has gone beyond it before."""
        for _ in range(CHANGED):
            client = self._ahead.first()
            if client is None or self._ahead.key(client)[0] > self.shares.virtual + self.shares.ahead:
                break
            self.judge(client)

    def first(self, tier: int, is_late: bool) -> Waiting | None:
        """What is next of these: of tier 1, of the client that is the least ahead."""
        if tier:
            client = self._ahead.first()
        else:
            while (client := self._heads[is_late].first()) is not None and self.judge(client):
                pass
        name = None if client is None else self._queues[client].heaps[is_late].first()
        return None if name is None else self.items[name]

    def near(self, first: Waiting) -> list[Waiting]:
        """The first one of its order and some that are as urgent, `NEAR` at most."""
        is_late, queue = first.is_late, self._queues[first.request.client]
        found = [self.items[name] for name in queue.heaps[is_late].top(NEAR)]
        if len(found) < NEAR and not queue.tier:
            found += [
                self.items[self._queues[client].heaps[is_late].first() or ""]
                for client in self._heads[is_late].top(NEAR - len(found) + 1)
                if client != first.request.client and not self.shares.is_ahead(client)
            ]
        last_s = first.due_s + NEAR_PART * first.slo_s
        return [one for one in found if one.due_s <= last_s]

    def orders(self) -> dict[tuple[int, bool], tuple[Waiting, int]]:
        """First and length of each that is not empty, by tier and whether it is hopeless. O(clients)."""
        found: dict[tuple[int, bool], tuple[Waiting, int]] = {}
        for queue in self._queues.values():
            for is_late, heap in zip((False, True), queue.heaps, strict=True):
                if (name := heap.first()) is not None:
                    first, count = found.get((queue.tier, is_late), (self.items[name], 0))
                    first = min(first, self.items[name], key=lambda one: one.key)
                    found[queue.tier, is_late] = first, count + len(heap)
        return dict(sorted(found.items()))

    def tier(self, one: Waiting) -> int:
        """That its client had when that was judged last."""
        return self._queues[one.request.client].tier

    def before(self, one: Waiting) -> tuple[float, float]:
        """About how many requests go before this one, and their tokens. O(buckets)."""
        count = tokens = 0.0
        for tier, buckets in enumerate(self._buckets[: one.tier + 1]):
            for (_, width_s, at), bucket in buckets.items():
                if tier < one.tier or one.is_late or (at + 1) * width_s <= one.due_s:
                    count, tokens = count + bucket[0], tokens + bucket[1]
        return count, tokens

    def dues(self, now_s: float) -> tuple[list[Due], list[Due]]:
        """By tier, what is due when, the first first. What is overdue is dropped. O(buckets log buckets)."""
        found: tuple[list[Due], list[Due]] = ([], [])
        for dues, buckets in zip(found, self._buckets, strict=True):
            spread: dict[float, list[float]] = {}
            for key in [key for key in buckets if (key[2] + 1) * key[1] <= now_s]:
                del buckets[key]
            for (is_spread, width_s, at), (count, tokens, prompts) in buckets.items():
                due_s = (at + 0.5) * width_s
                if is_spread:
                    whole = spread.setdefault(width_s, [0.0, 0.0, 0.0, 0.0])
                    for part, more in enumerate((count * due_s, count, tokens, prompts)):
                        whole[part] += more
                else:
                    dues.append((due_s, count, tokens, prompts))
            for due_sum_s, count, tokens, prompts in spread.values():
                slice_s = (due_sum_s / count - now_s) / SLICES
                parts = count / SLICES, tokens / SLICES, prompts / SLICES
                dues += [(now_s + part * slice_s, *parts) for part in range(1, SLICES + 1)]
            dues.sort()
        return found

    def came(self, slo_s: float, tokens: float, now_s: float) -> None:
        """A request has come, whether it waits or not."""
        asked = self.asked.get(slo_s)
        if asked is None:
            self.asked = dict(self._lately(now_s))
            asked = self.asked[slo_s] = Asked()
        asked.came(tokens, now_s)

    def shortest_s(self, now_s: float) -> float:
        """The shortest time that was promised of late, or to the first that wait; inf: none."""
        clients = [one for heap in (*self._heads, self._ahead) if (one := heap.first()) is not None]
        firsts = [heap.first() for client in clients for heap in self._queues[client].heaps]
        waiting = [self.items[name].slo_s for name in firsts if name is not None]
        return min([*waiting, *(slo_s for slo_s, _ in self._lately(now_s))], default=inf)

    def answered(self, took_s: float) -> None:
        """An answer is complete that was so long at a replica."""
        self.mean_s += 0.1 * (took_s - self.mean_s) if self.mean_s else took_s
        self.slowest_s = max(0.995 * self.slowest_s, took_s)

    # -- inside

    def _lately(self, now_s: float) -> list[tuple[float, Asked]]:
        return [one for one in self.asked.items() if now_s - one[1].last_s < 10 * max(RECENT_S, one[0])]

    def _enter(self, queue: _Queue, one: Waiting) -> bool:
        name, client, heap = one.request.id, one.request.client, queue.heaps[one.is_late]
        heap.put(name, one.key)
        if heap.first() != name or queue.tier:
            return False
        heads = self._heads[one.is_late]
        heads.put(client, one.key)
        return heads.first() == client

    def _withdraw(self, queue: _Queue, one: Waiting) -> None:
        name, client, heap = one.request.id, one.request.client, queue.heaps[one.is_late]
        was_first = heap.first() == name
        heap.discard(name)
        if was_first and not queue.tier:
            heads, first = self._heads[one.is_late], heap.first()
            if first is None:
                heads.discard(client)
            else:
                heads.put(client, heap.key(first))

    def _count(self, one: Waiting, sign: int) -> None:
        count = sign * one.request.stands_for
        tokens, prompt_tokens = count * one.tokens, count * one.request.input_tokens
        self.tokens = max(0.0, self.tokens + tokens)
        sort = one.slo_class, one.tier, one.is_late
        self.counts[sort] += sign
        if not self.counts[sort]:
            del self.counts[sort]
        if one.is_late:
            bucket = self.hopeless if not one.tier else None
        else:
            buckets = self._buckets[one.tier]
            bucket = buckets.get(one.bucket)
            if bucket is None and sign > 0:
                bucket = buckets[one.bucket] = [0.0, 0.0, 0.0]
        if bucket is not None:
            bucket[0] += count
            bucket[1] += tokens
            bucket[2] += prompt_tokens
            if bucket[0] < 0.5 and not one.is_late:
                del buckets[one.bucket]


def requests_of(dues: Sequence[Due]) -> float:
    """How many they are."""
    return sum([due[1] for due in dues])
