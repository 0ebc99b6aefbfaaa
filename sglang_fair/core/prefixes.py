"""The cached prefixes of waiting requests: which to look up before a pass, and which are being computed right now.

A look-up costs the engine about 10 µs, so 10,000 waiting requests cannot all be looked up before each batch.

    a new request           is looked up once, in order of arrival
    tokens were inserted    only a request whose first uncached tokens (`Job.block`) were just computed has a longer
                            prefix now; those are found by that block
    tokens were evicted     a prefix only gets shorter. The engine looks up each candidate anyway, so a request that
                            was overestimated is noticed when its turn comes
    anything else           a few more in each pass, in turn, until all were seen since the last change

A request whose next tokens are being computed for another one is worth passing over: one step later they are a cache
hit. It does not wait for a second computation if the first did not lengthen what the cache has: then the cache does not
keep it.

Every operation is O(1), amortised, however many wait; memory is O(waiting requests).
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice

from sglang_fair.core.job import Job
from sglang_fair.core.listener import Listener


@dataclass(slots=True, eq=False)
class Computation:
    """A step of the engine that computes `job`'s prompt from some block on."""

    job: Job


class Prefixes(Listener):
    """At most `most` look-ups per pass, of which `in_turn` are kept for requests that nothing points to. `waits`:
    requests wait for what is being computed (`Policy.waits_for_prefixes`)."""

    def __init__(self, *, waits: bool = False, most: int = 64, in_turn: int = 4) -> None:
        self._waits, self._most, self._in_turn = waits, most, in_turn
        self._new: OrderedDict[Job, None] = OrderedDict()
        self._known: OrderedDict[Job, Hashable] = OrderedDict()
        """Those that were looked up, each with the block by which it is found; None: by none."""
        self._by_block: dict[Hashable, Job | dict[Job, None]] = {}
        """Of those: one, or several."""
        self._grown: deque[Job] = deque()
        """Whose block was computed."""
        self._unseen = 0
        self._computing: dict[Hashable, Computation] = {}

    # ---- look-ups

    def changed(self) -> None:
        """The cache changed in some way."""
        self._unseen = len(self._known)

    def due(self) -> list[Job]:
        """The requests to look up in this pass. The caller calls `looked_up` for each."""
        most = self._most - self._in_turn
        chosen = dict.fromkeys(islice(self._new, most))
        while self._grown and len(chosen) < most:
            job = self._grown.pop()
            if self._known.get(job, "") is None:  # it waits, and was not looked up since
                chosen[job] = None
        in_turn = min(self._in_turn, self._unseen)
        for job in islice(self._known, in_turn):
            chosen[job] = None
        self._unseen -= in_turn
        return list(chosen)

    def looked_up(self, job: Job) -> None:
        """`job` was looked up: its prefix and its block are up to date."""
        block = job.block
        if job in self._known:
            self._known.move_to_end(job)
            if self._by_block.get(block) is job:
                return
            self._drop_block(job)
        else:
            self._new.pop(job, None)
        self._known[job] = block
        if block is not None:
            others = self._by_block.setdefault(block, job)
            if isinstance(others, dict):
                others[job] = None
            elif others is not job:
                self._by_block[block] = {others: None, job: None}

    def inserted(self, block: Hashable) -> None:
        """The cache holds the tokens of `block` now."""
        found = self._by_block.pop(block, ())
        for job in (found,) if isinstance(found, Job) else found:
            self._known[job] = None
            self._grown.append(job)

    def _forget(self, job: Job) -> None:
        self._new.pop(job, None)
        if job in self._known:
            self._drop_block(job)
            del self._known[job]

    def _drop_block(self, job: Job) -> None:
        block = self._known[job]
        if block is None:
            return
        others = self._by_block[block]
        if isinstance(others, dict):
            del others[job]
        if others is job or not others:
            del self._by_block[block]

    # ---- what is being computed

    def is_being_computed(self, job: Job) -> bool:
        """Whether to wait for another request's prefill that starts with the tokens which `job` needs next."""
        if job.block is None or not self._waits:
            return False
        computation = self._computing.get(job.block)
        if computation is None or computation.job is job:
            return False
        return computation is job.waited_for or job.prefix_tokens > job.waited_at_tokens

    def defer(self, job: Job) -> None:
        """`job` waits for what is being computed."""
        if job.block is not None and (computation := self._computing.get(job.block)) is not job.waited_for:
            job.waited_for, job.waited_at_tokens = computation, job.prefix_tokens

    def will_wait(self, job: Job, block: Hashable | None) -> bool:
        """Whether `job` will wait once the engine computes `block`."""
        return self._waits and block is not None and job.block == block

    def computes(self, job: Job) -> None:
        """The engine computes `job.block`, maybe for two requests; the first one counts."""
        if job.block is not None:
            self._computing.setdefault(job.block, Computation(job))

    def _stop_computing(self, job: Job) -> None:
        computation = self._computing.get(job.block)
        if computation is not None and computation.job is job:
            del self._computing[job.block]

    # ---- what happens to requests

    def arrive(self, job: Job) -> None:
        self._new[job] = None

    def leave(self, job: Job) -> None:
        self._forget(job)

    def admit(self, job: Job) -> None:
        self._forget(job)
        self.computes(job)

    def cached(self, job: Job) -> None:
        if job.block is not None:
            self.inserted(job.block)
            self._stop_computing(job)

    def retract(self, job: Job) -> None:
        self._stop_computing(job)
        self.arrive(job)

    def evict(self, job: Job, urgent: Job) -> None:
        self.retract(job)

    def finish(self, job: Job, outcome: str) -> None:
        self._stop_computing(job)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._new) + len(self._known)
