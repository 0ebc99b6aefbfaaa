"""DLPM whose quantum follows a target: a largest gap between clients, or a hit rate.

Rule: as DLPM. At each refill, before any client gets a quantum, Q^u is set anew within `min_quantum` and `max_quantum`:

    target_gap         the largest quantum with 2·(U + Q^u) / smallest weight <= target_gap, where U is the
                       dearest prompt and the dearest owed output of late (`largest`)
    target_hit_rate    the smallest quantum that reaches it; if none does, the one beyond which a larger one does not
                       help. The quantum is raised by a quarter while the share of cached tokens in admitted prompts
                       is below the target and rises by `GAIN` for each doubling; else it is lowered by a fifth. One
                       step per `horizon_tokens` of prompts, over which the share is averaged exponentially

Below the target the quantum moves in one direction until there is a reason to turn. Up: until it has doubled, or is at
its limit, and the hit rate has not risen by `GAIN`. Down: until the hit rate differs by `GAIN` from where the descent
began, or the quantum is no larger than the charge of an average request, below which a turn is one request anyway. So
a climb in vain ends at 2.5 times the quantum at which it began, at most, and is taken back.

A change is exact: all accounts are settled with the old quantum up to the present round, and the new one counts from
there. Credit above the new quantum is kept until it is spent.

Unit of fairness: service units. Bound: let C(t) be the larger of the quantum and of the largest credit of any client at
t. Two clients that both wait during [s, t] differ by at most 2·U + C(s) + C(t), because a counter lies in (-U, C] and
clients that wait are granted the same in each round, whatever the quantum is. `bound` returns 2·(U + C) with the
largest C since the start, `recent_bound` with the largest since the oldest of those who wait began to, or a little
before: what is read holds for every interval that ends with the reading, with whatever quantum it began. So after the
quantum has fallen the bound follows when all who waited then have stopped waiting once.

Knobs: one target (default: a hit rate of 0.5), the limits, `horizon_tokens`, and DLPM's; `quantum` is the first value.
Trade-offs: it reacts, so the first dear request and the first hot hour meet the old quantum. A target that any quantum
reaches drives it to `min_quantum`. If nothing is shared it keeps trying, between one and two and a half requests.
Otherwise it swings by a step around its target, and by a doubling around the best hit rate there is. It does not find a
gain that only more than a doubling would show. If `horizon_tokens` are only a few prompts, it climbs and descends by
chance. A gap below 2·(U + `min_quantum`) cannot be kept, and `bound` says so. Known leaks: as DLPM; and a client that
sends hot prompts without need raises the measured hit rate and so lowers everybody's quantum.
"""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import ClassVar

from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.job import Job
from sglang_fair.core.policy import checked_quantum

STEP = 1.25
"""A quantum that misses the target hit rate is multiplied or divided by this."""

GAIN = 0.02
"""A smaller change of the hit rate counts as none."""

DOUBLED = 2.0
"""A climb by this factor must have raised the hit rate by `GAIN`."""

HIT_RATE = 0.5
"""The target if none is given."""


