"""What Preble knows of its workers: the prefixes asked for in a sliding window, and the load that they stand for.

The window holds the latest requests. Each has one important prefix, which is used at one or more workers. Its cost is
the time that a worker spends to prefill it: miss rate x requests in the window x time to prefill it once. The cost is
shared among the workers that it is used at. Every sum is kept up to date, so no decision looks at all prefixes.
"""

import statistics
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np

from router.events import TOKEN_BYTES

_TPOT_SAMPLES = 200
"""Times per output token kept per worker, as in Preble's code."""

_TTFT_SAMPLES = 512

_FACTORS = np.random.default_rng(1).integers(0, 2**64, size=1 << 16, dtype=np.uint64)
_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class PrefillCost:
    """Time to prefill: linear in the new tokens, plus attention of the new tokens over the whole context.

    The default is the fit for Llama-3-70B on H100 that Preble's code carries (`model_equations.py`).
    """

    base_s: float = 28.9314e-3
    per_token_s: float = 0.182233e-3
    per_context_token_s: float = 4.00365e-6
    per_pair_s: float = 2.55050e-9

    def of(self, new_tokens: int, context_tokens: int) -> float:
        """Seconds to prefill `new_tokens` at the end of a prompt of `context_tokens`."""
        if new_tokens <= 0:
            return 0.0
        attention = self.per_context_token_s + self.per_pair_s * new_tokens
        return self.base_s + self.per_token_s * new_tokens + attention * context_tokens


class Key(NamedTuple):
    """Identifies a prefix, by a digest of its tokens."""

    namespace: str
    tokens: int
    digest: int


def key_of(namespace: str, tokens: bytes, count: int) -> Key:
    """The key of the first `count` tokens."""
    return Key(namespace, count, _digest(tokens, count))


@dataclass(eq=False, slots=True)
class Prefix:
    """A prefix that was asked for in the window.

    It ends at depth `end_tokens`; `new_tokens` of them are its own, the rest belongs to the prefix above it.
    """

    key: Key
    new_tokens: int
    end_tokens: int
    requests: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    workers: dict[str, None] = field(default_factory=dict)
    """Where it is used, in the order in which it came there."""
    moved: bool = False
    """Rebalancing has chosen `workers`; that overrides what the caches say."""
    cost_s: float = 0.0


class _Oldest(NamedTuple):
    """The least recently used prefixes at a worker, as many as a look at them takes in."""

    tokens: list[int]
    """Running sums of their tokens, and of their costs."""
    costs_s: list[float]
    keys: frozenset[Key]
    full: bool
    """There are more prefixes, so a new one at the end changes nothing."""


@dataclass(slots=True)
class WorkerLoad:
    """What the window and the requests in flight say about one worker."""

    prefill_s: float = 0.0
    prefix_tokens: int = 0
    decode_tokens: int = 0
    prefixes: OrderedDict[Key, Prefix] = field(default_factory=OrderedDict)
    """The least recently used first."""
    typical_tpot_s: float = 0.0
    load_s: float = 0.0
    """L: prefill in the window plus decoding under way. Stored, because every decision reads it of every worker."""
    _tpot_s: deque[float] = field(default_factory=lambda: deque(maxlen=_TPOT_SAMPLES))
    _ttft: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_TTFT_SAMPLES))
    """(when, seconds)."""
    _oldest: _Oldest | None = None
    """None when it must be computed anew."""

    def add(self, prefill_s: float = 0.0, decode_tokens: int = 0) -> None:
        """Adds prefill of the window and decoding under way; negative for what is over."""
        self.prefill_s += prefill_s
        self.decode_tokens += decode_tokens
        self.load_s = self.prefill_s + self.decode_tokens * self.typical_tpot_s

    def measure_tpot(self, tpot_s: float) -> None:
        """An answer took `tpot_s` per output token. Counts in `load_s` from the next `add` on."""
        self._tpot_s.append(tpot_s)
        self.typical_tpot_s = statistics.median(self._tpot_s)

    def measure_ttft(self, now_s: float, ttft_s: float) -> None:
        """A first token came after `ttft_s`."""
        self._ttft.append((now_s, ttft_s))

    def has_slowed(self, now_s: float, window_s: float, growth: float) -> bool:
        """Whether the mean time to first token in the window's second half is `growth` times that of its first."""
        middle_s = now_s - window_s / 2
        early = [ttft_s for at_s, ttft_s in self._ttft if now_s - window_s < at_s <= middle_s]
        late = [ttft_s for at_s, ttft_s in self._ttft if at_s > middle_s]
        return bool(early and late) and statistics.fmean(late) >= growth * statistics.fmean(early)

    def changes(self, key: Key) -> None:
        """The prefix of this key comes or goes, is used, or has another cost."""
        oldest = self._oldest
        if oldest is not None and (key in oldest.keys or not oldest.full):
            self._oldest = None

    def lost_s(self, tokens: int, probe: int) -> float:
        """What the worker loses by dropping its least recently used prefixes, at most `probe`, to free `tokens`."""
        if self._oldest is None:
            oldest = list(islice(self.prefixes.values(), probe))
            self._oldest = _Oldest(
                list(accumulate(prefix.new_tokens for prefix in oldest)),
                list(accumulate(prefix.cost_s for prefix in oldest)),
                frozenset(prefix.key for prefix in oldest),
                full=len(oldest) == probe,
            )
        freed, lost_s, _, _ = self._oldest
        if not freed:
            return 0.0
        return lost_s[-1] if tokens > freed[-1] else lost_s[bisect_left(freed, tokens)]


