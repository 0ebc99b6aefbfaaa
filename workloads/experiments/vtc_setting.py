"""What the VTC paper's experiments share: its engine, what is kept of a run, and its plots.

The engine is Llama-2-7b on one A10G with a KV pool of 10 000 tokens, and service is input + 2 · output tokens.
Overloaded with 256 in, 256 out it serves 903 tokens/s here and 875 to 904 in the paper's Tables 4 to 6, so
rates are the paper's own. Prompts share no prefix, so the prefix cache has no effect, as in the paper's engine,
which has none. Requests are admitted whenever there is room; the paper's engine looks every ten decode steps, so
that its requests begin and end several at a time.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import ClassVar

from sglang_fair.core.cost import Cost, make_cost
from workloads.experiments import senders
from workloads.experiments.claims import Table
from workloads.experiments.contract import Cell, Json, Result, Row, Simulated, TrafficSpec
from workloads.plots import Figure, Line, Panel, Panels, largest
from workloads.programs import Outcome
from workloads.records import Run
from workloads.session import Plan
from workloads.simulation import Site
from workloads.table import Percentile
from workloads.windows import Windows, regular_times, sample_times, throughput

POOL_TOKENS = 10_000
BOUND = 2 * max(256, 2 * POOL_TOKENS)
"""2U of Theorem 4.4, units: the largest input, and the pool full of outputs."""

TOKENS = 256
"""Input and output of a request, where an experiment does not say otherwise."""

LENGTH_S = 600.0

IN_STEP = 5
"""Requests of each client that wait at the start where requests are to run in step: they are admitted
together, so they end together and make room for as many. In the paper's engine admission every ten decode
steps does that."""

SAMPLE_S = 10.0
"""Between the points of a curve."""

WINDOW_S = 60.0
"""Of the windows in which rates and response times are taken."""

STEP_OVERHEAD = "decode_overhead_s=0.0115,prefill_overhead_s=0.02"
"""The papers' engine plans each step in Python before it runs, which shows on GPUs faster than an A10G. This
overhead gives the service that the cost-function paper reports for an H100."""

CONNECTIONS = 100_000
"""As many as there are requests: the paper's clients never wait for one."""

LABELS = {
    "fcfs": "FCFS",
    "lcf": "LCF",
    "vtc": "VTC",
    "vtc-noisy": "VTC (±50%)",
    "vtc-predict": "VTC (predict)",
    "vtc-oracle": "VTC (oracle)",
}


class VtcExperiment(Simulated):
    """An experiment of the VTC paper: senders of single requests, and everything that the paper measures."""

    lengths_s = (LENGTH_S, 180.0)
    curves_of: ClassVar[Sequence[str] | None] = None
    """Clients whose curves are kept, if not all."""

    def plan(self, length_s: float) -> Plan:
        """Requests arrive for that long, and the run ends there."""
        return Plan(length_s, connections_per_client=CONNECTIONS, sample_s=max(length_s / 20, 1.0))

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return observe(run, curves_of=self.curves_of)


def site(policy: str, options: str = "", **more: Json) -> Site:
    """The paper's engine under a policy, prompts first. `more` are fields of the site."""
    given = {"gpu": "a10g", "model": "llama-2-7b", "kv_tokens": POOL_TOKENS, "stall_ms": 0.0, **more}
    return Site(placement="round_robin", policy=policy, policy_options=options, **given)


def row(name: str, policy: str, sent: TrafficSpec, label: str = "", **more: Json) -> Row:
    return Row(name, site(policy, **more), sent, label or LABELS[policy])


def sent(
    name: str, *arrivals: Mapping[str, Json], tokens: Sequence[tuple[int, int]] | None = None
) -> TrafficSpec:
    """Clients 1, 2, ... with these arrivals, and inputs and outputs of `tokens`."""
    lengths = tokens or [(TOKENS, TOKENS)] * len(arrivals)
    return senders.traffic(
        name,
        *(
            senders.single(f"client {k}", one, *length)
            for k, (one, length) in enumerate(zip(arrivals, lengths, strict=True), start=1)
        ),
    )


def observe(run: Run, *, cost: str = "linear", curves_of: Sequence[str] | None = None) -> dict[str, Json]:
    """What the VTC paper measures: service rates and response times in windows of 60 s, the accumulated
    difference, the table of the service difference, and throughput. `cost` is the unit of service; `curves_of`
    names the clients whose curves are kept (default: all)."""
    assert run.end is not None, "a run that has ended"
    end_s = run.end.t_s
    windows = Windows(run, cost=make_cost(cost))
    times = regular_times(end_s, step_s=SAMPLE_S)
    points = [float(second) for second in range(1, int(end_s) + 1)]
    accumulated = windows.accumulated_difference(points)
    service = windows.service(0.0, end_s)
    every, half = int(SAMPLE_S), len(points) // 2
    rates, responses = windows.service_rate(times), windows.response_time(times)
    kept = windows.clients if curves_of is None else [name for name in curves_of if name in windows.clients]
    return {
        "clients": {name: _client(run, name, service[name]) for name in windows.clients},
        "tokens_per_s": throughput(run),
        "difference": difference(run, make_cost(cost)),
        "accumulated": {
            "max": max((value for value in accumulated if value is not None), default=None),
            "half": accumulated[half - 1] if half else None,
            "end": accumulated[-1] if points else None,
        },
        "curves": {
            "times_s": list(times),
            "rate": {name: list(rates[name] or ()) for name in kept},
            "response_s": {name: list(responses[name]) for name in kept},
            "accumulated": {
                "times_s": points[every - 1 :: every],
                "units": list(accumulated[every - 1 :: every]),
            },
        },
    }


