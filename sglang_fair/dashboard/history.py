"""What happened over time, in buckets of equal length.

What was gained between two looks is spread evenly over the time between them, so nothing is lost or counted twice
where a replica did not answer for a while; a bucket in which nobody answered says so (`looks` 0). A bucket names the
clients that got most in it, `MOST_NAMED` of them.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nlargest

MOST_NAMED = 100


@dataclass(slots=True)
class Bucket:
    """Begins at `number` times the step."""

    number: int
    looks: int = 0
    observed_s: float = 0.0
    """The part of it that lies between two looks."""
    service: dict[str, float] = field(default_factory=dict)
    others: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    of_bound: dict[str, float] = field(default_factory=dict)
    """By replica: the largest difference between two clients' service, divided by the bound."""
    waiting: int = 0
    """Most requests that waited at one look."""

    def add(self, service: Mapping[str, float], others: float, part: float) -> None:
        """Adds this part of some service, and drops names that are too many."""
        for name, units in service.items():
            if units:
                self.service[name] = self.service.get(name, 0.0) + units * part
        self.others += others * part
        if len(self.service) > MOST_NAMED:
            kept = nlargest(MOST_NAMED, self.service, key=lambda name: (self.service[name], name))
            named = {name: self.service[name] for name in kept}
            self.others += sum(self.service.values()) - sum(named.values())
            self.service = named


class History:
    """The last `length` buckets of `step_s` seconds. Times never go back."""

    def __init__(self, step_s: float, length: int) -> None:
        self.step_s = step_s
        self.length = length
        self._buckets: deque[Bucket] = deque(maxlen=length)

    def look(self, since_s: float, now_s: float, of_bound: Mapping[str, float], waiting: int) -> None:
        """Somebody answered at `now_s`, and before that at `since_s`."""
        newest = self._at(now_s)
        newest.looks += 1
        newest.waiting = max(newest.waiting, waiting)
        for name, part in of_bound.items():
            newest.of_bound[name] = max(part, newest.of_bound.get(name, 0.0))
        for bucket, part in self._parts(since_s, now_s):
            bucket.observed_s += (now_s - since_s) * part

    def gained(
        self,
        since_s: float,
        now_s: float,
        service: Mapping[str, float],
        others: float,
        prompt_tokens: float,
        cached_tokens: float,
    ) -> None:
        """A replica gave this between two looks at it."""
        self._at(now_s)
        for bucket, part in self._parts(since_s, now_s):
            bucket.add(service, others, part)
            bucket.prompt_tokens += prompt_tokens * part
            bucket.cached_tokens += cached_tokens * part

    def buckets(self) -> list[Bucket]:
        """The oldest first, without gaps."""
        return list(self._buckets)

    def _at(self, now_s: float) -> Bucket:
        """The bucket of `now_s`, after empty ones for the time since the last."""
        number = int(now_s // self.step_s)
        if not self._buckets:
            self._buckets.append(Bucket(number))
        for missing in range(max(self._buckets[-1].number + 1, number - self.length + 1), number + 1):
            self._buckets.append(Bucket(missing))
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
