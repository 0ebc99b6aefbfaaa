"""Preble's E2: exploit a cached prefix if it is the greater part of the prompt, otherwise explore by cost.

Preble (Srivatsa et al., 2024), §3, with the constants and the window of its public code. For each request:

* *Exploit* if the longest match is longer than the rest of the prompt: among the workers that hold it, the cheapest.
* *Explore* otherwise: the worker with the least L + M + P, in seconds of work. L, load: over a window of 3 minutes, for
  each important prefix that the worker is used for, miss rate x requests x time to prefill it, shared among the workers
  that it is used at; plus the decoding under way. M, eviction: the time to prefill again what must be dropped to make
  room, weighted by miss rate and requests. P: the prefill of this request, given what this worker holds of it.
* *Rebalance*, after 50 requests per worker: if the heaviest carries more than 1.5 times the lightest, prefixes that
  were asked for more than once move to the lightest, the cheapest first, as long as that does not turn the imbalance
  around. One that is alone is replicated once the heavy worker's time to first token has doubled within the window.

The *important* prefix of a prompt is the deepest stretch between two branches of the tree that is longer than all
above it. Only important prefixes carry load. Every sum is kept up to date, so no decision looks at all prefixes. Where
this differs from the public code is in docs/policies.md.
"""

import math
import statistics
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import ClassVar, NamedTuple

import numpy as np

from router.events import TOKEN_BYTES
from router.placement.contract import Ended, Placement, Request, WorkerView
from router.radix import Match

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


@dataclass(eq=False, slots=True)
class Prefix:
    """A prefix that was asked for in the window. `new_tokens` are its own, the rest belongs to the prefix above it."""

    key: Key
    new_tokens: int
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
    ttft: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_TTFT_SAMPLES))
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

    def has_slowed(self, now_s: float, window_s: float, growth: float) -> bool:
        """Whether the mean time to first token in the window's second half is `growth` times that of its first."""
        middle_s = now_s - window_s / 2
        early = [ttft_s for at_s, ttft_s in self.ttft if now_s - window_s < at_s <= middle_s]
        late = [ttft_s for at_s, ttft_s in self.ttft if at_s > middle_s]
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


class PrefixWindow:
    """The requests of the last `window_s` seconds, at most `max_requests`, and what they mean for each worker."""

    def __init__(self, prefill: PrefillCost, window_s: float, max_requests: int) -> None:
        self.prefixes: dict[Key, Prefix] = {}
        self.loads: dict[str, WorkerLoad] = {}
        self._prefill = prefill
        self._window_s = window_s
        self._max_requests = max_requests
        self._visits: deque[tuple[float, Prefix, int, int]] = deque()
        """When each request came, its prefix, and how many tokens were cached and asked for."""

    def __len__(self) -> int:
        return len(self._visits)

    def visit(
        self, key: Key, start: int, worker: str, hit_tokens: int, prompt_tokens: int, now_s: float
    ) -> None:
        """A request was sent to `worker` whose important prefix is `key`, of which its own stretch begins at depth
        `start`."""
        prefix = self.prefixes.setdefault(key, Prefix(key, key.tokens - start))
        self._visits.append((now_s, prefix, hit_tokens, prompt_tokens))
        prefix.requests += 1
        prefix.hit_tokens += hit_tokens
        prefix.prompt_tokens += prompt_tokens
        self.set_workers(prefix, [*prefix.workers, worker])
        self.loads[worker].prefixes.move_to_end(key)
        while len(self._visits) > self._max_requests:
            self._leave(*self._visits.popleft())

    def expire(self, now_s: float) -> None:
        """Drops the requests that are older than the window."""
        while self._visits and self._visits[0][0] <= now_s - self._window_s:
            self._leave(*self._visits.popleft())

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
        prefix.cost_s = miss * prefix.requests * self._prefill.of(prefix.new_tokens, prefix.key.tokens)
        for worker in kept:
            load = self.loads[worker]
            load.add(prefix.cost_s / len(kept))
            load.prefix_tokens += prefix.new_tokens
            load.prefixes.setdefault(prefix.key, prefix)
            load.changes(prefix.key)

    def _leave(self, _: float, prefix: Prefix, hit_tokens: int, prompt_tokens: int) -> None:
        prefix.requests -= 1
        prefix.hit_tokens -= hit_tokens
        prefix.prompt_tokens -= prompt_tokens
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


