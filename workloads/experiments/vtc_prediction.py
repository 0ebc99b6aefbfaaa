"""VTC, Figure 19 and Tables 4 to 6: predicted outputs, and another cost function, when all are overloaded."""

from collections.abc import Mapping, Sequence

from sglang_fair.core.cost import make_cost
from workloads.experiments import vtc_setting as vtc
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import Cell, Json, Result, Size, TrafficSpec, by_label
from workloads.experiments.senders import even, sender, traffic
from workloads.experiments.vtc_overload import OVERLOAD, RPM, overload
from workloads.records import Run

EIGHT_RPM = (24, 24, 24, 36, 36, 36, 36, 36)


def eight(waiting: int = 0) -> TrafficSpec:
    """Eight overloaded clients."""
    return traffic(
        "eight",
        *(
            sender(f"client {k}", even(rpm, waiting), vtc.TOKENS, vtc.TOKENS)
            for k, rpm in enumerate(EIGHT_RPM, start=1)
        ),
    )


TRAFFICS = {
    "two": overload(vtc.IN_STEP),
    "two-spread": OVERLOAD,
    "eight": eight(vtc.IN_STEP),
    "eight-spread": eight(),
}
"""With some requests of all waiting at the start, so that requests run in step; and without."""

POLICIES = ("vtc", "vtc-noisy", "vtc-oracle")
TWO_RPM = RPM


class Prediction(vtc.VtcExperiment):
    id = "vtc-fig19"

    def cells(self, size: Size) -> Sequence[Cell]:
        return [
            vtc.cell(f"{name}.{policy}", policy, sent, *vtc.extent(size))
            for name, sent in TRAFFICS.items()
            for policy in POLICIES
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return vtc.observe(run, curves_of=())

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {
            f"{name}-difference": vtc.accumulated(
                by_label({policy: results[f"{name}.{policy}"] for policy in POLICIES})
            )
            for name in ("two", "eight")
        }


class Profiled(vtc.VtcExperiment):
    id = "vtc-tab4"

    def cells(self, size: Size) -> Sequence[Cell]:
        return [
            vtc.cell(policy, policy, OVERLOAD, *vtc.extent(size), cost="profiled")
            for policy in ("fcfs", "vtc", "vtc-oracle")
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        found = vtc.observe(run, cost="profiled", curves_of=())
        return {**found, "difference": vtc.tenths(vtc.difference(run, make_cost("profiled")))}

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"difference": vtc.accumulated(by_label(results))}
