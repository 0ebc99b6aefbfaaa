"""When clients were backlogged in a run, and how far their services differed meanwhile.

A client is *backlogged* while it has a waiting request at every replica at every instant, which is what DLPM's proofs
for a cluster assume. A client that runs dry for a moment loses what it is owed, and its difference to others is no
longer bounded; so a doubtful moment ends an interval here.

Service is what the replicas have charged by their samples. A client is backlogged from one round of samples to the next
if every replica reports a waiting request of the client in both, and its queue was not empty in between: `backlog` is
a number that changes each time the client begins to wait. Without samples nothing is known.

The bound is the replicas' own, summed over them: 2·|workers|·(U + Q^u) for DLPM (Theorem 5.1).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sglang_fair.core.fairness import Curve, Interval, service_difference, service_lag
from workloads.records import Run, Sample


@dataclass(frozen=True, slots=True)
class Backlog:
    """Service difference and lag while clients were backlogged."""

    difference: float | None = None
    lag: float | None = None
    together_s: float | None = None
    bound: float | None = None

    @classmethod
    def of(cls, run: Run, names: Sequence[str]) -> "Backlog":
        if not run.samples:
            return cls()
        curves, waiting = _from_samples(run, names)
        difference, lag = service_difference(curves, waiting), service_lag(curves, waiting)
        return cls(difference, lag, _together_s(waiting), _sampled_bound(run))


def _together_s(waiting: Mapping[str, Sequence[Interval]]) -> float:
    """For how long at least two clients were backlogged."""
    edges = sorted(
        edge for spans in waiting.values() for start, end in spans for edge in ((start, 1), (end, -1))
    )
    total_s, depth, since_s = 0.0, 0, 0.0
    for time_s, change in edges:
        if depth >= 2:
            total_s += time_s - since_s
        depth, since_s = depth + change, time_s
    return total_s


def _from_samples(
    run: Run, names: Sequence[str]
) -> tuple[Mapping[str, Curve], Mapping[str, Sequence[Interval]]]:
    """Charged service at each complete round of samples, and the times from round to round with backlog."""
    rounds: dict[int, list[Sample]] = defaultdict(list)
    for sample in run.samples:
        rounds[sample.round].append(sample)
    workers = run.manifest.workers or len({sample.worker for sample in run.samples})
    complete = [
        (max(sample.t_s for sample in samples), {sample.worker: sample.clients for sample in samples})
        for _, samples in sorted(rounds.items())
        if len(samples) == workers
    ]
    curves: dict[str, Curve] = {}
    waiting: dict[str, list[Interval]] = {}
    for name in names:
        accounts_at = [
            (time_s, {worker: clients.get(name, {}) for worker, clients in accounts.items()})
            for time_s, accounts in complete
        ]
        totals = [
            sum(account.get("service", 0.0) for account in accounts.values()) for _, accounts in accounts_at
        ]
        curves[name] = Curve(tuple(time_s for time_s, _ in accounts_at), tuple(totals))
        waiting[name] = [
            # The end is included: the round that confirms the backlog is part of it.
            (start_s, math.nextafter(end_s, math.inf))
            for (start_s, before), (end_s, after) in pairwise(accounts_at)
            if all(_waits(before[worker], after[worker]) for worker in before)
        ]
    return curves, waiting


def _waits(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Whether a client waited at a replica from one round to the next."""
    waited = before.get("waiting", 0) > 0 and after.get("waiting", 0) > 0
    return waited and "backlog" in before and before["backlog"] == after.get("backlog")


def _sampled_bound(run: Run) -> float | None:
    """The sum of the largest that each replica stated: what it states holds for intervals that end then. None if one
    states nothing."""
    largest: dict[str, float | None] = {}
    for sample in run.samples:
        known = [bound for bound in (largest.get(sample.worker), sample.bound) if bound is not None]
        largest[sample.worker] = max(known, default=None)
    bounds = [bound for bound in largest.values() if bound is not None]
    if not largest or len(bounds) < max(len(largest), run.manifest.workers or 0):
        return None
    return sum(bounds)