@dataclass
class Preble(Placement):
    """`cache_tokens` is what one replica can cache; `first_tpot_s` stands in until a worker is measured."""

    uses_progress: ClassVar[bool] = False

    window_s: float = 180.0
    imbalance: float = 1.5
    warmup_requests: int = 50
    default_output_tokens: int = 45
    first_tpot_s: float = 0.15
    cache_tokens: int = 198_516
    ttft_growth: float = 2.0
    probe: int = 32
    max_window: int = 50_000
    prefill: PrefillCost = field(default_factory=PrefillCost)

    _window: PrefixWindow = field(init=False, repr=False)
    _loads: dict[str, WorkerLoad] = field(init=False, repr=False)
    """Of the window."""
    _routed: int = field(default=0, init=False, repr=False)
    _latest: tuple[Request, Match, tuple[Key, int]] | None = field(default=None, init=False, repr=False)
    """The last answer of `_important`: `placed` needs the same as `place` before it."""

    def __post_init__(self) -> None:
        if isinstance(self.prefill, dict):
            self.prefill = PrefillCost(**self.prefill)
        for name in (
            "window_s", "default_output_tokens", "first_tpot_s", "cache_tokens", "probe", "max_window"
        ):  # fmt: skip
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name} is {value}: it must be positive")
        if not (self.imbalance >= 1 and self.ttft_growth >= 1):
            raise ValueError("imbalance and ttft_growth are ratios of at least 1")

        self._window = PrefixWindow(self.prefill, self.window_s, self.max_window)
        self._loads = self._window.loads

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        self._window.expire(now_s)
        if match.tokens > request.input_tokens - match.tokens:
            prefix = self._window.prefixes.get(self._important(request, match)[0])
            chosen: Iterable[str] = prefix.workers if prefix is not None and prefix.moved else match.holders
            holders = [worker for worker in workers if worker.name in chosen]
            if holders:
                return self._cheapest(request, match, holders)
        return self._cheapest(request, match, workers)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        self._loads[worker].add(decode_tokens=self._output_tokens(request))
        if not request.input_tokens:
            return
        key, start = self._important(request, match)
        self._routed += 1
        self._window.visit(key, start, worker, match.of(worker), request.input_tokens, now_s)
        if self._routed >= self.warmup_requests * len(self._loads):
            self._rebalance(now_s)

    def done(self, ended: Ended, now_s: float) -> None:
        load = self._loads[ended.worker]
        if ended.tpot_s is not None and ended.outcome == "ok":
            load.measure_tpot(ended.tpot_s)
        load.add(decode_tokens=-self._output_tokens(ended.request))
        if ended.ttft_s is not None and ended.outcome == "ok":
            load.ttft.append((now_s, ended.ttft_s))

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        self._window.add_worker(worker, self.first_tpot_s)

    def worker_down(self, worker: str) -> None:
        self._window.remove_worker(worker)

    def _important(self, request: Request, match: Match) -> tuple[Key, int]:
        """The key of the request's important prefix, and the depth at which its own stretch begins."""
        if self._latest is None or self._latest[0] is not request or self._latest[1] is not match:
            start, stretch = 0, (0, 0)
            for end in (*match.branches, match.tokens, request.input_tokens):
                if end - start > start:
                    stretch = start, end
                start = end
            start, end = stretch
            self._latest = request, match, (Key(request.namespace, end, _digest(request.tokens, end)), start)
        return self._latest[2]

    # -- costs

    def _output_tokens(self, request: Request) -> int:
        return request.max_output_tokens or self.default_output_tokens

    def _eviction_s(self, load: WorkerLoad, new_tokens: int) -> float:
        """M: the time to prefill again what the worker drops to make room for `new_tokens`."""
        missing = load.prefix_tokens + new_tokens - self.cache_tokens
        return load.lost_s(missing, self.probe) if missing > 0 else 0.0

    def _cheapest(self, request: Request, match: Match, workers: Sequence[WorkerView]) -> str:
        """The worker of least L + M + P; among equals, who was sent fewer tokens so far; then by name."""
        tokens, held, loads = request.input_tokens, match.lengths.get, self._loads
        room, own_s = self.cache_tokens - tokens, dict[int, float]()
        best: tuple[float, int, str] = (math.inf, 0, "")
        best_s = math.inf
        for worker in workers:
            name = worker.name
            load, held_tokens = loads[name], held(name, 0)
            if held_tokens not in own_s:
                own_s[held_tokens] = self.prefill.of(tokens - held_tokens, tokens)
            cost_s = load.load_s + own_s[held_tokens]
            if cost_s > best_s:
                continue  # whatever must be evicted
            if load.prefix_tokens - held_tokens > room:
                cost_s += self._eviction_s(load, tokens - held_tokens)
                if cost_s > best_s:
                    continue
            best = min(best, (cost_s, worker.dispatched_tokens, name))
            best_s = best[0]
        return best[2]

    # -- rebalancing

    def _rebalance(self, now_s: float) -> None:
        if len(self._loads) < 2:
            return
        by_load = [(load.load_s, worker) for worker, load in self._loads.items()]
        heavy, light = max(by_load)[1], min(by_load)[1]
        if not self._loads[heavy].load_s > self.imbalance * self._loads[light].load_s:
            return
        latest = zip(range(self.probe), reversed(self._loads[heavy].prefixes.values()), strict=False)
        candidates = [prefix for _, prefix in latest if prefix.requests > 1]
        if len(candidates) == 1:
            (prefix,) = candidates
            if light not in prefix.workers and self._loads[heavy].has_slowed(
                now_s, self.window_s, self.ttft_growth
            ):
                self._assign(prefix, [*prefix.workers, light])
            return
        candidates.sort(key=lambda prefix: (prefix.cost_s / len(prefix.workers), prefix.key))
        for prefix in candidates:
            if light in prefix.workers:
                continue
            heavy_s, light_s = self._loads[heavy].load_s, self._loads[light].load_s
            share_s = prefix.cost_s / len(prefix.workers)
            if not heavy_s > self.imbalance * light_s or heavy_s - share_s < light_s + share_s:
                return
            self._assign(prefix, [light if worker == heavy else worker for worker in prefix.workers])

    def _assign(self, prefix: Prefix, workers: Iterable[str]) -> None:
        self._window.set_workers(prefix, workers)
        prefix.moved = True
