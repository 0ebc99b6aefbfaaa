"""What the experiments of QLM have in common: requests with deadlines on a simulated cluster (`workloads.deadlines`).

    W_A    one model, Vicuna-13B: a third each of interactive requests (20 s to the first token), Batch-1 (a minute) and
           Batch-2 (an hour)
    W_B    two models of Batch-1 and three of Batch-2: tuned versions of Mistral-7B, Vicuna-13B and Llama-70B
    W_C    W_A with mega prompts of three to four thousand tokens

A trace has 3,500 requests, as in the paper. Fewer replicas than the paper's 50 serve it, at as many requests a second
for each: 50 would hold all of a trace in memory at once, and nobody would wait.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from workloads.deadlines.run import Outcome, measure, simulate
from workloads.deadlines.traffic import Stream, requests
from workloads.experiments.contract import Cell, Experiment, Json, Measured, Result, Row, TrafficSpec
from workloads.session import Plan
from workloads.simulation import Fleet, Site

TRACE = 3_500
A100 = "a100-80g"
A10 = "a10g"
PAPER_REPLICAS = 50
MOST_RUNNING = 1024
NO_SHARES = 1e12
"""A quantum that no client uses up: then the order does not depend on what anybody had."""

ONE_MODEL: Mapping[str, str] = {"vicuna-13b": "vicuna-13b"}
W_B: Mapping[str, str] = {
    "b1-mistral-7b": "mistral-7b",
    "b1-llama-70b": "llama-2-70b-4bit",
    "b2-vicuna-13b": "vicuna-13b",
    "b2-llama-70b": "llama-2-70b-4bit",
    "b2-mistral-7b": "mistral-7b",
}
BATCH_1 = tuple(model for model in W_B if model.startswith("b1"))
BATCH_2 = tuple(model for model in W_B if model.startswith("b2"))

PLANS: Mapping[str, Json] = {"solver": "search", "plan_work": 50_000}
"""The same plan for the same queues, however fast the machine is."""


def qlm(
    replicas: int = 4,
    models: Mapping[str, str] = ONE_MODEL,
    *,
    options: Mapping[str, Json] | None = None,
    policy_options: str = "",
    shares: bool = False,
    **fleet: Any,
) -> Site:
    """QLM as in the paper, on A100s. `shares`: what a client had makes a difference at replicas."""
    return Site(
        replicas=replicas,
        placement="qlm",
        placement_options={**PLANS, **(options or {}), "evicts": True},
        policy="slo",
        policy_options=policy_options,
        quantum=None if shares else NO_SHARES,
        stall_ms=0.0,
        max_running=MOST_RUNNING,
        chunked_prefill_tokens=8192,
        ignore_eos=False,
        fleet=Fleet(**{"models": models, "gpus": (A100,), "host_kv_bytes": 80e9, **fleet}),
    )


def with_fleet(site: Site, **changes: Any) -> Site:
    assert site.fleet is not None
    return replace(site, fleet=replace(site.fleet, **changes))


def without_eviction(site: Site) -> Site:
    """Replicas take nobody back."""
    options = {**site.placement_options, "evicts": False}
    made = replace(site, policy_options="evictions=0", placement_options=options)
    return with_fleet(made, host_kv_bytes=0.0)


def other(placement: str, like: Site, policy: str = "fcfs", **options: Json) -> Site:
    """Another system on the same machines, whose replicas serve in order of arrival and take nobody back."""
    made = replace(like, placement=placement, placement_options=options, policy=policy)
    return with_fleet(made, host_kv_bytes=0.0) if policy == "fcfs" else made


def rule(like: Site) -> Site:
    """The product's own rule in place of QLM, with shares in the router if there are some at replicas. A replica that
    is to load another model at once ends what it runs at once."""
    options = {"evicts": like.placement_options["evicts"], "tiers": like.quantum is None, "finish_s": 0.0}
    return with_fleet(replace(like, placement="deadline", placement_options=options), finish_s=0.0)


SYSTEMS: Mapping[str, tuple[str, Callable[[Site], Site]]] = {
    "qlm": ("QLM", lambda fleet: fleet),
    "rule": ("deadline", rule),
    "deadline": ("deadline", rule),
    "edf": ("EDF", lambda fleet: other("edf", fleet)),
    "affine": ("EDF, loaded model first", lambda fleet: other("edf", fleet, prefers_loaded=True)),
    "fcfs": ("FCFS", lambda fleet: other("fcfs_models", fleet)),
    "fcfs_models": ("FCFS", lambda fleet: other("fcfs_models", fleet)),
    "shepherd": ("SHEPHERD", lambda fleet: other("shepherd", fleet)),
    "turn": ("round-robin", lambda fleet: other("spread", fleet)),
    "random": ("random", lambda fleet: other("spread", fleet, by="random")),
}
"""By the first part of a cell's name: the label, and the system on QLM's machines."""


def w_a(rate_per_s: float, **others: Any) -> list[Stream]:
    """Requests of one model, so many a second of all classes together."""
    names = ("interactive", "batch-1", "batch-2")
    model = next(iter(ONE_MODEL))
    return [Stream(model, name, 1 / 3 * rate_per_s, **others) for name in names]


def w_b(rate_per_s: float) -> list[Stream]:
    """Requests of five models; as many of Batch-2 as of Batch-1."""
    first = [Stream(model, "batch-1", rate_per_s / len(BATCH_1)) for model in BATCH_1]
    return first + [Stream(model, "batch-2", rate_per_s / len(BATCH_2)) for model in BATCH_2]


def row(name: str, site: Site, streams: Sequence[Stream], most: int | None, label: str, **more: Json) -> Row:
    """One site on one traffic of at most so many requests; `more` are further arguments of the traffic."""
    rate = sum(stream.rate_per_s for stream in streams)
    duration_s = most / rate if most is not None and rate else 100.0
    arguments = {"streams": [stream.to_json() for stream in streams], "most": most, **more}
    return Row(name, site, TrafficSpec("deadlines", arguments), label, Plan(duration_s))


def systems(
    names: Sequence[str],
    suffix: str,
    fleet: Site,
    streams: Sequence[Stream],
    most: int | None = TRACE,
    label: str = "{}",
    **more: Json,
) -> list[Row]:
    chosen = ((name, *SYSTEMS[name]) for name in names)
    return [
        row(f"{name}.{suffix}", system(fleet), streams, most, label.format(called), **more)
        for name, called, system in chosen
    ]


def swept(at: Mapping[str, Result]) -> list[str]:
    """What stands behind the systems' names, by size."""
    suffixes = {name.partition(".")[2] for name in at if "." in name}
    return sorted(suffixes, key=lambda one: [float(part) for part in one.split(".")])


