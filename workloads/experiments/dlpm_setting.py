"""What DLPM's experiments share: two testbeds, schedulers, rates, quanta, what is kept of a run, and plots.

The paper does not report rates, durations, clients, pool or quanta. For Figure 7, Llama-3.1-8B on A100s, one rule for
all workloads sets each of them:

    rate      each client sends an equal share of what the cluster completes, counted in well-behaved programs;
              so the well-behaved clients alone ask for 3/4 of it, and what makes the bad one's programs larger
              is overload
    Q^u       what four requests of a well-behaved client are charged by a replica: extend tokens + 2 · output
    Q^w       what sixteen of its programs are charged by the router: all prompt tokens + 2 · output
    running   at most 256 requests a replica, the largest decode batch for which CUDA graphs are usually captured

The second testbed is Llama-3.2-3B on A10G, whose pool holds 129,000 tokens beside the model; prompts are cut into
chunks of 2,048 tokens, as SGLang does by itself on GPUs of 24 GB. Rates are given in parts of what one such GPU
completes of a burst, start and tail included; the well-behaved clients alone ask for less than that. Q^u is what one
program is charged, Q^w four times what it is charged in full.

Clients have as many connections as they like, so requests wait at the replicas, where the policy orders them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from re import fullmatch
from typing import ClassVar, NamedTuple

from sglang_fair.core.options import shipped
from sglang_fair.settings.table import Cluster
from workloads.clients import SCENARIOS, Client, Scale
from workloads.experiments.claims import Entry
from workloads.experiments.contract import Cell, Json, Result, Scheduler, Simulated, TrafficSpec
from workloads.experiments.store import rounded
from workloads.measures import summarize
from workloads.plots import Panel, Panels
from workloads.programs import PackedCodec
from workloads.records import Run
from workloads.session import Plan
from workloads.simulation import Site
from workloads.table import Requests
from workloads.windows import Windows, regular_times

MAX_RUNNING = 256
DRAIN_S = 240.0
"""After the last arrival of Figure 7, the well-behaved clients' programs are waited for at most so long."""
CLIENTS = Scale().good_clients + 1

DEFAULT = "shipped"
"""The last part of a cell's name."""
SHIPPED = Scheduler(
    "shipped default",
    {
        "placement": "d2lpm-queue",
        "policy": Cluster.policy,
        "policy_options": shipped(Cluster.policy, Cluster.policy_options),
        "quantum": None,
        "worker_quantum": None,
        "stall_ms": Cluster.stall_ms,
        "target_tpot_ms": Cluster.target_tpot_ms,
    },
)
"""As `sglang-fair cluster` runs, unless told otherwise: with its rule of steps, mixed, and its quanta."""


@dataclass(frozen=True, slots=True)
class ProgramKind:
    """A kind of program, as a well-behaved client sends it."""

    title: str
    requests: int
    capacity_per_s: float
    """Programs a second that one replica serves when these are all there is; `dlpm-fig7-load` measures it."""
    charged: float
    """Service units of one program when each prefix is computed once."""
    charged_in_full: float
    """The same with all prompt tokens counted."""

    @property
    def quanta_7(self) -> dict[str, float]:
        """Q^u and Q^w of Figure 7, units."""
        quantum = float(f"{4 * self.charged / self.requests:.3g}")
        return {"quantum": quantum, "worker_quantum": 16 * self.charged_in_full}

    @property
    def quanta(self) -> dict[str, float]:
        """Q^u and Q^w of the second testbed, units."""
        return {"quantum": self.charged, "worker_quantum": 4 * self.charged_in_full}

    def rate_per_s(self, parts: float) -> float:
        """Programs a second that ask for `parts` times what one GPU completes."""
        return float(f"{parts * self.capacity_per_s:.4g}")


KINDS: Mapping[str, ProgramKind] = {
    "qa": ProgramKind("long-document QA", 8, 0.45, 21_500.0, 172_000.0),
    "tot": ProgramKind("tree of thoughts", 30, 0.63, 16_600.0, 52_400.0),
    "judge": ProgramKind("LLM as a judge", 3, 2.1, 4_840.0, 10_300.0),
}
"""On an A100, by a scenario's app."""

TOT2 = ProgramKind("trees of two branches", 30, 0.24, 16_600.0, 52_400.0)
TOT3 = ProgramKind("trees of three branches", 120, 0.062, 64_600.0, 219_000.0)
JUDGE = ProgramKind("judgements", 3, 0.9, 4_840.0, 10_300.0)
CHAT = ProgramKind("conversations, of which 64 run at a time", 1, 13.0, 440.0, 510.0)
"""On an A10G."""


