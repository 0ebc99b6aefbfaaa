"""What the experiments of QLM have in common: requests with deadlines on a simulated cluster (`workloads.deadlines`).

    W_A    one model, Vicuna-13B: a third each of interactive requests (20 s to the first token), Batch-1 (a minute) and
           Batch-2 (an hour)
    W_B    two models of Batch-1 and three of Batch-2: tuned versions of Mistral-7B, Vicuna-13B and Llama-70B
    W_C    W_A with mega prompts of three to four thousand tokens

A trace has 3,500 requests, as in the paper. Fewer replicas than the paper's 50 serve it, at as many requests a second
for each: 50 would hold all of a trace in memory at once, and nobody would wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite
from typing import Any

from workloads.deadlines.cluster import Outcome, simulate
from workloads.deadlines.fleet import Fleet
from workloads.deadlines.measures import measure
from workloads.deadlines.traffic import Stream, requests
from workloads.experiments.contract import Cell, Experiment, Json, Measured, Result, TrafficSpec
from workloads.session import Plan
from workloads.simulation import Site

TRACE = 3_500
A100 = "a100-80g"
A10 = "a10g"
PAPER_REPLICAS = 50

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

PAPER_QLM: Mapping[str, Json] = {"prefixes": False, "tiers": False}
"""The paper's: nobody has a share, and prefixes do not count."""

LABELS: Mapping[str, str] = {
    "qlm": "QLM",
    "edf": "EDF",
    "fcfs_models": "FCFS",
    "shepherd": "SHEPHERD",
    "spread": "round-robin",
}


def qlm(replicas: int = 4, models: Mapping[str, str] = ONE_MODEL, **others: Any) -> Fleet:
    """QLM as in the paper, on A100s."""
    made: dict[str, Any] = {
        "placement": "qlm",
        "options": PAPER_QLM,
        "models": models,
        "gpus": (A100,) * replicas,
        **QLM_REPLICAS,
    }
    return Fleet(**{**made, **others})


QLM_REPLICAS: Mapping[str, Any] = {"policy": "slo", "evicts": True, "shares": False}
"""How its replicas are run."""


def other(placement: str, like: Fleet, **options: Json) -> Fleet:
    """Another system on the same machines, whose replicas serve in order of arrival and take nobody back."""
    return replace(like, placement=placement, options=options, policy="fcfs", evicts=False)


def w_a(rate_per_s: float, **others: Any) -> list[Stream]:
    """Requests of one model, so many a second of all classes together."""
    names = ("interactive", "batch-1", "batch-2")
    model = next(iter(ONE_MODEL))
    return [Stream(model, name, 1 / 3 * rate_per_s, **others) for name in names]


def w_b(rate_per_s: float) -> list[Stream]:
    """Requests of five models; as many of Batch-2 as of Batch-1."""
    first = [Stream(model, "batch-1", rate_per_s / len(BATCH_1)) for model in BATCH_1]
    return first + [Stream(model, "batch-2", rate_per_s / len(BATCH_2)) for model in BATCH_2]


def cell(
    name: str,
    fleet: Fleet,
    streams: Sequence[Stream],
    *,
    most: int | None = TRACE,
    seeds: tuple[str, ...] = ("0",),
    label: str = "",
    **more: Json,
) -> Cell:
    """One fleet on one traffic; `more` are further arguments for who measures."""
    rate = sum(stream.rate_per_s for stream in streams)
    duration_s = most / rate if most is not None and rate else 100.0
    arguments = {
        "fleet": fleet.to_json(),
        "streams": [_finite(asdict(stream)) for stream in streams],
        "most": most,
        **more,
    }
    label = label or LABELS.get(fleet.placement, fleet.placement)
    site = Site(replicas=len(fleet.gpus))
    return Cell(name, site, TrafficSpec("deadlines", arguments), Plan(duration_s), seeds, label)


def _finite(values: Mapping[str, Json]) -> dict[str, Json]:
    return {
        name: None if isinstance(value, float) and not isfinite(value) else value
        for name, value in values.items()
    }


def run_of(cell: Cell, seed: str, **changes: Any) -> Outcome:
    """The cell's run; `changes` of its fleet."""
    told = cell.traffic.arguments
    streams = [Stream.from_json(stream) for stream in told["streams"]]
    fleet = Fleet.from_json(told["fleet"])
    return simulate(
        replace(fleet, **changes) if changes else fleet, requests(streams, seed, most=told["most"])
    )


class Deadlines(Experiment):
    """An experiment whose cells are such runs."""

    bounds_steps = False

    def run(self, cell: Cell, seed: str) -> Measured:
        outcome = run_of(cell, seed)
        return Measured(self.measure(cell, outcome), outcome.end_s * len(outcome.replicas))

    def measure(self, cell: Cell, outcome: Outcome) -> Mapping[str, Json]:
        """What is kept of a run."""
        return measure(outcome)


def points(results: Mapping[str, Result], one: str, other: str, path: str = "attained") -> float:
    """By how many percentage points more are in time in a cell than in another."""
    return 100 * (results[one].number(path) - results[other].number(path))


def ratio(results: Mapping[str, Result], one: str, other: str, path: str) -> float:
    """A number of a cell over that of another."""
    return results[one].number(path) / results[other].number(path)
