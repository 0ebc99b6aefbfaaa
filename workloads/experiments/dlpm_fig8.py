"""DLPM, Figure 8: multi-turn conversations on two replicas; two clients flood, one of them calms down midway."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import Cell, Json, Result, Size, TrafficSpec, by_label
from workloads.experiments.curves import between, largest
from workloads.experiments.dlpm_fig7_setting import SCHEDULERS
from workloads.experiments.program_senders import CHAT, sender
from workloads.experiments.senders import traffic
from workloads.records import Run

REPLICAS = 2
MAX_RUNNING = 64
NORMAL, FLOOD = 0.12, 0.8
"""Of what the cluster does. Until the middle all ask for 1.84 times that, then for 1.16 times."""
GOOD, CALMS, FLOODS = ("client 0", "client 1"), "client 2", "client 3"
LENGTH_S, WINDOW_S = 200.0, 20.0


def conversations(replicas: int, length_s: float) -> TrafficSpec:
    """Clients 0 and 1 send as usual, 2 and 3 flood, 2 until the middle of the run."""
    normal, flood = (dlpm.CHAT.rate_per_s(part * replicas) for part in (NORMAL, FLOOD))
    return traffic(
        "chat",
        *(sender(name, CHAT, normal) for name in GOOD),
        sender(CALMS, CHAT, (flood, length_s / 2), (normal, length_s), well_behaved=False),
        sender(FLOODS, CHAT, flood, well_behaved=False),
    )


class Figure8(dlpm.A10GExperiment):
    id = "dlpm-fig8"

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s = LENGTH_S if size == "full" else 40.0
        return [
            Cell(
                name,
                dlpm.a10g(name, REPLICAS, **dlpm.CHAT.quanta | {"max_running": MAX_RUNNING}),
                conversations(REPLICAS, length_s),
                dlpm.plan(length_s),
                label=scheduler.label,
            )
            for name, scheduler in SCHEDULERS.items()
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return dlpm.observe_curves(run, window_s=WINDOW_S, step_s=4.0)

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        def longest(result: Result, *clients: str) -> float:
            return max(largest(result.curve("response_s", one)) for one in clients)

        return {
            "good_s": {name: longest(result, *GOOD) for name, result in results.items()},
            "floods_s": {name: longest(result, FLOODS) for name, result in results.items()},
            "calmed_s": {name: _calmed_s(result) for name, result in results.items()},
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"time": dlpm.over_time(by_label(results), (13.0, 5.0), ("response_s", "service"))}


def _calmed_s(result: Result) -> float | None:
    """Mean response time of client 2 in the quarter of the run after it calms down; None where nothing is served."""
    length_s = result.cell.plan.duration_s
    served = between(result.curve("response_s", CALMS), length_s / 2, 0.75 * length_s)
    return fmean(served) if served else None
