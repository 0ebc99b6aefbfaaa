"""What was given over time, in buckets of equal length. Pure.

What was gained between two looks is spread evenly over the time between them, so nothing is lost or counted twice
where a replica did not answer for a while; a bucket in which no replica answered says so (`looks` 0). The newest
`whole` buckets name all clients, older ones the `MOST_NAMED` that got most: the rest is `OTHERS`.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_fair.dashboard.reading import OTHERS

MOST_NAMED = 100

Amounts: TypeAlias = NDArray[np.float64]
"""Of one client: tokens computed, cached and made, units of service, requests admitted, and seconds times requests that
waited."""
EXTEND, CACHED, OUTPUT, SERVICE, ADMITTED, WAITED_S = range(6)
TOKENS = slice(EXTEND, SERVICE)


def amounts() -> Amounts:
    return np.zeros(WAITED_S + 1)


def add(sums: dict[str, Amounts], more: Mapping[str, Amounts], part: float = 1.0) -> None:
    """Adds this part of it, by name."""
    for name, units in more.items():
        if name in sums:
            sums[name] += units * part
        elif units.any():
            sums[name] = units * part


@dataclass(slots=True)
class Bucket:
    """Begins at `number` times the step."""

    number: int
    looks: int = 0
    observed_s: float = 0.0
    """The part of it that lies between two looks."""
    clients: dict[str, Amounts] = field(default_factory=dict)
    """With `OTHERS`: clients without a name."""
    replicas: dict[str, Amounts] = field(default_factory=dict)
    of_bound: dict[str, float] = field(default_factory=dict)
    """By replica: the largest difference between two clients' service, divided by the bound."""

    def fold(self) -> None:
        if len(self.clients) > MOST_NAMED:
            others = self.clients.pop(OTHERS, amounts())
            kept = nlargest(MOST_NAMED, self.clients.items(), key=lambda item: (item[1][SERVICE], item[0]))
            named = dict(kept)
            rest = [units for name, units in self.clients.items() if name not in named]
            self.clients = named | {OTHERS: np.sum([others, *rest], axis=0)}


class History:
    """The last `length` buckets of `step_s` seconds. Times never go back."""

    def __init__(self, step_s: float, length: int, whole: int = 0) -> None:
        self.step_s = step_s
        self._length, self._whole = length, whole
        self._buckets: deque[Bucket] = deque(maxlen=length)

    def look(self, since_s: float, now_s: float, of_bound: Mapping[str, float]) -> None:
        """A replica answered at `now_s`, and before that at `since_s`."""
        newest = self._at(now_s)
        newest.looks += 1
        for name, part in of_bound.items():
            newest.of_bound[name] = max(part, newest.of_bound.get(name, 0.0))
        for bucket, part in self._parts(since_s, now_s):
            bucket.observed_s += (now_s - since_s) * part

    def gained(self, since_s: float, now_s: float, replica: str, clients: Mapping[str, Amounts]) -> None:
        """A replica gave this between two looks at it."""
        self._at(now_s)
        total = {replica: np.sum([*clients.values()], axis=0)} if clients else {}
        for bucket, part in self._parts(since_s, now_s):
            add(bucket.clients, clients, part)
            add(bucket.replicas, total, part)
            if bucket.number <= self._buckets[-1].number - self._whole:
                bucket.fold()

    def buckets(self) -> list[Bucket]:
        """The oldest first, without gaps."""
        return list(self._buckets)

    def _at(self, now_s: float) -> Bucket:
        """The bucket of `now_s`, after empty ones for the time since the last."""
        number = int(now_s // self.step_s)
        if not self._buckets:
            self._buckets.append(Bucket(number))
        for missing in range(max(self._buckets[-1].number + 1, number - self._length + 1), number + 1):
            self._buckets.append(Bucket(missing))
            if self._whole and len(self._buckets) > self._whole:
                self._buckets[-1 - self._whole].fold()
        return self._buckets[-1]

    def _parts(self, since_s: float, now_s: float) -> Iterator[tuple[Bucket, float]]:
        """The buckets of this time with the part of it that lies in each. What is older than all is the oldest's."""
        if now_s <= since_s:
            yield self._buckets[-1], 1.0
            return
        until_s = now_s
        for bucket in reversed(self._buckets):
            start_s = bucket.number * self.step_s
            is_oldest = bucket is self._buckets[0]
            begin_s = since_s if is_oldest else min(max(since_s, start_s), until_s)
            if until_s > begin_s:
                yield bucket, (until_s - begin_s) / (now_s - since_s)
            until_s = begin_s
            if until_s <= since_s:
                return


class Sums:
    """Some buckets together."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self.clients: dict[str, Amounts] = {}
        self.replicas: dict[str, Amounts] = {}
        self.observed_s = 0.0
        for bucket in buckets:
            self.observed_s += bucket.observed_s
            add(self.clients, bucket.clients)
            add(self.replicas, bucket.replicas)

    def of(self, client: str) -> Amounts:
        return self.clients.get(client, amounts())

    def rate(self, amount: float) -> float:
        return float(amount) / self.observed_s if self.observed_s else 0.0
