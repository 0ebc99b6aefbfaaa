"""VTC, Figure 10: what clients ask for changes twice; LCF, which has no counter lift, makes up for old times."""

from collections.abc import Mapping, Sequence

from workloads.experiments import vtc_setting as vtc
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
from workloads.experiments.curves import average
from workloads.experiments.senders import FromSenders, even, on_off, sender, traffic
from workloads.records import Run

OVERLOAD_RPM = 60
"""Of each client in the second phase."""


class Shift(FromSenders):
    id = "vtc-fig10"
    title = "Traffic that shifts: what one client did not use is not made up for later"
    source = "VTC, Figure 10"
    about = (
        "Three phases of 5 minutes: client 1 sends 30 requests/min every other minute while client 2 sends 120 all the "
        "time; both send 60, which is more than the engine serves; 30 and 90. All 256 + 256 tokens."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        phase_s, seeds = (300.0, ("0", "1", "2")) if size == "full" else (120.0, ("0",))
        return [
            Cell(policy, vtc.site(policy), self._traffic(phase_s), vtc.plan(3 * phase_s), seeds)
            for policy in ("vtc", "lcf")
        ]

    def _traffic(self, phase_s: float) -> Traffic:
        first = [on_off(30), even(OVERLOAD_RPM), even(30)]
        second = [even(120), even(OVERLOAD_RPM), even(90)]
        phases = ({"kind": "phases", "phases": [[phase_s, one] for one in each]} for each in (first, second))
        return traffic("shift", *(sender(f"client {k}", one, 256, 256) for k, one in enumerate(phases, 1)))

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return vtc.observe(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        rows = {
            label: [self._share(results[cell], phase) for phase in range(3)]
            for label, cell in (("VTC", "vtc"), ("LCF", "lcf"))
        }
        fair = rows["VTC"][1]
        asked = OVERLOAD_RPM / 60 * (256 + 2 * 256)
        served = {label: self._rate(results[label.lower()], 1) / asked for label in rows}
        apart = max(abs(rows["VTC"][phase] - rows["LCF"][phase]) for phase in (0, 2))
        return Report(
            claims=[
                Claim(
                    "When both overload, VTC serves them alike",
                    "equal rates",
                    f"client 1 receives {fair:.0%}",
                    verdict(abs(fair - 0.5) <= 0.05, partly=abs(fair - 0.5) <= 0.1),
                ),
                Claim(
                    "LCF then favours client 1, whose counter lags behind from before",
                    "disproportionately client 1",
                    f"client 1 receives {served['LCF']:.0%} of what it asks for, {rows['LCF'][1]:.0%} of the whole; "
                    f"under VTC {served['VTC']:.0%} and {fair:.0%}",
                    verdict(
                        served["LCF"] >= 0.97 and rows["LCF"][1] >= fair + 0.04, partly=rows["LCF"][1] > fair
                    ),
                    "It cannot receive more than it asks for.",
                ),
                Claim(
                    "Before and after, VTC and LCF are alike",
                    "similar",
                    f"client 1's shares differ by at most {apart * 100:.0f} points",
                    verdict(apart <= 0.05, partly=apart <= 0.1),
                    "Under VTC client 1 begins the last phase with a backlog, for it asked for more than its half; "
                    "under LCF it has none.",
                ),
            ],
            tables=[
                Table(
                    "Client 1's part of the service, by phase",
                    ("scheduler", "ON/OFF, %", "overload, %", "below its share, %"),
                    [(label, *(100 * share for share in shares)) for label, shares in rows.items()],
                )
            ],
            figures=[
                Figure(
                    "rate",
                    "Received service rate in 60 s windows.",
                    vtc.rates({"VTC": results["vtc"], "LCF": results["lcf"]}),
                    (9.0, 3.4),
                )
            ],
        )

    @staticmethod
    def _rate(result: Result, phase: int) -> float:
        """Client 1's service rate in the windows that lie inside a phase, units/s."""
        return average(result.curve("rate", "client 1"), *Shift._span(result, phase))

    @staticmethod
    def _span(result: Result, phase: int) -> tuple[float, float]:
        phase_s = result.cell.plan.duration_s / 3
        return phase * phase_s + 30.0, (phase + 1) * phase_s - 30.0

    @staticmethod
    def _share(result: Result, phase: int) -> float:
        """Client 1's part of what both receive, in the windows that lie inside a phase."""
        span = Shift._span(result, phase)
        one, other = (average(result.curve("rate", f"client {k}"), *span) for k in (1, 2))
        return one / (one + other)
