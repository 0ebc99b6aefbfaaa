"""VTC, Figures 4, 5, 6 and 9: clients that ask for less than their share, now and then, or more and more."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from statistics import fmean

from workloads.experiments import vtc_setting as vtc
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import Cell, Json, Result, Size, TrafficSpec
from workloads.experiments.curves import Line, average, variation
from workloads.experiments.senders import even, on_off, sender, traffic

BELOW_SHARE_RPM = (15, 30, 90)
ON_OFF_RPM, OVERLOADED_ON_OFF_RPM = (30, 120), (120, 180)
"""Client 1 sends at its rate every other minute, client 2 all the time."""
STEADY_RPM, RAMP_RPM = 30, (12, 120)


class _OneRun(vtc.VtcExperiment):
    """One cell, VTC on one traffic, and the paper's two panels: service rate and response time."""

    @abstractmethod
    def traffic(self, length_s: float) -> TrafficSpec:
        """The clients of a run of that length."""

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = vtc.extent(size) if size == "full" else (300.0, ("0",))
        return [vtc.cell("vtc", "vtc", self.traffic(length_s), length_s, seeds)]

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"service": vtc.rates_and_responses(results["vtc"])}


def _clients(name: str, *arrivals: Mapping[str, Json]) -> TrafficSpec:
    return traffic(
        name, *(sender(f"client {k}", one, vtc.TOKENS, vtc.TOKENS) for k, one in enumerate(arrivals, start=1))
    )


class BelowShare(_OneRun):
    id = "vtc-fig4"

    def traffic(self, length_s: float) -> TrafficSpec:
        return _clients("below-share", *(even(rpm) for rpm in BELOW_SHARE_RPM))

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        return {"response_s": _by_third(results["vtc"], "client 3")}


class OnOff(_OneRun):
    id = "vtc-fig5"

    def traffic(self, length_s: float) -> TrafficSpec:
        return _clients("on-off", on_off(ON_OFF_RPM[0]), even(ON_OFF_RPM[1]))

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        run = results["vtc"]
        off = vtc.phases_of(run.cell.plan.duration_s - 60.0, 60.0, 60.0)
        middles = [(start + end) / 2 for start, end in off]
        share = _share(run, "client 2")
        return {
            "varies": variation(vtc.total_rate(run), vtc.WINDOW_S),
            "off_share": fmean(average(share, middle - 1, middle + 1) for middle in middles),
        }


class OnOffOverload(_OneRun):
    id = "vtc-fig6"

    def traffic(self, length_s: float) -> TrafficSpec:
        return _clients("on-off-overload", on_off(OVERLOADED_ON_OFF_RPM[0]), even(OVERLOADED_ON_OFF_RPM[1]))

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        return {"gap": vtc.largest_gap(results["vtc"], "client 1", "client 2")}


class Isolation(_OneRun):
    id = "vtc-fig9"

    def traffic(self, length_s: float) -> TrafficSpec:
        ramp = {"kind": "ramp", "rpm": RAMP_RPM[0], "to_rpm": RAMP_RPM[1], "over_s": length_s}
        return _clients("ramp", even(STEADY_RPM), ramp)

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        return {"response_s": [_by_third(results["vtc"], f"client {k}") for k in (1, 2)]}


def _share(run: Result, client: str) -> Line:
    """A client's part of the total service rate over time."""
    (times, total), (_, mine) = vtc.total_rate(run), run.curve("rate", client)
    parts = zip(mine, total, strict=True)
    return times, [None if one is None or not every else one / every for one, every in parts]


def _by_third(run: Result, client: str) -> dict[str, float]:
    """A client's response time, the mean in the first and in the last third of the run."""
    line, length_s = run.curve("response_s", client), run.cell.plan.duration_s
    return {
        "first": average(line, 0.0, length_s / 3),
        "last": average(line, length_s * 2 / 3, length_s),
    }
