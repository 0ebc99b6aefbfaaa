"""Preble's E2: exploit a cached prefix if it is the greater part of the prompt, otherwise explore by cost.

Preble (Srivatsa et al., 2024), §3, with the constants and the window of its public code. For each request:

* *Exploit* if the longest match is longer than the rest of the prompt: among the workers that hold it, the cheapest.
* *Explore* otherwise: the worker with the least L + M + P, in seconds of work.
  L, load: over a window of 3 minutes, for each important prefix that the worker is used for, miss rate x requests x
  time to prefill it, shared among the workers that it is used at; plus the decoding under way, requests x output
  tokens x median time per output token. M, eviction: what must be dropped to make room, as the time to prefill it
  again, weighted by miss rate and requests. P: the prefill of this request, given what this worker holds of it.
* *Rebalance*, after 50 requests per worker: if the heaviest carries more than 1.5 times the lightest, prefixes that
  were asked for more than once move from one to the other, the cheapest first, as long as that does not turn the
  imbalance around. If there is only one such prefix, moving it is of no use: it is replicated ("autoscaled") once
  the heavy worker's time to first token has doubled from the first to the second half of the window.

The *important* prefix of a prompt is the deepest stretch between two branches of the tree that is longer than all
above it (Preble's "large node"). Only important prefixes carry load; `prefix_window` keeps them.

Cached prefixes come from the router's shared tree, which follows the replicas' own events; Preble's own tree believes
what it once routed. So all placements are compared on the same knowledge, and there is one tree to bound. Kept here
is a window of at most `max_window` requests and the prefixes in it, found by a digest.

Unit of fairness: none. Trade-off: locality and load are weighed in seconds, whoever asks.

Errors of the public code, and what is done here instead. The cheapest holder is returned by its name, not by its
position among the holders. A prompt that is wholly cached exploits, because the true match length decides. Nothing
scans all nodes: loads are running sums, and eviction and rebalancing look at `probe` prefixes at most. Costs are
brought up to date after every single move; another pair of workers has its turn with the next request, in place of a
recursion on old costs. Moving a prefix takes it from the heavy worker only, and leaves longer prefixes that are
important themselves where they are. Everything has a bound. Room in a cache is counted, where the code takes memory
to be always full; prefixes outside the window are dropped first and cost nothing.

Other differences: the output length of a request is its limit (45 tokens if it names none), as in the code, and not
the average of past ones, as in the paper. A conversation that grows turn by turn is another prefix each time.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from router.placement.contract import Ended, Placement, Request, WorkerView
from router.placement.prefix_window import Key, PrefillCost, Prefix, PrefixWindow, WorkerLoad, key_of
from router.radix import Match


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
    _latest: tuple[Request, Match, tuple[Key, int, int]] | None = field(default=None, init=False, repr=False)
    """The last answer of `_important`: `placed` needs the same as `place` before it."""

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

        self._window = PrefixWindow(self.prefill, self.window_s, self.max_window)
        self._loads = self._window.loads

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        """The cheapest holder, or the cheapest worker."""
        self._window.expire(now_s)
        if match.tokens > request.input_tokens - match.tokens:
            prefix = self._window.prefixes.get(self._important(request, match)[0])
            chosen: Iterable[str] = prefix.workers if prefix is not None and prefix.moved else match.holders
            holders = [worker for worker in workers if worker.name in chosen]
            if holders:
                return self._cheapest(request, match, holders)
        return self._cheapest(request, match, workers)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """Enters the request in the window, and rebalances."""
        self._loads[worker].add(decode_tokens=self._output_tokens(request))
        if not request.input_tokens:
            return
        key, start, end = self._important(request, match)
        self._routed += 1
        self._window.visit(
            key,
            start,
            end,
            worker,
            hit_tokens=match.of(worker),
            prompt_tokens=request.input_tokens,
            now_s=now_s,
        )
        if self._routed >= self.warmup_requests * len(self._loads):
            self._rebalance(now_s)

    def done(self, ended: Ended, now_s: float) -> None:
        """Takes the request's decoding off the load, and learns from its times."""
        load = self._loads[ended.worker]
        if ended.tpot_s is not None and ended.outcome == "ok":
            load.measure_tpot(ended.tpot_s)
        load.add(decode_tokens=-self._output_tokens(ended.request))
        if ended.ttft_s is not None and ended.outcome == "ok":
            load.measure_ttft(now_s, ended.ttft_s)

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        """It starts without load."""
        self._window.add_worker(worker, self.first_tpot_s)

    def worker_down(self, worker: str) -> None:
        """Prefixes that were used there alone get a new worker when they are next asked for."""
        self._window.remove_worker(worker)

    def _important(self, request: Request, match: Match) -> tuple[Key, int, int]:
        """The key of the request's important prefix, and the depths between which its own stretch lies."""
        if self._latest is None or self._latest[0] is not request or self._latest[1] is not match:
            start, stretch = 0, (0, 0)
            for end in (*match.branches, match.tokens, request.input_tokens):
                if end - start > start:
                    stretch = start, end
                start = end
            start, end = stretch
            self._latest = request, match, (key_of(request.namespace, request.tokens, end), start, end)
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
        heavy, light = self._extremes()
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

    def _extremes(self) -> tuple[str, str]:
        by_load = [(load.load_s, worker) for worker, load in self._loads.items()]
        return max(by_load)[1], min(by_load)[1]
