"""What the experiments around DLPM's Figure 7 share: schedulers, rates, quanta, and what is kept of a run.

The paper does not report rates, durations, clients, pool or quanta. One rule for all workloads sets each of them:

    rate      each client sends an equal share of what the cluster completes, counted in well-behaved programs;
              so the well-behaved clients alone ask for 3/4 of it, and what makes the bad one's programs larger
              is overload
    Q^u       what four requests of a well-behaved client are charged by a replica: extend tokens + 2 · output
    Q^w       what sixteen of its programs are charged by the router: all prompt tokens + 2 · output
    running   at most 256 requests a replica, the largest decode batch for which CUDA graphs are usually captured

Clients have as many connections as they like, so requests wait at the replicas, where the policy orders them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sglang_fair.settings.table import Cluster
from workloads.clients import SCENARIOS, Client, Scale
from workloads.experiments.contract import Cell, Json, Result, Simulated, TrafficSpec
from workloads.measures import ClientSummary, summarize
from workloads.programs import PackedCodec
from workloads.records import Run
from workloads.session import Plan
from workloads.simulation import Site
from workloads.table import Percentile

LOAD = 1.0
"""A client's rate, in equal shares of what the cluster completes."""
REQUESTS_PER_QUANTUM = 4
PROGRAMS_PER_WORKER_QUANTUM = 16
MAX_RUNNING = 256

SHIPPED_STEPS: Mapping[str, Json] = {
    "stall_ms": Cluster.stall_ms,
    "target_tpot_ms": Cluster.target_tpot_ms,
}
"""Fields of a site whose replicas share steps as `sglang-fair cluster` has it, unless told otherwise."""

DRAIN_S = 240.0
"""After the last arrival, the well-behaved clients' programs are waited for at most so long."""


@dataclass(frozen=True, slots=True)
class ProgramKind:
    """A kind of program, as a well-behaved client sends it."""

    title: str
    requests: int
    """Of a program."""
    capacity_per_s: float
    """Programs a second that one replica serves when these are all there is; `dlpm_fig7_load` measures it."""
    charged: float
    """Service units of one program when each prefix is computed once."""
    charged_in_full: float
    """The same with all prompt tokens counted."""

    @property
    def quantum(self) -> float:
        """Q^u, units."""
        return float(f"{REQUESTS_PER_QUANTUM * self.charged / self.requests:.3g}")

    @property
    def worker_quantum(self) -> float:
        """Q^w, units."""
        return PROGRAMS_PER_WORKER_QUANTUM * self.charged_in_full

    def rate_per_s(self, replicas: int, load: float = LOAD) -> float:
        """Programs a second of one client."""
        return float(f"{load * self.capacity_per_s * replicas / CLIENTS:.4g}")


KINDS: Mapping[str, ProgramKind] = {
    "qa": ProgramKind("long-document QA", 8, 0.45, 21_500.0, 172_000.0),
    "tot": ProgramKind("tree of thoughts", 30, 0.63, 16_600.0, 52_400.0),
    "judge": ProgramKind("LLM as a judge", 3, 2.1, 4_840.0, 10_300.0),
}
"""By a scenario's app."""

CLIENTS = Scale().good_clients + 1


@dataclass(frozen=True, slots=True)
class ComparedScheduler:
    """A pair of placement and policy: how requests are handed out, and how a replica orders them."""

    label: str
    placement: str
    policy: str
    single: bool = True
    """Whether it differs from the others with one replica."""


SCHEDULERS: Mapping[str, ComparedScheduler] = {
    "d2lpm": ComparedScheduler("D2LPM", "d2lpm", "dlpm"),
    "rr": ComparedScheduler("RR+LPM", "round_robin", "lpm"),
    "preble": ComparedScheduler("Preble", "preble", "lpm", single=False),
    "vtc": ComparedScheduler("VTC", "client_round_robin", "vtc"),
    "cache-aware": ComparedScheduler("cache_aware", "cache_aware", "lpm", single=False),
}
"""By the last part of a cell's name. With one replica Preble and cache_aware are RR+LPM."""


class ScenarioExperiment(Simulated):
    """An experiment whose traffic is a scenario at a rate, and whose records have what Figure 7 measures."""

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        return clients(cell, seed)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return observe(run)


