"""DLPM, Figure 9: trees of thoughts on four A10G, one client with questions ten times as long."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.contract import (
    Cell,
    Claim,
    Figure,
    Json,
    Report,
    Result,
    Size,
    Table,
    Traffic,
    verdict,
)
from workloads.experiments.curves import average, largest
from workloads.experiments.dlpm_fig7_setting import SCHEDULERS
from workloads.experiments.program_senders import QUESTION_TOKENS, sender, tot
from workloads.experiments.senders import FromSenders, traffic
from workloads.records import Run

REPLICAS = 4
LOAD = 1.5
"""What all ask for together, in parts of what the cluster does; well-behaved clients: two thirds of that."""
QUANTA = {"quantum": 5_000.0, "worker_quantum": 40_000.0}
"""Q^w is the paper's largest (Figure 10). By the rule of Figure 7 it would be 876,000 units here: three minutes of
a worker, for which one client's trees may stand in line at the one that holds them."""
LONG, SHORT = "client 0", ("client 1", "client 2")


def trees(replicas: int, *, factor: int = 10) -> Traffic:
    """Three clients with trees of three branches at equal rates; client 0's questions are `factor` times as long."""
    rate = dlpm.TOT3.rate_per_s(LOAD * replicas / 3)
    return traffic(
        "tot",
        sender(LONG, tot(3, QUESTION_TOKENS * factor), rate, well_behaved=factor == 1),
        *(sender(name, tot(3), rate) for name in SHORT),
    )


class Figure9(FromSenders):
    id = "dlpm-fig9"
    title = "Response time and service over time: trees of thoughts, one client with long questions"
    source = "DLPM, Figure 9"
    about = (
        "Llama-3.2-3B on four A10G. Three clients send trees of three branches (120 requests) at equal rates, 24 "
        "each; client 0's questions are ten times as long. Together they ask for 1.5 times what the cluster does, "
        "which the paper does not tell. All programs are run to their end. Q^u is 5,000 and Q^w 40,000 units."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        replicas, programs = (REPLICAS, 24) if full else (2, 2)
        return [
            Cell(
                name,
                dlpm.a10g(name, replicas, **QUANTA),
                trees(replicas),
                dlpm.plan(3600.0, programs, drain_s=None),
            )
            for name in SCHEDULERS
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return dlpm.observe_curves(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        ends = {name: result.number("end_s") for name, result in results.items()}
        fair, preble, strict = results["d2lpm"], results["preble"], results["vtc"]
        labels = {name: scheduler.label for name, scheduler in SCHEDULERS.items()}
        slowest = max(ends["vtc"], ends["preble"]) / ends["d2lpm"]
        first = min(ends, key=lambda name: (ends[name], name))
        waits = {
            name: max(largest(result.curve("response_s", one)) for one in SHORT)
            for name, result in results.items()
        }
        ratios = {name: _shares(result, "actual") for name, result in results.items()}
        seen = _shares(fair, "service")
        even = max(abs(ratios[name] - 1) for name in ("d2lpm", "vtc"))
        return Report(
            claims=[
                Claim(
                    "D2LPM finishes first",
                    "up to 2× faster than VTC and Preble",
                    f"{labels[first]} first; VTC {ends['vtc'] / ends['d2lpm']:.2f}×, Preble "
                    f"{ends['preble'] / ends['d2lpm']:.2f}×, RR+LPM {ends['rr'] / ends['d2lpm']:.2f}× its time",
                    verdict(first == "d2lpm" and slowest >= 1.5, partly=ends["d2lpm"] <= 1.05 * ends[first]),
                    "The pool of an A10G holds 129,000 tokens here, most of the trees under way, so little is "
                    "computed twice under any scheduler, and what is left to win is small.",
                ),
                Claim(
                    "VTC and D2LPM give all three the same actual service while all wait",
                    "equal",
                    f"client 0 over the others: D2LPM {ratios['d2lpm']:.2f}, VTC {ratios['vtc']:.2f}",
                    verdict(even <= 0.15, partly=even <= 0.4),
                    "A client waits for its own earlier thoughts at times, and then has nothing to be served.",
                ),
                Claim(
                    "Client 0 is then seen to receive more, because its long prefixes are cached",
                    "more than the others",
                    f"{seen:.1f}× the others' client-side service",
                    verdict(seen > 1.2),
                ),
                Claim(
                    "Schedulers without fairness control keep the others waiting",
                    "Preble up to 600 s",
                    f"clients 1 and 2, longest mean in 60 s: D2LPM {waits['d2lpm']:.0f} s, VTC {waits['vtc']:.0f} s, "
                    f"Preble {waits['preble']:.0f} s, RR+LPM {waits['rr']:.0f} s",
                    verdict(
                        min(waits["preble"], waits["rr"]) >= 2 * waits["d2lpm"],
                        partly=max(waits["preble"], waits["rr"]) >= 1.3 * waits["d2lpm"],
                    ),
                    "Our Preble does not pin a client to one GPU for long: it moves prefixes off a GPU that is much "
                    "busier than another, as its public code does.",
                ),
                Claim(
                    "Preble leaves most of the cluster idle while client 0's prefixes are pinned to one GPU",
                    "a quarter of the capacity from 300 to 600 s",
                    f"over the whole run the busiest replica computes {preble.number('imbalance'):.2f}× the "
                    f"average's prompt tokens (D2LPM {fair.number('imbalance'):.2f}×, VTC "
                    f"{strict.number('imbalance'):.2f}×)",
                    verdict(preble.number("imbalance") >= 2.0, partly=preble.number("imbalance") >= 1.3),
                    "As said above. What each replica did from 300 to 600 s is not kept: it is the run's work that "
                    "is shared evenly.",
                ),
            ],
            tables=[
                Table(
                    "The whole run",
                    (
                        "scheduler",
                        "end, s",
                        "tokens/s until then",
                        "hit rate",
                        "longest mean response of clients 1 and 2, s",
                        "actual service, client 0 : others",
                        "client-side, client 0 : others",
                    ),
                    [
                        (
                            labels[name],
                            result.shown("end_s"),
                            result.shown("tokens_per_s"),
                            result.shown("hit_rate"),
                            waits[name],
                            ratios[name],
                            _shares(result, "service"),
                        )
                        for name, result in results.items()
                    ],
                )
            ],
            figures=[
                Figure(
                    "time",
                    "Response time, actual service and client-side service in 60 s windows, to each scheduler's end.",
                    dlpm.over_time({labels[name]: result for name, result in results.items()}),
                    (13.0, 7.0),
                )
            ],
        )


def _shares(result: Result, what: str) -> float:
    """Client 0's service over the average of the others', from when queues have formed to the last arrivals."""
    last_s = 0.75 * result.first["end_s"]
    mine, *others = (
        average(result.curve(what, name), min(60.0, last_s / 2), last_s) for name in (LONG, *SHORT)
    )
    return mine / fmean(others)
