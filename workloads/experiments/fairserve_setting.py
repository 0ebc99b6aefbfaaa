"""What FairServe's experiments have in common: the crowd, the schedulers, and what is kept of a run.

The study's volumes are not published, and neither are model, GPU, pool and limits of its evaluation. Here 1,000 users
with log-normal rates, 99 of 100 below 100 calls a minute, send interactions of six applications to eight A100. Rates
and pools are such that the cluster is overloaded in little more than the surge: with a full A100's pool it would hold
forty seconds of work before it counts as full.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from workloads.apps import BY_NAME, Crowd, service
from workloads.clients import Client
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Simulated, Size, TrafficSpec
from workloads.records import Run
from workloads.served import totals
from workloads.session import Plan
from workloads.simulation import Site

LENGTH_S = 300.0
QUICK_S = 40.0
USERS, QUICK_USERS = 1000, 60
MEDIAN_RPM = 0.008
SPREAD = 2.0
ABUSERS, LEAST_ABUSE, MOST_ABUSE = 5, 150.0, 1500.0
ABUSED = "app12"
"""What abusers send."""
SURGE, SURGE_FACTOR = 0.1, 6.0
REPLICAS, KV_TOKENS = 8, 65_536
TIMEOUT_S = 120.0
"""A user gives an interaction up that takes longer."""
RPM = 10
"""The fixed limit of the baseline, in calls a minute."""
LIMITS: Mapping[str, Json] = {"user": 20, "apps": {"*": 20}}
"""What 99 of 100 users stay below in their busiest minute, by a run without throttle."""


@dataclass(frozen=True)
class Scheduler:
    """One of the paper's, or ours."""

    label: str
    policy: str
    options: str = ""
    throttle: str = "none"
    limits: Mapping[str, Json] = field(default_factory=dict)


SCHEDULERS: Mapping[str, Scheduler] = {
    "rpm": Scheduler("RPM", "fcfs", throttle="rpm", limits={"user": RPM}),
    "vtc": Scheduler("VTC", "vtc"),
    "fs-w": Scheduler("FS(W)", "wsc", "lead=0"),
    "fs": Scheduler("FS(W+I)", "wsc", throttle="oit", limits=LIMITS),
    "literal": Scheduler(
        "FS(W+I), by the letter",
        "wsc",
        "lead=inf,charge=on_finish,literal=true",
        throttle="oit",
        limits={**LIMITS, "counts": "arrivals"},
    ),
    "dlpm": Scheduler("WSC-DLPM + OIT", "wsc-dlpm", throttle="oit", limits=LIMITS),
}


def site(name: str, **more: Json) -> Site:
    """A100 with Llama-3.1-8B, prompts first as in the paper."""
    chosen = SCHEDULERS[name]
    given: dict[str, Json] = {"replicas": REPLICAS, "kv_tokens": KV_TOKENS, **more}
    return Site(
        placement="least_tokens",
        policy=chosen.policy,
        policy_options=chosen.options,
        throttle=chosen.throttle,
        limits=chosen.limits,
        stall_ms=0.0,
        **given,
    )


def plan(duration_s: float) -> Plan:
    """Interactions begin for so long; the run goes on until all have ended or were given up."""
    return Plan(
        duration_s,
        drain_s=None,
        connections_per_client=1_000_000,
        sample_s=max(duration_s / 10, 1.0),
        token_step_s=5.0,
        program_timeout_s=TIMEOUT_S,
        waits=True,
    )


def crowd(size: Size, surge: float = SURGE) -> TrafficSpec:
    """The traffic."""
    return TrafficSpec("crowd", {"users": USERS if size == "full" else QUICK_USERS, "surge": surge})


def served(apps: Mapping[str, Mapping[str, Json]]) -> dict[str, tuple[float, float]]:
    """The service of each application's answered calls, plain and in average calls of the application."""
    plain = {app: service(one["prompt_tokens"], one["output_tokens"]) for app, one in apps.items()}
    return {app: (units, units / BY_NAME[app].normal_cost) for app, units in plain.items()}


def compared(
    result: Result, ratios: Callable[[Mapping[str, Json]], tuple[float | None, float | None]]
) -> Mapping[str, Json]:
    """A row of a table: two ratios, of plain and of normalised service, as medians over seeds. None where a run has
    nothing to divide by."""
    plain, normalised = zip(*map(ratios, result.runs), strict=True)
    return {
        "label": result.cell.title,
        "plain": None if None in plain else median(plain),
        "normalised": None if None in normalised else median(normalised),
    }


def _abuser_over_user(run: Mapping[str, Json]) -> tuple[float | None, float | None]:
    users, heard = served(run["apps"]).values(), run["good"]["heard_users"]
    abused = served({ABUSED: run["bad"]})[ABUSED]
    plain, normalised = (sum(one) / heard if heard else 0.0 for one in zip(*users, strict=True))
    each = [units / run["bad"]["users"] for units in abused]
    return each[0] / plain if plain else None, each[1] / normalised if normalised else None


class Crowded(Simulated):
    """An experiment with the crowd."""

    schedulers: Sequence[str] = tuple(SCHEDULERS)

    def cells(self, size: Size) -> Sequence[Cell]:
        return [self.cell(name, size) for name in self.schedulers]

    def cell(self, name: str, size: Size, surge: float = SURGE, suffix: str = "") -> Cell:
        """One of the schedulers, with overload in that part of the time."""
        length_s, seeds = (LENGTH_S, SEEDS) if size == "full" else (QUICK_S, SEEDS[:1])
        label = SCHEDULERS[name].label
        return Cell(f"{name}{suffix}", site(name), crowd(size, surge), plan(length_s), seeds, label)

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        given = cell.traffic.arguments
        made = Crowd(
            users=given["users"],
            median_rpm=MEDIAN_RPM * USERS / given["users"],
            spread=SPREAD,
            abusers=ABUSERS,
            least_abuse=LEAST_ABUSE,
            most_abuse=MOST_ABUSE,
            abused=ABUSED,
            surge=given["surge"],
            surge_factor=SURGE_FACTOR,
        )
        return made.clients(seed, cell.plan.duration_s)

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        """What an abuser got over what a user got."""
        return {"fairness": [compared(results[name], _abuser_over_user) for name in self.schedulers]}

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        facts = run.manifest.clients
        good = [name for name, one in facts.items() if one["well_behaved"]]
        bad = [name for name, one in facts.items() if not one["well_behaved"]]
        everybody = totals(run, [*good, *bad])
        apps = sorted({str(facts[name]["app"]) for name in good})
        assert run.end is not None
        return {
            "good": totals(run, good).to_json(),
            "bad": totals(run, bad).to_json(),
            "all": everybody.to_json(),
            "apps": {
                app: totals(run, [name for name in good if facts[name]["app"] == app]).to_json()
                for app in apps
            },
            "end_s": run.end.t_s,
            "prompt_per_s": everybody.prompt_tokens / run.end.t_s,
            "decode_per_s": everybody.output_tokens / run.end.t_s,
        }
