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
CHANGED = 2
"""Clients that come within their share with one event, at most."""
RECENT_S = 60.0
"""Over which arrivals are counted."""

Due = tuple[float, float, float, float]
"""When it is due, how many requests, their tokens, and those of their prompts."""
Dues = tuple[list[Due], list[Due]]
"""By tier, the first first."""
LATE = False, 1.0, inf
"""The bucket of the hopeless."""


@dataclass(slots=True, eq=False)
class Job:
    """A request that waits or is in flight. Of its `key` less goes first."""

    request: Request
    number: int
    came_s: float
    due_s: float
    slo_s: float
    cost: float
    tier: int
    is_late: bool = False
    waited: bool = False
    sent_s: float = 0.0
    tokens: float = field(init=False)
    """Of its prompt and its expected answer."""
    key: tuple[float, float, int] = field(init=False)
    bucket: tuple[bool, float, float] = field(init=False)
    """Where it is counted: whether that is spread, its width and number."""

    def __post_init__(self) -> None:
        self.tokens = self.request.input_tokens + self.request.expected_output_tokens
        step_s = self.slo_s / STEPS
        self.key = floor(self.due_s / step_s) * step_s, self.tokens, self.number
        width_s = 2.0 ** (frexp(max(LEAST_LEFT_S, self.due_s - self.came_s) / BUCKETS)[1] - 1)
        self.bucket = self.slo_s >= SPREAD_S, width_s, floor(self.due_s / width_s)

    @property
    def slo_class(self) -> str:
        return self.request.promise.slo_class if self.request.promise is not None else ""


@dataclass(slots=True)
class Asked:
    """Requests that were promised the same time: how many come a second, and their tokens."""

    count: float = 0.0
    tokens: float = 0.0
    last_s: float = -inf

    def came(self, tokens: float, now_s: float) -> None:
        part = exp((self.last_s - now_s) / RECENT_S)
        self.count, self.tokens, self.last_s = 1 + part * self.count, tokens + part * self.tokens, now_s

    def per_s(self, now_s: float) -> tuple[float, float]:
        """Requests and tokens."""
        part = exp((self.last_s - now_s) / RECENT_S) / RECENT_S
        return self.count * part, self.tokens * part


@dataclass(slots=True, eq=False)
class _Queue:
    """What one client has waiting, in time and hopeless."""

    client: str
    tier: int = 0
    heaps: tuple[LazyHeap[Job], LazyHeap[Job]] = field(default_factory=lambda: (LazyHeap(), LazyHeap()))


