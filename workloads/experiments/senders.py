"""Clients described as JSON, of which an experiment's traffic is made. Those here send single requests, as in the VTC
papers; those of `program_senders` send programs.

A sender of single requests is {"name", "arrivals", "input", "output"}: lengths in tokens, and arrivals in requests a
minute:

    {"kind": "even", "rpm": 90, "waiting": 5}                    equal gaps; `waiting` more at the very start
    {"kind": "poisson", "rpm": 90}
    {"kind": "on-off", "rpm": 30, "on_s": 60, "off_s": 60}       equal gaps while ON, nothing while OFF
    {"kind": "ramp", "rpm": 12, "to_rpm": 120, "over_s": 600}    a rate that rises in a straight line
    {"kind": "phases", "phases": [[300, {...}], ...]}            one after the other, each for so many seconds

No two prompts have anything in common.
"""

from collections.abc import Mapping, Sequence

from workloads.arrivals import (
    Arrivals,
    EvenArrivals,
    GammaArrivals,
    OnOffArrivals,
    PhasedArrivals,
    RampArrivals,
)
from workloads.clients import Client, fixed_length_client
from workloads.experiments import program_senders
from workloads.experiments.contract import Cell, Json, Simulated, TrafficSpec
from workloads.programs import PackedCodec

MINUTE_S, START_S = 60.0, 1e-3


def sender(name: str, arrivals: Mapping[str, Json], input_tokens: int, output_tokens: int) -> dict[str, Json]:
    """One client that sends single requests of these lengths."""
    return {"name": name, "arrivals": dict(arrivals), "input": input_tokens, "output": output_tokens}


def even(rpm: float, waiting: int = 0) -> dict[str, Json]:
    """Evenly spaced requests; `waiting` more of them come at the very start."""
    return {"kind": "even", "rpm": rpm, "waiting": waiting}


def poisson(rpm: float) -> dict[str, Json]:
    """Requests at exponentially distributed gaps."""
    return {"kind": "poisson", "rpm": rpm}


def on_off(rpm: float, on_s: float = 60.0, off_s: float = 60.0) -> dict[str, Json]:
    """Evenly spaced requests in every other phase."""
    return {"kind": "on-off", "rpm": rpm, "on_s": on_s, "off_s": off_s}


def traffic(name: str, *senders: Mapping[str, Json]) -> TrafficSpec:
    """The traffic of these clients."""
    return TrafficSpec(name, {"senders": [dict(one) for one in senders]})


def clients_of(spec: TrafficSpec, seed: str) -> tuple[Client, ...]:
    """The clients of a traffic, whatever they send. Raises ValueError for an unknown kind of arrivals."""
    return tuple(
        program_senders.client(one, seed) if "shape" in one else _client(one, seed)
        for one in spec.arguments["senders"]
    )


class FromSenders(Simulated):
    """An experiment whose traffic is made of senders."""

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        return clients_of(cell.traffic, seed)


def _client(one: Mapping[str, Json], seed: str) -> Client:
    return fixed_length_client(
        one["name"],
        input_tokens=one["input"],
        output_tokens=one["output"],
        arrivals=_arrivals(one["arrivals"]),
        codec=PackedCodec(),
        seed=seed,
    )


def _arrivals(given: Mapping[str, Json]) -> Arrivals:
    match given["kind"]:
        case "even":
            return _even(given["rpm"] / MINUTE_S, given["waiting"])
        case "poisson":
            return GammaArrivals(given["rpm"] / MINUTE_S)
        case "on-off":
            return OnOffArrivals(_even(given["rpm"] / MINUTE_S), given["on_s"], given["off_s"])
        case "ramp":
            return RampArrivals(given["rpm"] / MINUTE_S, given["to_rpm"] / MINUTE_S, given["over_s"])
        case "phases":
            phases: Sequence[tuple[float, Mapping[str, Json]]] = given["phases"]
            return PhasedArrivals([(_arrivals(arrivals), duration_s) for duration_s, arrivals in phases])
        case kind:
            raise ValueError(f"no arrivals {kind!r}")


def _even(rate_per_s: float, waiting: int = 0) -> Arrivals:
    if not waiting:
        return EvenArrivals(rate_per_s)
    start = EvenArrivals(waiting / START_S, first_s=0.0), START_S
    return PhasedArrivals([start, (EvenArrivals(rate_per_s), float("inf"))])