@dataclass(slots=True)
class _Visit:
    """One request of the window."""

    at_s: float
    prefix: Prefix
    hit_tokens: int
    prompt_tokens: int


class PrefixWindow:
    """The requests of the last `window_s` seconds, at most `max_requests`, and what they mean for each worker."""

    def __init__(self, prefill: PrefillCost, window_s: float, max_requests: int) -> None:
        self.prefixes: dict[Key, Prefix] = {}
        self.loads: dict[str, WorkerLoad] = {}
        self._prefill = prefill
        self._window_s = window_s
        self._max_requests = max_requests
        self._visits: deque[_Visit] = deque()

    def __len__(self) -> int:
        return len(self._visits)

    def visit(
        self,
        key: Key,
        start: int,
        end: int,
        worker: str,
        *,
        hit_tokens: int,
        prompt_tokens: int,
        now_s: float,
    ) -> None:
        """A request was sent to `worker` whose important prefix is `key`, from depth `start` to `end`."""
        prefix = self.prefixes.setdefault(key, Prefix(key, end - start, end))
        self._visits.append(_Visit(now_s, prefix, hit_tokens, prompt_tokens))
        prefix.requests += 1
        prefix.hit_tokens += hit_tokens
        prefix.prompt_tokens += prompt_tokens
        self.set_workers(prefix, [*prefix.workers, worker])
        self.loads[worker].prefixes.move_to_end(key)
        while len(self._visits) > self._max_requests:
            self._leave(self._visits.popleft())

    def expire(self, now_s: float) -> None:
        """Drops the requests that are older than the window."""
        while self._visits and self._visits[0].at_s <= now_s - self._window_s:
            self._leave(self._visits.popleft())

    def add_worker(self, worker: str, first_tpot_s: float) -> None:
        """A worker without load; `first_tpot_s` stands in until it is measured."""
        self.loads[worker] = WorkerLoad(typical_tpot_s=first_tpot_s)

    def remove_worker(self, worker: str) -> None:
        """Prefixes that were used at `worker` alone get a new worker when they are next asked for."""
        for prefix in list(self.loads[worker].prefixes.values()):
            self.set_workers(prefix, [other for other in prefix.workers if other != worker])
            prefix.moved = prefix.moved and bool(prefix.workers)
        del self.loads[worker]

    def set_workers(self, prefix: Prefix, workers: Iterable[str]) -> None:
        """Assigns the prefix to `workers`, and brings its cost and the loads that it is part of up to date."""
        for worker in prefix.workers:
            load = self.loads[worker]
            load.add(-prefix.cost_s / len(prefix.workers))
            load.prefix_tokens -= prefix.new_tokens
            load.changes(prefix.key)
        kept = dict.fromkeys(workers)
        for worker in prefix.workers:
            if worker not in kept:
                left = self.loads[worker]
                del left.prefixes[prefix.key]
                if not left.prefixes:
                    left.add(-left.prefill_s)  # drop what rounding has left over
        prefix.workers = kept
        miss = 1 - prefix.hit_tokens / prefix.prompt_tokens if prefix.prompt_tokens else 0.0
        prefix.cost_s = miss * prefix.requests * self._prefill.of(prefix.new_tokens, prefix.end_tokens)
        for worker in kept:
            load = self.loads[worker]
            load.add(prefix.cost_s / len(kept))
            load.prefix_tokens += prefix.new_tokens
            load.prefixes.setdefault(prefix.key, prefix)
            load.changes(prefix.key)

    def _leave(self, visit: _Visit) -> None:
        prefix = visit.prefix
        prefix.requests -= 1
        prefix.hit_tokens -= visit.hit_tokens
        prefix.prompt_tokens -= visit.prompt_tokens
        if prefix.requests:
            self.set_workers(prefix, prefix.workers)
        else:
            self.set_workers(prefix, ())
            del self.prefixes[prefix.key]


def _digest(tokens: bytes, count: int) -> int:
    """64 bits for the first `count` tokens: a sum of pairs of tokens, each times a factor of its place."""
    pairs = np.frombuffer(tokens, "<u8", count // 2)
    total = 0
    for start in range(0, len(pairs), len(_FACTORS)):
        piece = pairs[start : start + len(_FACTORS)]
        total = (total * _ODD + int(np.dot(piece, _FACTORS[: len(piece)]))) % 2**64
    last = tokens[(count - count % 2) * TOKEN_BYTES : count * TOKEN_BYTES]
    return (total * _ODD + int.from_bytes(last, "little")) % 2**64
