"""What waits for one model: who is next, and how much is due when.

    order    by the time at which a first token is due, in steps of a tenth of the promised time; in a step the least
             work first. Four orders: tier 0 and 1, in time and hopeless
    buckets  of those in time, count and tokens by due time, as wide as a twenty-fourth of the promised time or less. So
             a look (`models`) takes as long with 400,000 requests as with 40

A change costs O(log waiting).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, floor, frexp, inf
from typing import NamedTuple

from router.placement.contract import Request
from sglang_fair.core.heap import LazyHeap

STEPS, BUCKETS = 10, 24
"""Of a promised time."""
NEAR, NEAR_PART = 31, 0.05
"""So many of those that are due within this part of the promised time are equally urgent: least work decides."""
SPREAD_S, SLICES = 3_600.0, 8
"""Who is promised its first token in this time or a longer one has its work spread over what is left: as much in each
of so many slices. So a day's batch is neither free until its last hour nor in the way of a chat."""
RECENT_S = 60.0
"""Over which arrivals are counted."""

Bucket = tuple[bool, float, int]
"""Whether it is spread, its width and number."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits."""

    request: Request
    number: int
    slo_s: float
    due_s: float
    since_s: float
    tier: int
    is_late: bool = False

    @property
    def tokens(self) -> float:
        """Of its prompt and its expected answer."""
        return self.request.input_tokens + self.request.expected_output_tokens

    @property
    def work(self) -> tuple[float, float, float]:
        """Requests that it stands for, their tokens, and those of their prompts."""
        count = self.request.stands_for
        return count, count * self.tokens, count * self.request.input_tokens

    @property
    def slo_class(self) -> str:
        """By which it was promised; "": nothing was."""
        return self.request.promise.slo_class if self.request.promise is not None else ""

    @property
    def key(self) -> tuple[float, float, int]:
        """Less goes first."""
        step_s = self.slo_s / STEPS
        return floor(self.due_s / step_s) * step_s, self.tokens, self.number

    @property
    def bucket(self) -> Bucket:
        """Where it is counted."""
        width_s = 2.0 ** (frexp(self.slo_s / BUCKETS)[1] - 1)
        return self.slo_s >= SPREAD_S, width_s, floor(self.due_s / width_s)


class Due(NamedTuple):
    """So many requests, with their tokens and those of their prompts, are due together."""

    due_s: float
    requests: float
    tokens: float
    prompt_tokens: float


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
class Line:
    """`fed_s`: when one was sent last, or began to wait where nobody did. `mean_s`, `slowest_s`: time at a replica."""

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
    """Who waits, by class, tier and whether it is hopeless."""
    hopeless: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Requests, tokens and prompt tokens of those of tier 0 that would miss anyway."""
    _heads: tuple[LazyHeap[str], ...] = field(default_factory=lambda: tuple(LazyHeap() for _ in range(4)))
    _buckets: tuple[dict[Bucket, list[float]], ...] = field(default_factory=lambda: ({}, {}))

    def put(self, one: Waiting) -> bool:
        """It waits. Whether it is the first of its order."""
        self.items[one.request.id] = one
        self._count(one, 1)
        heads = self._heads[2 * one.tier + one.is_late]
        heads.put(one.request.id, one.key)
        return heads.first() == one.request.id

    def remove(self, one: Waiting) -> None:
        """It waits no more."""
        del self.items[one.request.id]
        self._heads[2 * one.tier + one.is_late].discard(one.request.id)
        self._count(one, -1)

    def move(self, one: Waiting, *, tier: int, is_late: bool) -> bool:
        """It is in another tier, or hopeless. Whether it is the first there."""
        self.remove(one)
        one.tier, one.is_late = tier, is_late
        return self.put(one)

    def first(self, tier: int, is_late: bool) -> Waiting | None:
        """Who is next of these."""
        name = self._heads[2 * tier + is_late].first()
        return None if name is None else self.items[name]

    def orders(self) -> list[tuple[int, Waiting, int]]:
        """Number, first and length of each that is not empty."""
        found = [(at, heads.first(), len(heads)) for at, heads in enumerate(self._heads)]
        return [(at, self.items[name], count) for at, name, count in found if name is not None]

    def near(self, first: Waiting) -> Iterator[Waiting]:
        """It and some that follow in its order, `NEAR` at most."""
        return map(self.items.__getitem__, self._heads[2 * first.tier + first.is_late].top(NEAR))

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
        for tier, buckets in enumerate(self._buckets):
            for key in [key for key in buckets if (key[2] + 1) * key[1] <= now_s]:
                del buckets[key]
            for (is_spread, width_s, at), (count, tokens, prompts) in buckets.items():
                due_s = (at + 0.5) * width_s
                if is_spread:
                    for part in range(1, SLICES + 1):
                        slice_s = now_s + (due_s - now_s) * part / SLICES
                        found[tier].append(Due(slice_s, count / SLICES, tokens / SLICES, prompts / SLICES))
                else:
                    found[tier].append(Due(due_s, count, tokens, prompts))
            found[tier].sort()
        return found

    def came(self, slo_s: float, tokens: float, now_s: float) -> None:
        """A request has come, whether it waits or not."""
        asked = self.asked.get(slo_s)
        if asked is None:
            for old in [
                old for old, one in self.asked.items() if now_s - one.last_s > 10 * max(RECENT_S, old)
            ]:
                del self.asked[old]
            asked = self.asked[slo_s] = Asked()
        asked.came(tokens, now_s)

    def shortest_s(self, now_s: float) -> float:
        """The shortest time that was promised of late, or to the first that wait; inf: none."""
        lately = [
            slo_s for slo_s, one in self.asked.items() if now_s - one.last_s < 10 * max(RECENT_S, slo_s)
        ]
        return min([*lately, *(first.slo_s for _, first, _ in self.orders())], default=inf)

    def answered(self, took_s: float) -> None:
        """An answer is complete that was so long at a replica."""
        self.mean_s += 0.1 * (took_s - self.mean_s) if self.mean_s else took_s
        self.slowest_s = max(0.995 * self.slowest_s, took_s)

    def _count(self, one: Waiting, sign: int) -> None:
        count, tokens, prompt_tokens = one.work
        self.tokens = max(0.0, self.tokens + sign * tokens)
        sort = one.slo_class, one.tier, one.is_late
        self.counts[sort] += sign
        if not self.counts[sort]:
            del self.counts[sort]
        buckets, key = self._buckets[one.tier], one.bucket
        bucket = self.hopeless if one.is_late else buckets.get(key)
        if bucket is None:
            if sign < 0:
                return
            bucket = buckets[key] = [0.0, 0.0, 0.0]
        if one.is_late and one.tier:
            return
        bucket[0] += sign * count
        bucket[1] += sign * tokens
        bucket[2] += sign * prompt_tokens
        if bucket[0] < 0.5 and not one.is_late:
            del buckets[key]