def site(scheduler: str, kind: str, replicas: int, **more: Json) -> Site:
    """A cluster of A100s under one of `SCHEDULERS`, prompts first as in the paper. `more` are fields of the site."""
    chosen, sizes = SCHEDULERS[scheduler], KINDS[kind]
    given = {
        "quantum": sizes.quantum,
        "worker_quantum": sizes.worker_quantum,
        "max_running": MAX_RUNNING,
        "stall_ms": 0.0,
        **more,
    }
    return Site(replicas=replicas, placement=chosen.placement, policy=chosen.policy, **given)


def plan(duration_s: float) -> Plan:
    """Programs arrive for that long; then the well-behaved clients' are waited for."""
    return Plan(
        duration_s,
        drain_s=DRAIN_S,
        drain_for="well-behaved",
        connections_per_client=1_000_000,
        sample_s=2.0,
        token_step_s=2.0,
    )


def cell(
    name: str,
    scenario: str,
    scheduler: str,
    replicas: int,
    duration_s: float,
    *,
    load: float = LOAD,
    seeds: Sequence[str] = ("0",),
    **more: Json,
) -> Cell:
    """A scenario under a scheduler. `more` are fields of the site."""
    kind = SCENARIOS[scenario].app
    rate = KINDS[kind].rate_per_s(replicas, load)
    traffic = TrafficSpec(scenario, {"rate_per_s": rate})
    return Cell(
        name,
        site(scheduler, kind, replicas, **more),
        traffic,
        plan(duration_s),
        tuple(seeds),
        SCHEDULERS[scheduler].label,
    )


def clients(given: Cell, seed: str) -> Sequence[Client]:
    """Three well-behaved clients and a bad one: Gamma arrivals with the variation of a Poisson process."""
    rate, with_bad = given.traffic.arguments["rate_per_s"], given.traffic.arguments.get("with_bad", True)
    return SCENARIOS[given.traffic.name].clients(
        scale=Scale(), rate_per_s=rate, codec=PackedCodec(), seed=seed, with_bad=with_bad
    )


def observe(run: Run) -> dict[str, Json]:
    """What the paper measures, and the hit rate, the service difference and how evenly replicas were used."""
    found = summarize(run)
    good = [client for client in found.clients.values() if client.well_behaved]
    return {
        "service_rate": found.service_rate,
        "actual_rate": found.actual_rate,
        "tokens_per_s": found.throughput_tokens_per_s,
        "jain": found.jain,
        "jain_actual": found.jain_actual,
        "p50_s": found.well_behaved_p50_s,
        "p99_s": found.well_behaved_p99_s,
        "p50_cut": found.p50_at_least,
        "p99_cut": found.p99_at_least,
        "ttft_p50_s": found.ttft_p50_s,
        "ttft_p99_s": found.ttft_p99_s,
        "ttft_p50_cut": _cut(client.ttft_p50 for client in good),
        "ttft_p99_cut": _cut(client.ttft_p99 for client in good),
        "hit_rate": found.hit_rate,
        "difference": found.service_difference,
        "backlog_s": found.backlog_s,
        "bound": found.bound,
        "imbalance": imbalance(run),
        "clients": {name: _client(client) for name, client in found.clients.items()},
    }


def imbalance(run: Run) -> float | None:
    """Prompt tokens computed by the busiest replica over the mean of all replicas; None where no request says."""
    computed = dict.fromkeys(range(run.manifest.workers or 0), 0)
    for record in run.requests:
        if record.worker is not None and record.extend_tokens is not None:
            computed[int(record.worker.removeprefix("r"))] += record.extend_tokens
    total = sum(computed.values())
    return max(computed.values()) * len(computed) / total if total else None


def _cut(percentiles: Iterable[Percentile | None]) -> bool:
    return any(one.at_least for one in percentiles if one is not None)


def _client(client: ClientSummary) -> dict[str, Json]:
    return {
        "programs": client.programs,
        "finished": client.finished,
        "service_rate": client.service_rate,
        "actual_rate": client.actual_rate,
        "hit_rate": client.hit_rate,
    }


def latency(scenario: str, percent: int) -> str:
    """The field with the latency that the paper measures: of a program, for QA of a request's first token."""
    return f"{'ttft_' if SCENARIOS[scenario].app == 'qa' else ''}p{percent}_s"


def is_cut(result: Result, path: str) -> bool:
    """Whether the latency at `path` is a lower bound, because the run ended first."""
    return any(run[path.removesuffix("_s") + "_cut"] for run in result.runs)


def shown_latency(result: Result, path: str) -> str:
    """A latency for a table; a lower bound is marked with ">"."""
    return ("> " if is_cut(result, path) else "") + result.shown(path)
