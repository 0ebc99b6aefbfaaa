"""VTC, Figures 7 and 8: Poisson arrivals, requests of unlike lengths."""

from collections.abc import Mapping, Sequence

from workloads.experiments import vtc_setting as vtc
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import Cell, Result, Size
from workloads.experiments.senders import poisson, sender, traffic

RPM = (480, 90)
SHAPES: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "short-long": ((64, 64), (256, 256)),
    "in-out": ((64, 512), (512, 64)),
}
"""(input, output) of client 1 and of client 2, in tokens: Figure 7 and Figure 8."""


class Lengths(vtc.VtcExperiment):
    id = "vtc-fig7-8"

    def cells(self, size: Size) -> Sequence[Cell]:
        return [
            vtc.cell(
                f"{name}.{policy}",
                policy,
                traffic(
                    name,
                    *(
                        sender(f"client {k}", poisson(rpm), *shape)
                        for k, (rpm, shape) in enumerate(zip(RPM, shapes, strict=True), start=1)
                    ),
                ),
                *vtc.extent(size),
            )
            for name, shapes in SHAPES.items()
            for policy in ("vtc", "fcfs")
        ]

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        found = {}
        for name in SHAPES:
            both = {"VTC": results[f"{name}.vtc"], "FCFS": results[f"{name}.fcfs"]}
            found[f"{name}-rate"] = vtc.rates(both)
            found[f"{name}-difference"] = vtc.accumulated(both, bound=vtc.BOUND)
        return found
