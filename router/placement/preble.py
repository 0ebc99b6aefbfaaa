"""Preble's E2: exploit a cached prefix when it is the greater part of the prompt, otherwise explore by cost.

Preble (Srivatsa et al., 2024), §3, with the constants and the windowing of its public code. For each request:

* *Exploit* if the longest match is longer than what is not matched: among the workers that hold it, the
  cheapest.
* *Explore* otherwise: the worker with the least L + M + P, in seconds of work.
  L, load: over a window of 3 minutes, for each important prefix that the worker is used for, miss rate x
  requests x time to prefill it, shared among the workers it is used at; plus the decoding under way,
  requests x output tokens x median time per output token. M, eviction: what must be dropped to make room,
  as the time to prefill it again, weighted by miss rate and requests. P: the prefill of this request itself
  with what this worker holds of it.
* *Rebalance*, after 50 requests per worker: when the heaviest carries more than 1.5 times the lightest,
  prefixes asked for more than once move from one to the other, the cheapest first, as long as that does not
  turn the imbalance around. A prefix that is alone in this cannot move usefully: it is replicated
  ("autoscaled") when the heavy worker's time to first token has doubled from the first to the second half
  of the window.

An *important* prefix of a prompt is the deepest stretch between two branches of the tree that is longer
than all above it (Preble's "large node"). Only these carry load.

What it knows about caches is the router's shared tree, which follows the replicas' own events; Preble's own
tree believes what it once routed. So all placements are compared on the same knowledge, there is one tree
to bound, and what this file keeps is a window of at most `max_window` requests and the prefixes in it,
found by a digest.

Unit of fairness: none. Trade-off: locality and load are weighed in seconds, whoever asks.

Where the public code goes wrong, and what is done here: the cheapest holder is returned by its name, not by
its position among the holders; a prompt that is wholly cached exploits, since the true match length
decides; nothing scans all nodes: loads are running sums, eviction and rebalancing look at `probe` prefixes
at most; the window is a deque; costs are brought up to date after every single move, and another pair of
workers has its turn with the next request instead of a recursion on old costs; moving a prefix takes it
from the heavy worker only, and leaves longer prefixes that are important themselves where they are;
everything has a bound; room in a cache is counted instead of "memory is always full", and prefixes outside
the window are dropped first and cost nothing.

Known to differ besides: the output length of a request is its limit (45 tokens if it names none), as in the
code, not the average of past ones, as in the paper; a conversation that grows turn by turn is another
prefix each time.
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
from router.placement.contract import Ended, Request, WorkerView
from router.radix import Match

_SAMPLES = 200
"""Times per output token that are kept per worker, as in Preble's code."""

_TTFT_SAMPLES = 512