@dataclass(slots=True, eq=False)
class Line:
    """`fed_s`: when one was sent last, or began to wait where none did. `mean_s`, `slowest_s`: time at a replica."""

    shares: Shares
    count: int = 0
    tokens: float = 0.0
    """Of all that wait."""
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
    counts: Counter[tuple[str, int, bool]] = field(default_factory=Counter)
    """What waits, by class, tier and whether it is hopeless."""
    buckets: tuple[dict[tuple[bool, float, float], list[float]], ...] = field(
        default_factory=lambda: ({}, {})
    )
    _queues: dict[str, _Queue] = field(default_factory=dict)
    _heads: tuple[LazyHeap[str], LazyHeap[str]] = field(default_factory=lambda: (LazyHeap(), LazyHeap()))
    """Clients of tier 0 by the key of their first request, in time and hopeless."""
    _ahead: LazyHeap[str] = field(default_factory=LazyHeap)
    """Those of tier 1, by start."""

    def put(self, one: Job) -> bool:
        """It waits. Whether it is the first of its order."""
        client = one.request.client
        queue = self._queues.get(client)
        if queue is None:
            queue = self._queues[client] = _Queue(client)
        self._count(one, 1)
        queue.heaps[one.is_late].put(one, one.key)
        self._stand(queue, one.is_late)
        return (
            not queue.tier
            and queue.heaps[one.is_late].first() is one
            and (self._heads[one.is_late].first() == client)
        )

    def remove(self, one: Job) -> None:
        """It waits no more."""
        queue = self._queues[one.request.client]
        self._count(one, -1)
        queue.heaps[one.is_late].discard(one)
        self._stand(queue, one.is_late)
        if not (len(queue.heaps[0]) or len(queue.heaps[1])):
            self._ahead.discard(queue.client)
            del self._queues[queue.client]

    def miss(self, one: Job) -> None:
        """It would miss its deadline: it is hopeless, in its client's tier."""
        queue = self._queues[one.request.client]
        self._count(one, -1)
        queue.heaps[False].discard(one)
        self._stand(queue, False)
        one.is_late, one.tier = True, queue.tier
        self.put(one)

    def judge(self, client: str) -> int:
        """The tier of a client that waits here, as it is now."""
        queue, start = self._queues[client], self.shares.start(client)
        tier = int(start > self.shares.virtual + self.shares.ahead)
        if tier:
            self._ahead.put(client, (start, client))
        if tier != queue.tier:
            queue.tier = tier
            if not tier:
                self._ahead.discard(client)
            self._stand(queue, False)
            self._stand(queue, True)
        return tier

    def settle(self) -> None:
        """Clients come within their share, a few at a time: each has gone beyond it before."""
        for _ in range(CHANGED):
            client = self._ahead.first()
            if client is None or self._ahead.key(client)[0] > self.shares.virtual + self.shares.ahead:
                break
            self.judge(client)

    def first(self, tier: int, is_late: bool) -> Job | None:
        """What is next of these: of tier 1, of the client that is the least ahead."""
        if tier:
            client = self._ahead.first()
        else:
            while (client := self._heads[is_late].first()) is not None and self.judge(client):
                pass
        return None if client is None else self._queues[client].heaps[is_late].first()

    def near(self, first: Job) -> list[Job]:
        """The first one of its order and some that are as urgent, `NEAR` at most."""
        queue = self._queues[first.request.client]
        found = queue.heaps[first.is_late].top(NEAR)
        if len(found) < NEAR and not queue.tier:
            for client in self._heads[first.is_late].top(NEAR - len(found) + 1):
                other = self._queues[client].heaps[first.is_late].first()
                if client != queue.client and other is not None and not self.shares.is_ahead(client):
                    found.append(other)
        last_s = first.due_s + NEAR_PART * first.slo_s
        return [one for one in found if one.due_s <= last_s]

    def orders(self) -> dict[tuple[int, bool], tuple[Job, int]]:
        """First and length of each that is not empty, by tier and whether it is hopeless. O(clients)."""
        found: dict[tuple[int, bool], tuple[Job, int]] = {}
        for queue in self._queues.values():
            for is_late, heap in zip((False, True), queue.heaps, strict=True):
                if (one := heap.first()) is not None:
                    first, count = found.get((queue.tier, is_late), (one, 0))
                    found[queue.tier, is_late] = min(first, one, key=lambda each: each.key), count + len(heap)
        return dict(sorted(found.items()))

    def tier(self, one: Job) -> int:
        """That its client had when that was judged last."""
        return self._queues[one.request.client].tier

    def before(self, one: Job) -> tuple[float, float]:
        """About how many requests go before this one, and their tokens. O(buckets)."""
        found = [
            bucket
            for tier, buckets in enumerate(self.buckets[: one.tier + 1])
            for key, bucket in buckets.items()
            if key is not LATE and (tier < one.tier or one.is_late or (key[2] + 1) * key[1] <= one.due_s)
        ]
        return sum(bucket[0] for bucket in found), sum(bucket[1] for bucket in found)

    def dues(self, now_s: float) -> Dues:
        """What is due when. What is overdue is dropped. O(buckets log buckets)."""
        found: Dues = ([], [])
        for dues, buckets in zip(found, self.buckets, strict=True):
            spread: dict[float, list[float]] = {}
            for key in [key for key in buckets if (key[2] + 1) * key[1] <= now_s]:
                del buckets[key]
            for key, (count, tokens, prompts) in buckets.items():
                is_spread, width_s, at = key
                due_s = (at + 0.5) * width_s
                if is_spread:
                    whole = spread.setdefault(width_s, [0.0, 0.0, 0.0, 0.0])
                    for part, more in enumerate((count * due_s, count, tokens, prompts)):
                        whole[part] += more
                elif key is not LATE:
                    dues.append((due_s, count, tokens, prompts))
            for due_sum_s, count, tokens, prompts in spread.values():
                slice_s = (due_sum_s / count - now_s) / SLICES
                parts = count / SLICES, tokens / SLICES, prompts / SLICES
                dues += [(now_s + part * slice_s, *parts) for part in range(1, SLICES + 1)]
            dues.sort()
        return found

    def came(self, one: Job) -> None:
        """A request has come, whether it waits or not."""
        asked = self.asked.get(one.slo_s)
        if asked is None:
            self.asked = dict(self._lately(one.came_s))
            asked = self.asked[one.slo_s] = Asked()
        asked.came(one.tokens, one.came_s)

    def shortest_s(self, now_s: float) -> float:
        """The shortest time that was promised of late, or to the first that wait; inf: none."""
        clients = [one for heap in (*self._heads, self._ahead) if (one := heap.first()) is not None]
        firsts = [heap.first() for client in clients for heap in self._queues[client].heaps]
        waiting = [one.slo_s for one in firsts if one is not None]
        return min([*waiting, *(slo_s for slo_s, _ in self._lately(now_s))], default=inf)

    def answered(self, took_s: float) -> None:
        """An answer is complete that was so long at a replica."""
        self.mean_s += 0.1 * (took_s - self.mean_s) if self.mean_s else took_s
        self.slowest_s = max(0.995 * self.slowest_s, took_s)

    # -- inside

    def _lately(self, now_s: float) -> list[tuple[float, Asked]]:
        return [one for one in self.asked.items() if now_s - one[1].last_s < 10 * max(RECENT_S, one[0])]

    def _stand(self, queue: _Queue, is_late: bool) -> None:
        """A client's place among those of tier 0 follows its first request."""
        heads, first = self._heads[is_late], queue.heaps[is_late].first()
        if first is None or queue.tier:
            heads.discard(queue.client)
        else:
            heads.put(queue.client, first.key)

    def _count(self, one: Job, sign: int) -> None:
        count = sign * one.request.stands_for
        self.count += sign
        self.tokens = max(0.0, self.tokens + count * one.tokens)
        sort = one.slo_class, one.tier, one.is_late
        self.counts[sort] += sign
        if not self.counts[sort]:
            del self.counts[sort]
        key, buckets = LATE if one.is_late else one.bucket, self.buckets[one.tier]
        bucket = buckets.get(key)
        if bucket is None:
            if sign < 0:  # it was overdue
                return
            bucket = buckets[key] = [0.0, 0.0, 0.0]
        bucket[0] += count
        bucket[1] += count * one.tokens
        bucket[2] += count * one.request.input_tokens
        if bucket[0] < 0.5:
            del buckets[key]
