"""VTC, Figure 10: what clients ask for changes twice; LCF, which has no counter lift, makes up for old times."""

from collections.abc import Mapping, Sequence

from workloads.experiments import vtc_setting as vtc
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Size, TrafficSpec, by_label
from workloads.experiments.curves import average
from workloads.experiments.senders import even, on_off, sender, traffic

PHASE_S = 300.0
RPM = ((30, 60, 30), (120, 60, 90))
"""Of client 1 and of client 2 in each phase; in the first, client 1 sends every other minute."""


class Shift(vtc.VtcExperiment):
    id = "vtc-fig10"

    def cells(self, size: Size) -> Sequence[Cell]:
        phase_s, seeds = (PHASE_S, SEEDS) if size == "full" else (120.0, SEEDS[:1])
        return [vtc.cell(policy, policy, _traffic(phase_s), 3 * phase_s, seeds) for policy in ("vtc", "lcf")]

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        asked = RPM[0][1] / 60 * (vtc.TOKENS + 2 * vtc.TOKENS)
        return {
            "shares": {name: [_share(one, phase) for phase in range(3)] for name, one in results.items()},
            "served": {name: _rate(one, "client 1", 1) / asked for name, one in results.items()},
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"rate": vtc.rates(by_label(results), (9.0, 3.4))}


def _traffic(phase_s: float) -> TrafficSpec:
    first = [on_off(RPM[0][0]), *(even(rpm) for rpm in RPM[0][1:])]
    phases = (
        {"kind": "phases", "phases": [[phase_s, one] for one in each]}
        for each in (first, [even(rpm) for rpm in RPM[1]])
    )
    return traffic(
        "shift", *(sender(f"client {k}", one, vtc.TOKENS, vtc.TOKENS) for k, one in enumerate(phases, 1))
    )


def _rate(result: Result, client: str, phase: int) -> float:
    """A client's service rate in the windows that lie inside a phase, units/s."""
    phase_s = result.cell.plan.duration_s / 3
    return average(result.curve("rate", client), phase * phase_s + 30.0, (phase + 1) * phase_s - 30.0)


def _share(result: Result, phase: int) -> float:
    """Client 1's part of what both receive, in the windows that lie inside a phase."""
    one, other = (_rate(result, f"client {k}", phase) for k in (1, 2))
    return one / (one + other)