def columns(at: Mapping[str, Result], names: Sequence[str], suffix: str, path: str = "attained") -> list[str]:
    return [at[f"{name}.{suffix}"].shown(path) for name in names]


def run_of(cell: Cell, seed: str, site: Site | None = None) -> Outcome:
    """The cell's run, or its traffic on another site."""
    told = cell.traffic.arguments
    streams = [Stream.from_json(stream) for stream in told["streams"]]
    return simulate(site or cell.site, requests(streams, seed, most=told["most"]))


class Deadlines(Experiment):
    bounds_steps = False
    seeds = ("0",)

    def run(self, cell: Cell, seed: str) -> Measured:
        outcome = run_of(cell, seed)
        return Measured(self.measure(cell, outcome), outcome.end_s * len(outcome.replicas))

    def measure(self, cell: Cell, outcome: Outcome) -> Mapping[str, Json]:
        return measure(outcome)


def pair(at: Mapping[str, Result], suffix: str, one: str, other: str, path: str) -> tuple[float, float]:
    """A number of two systems on one traffic, or of two cells."""
    mine, theirs = (at[f"{name}.{suffix}" if suffix else name][path] for name in (one, other))
    return mine, theirs


def points(at: Mapping[str, Result], suffix: str, one: str, other: str, path: str = "attained") -> float:
    """By how many percentage points more are in time."""
    mine, theirs = pair(at, suffix, one, other, path)
    return 100 * (mine - theirs)


def ratio(at: Mapping[str, Result], suffix: str, one: str, other: str, path: str) -> float:
    mine, theirs = pair(at, suffix, one, other, path)
    return mine / theirs
