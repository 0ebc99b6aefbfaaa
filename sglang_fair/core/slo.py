"""SLO: DLPM, and among the clients with credit the request that is due first goes first (QLM, beyond the paper).

    1  clients with a positive deficit counter, as in DLPM; none else, however urgent
    2  among them those whose next request is of tier 0, within its client's share of the cluster, before tier 1
    3  then by slack, the time that is left until the first token is due, in steps of `STEP_S`; those that are promised
       nothing come last
    4  then calls of interactions that have begun, then the longest cached prefix, then the order of arrival

A round pays clients with a positive counter as well, up to a full quantum. Within one client the order is the same from
3 on, and `patience` holds. Tier and slack come from the gateway (`common.deadlines`, `common.caller`). Running requests
may be taken back for one of tier 0 that would miss its deadline otherwise (`core.preemption`).

Bound: DLPM's, 2·(U + Q^u): the theorem holds for any order among clients with a positive counter. With n clients that
are served meanwhile and an engine that serves a units a second, a request waits at most n·(b + 2·(U + Q^u)) / a, b what
its client receives until it is admitted, whatever the others claim. Proof and premises: docs/policies.md, `slo`.
Unit of fairness: service units; with `normalised` average calls, charged as under `wsc-dlpm`, and the quantum is then 2
of these. Knobs, trade-offs and leaks: as DLPM and docs/policies.md.
"""

from dataclasses import dataclass
from math import floor, inf, nan
from typing import Any, ClassVar

from sglang_fair.core.clients import ClientQueues
from sglang_fair.core.dlpm import Deficit, Dlpm
from sglang_fair.core.job import Job
from sglang_fair.core.policy import DEFAULT_QUANTUM
from sglang_fair.core.wsc import WscDlpm, is_started

STEP_S = 0.5
"""Two requests that are due in the same step are equally urgent."""

MOST_EVICTIONS = 3
"""How often one request may be taken back for others, unless `evictions` says otherwise."""

LARGEST_EVICTIONS = 16

_STARTED = 1 << 28
"""Of a call whose interaction has begun; no prefix has so many tokens."""

_USUAL = nan
"""The quantum, if none is given."""


def due_step(job: Job) -> float:
    """The step of time in which its first token is due; inf if nothing was promised. Smaller is more urgent: the slack
    of two requests that wait differs by what their steps differ by."""
    return inf if job.deadline_s is None else floor(job.deadline_s / STEP_S)


def urgent_first(job: Job) -> Any:
    """Least slack, then `wsc.started_then_longest_prefix`, in one number less: each waiting request keeps its own."""
    return due_step(job), -job.prefix_tokens - _STARTED * is_started(job), job.arrival


@dataclass
class Slo(WscDlpm):
    """DLPM with the least slack first among clients with credit.

    `normalised`: charges over what is normal for the application, as `wsc-dlpm`. `evictions`: how often one request may
    be taken back for more urgent ones, at most `LARGEST_EVICTIONS`; 0: nobody is. ValueError for another number of
    these, and as `WscDlpm`.
    """

    name: ClassVar[str] = "slo"
    keeps_bound_with_transfers: ClassVar[bool] = True
    newcomers_first: ClassVar[bool] = False
    scales = False
    quantum: float = _USUAL
    normalised: bool = False
    evictions: int = MOST_EVICTIONS

    def __post_init__(self) -> None:
        if self.quantum is _USUAL:
            self.quantum = WscDlpm.quantum if self.normalised else DEFAULT_QUANTUM
        if not 0 <= self.evictions <= LARGEST_EVICTIONS:
            raise ValueError(f"evictions must be from 0 to {LARGEST_EVICTIONS}, not {self.evictions!r}")
        super().__post_init__()
        self.scales = self.normalised
        if not self.normalised:
            self.price, self.system_surcharge = None, 0.0
        self._queues = ClientQueues(urgent_first, self.patience, turns=False)

    def ended(self, job: Job) -> None:
        if self.normalised:
            super().ended(job)

    def _units(self, account: Deficit) -> float:
        """q after the rounds since it was settled: +Q^u in each, up to Q^u."""
        rounds = self._round - account.settled
        return min(self.quantum, account.units + self.quantum * rounds) if rounds else account.units

    def _order(self, head: Job) -> Any:
        return (head.tier, *urgent_first(head))

    def _prices(self, job: Job, cached_tokens: int) -> tuple[float, float]:
        return (
            super()._prices(job, cached_tokens) if self.normalised else Dlpm._prices(self, job, cached_tokens)
        )