SCHEDULERS: Mapping[str, Scheduler] = {
    "d2lpm": Scheduler("D2LPM", {"placement": "d2lpm", "policy": "dlpm"}),
    "rr": Scheduler("RR+LPM", {"placement": "round_robin", "policy": "lpm"}),
    "preble": Scheduler("Preble", {"placement": "preble", "policy": "lpm"}),
    "vtc": Scheduler("VTC", {"placement": "client_round_robin", "policy": "vtc"}),
    "cache-aware": Scheduler("cache_aware", {"placement": "cache_aware", "policy": "lpm"}),
}
"""By the last part of a cell's name."""

POLICIES = {"dlpm": "DLPM", "lpm": "LPM", "vtc": "VTC"}
"""With one replica, by their labels."""

A10G: Mapping[str, Json] = {
    "gpu": "a10g",
    "model": "llama-3.2-3b",
    "max_running": MAX_RUNNING,
    "chunked_prefill_tokens": 2048,
}


def site(scheduler: str, replicas: int, **fields: Json) -> Site:
    """Replicas under one of `SCHEDULERS`, prompts first as in the paper. `fields` are others of the site."""
    return Site(**{"replicas": replicas, "stall_ms": 0.0, **SCHEDULERS[scheduler].fields, **fields})


def a10g(scheduler: str, replicas: int = 1, **fields: Json) -> Site:
    return site(scheduler, replicas, **{**A10G, **fields})


def scenario(
    name: str, scheduler: str, replicas: int, *, load: float = 1.0, with_bad: bool = True, **fields: Json
) -> tuple[Site, TrafficSpec]:
    """A scenario of Figure 7 on A100s at `load` times the rates of its rule."""
    kind = KINDS[SCENARIOS[name].app]
    arguments = {"rate_per_s": kind.rate_per_s(load * replicas / CLIENTS)}
    sent = TrafficSpec(name, arguments if with_bad else arguments | {"with_bad": False})
    return site(scheduler, replicas, **{"max_running": MAX_RUNNING, **kind.quanta_7, **fields}), sent


def plan(
    duration_s: float, programs: int | None = None, *, drain_s: float | None = 0.0, drain_for: Json = "all"
) -> Plan:
    """Programs arrive for `duration_s`, at most `programs` of each client. The run ends `drain_s` later, or with the
    last program."""
    return Plan(
        duration_s,
        programs_per_client=programs,
        drain_s=drain_s,
        drain_for=drain_for,
        connections_per_client=1_000_000,
        sample_s=2.0,
        token_step_s=2.0,
    )


def clients(spec: TrafficSpec, seed: str) -> Sequence[Client]:
    """Three well-behaved clients and a bad one: Gamma arrivals with the variation of a Poisson process."""
    rate, with_bad = spec.arguments["rate_per_s"], spec.arguments.get("with_bad", True)
    return SCENARIOS[spec.name].clients(
        scale=Scale(), rate_per_s=rate, codec=PackedCodec(), seed=seed, with_bad=with_bad
    )


class A10GExperiment(Simulated):
    """On the second testbed."""

    curves: ClassVar[tuple[float, float] | None] = None
    """Length and distance in seconds of the windows of curves, where some are kept."""

    def plan(self, length_s: float) -> Plan:
        return plan(length_s)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return observe_curves(run, *self.curves) if self.curves else observe(run)


class ScenarioExperiment(A10GExperiment):
    """On A100s: the traffic is a scenario at a rate. The well-behaved clients' programs are waited for."""

    def plan(self, length_s: float) -> Plan:
        return plan(length_s, drain_s=DRAIN_S, drain_for="well-behaved")

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        return clients(cell.traffic, seed)


# ---- what is kept of a run


def observe(run: Run) -> dict[str, Json]:
    """What Figure 7 measures, and the hit rate, the service difference and how evenly replicas were used."""
    found = summarize(run)
    good = [client for client in found.clients.values() if client.well_behaved]
    same = (
        "service_rate",
        "actual_rate",
        "jain",
        "jain_actual",
        "ttft_p50_s",
        "ttft_p99_s",
        "hit_rate",
        "backlog_s",
        "program_mean_s",
        "program_spread",
    )
    kept = ("programs", "finished", "service_rate", "actual_rate", "hit_rate")
    return {
        **{name: getattr(found, name) for name in (*same, "bound")},
        "tokens_per_s": found.throughput_tokens_per_s,
        "p50_s": found.well_behaved_p50_s,
        "p99_s": found.well_behaved_p99_s,
        "p50_cut": found.p50_at_least,
        "p99_cut": found.p99_at_least,
        "program_mean_cut": found.program_mean_at_least,
        "ttft_p50_cut": any(one.ttft_p50 is not None and one.ttft_p50.at_least for one in good),
        "ttft_p99_cut": any(one.ttft_p99 is not None and one.ttft_p99.at_least for one in good),
        "difference": found.service_difference,
        "imbalance": imbalance(run),
        "clients": {name: {what: getattr(one, what) for what in kept} for name, one in found.clients.items()},
    }


