"""Eviction of running requests: which ones an engine takes back so that another one meets its deadline.

The engine keeps what it has computed of them (`overlay.preempt`), so they go on where they stopped, and wait again as
others of their client do, with no precedence.

    for which  the request that is next by the policy, if it is of tier 0, is promised a first token by some time, does
               not fit, and would miss it if it waited for those that run to end. One that is late already gains
               nothing by it. One that has written has had its first token, and needs no room
    which      requests of tier 1, and those of other clients that owe, so that a flood that is alone in its share (tier
               0) makes room for others too. Then such of tier 0 that are due `LATER_S` or more after it: batch work
               makes room for chats, and chats do not take one another back
    never      one that was taken back `most` times, one whose prompt is not computed, the server's own
    how many   the least that suffices: none of them can be spared. If all together do not suffice, none
    in order   tier 1 and those that owe first, then largest slack, then the latest arrival

A request that is taken back has written, so nothing is taken back for it: there are no circles, and no request is taken
back more than `most` times.

When those that run end is not known: each is taken to make the output that it announced, and what it may at most once
that is over. How long a decode step and a prompt token take is measured (`step`); before that, none is taken back.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from sglang_fair.core.job import Job
from sglang_fair.core.listener import Listener
from sglang_fair.core.slo import STEP_S, due_step

LATER_S = 120.0
"""In a trial, evicting only for what is due so much earlier halved evictions and brought 2 points more in time."""
RECENT = 0.1
"""Weight of the latest step among the measured ones."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A running request, and the tokens of memory that there would be more without it: its own, and those that are kept
    for its output."""

    job: Job
    tokens: float
    can_go: bool = True
    """The engine can take it back now."""


@dataclass(frozen=True, slots=True)
class Missing:
    """What a request needs to run beyond what is free."""

    tokens: float = 0.0
    places: int = 0
    """Among those that may run at once."""


@dataclass
class Preemption(Listener):
    """Chooses. `most`: how often one request may be taken back. `owes`: whether a client has used up its quantum."""

    most: int
    owes: Callable[[str], bool] = lambda client: False
    evictions: int = field(default=0, init=False)
    """How many were taken back."""
    _times: dict[Job, int] = field(default_factory=dict, init=False, repr=False)
    """How often each request that is here was taken back; those that were."""
    _step_s: float = field(default=0.0, init=False, repr=False)
    """Of a decode step."""
    _token_s: float = field(default=0.0, init=False, repr=False)
    """Of a prompt token, with its part of the step."""

    def step(
        self, duration_s: float, extended: Mapping[str, int], *, decoded: int = 0, requests: int = 0
    ) -> None:
        if duration_s <= 0:
            return
        if extended_tokens := sum(extended.values()):
            self._token_s = _recent(self._token_s, duration_s / extended_tokens)
        elif decoded:
            self._step_s = _recent(self._step_s, duration_s / decoded)

    def may_take_back(self, job: Job) -> bool:
        """Whether anybody could be taken back for the waiting `job` at all."""
        return job.tier == 0 and job.deadline_s is not None and not job.system and not job.output_tokens

    def choose(self, job: Job, missing: Missing, running: Sequence[Runner], now_s: float) -> list[Job]:
        """What to take back for the waiting `job`, in this order; nothing if it need not be, or if it would not help.
        `running` are all that run. O(running log running)."""
        if not self.may_take_back(job) or not self._would_miss(job, missing, running, now_s):
            return []
        may_go = (one for one in running if one.can_go and self._may_go(one.job, job))
        in_order = sorted(may_go, key=lambda one: self._order(one.job, job))
        return [runner.job for runner in _least(in_order, missing)]

    def evict(self, job: Job, urgent: Job) -> None:
        self.evictions += 1
        self._times[job] = self.times(job) + 1

    def leave(self, job: Job) -> None:
        self._times.pop(job, None)

    def finish(self, job: Job, outcome: str) -> None:
        self._times.pop(job, None)

    def times(self, job: Job) -> int:
        """How often `job` was taken back."""
        return self._times.get(job, 0)

    def wait_s(self, missing: Missing, running: Iterable[Runner]) -> float:
        """Until those that run have left what is missing; inf if all of them together have not got it."""
        tokens, places = missing.tokens, missing.places
        if tokens <= 0 and places <= 0:
            return 0.0
        for left, runner in sorted(((_left(one.job), one) for one in running), key=lambda pair: pair[0]):
            tokens, places = tokens - runner.tokens, places - 1
            if tokens <= 0 and places <= 0:
                return left * self._step_s
        return inf

    def _would_miss(self, job: Job, missing: Missing, running: Sequence[Runner], now_s: float) -> bool:
        assert job.deadline_s is not None
        wait_s = self.wait_s(missing, running) if self._step_s else 0.0
        return wait_s > 0 and now_s <= job.deadline_s < now_s + wait_s + self._prompt_s(job)

    def _may_go(self, job: Job, urgent: Job) -> bool:
        if job.system or self.times(job) >= self.most or job.reached_tokens < job.prompt_tokens:
            return False
        return self._yields(job, urgent) or due_step(job) * STEP_S >= due_step(urgent) * STEP_S + LATER_S

    def _yields(self, job: Job, urgent: Job) -> bool:
        """Whatever it was promised."""
        return job.tier > urgent.tier or (job.client != urgent.client and self.owes(job.client))

    def _order(self, job: Job, urgent: Job) -> tuple[bool, float, int]:
        return not self._yields(job, urgent), -due_step(job), -job.arrival

    def _prompt_s(self, job: Job) -> float:
        return self._token_s * max(0, job.prompt_tokens - job.prefix_tokens)


def _recent(before: float, latest: float) -> float:
    return before + RECENT * (latest - before) if before else latest


def _left(job: Job) -> int:
    """Output tokens until it ends."""
    announced = job.expected_output_tokens
    if announced is None or announced <= job.output_tokens:
        announced = job.max_output_tokens
    return max(1, min(announced, job.max_output_tokens) - job.output_tokens)


def _least(in_order: Iterable[Runner], missing: Missing) -> list[Runner]:
    """The first that have what is missing, without those that are not needed for it; none if all have not."""
    taken: list[Runner] = []
    tokens, places = missing.tokens, missing.places
    for runner in in_order:
        if tokens <= 0 and places <= 0:
            break
        taken.append(runner)
        tokens, places = tokens - runner.tokens, places - 1
    if tokens > 0 or places > 0:
        return []
    for runner in taken[::-1]:
        if tokens + runner.tokens <= 0 and places + 1 <= 0:
            taken.remove(runner)
            tokens, places = tokens + runner.tokens, places + 1
    return taken
