"""VTC, Figures 3a and 3b: two clients that both ask for more than there is."""

from collections.abc import Mapping, Sequence

from workloads.experiments import vtc_setting as vtc
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import Cell, Json, Result, Size, TrafficSpec, by_label
from workloads.experiments.senders import even, sender, traffic

RPM = (90, 180)


def overload(waiting: int = 0) -> TrafficSpec:
    """Both clients above half of what the engine serves, one twice the other."""
    return traffic(
        "overload",
        *(
            sender(f"client {k}", even(rpm, waiting), vtc.TOKENS, vtc.TOKENS)
            for k, rpm in enumerate(RPM, start=1)
        ),
    )


OVERLOAD = overload()


class Overload(vtc.VtcExperiment):
    id = "vtc-fig3"

    def cells(self, size: Size) -> Sequence[Cell]:
        return [vtc.cell(policy, policy, OVERLOAD, *vtc.extent(size)) for policy in ("vtc", "fcfs")]

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        return {"gap": vtc.largest_gap(results["vtc"], "client 1", "client 2")}

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        named = by_label(results)
        return {"difference": vtc.accumulated(named, bound=vtc.BOUND), "rate": vtc.rates(named)}
