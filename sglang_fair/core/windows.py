"""A sliding minute: how many requests of each key count now, and when the next one may come.

A request at t counts in every 60 s that contain t, so none of these has more than the limit; the window opens again
60 s after the oldest that counts. Memory is O(requests that count).
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from itertools import islice
from math import inf
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

MINUTE_S = 60.0


class Sliding(Generic[Key]):
    """The last 60 seconds: a request at t counts until t + 60 s, exclusively. Beyond `most` keys, those without a
    request for longest are forgotten."""

    def __init__(self, most: float = inf) -> None:
        self._most = most
        self._now_s = 0.0
        self._times_s: OrderedDict[Key, list[float]] = OrderedDict()
        """In order of each key's last request, so that those without one in the last minute come first."""
        self._due_s = inf
        """No key is to be forgotten before."""

    def tick(self, now_s: float) -> None:
        """It is `now_s`; times never go back."""
        self._now_s = now_s
        while self._due_s <= now_s:
            self._due_s = next(iter(self._times_s.values()))[-1] + MINUTE_S if self._times_s else inf
            if self._due_s <= now_s:
                self._times_s.popitem(last=False)

    def count(self, *keys: Key) -> None:
        """Count one request of each of `keys`, now."""
        now_s = self._now_s
        for key in keys:
            times_s = self._times_s.get(key)
            if times_s is None:
                self._times_s[key] = [now_s]
                self._due_s = min(self._due_s, now_s + MINUTE_S)
                if len(self._times_s) > self._most:
                    self._times_s.popitem(last=False)
            else:
                times_s.append(now_s)
                self._prune(times_s)
                self._times_s.move_to_end(key)

    def opens_s(self, key: Key, limit: int) -> float:
        """When `key` may have its next request, with `limit` a minute; a time that is past means now."""
        times_s = self._times_s.get(key)
        if times_s is None or len(times_s) < limit:
            return -inf
        self._prune(times_s)
        return times_s[-limit] + MINUTE_S if len(times_s) >= limit else -inf

    def count_of(self, key: Key) -> int:
        """How many requests of `key` count now."""
        times_s = self._times_s.get(key)
        if times_s is None:
            return 0
        self._prune(times_s)
        return len(times_s)

    def counts(self) -> Mapping[Key, int]:
        """How many requests count now, for each key that has any."""
        return self.latest_counts(len(self._times_s))

    def latest_counts(self, most: int) -> Mapping[Key, int]:
        """The same, of the `most` keys with the latest requests."""
        return {key: self.count_of(key) for key in islice(reversed(self._times_s), most)}

    def _prune(self, times_s: list[float]) -> None:
        if times_s and times_s[0] + MINUTE_S <= self._now_s:
            left = (at for at, time_s in enumerate(times_s) if time_s + MINUTE_S > self._now_s)
            del times_s[: next(left, len(times_s))]