def imbalance(run: Run) -> float | None:
    """Prompt tokens computed by the busiest replica over the mean of all replicas; None where no request says."""
    computed = dict.fromkeys(range(run.manifest.workers or 0), 0)
    for record in run.requests:
        if record.worker is not None and record.extend_tokens is not None:
            computed[int(record.worker.removeprefix("r"))] += record.extend_tokens
    total = sum(computed.values())
    return max(computed.values()) * len(computed) / total if total else None


PROGRAM_TIMES = {
    "program_mean_s": "Program time of the well-behaved clients, s: the mean (> where the run ended before)",
    "program_spread": "Spread of the well-behaved clients' program times: standard deviation over the mean",
}
"""SAGA's measure (arXiv 2605.00528)."""

DIFFERENCE = "Largest difference of actual service between clients while both are backlogged, units"


class Point(NamedTuple):
    """A setting on so many GPUs."""

    setting: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.setting}-d{self.number}"

    @property
    def words(self) -> str:
        return f"{self.setting}, D = {self.number}"


class Grid:
    """Results by point and scheduler, which are what cells' names have."""

    def __init__(self, results: Mapping[str, Result]) -> None:
        self._at: dict[tuple[Point, str], Result] = {}
        for name, result in results.items():
            found = fullmatch(r"(.+)-d(\d+)[-.](.+)", name)
            assert found, name
            self._at[Point(found[1], int(found[2])), found[3]] = result
        self.points = list(dict.fromkeys(point for point, _ in self._at))

    def get(self, point: Point, scheduler: str) -> Result | None:
        """None where a scheduler has no point of its own."""
        return self._at.get((point, scheduler))

    def number(self, point: Point, scheduler: str, what: str) -> float:
        return self._at[point, scheduler][path(point.setting, what)]

    def row(self, title: str, point: Point, schedulers: Iterable[str], what: str) -> list[Entry]:
        """Of a table. A latency that is a lower bound is marked with ">", and a dash is what there is not."""
        field, row = path(point.setting, what), list[Entry]([title, f"{point.number}"])
        for one in (self.get(point, name) for name in schedulers):
            row.append(None if one is None else ("> " if is_cut(one, field) else "") + one.shown(field))
        return row


def path(setting: str, what: str) -> str:
    """The field of a measure. Latency is a program's for trees and judgements, elsewhere a first token's."""
    scenario = SCENARIOS.get(setting)
    if what == "rate":
        return "service_rate" if scenario else "tokens_per_s"
    if what not in ("p50", "p99"):
        return what
    programs = scenario.app != "qa" if scenario else setting == "fig10"
    return f"{'' if programs else 'ttft_'}{what}_s"


def is_cut(result: Result, path: str) -> bool:
    """Whether the latency at `path` is a lower bound, because the run ended first."""
    return any(run.get(path.removesuffix("_s") + "_cut") for run in result.runs)


def observe_curves(run: Run, window_s: float, step_s: float) -> dict[str, Json]:
    """The same, the time at which the run ended, and each client's curves over the whole run."""
    assert run.end is not None, "a run that has ended"
    table = Requests(run)
    client_side, actual = (Windows(table, side=side, window_s=window_s) for side in ("client", "actual"))
    times = regular_times(run.end.t_s, step_s=step_s, window_s=window_s)
    curves = {
        "service": client_side.service_rate(times),
        "actual": actual.service_rate(times),
        "response_s": client_side.response_time(times),
    }
    kept = {
        what: {name: rounded(found[name] or (), 4) for name in client_side.clients}
        for what, found in curves.items()
    }
    return observe(run) | {"end_s": run.end.t_s, "curves": {"times_s": list(times), **kept}}


OVER_TIME: Mapping[str, str] = {
    "response_s": "response time, s",
    "actual": "actual service, units/s",
    "service": "service, units/s",
}


def over_time(results: Iterable[Result], rows: Sequence[str] = tuple(OVER_TIME)) -> Panels:
    """A column for each result, a row for each kind of curve."""

    found = list(results)
    return [
        [Panel(OVER_TIME[what], one.curves(what), title="" if place else one.cell.title) for one in found]
        for place, what in enumerate(rows)
    ]