@dataclass
class DlpmAdaptive(Dlpm):
    """DLPM with a changing `quantum`. ValueError for two targets, and for impossible limits and targets."""

    name: ClassVar[str] = "dlpm-adaptive"
    target_gap: float | None = None
    target_hit_rate: float | None = None
    min_quantum: float = 200.0
    max_quantum: float = 20_000.0
    horizon_tokens: int = 50_000

    _largest_debt: float | None = field(default=None, init=False, repr=False)
    """U plus what a predictor may have charged ahead. None: nothing was admitted yet."""
    _prompt_tokens: float = field(default=0.0, init=False, repr=False)
    _cached_tokens: float = field(default=0.0, init=False, repr=False)
    """Tokens of admitted prompts, averaged exponentially over `horizon_tokens`."""
    _admitted: float = field(default=0.0, init=False, repr=False)
    _charged: float = field(default=0.0, init=False, repr=False)
    """Requests and service units, averaged in the same way."""
    _tokens_since_step: int = field(default=0, init=False, repr=False)
    _climbs: bool = field(default=False, init=False, repr=False)
    """Below the target: the next step is up."""
    _began: tuple[float, float] | None = field(default=None, init=False, repr=False)
    """Below the target: quantum and hit rate where the present direction began, or last gained. Else None."""
    _above: list[tuple[float, str]] = field(default_factory=list, init=False, repr=False)
    """Heap of (-refund, client) of clients that had credit above the quantum when it was changed."""
    _most_credit: float = field(default=0.0, init=False, repr=False)
    """The largest C since the start."""
    _recent_credits: tuple[float, float] = field(default=(0.0, 0.0), init=False, repr=False)
    """The largest C between the last two calls of `all_waited_anew`, and since."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_gap is None and self.target_hit_rate is None:
            self.target_hit_rate = HIT_RATE
        if self.target_gap is not None and self.target_hit_rate is not None:
            raise ValueError("the quantum follows one target: give target_gap or target_hit_rate, not both")
        if self.target_gap is not None and not 0 < self.target_gap < inf:
            raise ValueError(
                f"target_gap must be a positive number of service units, not {self.target_gap!r}"
            )
        if self.target_hit_rate is not None and not 0 <= self.target_hit_rate <= 1:
            raise ValueError(f"target_hit_rate must be between 0 and 1, not {self.target_hit_rate!r}")
        if checked_quantum(self.min_quantum) > checked_quantum(self.max_quantum):
            raise ValueError(f"min_quantum {self.min_quantum!r} is above max_quantum {self.max_quantum!r}")
        if self.horizon_tokens < 1:
            raise ValueError(f"horizon_tokens must be at least 1, not {self.horizon_tokens!r}")
        self.quantum = self._within_limits(self.quantum)
        self._note_credit()

    def admitted(self, job: Job, input_units: float, output_units: float) -> None:
        super().admitted(job, input_units, output_units)
        charged_ahead = 0 if self.predictor is None else output_units
        self._largest_debt = input_units + output_units + charged_ahead
        kept = self.horizon_tokens / (self.horizon_tokens + job.prompt_tokens)
        self._prompt_tokens = kept * self._prompt_tokens + job.prompt_tokens
        self._cached_tokens = kept * self._cached_tokens + min(job.cached_tokens, job.prompt_tokens)
        self._admitted = kept * self._admitted + 1
        self._charged *= kept
        self._tokens_since_step += job.prompt_tokens

    def charge(self, client: str, units: float) -> None:
        self._charged += units
        super().charge(client, units)

    def hit_rate(self) -> float | None:
        """The averaged share of cached tokens. None: no prompt was admitted yet."""
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else None

    def _before_refill(self) -> None:
        quantum = self._wanted()
        if quantum != self.quantum:
            self._change_quantum(quantum)

    def _wanted(self) -> float:
        if self.target_gap is not None:
            half = self.target_gap * self.weights.smallest() / 2
            if self._largest_debt is None:
                return self._within_limits(min(self.quantum, half))
            left = half - self._largest_debt
            return self._within_limits(left / 2 if self.borrow else left)
        rate, target = self.hit_rate(), self.target_hit_rate
        if rate is None or target is None or self._tokens_since_step < self.horizon_tokens:
            return self.quantum
        self._tokens_since_step = 0
        if rate >= target:
            self._began, self._climbs = None, True
            return self._within_limits(self.quantum / STEP)
        self._turn(rate)
        return self._within_limits(self.quantum * STEP if self._climbs else self.quantum / STEP)

    def _turn(self, rate: float) -> None:
        """Below the target: decide in which direction the next step goes."""
        paid = turns = False
        if self._began is not None:
            quantum, before = self._began
            if self._climbs:
                paid = rate >= before + GAIN
                turns = not paid and self.quantum >= min(DOUBLED * quantum, self.max_quantum)
            else:
                one_request = self._charged / self._admitted if self._admitted else 0.0
                turns = abs(rate - before) >= GAIN or self.quantum <= self._within_limits(one_request)
        if self._began is None or paid or turns:
            self._began = self.quantum, rate
        self._climbs ^= turns

    def _within_limits(self, quantum: float) -> float:
        return min(max(quantum, self.min_quantum), self.max_quantum)

    def recent_bound(self, input_units: float, output_units: float) -> float | None:
        """2·(U + C) / min weight, with the largest C that an interval which ends now may have begun with."""
        return self._by_recent_weights(
            self._bound(input_units, output_units, max(*self._recent_credits, self._credit()))
        )

    def all_waited_anew(self) -> None:
        self._recent_credits = self._recent_credits[1], self._credit()

    def _change_quantum(self, quantum: float) -> None:
        super()._change_quantum(quantum)
        self._above = [
            (-account.refund, client) for client, account in self._deficits.items() if account.refund > 0
        ]
        heapify(self._above)
        self._note_credit()

    def _note_credit(self) -> None:
        """Until the next change C does not grow."""
        credit, (before, since) = self._credit(), self._recent_credits
        self._most_credit = max(self._most_credit, credit)
        self._recent_credits = before, max(since, credit)

    def _largest_credit(self) -> float:
        return max(self._most_credit, self._credit())

    def _credit(self) -> float:
        """C: the larger of the quantum and of the largest credit that is left from a larger one."""
        while self._above:
            above, client = self._above[0]
            account = self._deficits.get(client)
            left = 0.0 if account is None else account.refund
            if left == -above:
                return self.quantum + left
            if left > 0:
                heapreplace(self._above, (-left, client))
            else:
                heappop(self._above)
        return self.quantum
