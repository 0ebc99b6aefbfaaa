"""DLPM, Figure 9: trees of thoughts on four A10G, one client with questions ten times as long."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import Cell, Json, Result, Size, TrafficSpec, by_label
from workloads.experiments.curves import average, largest
from workloads.experiments.dlpm_fig7_setting import SCHEDULERS
from workloads.experiments.program_senders import QUESTION_TOKENS, sender, tot
from workloads.experiments.senders import traffic
from workloads.programs.tree_of_thought import TreeOfThought
from workloads.records import Run

REPLICAS, PROGRAMS = 4, 24
LOAD = 1.5
"""What all ask for together, in parts of what the cluster does; well-behaved clients: two thirds of that."""
QUANTUM, WORKER_QUANTUM = 5_000.0, 40_000.0
"""Q^w is the paper's largest (Figure 10). By the rule of Figure 7 it would be 876,000 units here: three minutes of
a worker, for which one client's trees may stand in line at the one that holds them."""
LONG, SHORT = "client 0", ("client 1", "client 2")
BRANCHES = 3
TREE_REQUESTS = TreeOfThought(BRANCHES).requests
WINDOW_S = 60.0


def trees(replicas: int, *, factor: int = 10) -> TrafficSpec:
    """Three clients with trees of three branches at equal rates; client 0's questions are `factor` times as long."""
    rate = dlpm.TOT3.rate_per_s(LOAD * replicas / 3)
    return traffic(
        "tot",
        sender(LONG, tot(BRANCHES, QUESTION_TOKENS * factor), rate, well_behaved=factor == 1),
        *(sender(name, tot(BRANCHES), rate) for name in SHORT),
    )


class Figure9(dlpm.A10GExperiment):
    id = "dlpm-fig9"

    def cells(self, size: Size) -> Sequence[Cell]:
        replicas, programs = (REPLICAS, PROGRAMS) if size == "full" else (2, 2)
        return [
            Cell(
                name,
                dlpm.a10g(name, replicas, quantum=QUANTUM, worker_quantum=WORKER_QUANTUM),
                trees(replicas),
                dlpm.plan(3600.0, programs, drain_s=None),
                label=scheduler.label,
            )
            for name, scheduler in SCHEDULERS.items()
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return dlpm.observe_curves(run, window_s=WINDOW_S)

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        ends = {name: result.number("end_s") for name, result in results.items()}
        first = min(ends, key=lambda name: (ends[name], name))
        return {
            "first": first,
            "first_label": SCHEDULERS[first].label,
            "later": {name: end / ends["d2lpm"] for name, end in ends.items()},
            "waits": {
                name: max(largest(result.curve("response_s", one)) for one in SHORT)
                for name, result in results.items()
            },
            "actual": {name: _shares(result, "actual") for name, result in results.items()},
            "seen": {name: _shares(result, "service") for name, result in results.items()},
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"time": dlpm.over_time(by_label(results), (13.0, 7.0))}


def _shares(result: Result, what: str) -> float:
    """Client 0's service over the mean of the others', from the time when queues have formed to the last arrivals."""
    last_s = 0.75 * result.first["end_s"]
    mine, *others = (
        average(result.curve(what, name), min(WINDOW_S, last_s / 2), last_s) for name in (LONG, *SHORT)
    )
    return mine / fmean(others)
