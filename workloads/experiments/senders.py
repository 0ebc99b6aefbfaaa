"""Clients that send single requests, as JSON: the traffic of the VTC papers.

A sender is {"name", "arrivals", "input", "output"}: lengths in tokens, and arrivals in requests a minute:

    {"kind": "even", "rpm": 90, "waiting": 5}                    equal gaps; so many more at the very start
    {"kind": "poisson", "rpm": 90}
    {"kind": "on-off", "rpm": 30, "on_s": 60, "off_s": 60}       equal gaps while ON, nothing while OFF
    {"kind": "ramp", "rpm": 12, "to_rpm": 120, "over_s": 600}    a rate that rises in a straight line
    {"kind": "phases", "phases": [[300, {...}], ...]}            one after the other, each for so many seconds

Prompts are random tokens from (seed, client, number of the request): no two have anything in common.
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
from workloads.clients import Client
from workloads.experiments.contract import Json, Traffic
from workloads.programs.call import Program
from workloads.programs.codec import TOKEN_BYTES
from workloads.programs.prose import seeded
from workloads.programs.single import Single

MINUTE_S, START_S = 60.0, 1e-3


def sender(name: str, arrivals: Mapping[str, Json], input_tokens: int, output_tokens: int) -> dict[str, Json]:
    """One client of a traffic."""
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


def traffic(name: str, *senders: Mapping[str, Json]) -> Traffic:
    """These clients together."""
    return Traffic(name, {"senders": [dict(one) for one in senders]})


def clients_of(told: Traffic, seed: str) -> tuple[Client, ...]:
    """The clients of a traffic. Raises ValueError for a kind of arrivals that there is not."""
    return tuple(_client(one, seed) for one in told.arguments["senders"])


def unique_prompt(seed: str, client: str, index: int, tokens: int) -> bytes:
    """Packed token ids that no other request begins with."""
    prompt = bytearray(TOKEN_BYTES * tokens)
    prompt[::TOKEN_BYTES] = seeded(seed, client, "prompt", index).randbytes(tokens)
    return bytes(prompt)


def _client(told: Mapping[str, Json], seed: str) -> Client:
    name, shape = told["name"], Single(told["output"])

    def program(index: int) -> Program:
        return shape.program(unique_prompt(seed, name, index, told["input"]))

    return Client(name, program, _arrivals(told["arrivals"]), seed, requests=1)


def _arrivals(told: Mapping[str, Json]) -> Arrivals:
    match told["kind"]:
        case "even":
            return _even(told["rpm"] / MINUTE_S, told["waiting"])
        case "poisson":
            return GammaArrivals(told["rpm"] / MINUTE_S)
        case "on-off":
            return OnOffArrivals(_even(told["rpm"] / MINUTE_S), told["on_s"], told["off_s"])
        case "ramp":
            return RampArrivals(told["rpm"] / MINUTE_S, told["to_rpm"] / MINUTE_S, told["over_s"])
        case "phases":
            phases: Sequence[tuple[float, Mapping[str, Json]]] = told["phases"]
            return PhasedArrivals([(_arrivals(arrivals), duration_s) for duration_s, arrivals in phases])
        case kind:
            raise ValueError(f"no arrivals {kind!r}")


def _even(rate_per_s: float, waiting: int = 0) -> Arrivals:
    if not waiting:
        return EvenArrivals(rate_per_s)
    start = EvenArrivals(waiting / START_S, first_s=0.0), START_S
    return PhasedArrivals([start, (EvenArrivals(rate_per_s), float("inf"))])