def difference(run: Run, cost: Cost) -> dict[str, Json]:
    """A row of the paper's tables: the service difference over 19 sample times. A request's cost is spread evenly
    from its first token to its end, as in the paper's own program."""
    assert run.end is not None, "a run that has ended"
    samples = sample_times(run.end.t_s, warm_up_s=min(30.0, run.end.t_s / 20))
    table = Windows(run, cost=cost, method="spread").difference_table(samples)
    return {"max": table.maximum, "avg": table.mean, "var": table.variance}


def _client(run: Run, name: str, service: float | None) -> dict[str, Json]:
    assert run.end is not None
    mine = [one for one in run.requests if one.client == name]
    waits = [one.t_first_token_s - one.t_intended_s for one in mine if one.t_first_token_s is not None]
    refused = [one for one in mine if one.outcome == Outcome.FAILED]
    unanswered = [one for one in mine if one.t_first_token_s is None and one.outcome != Outcome.FAILED]
    waited = [*waits, *(run.end.t_s - one.t_intended_s for one in unanswered)]
    percentiles = {
        f"p{percent}": found and found.value_s
        for percent in (50, 90)
        for found in [Percentile.of([(wait, False) for wait in waits], percent)]
    }
    return {
        "sent": len(mine),
        "answered": len(waits),
        "refused": len(refused),
        "service": service,
        "response_s": {"mean": fmean(waits) if waits else None, **percentiles},
        "waited_s": fmean(waited) if waited else None,
    }


# ---- numbers of results


def total_rate(result: Result) -> Line:
    """The sum of all clients' service rates, at times when every one is known."""
    curves = result.first["curves"]
    rows = zip(*curves["rate"].values(), strict=True)
    return curves["times_s"], [None if None in row else sum(row) for row in rows]


def largest_gap(result: Result, first: str, second: str, *, since_s: float = WINDOW_S) -> float:
    """The largest difference of two clients' service rates in a window, as a part of their mean. Raises ValueError
    where there is none."""
    (times, one), (_, other) = result.curve("rate", first), result.curve("rate", second)
    gaps = {
        time_s: 2 * abs(mine - theirs) / (mine + theirs)
        for time_s, mine, theirs in zip(times, one, other, strict=True)
        if mine is not None and theirs is not None and mine + theirs
    }
    return largest((list(gaps), list(gaps.values())), since_s)


def tenths(difference: Mapping[str, Json]) -> dict[str, Json]:
    """A row in tenths of its unit."""
    factors = {"max": 0.1, "avg": 0.1, "var": 0.01}
    return {key: None if value is None else value * factors[key] for key, value in difference.items()}


# ---- tables and plots

DIFFERENCE = """scheduler | max | max, paper | mean | mean, paper | variance | variance, paper | tokens/s |
    tokens/s, paper"""


def beside_paper(
    title: str, results: Iterable[Result], paper: Iterable[Sequence[float] | None], path: str = "difference"
) -> Table:
    """Service differences, each number beside the paper's."""
    paths, rows = [*(f"{path}/{what}" for what in ("max", "avg", "var")), "tokens_per_s"], []
    for one, theirs in zip(results, paper, strict=True):
        pairs = zip(map(one.shown, paths), theirs or (None,) * 4, strict=True)
        rows.append([one.cell.title, *(entry for pair in pairs for entry in pair)])
    return Table(title, DIFFERENCE, rows)


RATE = "service rate, units/s"
RESPONSE = "response time, s"


def rates_and_responses(result: Result) -> Figure:
    caption = f"""Received service rate in {WINDOW_S:.0f} s windows (left) and response time of the requests sent in
        them (right), VTC."""
    rates = Panel(RATE, result.curves("rate"), dashed={"total": total_rate(result)})
    return Figure("service", caption, [[rates, Panel(RESPONSE, result.curves("response_s"))]])


def rates(results: Mapping[str, Result]) -> Panels:
    return [[Panel(RATE, result.curves("rate"), title=title) for title, result in results.items()]]


def accumulated(*results: Result, bound: float | None = None) -> Panels:
    levels = {} if bound is None else {f"bound {bound:,.0f}": bound}
    return [[difference_panel({result.cell.title: result for result in results}, levels=levels)]]


def difference_panel(results: Mapping[str, Result], **more: Json) -> Panel:
    found = {name: result.first["curves"]["accumulated"] for name, result in results.items()}
    lines = {name: (one["times_s"], one["units"]) for name, one in found.items()}
    return Panel("difference of service, units", lines, **more)
