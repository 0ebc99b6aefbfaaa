"""One run of requests with deadlines on a simulated cluster, and what of it was in time.

attained      part of the requests whose first token came within their class's time; of each class too
goodput       requests within their time, a second, until the last answer is complete
throughput    requests a second, all of them
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_fair.common.deadlines import Promise
from sglang_fair.sim.replica import Replica, SimRequest
from workloads.deadlines.traffic import THINK_S, Asked
from workloads.session import Ending
from workloads.simulation.cluster import LONGEST_S, PROGRESS_S, Cluster, Flight
from workloads.simulation.site import Site


@dataclass(slots=True)
class Served:
    """What became of one request."""

    asked: Asked
    placed_s: float | None = None
    """When a replica got it for the first time."""
    first_s: float | None = None
    """When its first token came."""
    ended_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    """Of its last part, if it was cut off."""
    is_refused: bool = False

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.asked.at_s

    @property
    def met(self) -> bool:
        """Its first token came in time."""
        return self.first_s is not None and self.first_s <= self.asked.due_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run: all requests in order of arrival, when the last one ended, and the cluster that served them."""

    served: Sequence[Served]
    end_s: float
    cluster: Cluster

    @property
    def replicas(self) -> Sequence[Replica]:
        return self.cluster.replicas

    def total(self, meter: str) -> float:
        """Of all replicas (`sim.Meters`)."""
        return float(sum(getattr(replica.meters, meter) for replica in self.replicas))


class _Run:
    def __init__(self, site: Site, asked: Iterable[Asked]) -> None:
        self.cluster = Cluster(site, self._over, step_s=PROGRESS_S, report_s=0.0)
        self.served: list[Served] = []
        for one in asked:
            self.cluster.at(one.at_s, self._arrive, one)

    def _arrive(self, asked: Asked) -> None:
        served = Served(asked)
        self.served.append(served)
        request = SimRequest(
            asked.id,
            asked.client,
            asked.tokens,
            asked.output_tokens,
            asked.most_tokens,
            app="app" if asked.interaction else "",
            interaction=asked.interaction,
            slo_class=asked.slo_class,
        )
        self.cluster.send(
            request,
            served,
            model=asked.model,
            promise=Promise(asked.slo_class, asked.slo_s, asked.due_s),
            last=asked.call == asked.calls,
            begun=asked.call - 1,
        )

    def _over(self, flight: Flight, end: Ending) -> None:
        served, asked, now_s = flight.owner, flight.owner.asked, self.cluster.now_s
        record(served, flight)
        served.is_refused = end.error is not None
        if served.is_refused:
            return
        served.ended_s = now_s
        served.output_tokens = end.output_tokens
        served.cached_tokens = end.cached_tokens or 0
        if asked.call < asked.calls:
            said = flight.request.tokens[len(asked.tokens) :] + end.reply.packed
            following = asked.following(now_s + THINK_S, said)
            self.cluster.at(following.at_s, self._arrive, following)


def record(served: Served, flight: Flight) -> None:
    """What is known of a request, whether it is over or not."""
    served.placed_s = flight.placed_s
    served.first_s = flight.token_times[0][0] if flight.token_times else None


def simulate(site: Site, asked: Iterable[Asked], *, until_s: float = LONGEST_S) -> Outcome:
    """A run of `asked`, to the end of the last request or to `until_s`. The same for the same arguments."""
    run = _Run(site, asked)
    run.cluster.begin()
    while run.cluster.now_s <= until_s and run.cluster.step():
        pass
    for flight in run.cluster.flights.values():
        record(flight.owner, flight)
    ends = [one.ended_s for one in run.served if one.ended_s is not None]
    return Outcome(run.served, max(ends, default=0.0), run.cluster)


# ---- measures


def attained(served: Sequence[Served]) -> float | None:
    """The part that was in time; None of nobody."""
    return sum(one.met for one in served) / len(served) if served else None


def by(served: Sequence[Served], key: Callable[[Served], str]) -> dict[str, list[Served]]:
    """Grouped by `key`, in order of the keys."""
    found: dict[str, list[Served]] = {}
    for one in served:
        found.setdefault(key(one), []).append(one)
    return dict(sorted(found.items()))


def percentile(values: Sequence[float], part: float) -> float | None:
    """The smallest of the values that `part` of them do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None


def measure(outcome: Outcome) -> dict[str, Any]:
    """What is kept of a run."""
    served = outcome.served
    end_s = max(outcome.end_s, 1e-9)
    waits = [one.ttft_s for one in served if one.ttft_s is not None]
    classes: Mapping[str, Any] = {
        name: {
            "attained": attained(some),
            "p50_s": percentile([one.ttft_s for one in some if one.ttft_s is not None], 0.5),
            "p99_s": percentile([one.ttft_s for one in some if one.ttft_s is not None], 0.99),
            "requests": len(some),
        }
        for name, some in by(served, lambda one: one.asked.slo_class).items()
    }
    return {
        "attained": attained(served),
        "classes": classes,
        "goodput_per_s": sum(one.met for one in served) / end_s,
        "throughput_per_s": sum(one.ended_s is not None for one in served) / end_s,
        "end_s": end_s,
        "p99_s": percentile(waits, 0.99),
        "requests": len(served),
        "ended": sum(one.ended_s is not None for one in served),
        "plans": outcome.cluster.plans,
        "busy_part": (outcome.total("prefill_s") + outcome.total("decode_s"))
        / (end_s * max(1, len(outcome.replicas))),
        **{
            name: outcome.total(name)
            for name in ("swaps", "swap_s", "evictions", "extend_tokens", "output_tokens")
        },
    }