_FACTORS = np.random.default_rng(1).integers(0, 2**64, size=1 << 16, dtype=np.uint64)
_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class PrefillCost:
    """Time to prefill: linear in the new tokens, plus attention of the new ones over the whole context.

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


Key = tuple[str, int, int]
"""Of a prefix: namespace, length, digest."""


@dataclass(eq=False, slots=True)
class _Prefix:
    """An important prefix that was asked for in the window: `new_tokens` long below its own context."""

    key: Key
    new_tokens: int
    end_tokens: int
    requests: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    workers: dict[str, None] = field(default_factory=dict)
    """Where it is used, in the order in which it came there."""
    moved: bool = False
    """`workers` was decided by rebalancing, and overrides what the caches say."""
    cost_s: float = 0.0


@dataclass(slots=True)
class _WorkerLoad:
    """What the window and the requests in flight say about one worker."""

    prefill_s: float = 0.0
    prefix_tokens: int = 0
    decode_tokens: int = 0
    prefixes: OrderedDict[Key, _Prefix] = field(default_factory=OrderedDict)
    """Least recently used first."""
    oldest: "_Oldest | None" = None
    """The first of them; None when they have changed."""
    tpot_s: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    typical_tpot_s: float = 0.0
    ttft: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_TTFT_SAMPLES))
    """(when, seconds)."""

    load_s: float = 0.0
    """L: prefill in the window plus decoding under way. Kept, because every decision reads that of every worker."""

    def add(self, prefill_s: float = 0.0, decode_tokens: int = 0) -> None:
        """So much more is in the window, and under way; both are negative for what is over."""
        self.prefill_s += prefill_s
        self.decode_tokens += decode_tokens
        self.load_s = self.prefill_s + self.decode_tokens * self.typical_tpot_s

    def changes(self, key: Key) -> None:
        """The prefix of this key comes or goes, is used, or costs another amount."""
        oldest = self.oldest
        if oldest is not None and (key in oldest.keys or not oldest.full):
            self.oldest = None


class _Oldest(NamedTuple):
    """The least recently used prefixes at a worker, as many as are looked at."""

    tokens: list[int]
    """Running sums of them, and of costs."""
    costs_s: list[float]
    keys: frozenset[Key]
    full: bool
    """There are more, so what comes last changes nothing."""


@dataclass(slots=True)
class _Visit:
    """One request of the window."""

    at_s: float
    prefix: _Prefix
    hit_tokens: int
    prompt_tokens: int


@dataclass
class Preble:
    """`cache_tokens` is what one replica can cache; `first_tpot_s` stands in until a worker is measured."""

    uses_caches: ClassVar[bool] = True
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

    _prefixes: dict[Key, _Prefix] = field(default_factory=dict, init=False, repr=False)
    _window: deque[_Visit] = field(default_factory=deque, init=False, repr=False)
    _loads: dict[str, _WorkerLoad] = field(default_factory=dict, init=False, repr=False)
    _routed: int = field(default=0, init=False, repr=False)
    _latest: tuple[Request, Match, tuple[Key, int, int]] | None = field(default=None, init=False, repr=False)
    """What `_important` said last: `placed` asks what `place` has asked."""

    def __post_init__(self) -> None:
        if isinstance(self.prefill, dict):
            self.prefill = PrefillCost(**self.prefill)
        positive = {
            "window_s": self.window_s,
            "default_output_tokens": self.default_output_tokens,
            "first_tpot_s": self.first_tpot_s,
            "cache_tokens": self.cache_tokens,
            "probe": self.probe,
            "max_window": self.max_window,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name} is {value}: it must be positive")
        if not (self.imbalance >= 1 and self.ttft_growth >= 1):
            raise ValueError("imbalance and ttft_growth are ratios of at least 1")

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        """The cheapest holder, or the cheapest worker."""
        self._expire(now_s)
        if match.tokens > request.input_tokens - match.tokens:
            prefix = self._prefixes.get(self._important(request, match)[0])
            chosen: Iterable[str] = prefix.workers if prefix is not None and prefix.moved else match.holders
            holders = [worker for worker in workers if worker.name in chosen]
            if holders:
                return self._cheapest(request, match, holders)
        return self._cheapest(request, match, workers)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """Enters the request in the window and rebalances."""
        load = self._loads[worker]
        load.add(decode_tokens=self._output_tokens(request))
        if not request.input_tokens:
            return
        key, start, end = self._important(request, match)
        prefix = self._prefixes.setdefault(key, _Prefix(key, end - start, end))
        self._routed += 1
        self._visit(_Visit(now_s, prefix, match.of(worker), request.input_tokens), worker)
        while len(self._window) > self.max_window:
            self._leave(self._window.popleft())
        if self._routed >= self.warmup_requests * len(self._loads):
            self._rebalance(now_s)

    def done(self, ended: Ended, now_s: float) -> None:
        """Takes the request's decoding off, and learns from its times."""
        load = self._loads[ended.worker]
        if ended.tpot_s is not None and ended.outcome == "ok":
            load.tpot_s.append(ended.tpot_s)
            load.typical_tpot_s = statistics.median(load.tpot_s)
        load.add(decode_tokens=-self._output_tokens(ended.request))
        if ended.ttft_s is not None and ended.outcome == "ok":
            load.ttft.append((now_s, ended.ttft_s))

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        """Starts without load."""
        self._loads[worker] = _WorkerLoad(typical_tpot_s=self.first_tpot_s)

    def worker_changed(self, worker: str, capacity: float) -> None:
        """Changes nothing: what a worker needs per token is measured."""

    def worker_down(self, worker: str) -> None:
        """Prefixes that were used there only are assigned anew when they are next asked for."""
        for prefix in list(self._loads[worker].prefixes.values()):
            self._set_workers(prefix, [other for other in prefix.workers if other != worker])
            prefix.moved = prefix.moved and bool(prefix.workers)
        del self._loads[worker]

    def credits(self, limit: int) -> dict[str, dict[str, float]]:
        """None are kept."""
        return {}

    def _important(self, request: Request, match: Match) -> tuple[Key, int, int]:
        """The key of the request's important prefix, and the depths between which its own stretch lies."""
        if self._latest is None or self._latest[0] is not request or self._latest[1] is not match:
            start, stretch = 0, (0, 0)
            for end in (*match.branches, match.tokens, request.input_tokens):
                if end - start > start:
                    stretch = start, end
                start = end
            start, end = stretch
            self._latest = (
                request,
                match,
                ((request.namespace, end, _digest(request.tokens, end)), start, end),
            )
        return self._latest[2]

    # -- costs

    def _output_tokens(self, request: Request) -> int:
        return request.max_output_tokens or self.default_output_tokens

    def _eviction_s(self, load: _WorkerLoad, new_tokens: int) -> float:
        """M: what is lost when the worker drops its least recently used prefixes for `new_tokens` more."""
        missing = load.prefix_tokens + new_tokens - self.cache_tokens
        if missing <= 0:
            return 0.0
        if load.oldest is None:
            oldest = list(islice(load.prefixes.values(), self.probe))
            load.oldest = _Oldest(
                list(accumulate(prefix.new_tokens for prefix in oldest)),
                list(accumulate(prefix.cost_s for prefix in oldest)),
                frozenset(prefix.key for prefix in oldest),
                full=len(oldest) == self.probe,
            )
        tokens, lost_s, _, _ = load.oldest
        if not tokens:
            return 0.0
        return lost_s[-1] if missing > tokens[-1] else lost_s[bisect_left(tokens, missing)]

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

    # -- the window

    def _visit(self, visit: _Visit, worker: str) -> None:
        prefix = visit.prefix
        self._window.append(visit)
        prefix.requests += 1
        prefix.hit_tokens += visit.hit_tokens
        prefix.prompt_tokens += visit.prompt_tokens
        self._set_workers(prefix, [*prefix.workers, worker])
        self._loads[worker].prefixes.move_to_end(prefix.key)

    def _leave(self, visit: _Visit) -> None:
        prefix = visit.prefix
        prefix.requests -= 1
        prefix.hit_tokens -= visit.hit_tokens
        prefix.prompt_tokens -= visit.prompt_tokens
        if prefix.requests:
            self._set_workers(prefix, prefix.workers)
        else:
            self._set_workers(prefix, ())
            del self._prefixes[prefix.key]

    def _expire(self, now_s: float) -> None:
        while self._window and self._window[0].at_s <= now_s - self.window_s:
            self._leave(self._window.popleft())

    def _set_workers(self, prefix: _Prefix, workers: Iterable[str]) -> None:
        """Assigns the prefix to `workers` and brings its cost, and the loads it is part of, up to date."""
        for worker in prefix.workers:
            load = self._loads[worker]
            load.add(-prefix.cost_s / len(prefix.workers))
            load.prefix_tokens -= prefix.new_tokens
            load.changes(prefix.key)
        kept = dict.fromkeys(workers)
        for worker in prefix.workers:
            if worker not in kept:
                left = self._loads[worker]
                del left.prefixes[prefix.key]
                if not left.prefixes:
                    left.add(-left.prefill_s)  # what rounding has left over
        prefix.workers = kept
        miss = 1 - prefix.hit_tokens / prefix.prompt_tokens if prefix.prompt_tokens else 0.0
        prefix.cost_s = miss * prefix.requests * self.prefill.of(prefix.new_tokens, prefix.end_tokens)
        for worker in kept:
            load = self._loads[worker]
            load.add(prefix.cost_s / len(kept))
            load.prefix_tokens += prefix.new_tokens
            load.prefixes.setdefault(prefix.key, prefix)
            load.changes(prefix.key)

    # -- rebalancing

    def _rebalance(self, now_s: float) -> None:
        if len(self._loads) < 2:
            return
        heavy, light = self._extremes()
        if not self._loads[heavy].load_s > self.imbalance * self._loads[light].load_s:
            return
        latest = zip(range(self.probe), reversed(self._loads[heavy].prefixes.values()), strict=False)
        candidates = [prefix for _, prefix in latest if prefix.requests > 1]
        if len(candidates) == 1:
            (prefix,) = candidates
            if light not in prefix.workers and self._is_slowing(heavy, now_s):
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

    def _assign(self, prefix: _Prefix, workers: Iterable[str]) -> None:
        self._set_workers(prefix, workers)
        prefix.moved = True

    def _extremes(self) -> tuple[str, str]:
        by_load = [(load.load_s, worker) for worker, load in self._loads.items()]
        return max(by_load)[1], min(by_load)[1]

    def _is_slowing(self, worker: str, now_s: float) -> bool:
        """The mean time to first token in the window's second half is `ttft_growth` times the first's."""
        middle_s = now_s - self.window_s / 2
        samples = self._loads[worker].ttft
        early = [ttft_s for at_s, ttft_s in samples if now_s - self.window_s < at_s <= middle_s]
        late = [ttft_s for at_s, ttft_s in samples if at_s > middle_s]
        return bool(early and late) and statistics.fmean(late) >= self.ttft_growth * statistics.fmean(early)


def _digest(tokens: bytes, count: int) -> int:
    """64 bits for the first `count` tokens: a sum of pairs of tokens, each times a factor of its place."""
    pairs = np.frombuffer(tokens, "<u8", count // 2)
    total = 0
    for start in range(0, len(pairs), len(_FACTORS)):
        piece = pairs[start : start + len(_FACTORS)]
        total = (total * _ODD + int(np.dot(piece, _FACTORS[: len(piece)]))) % 2**64
    last = tokens[(count - count % 2) * TOKEN_BYTES : count * TOKEN_BYTES]
    return (total * _ODD + int.from_bytes(last, "little")) % 2**64
