"""VTC, Figure 19 and Tables 4 to 6: predicted outputs, and another cost function, when all are overloaded."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from sglang_fair.core.cost import make_cost
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
from workloads.experiments.senders import FromSenders, even, sender, traffic
from workloads.experiments.vtc_overload import OVERLOAD, overload
from workloads.records import Run


def eight(waiting: int = 0) -> Traffic:
    """Eight overloaded clients."""
    rates = (24, 24, 24, 36, 36, 36, 36, 36)
    return traffic(
        "eight",
        *(sender(f"client {k}", even(rpm, waiting), 256, 256) for k, rpm in enumerate(rates, start=1)),
    )


TRAFFICS = {
    "two": overload(vtc.IN_STEP),
    "two-spread": OVERLOAD,
    "eight": eight(vtc.IN_STEP),
    "eight-spread": eight(),
}
"""With some requests of all waiting at the start, so that requests run in step; and without."""

POLICIES = {"VTC": "vtc", "VTC (±50%)": "vtc-noisy", "VTC (oracle)": "vtc-oracle"}

PAPER: Mapping[str, Mapping[str, vtc.PaperRow]] = {
    "two": {
        "VTC": (192.88, 103.77, 6981.24, 893),
        "VTC (±50%)": (33.98, 12.54, 111.94, 904),
        "VTC (oracle)": (5.87, 0.51, 1.71, 895),
    },
    "eight": {
        "VTC": (322.16, 162.20, 5151.49, 875),
        "VTC (±50%)": (99.43, 66.32, 487.10, 875),
        "VTC (oracle)": (43.23, 36.34, 56.52, 875),
    },
}
"""Tables 5 and 6: maximum, mean and variance of the service difference, and tokens/s."""


class Prediction(FromSenders):
    id = "vtc-fig19"
    title = "Charging predicted outputs ahead shrinks the difference"
    source = "VTC, Figure 19, Tables 5 and 6"
    about = (
        "256 + 256 tokens, evenly spaced, overloaded: two clients (90 and 180 requests/min), or eight (24 and 36). "
        "Once with some requests of all waiting at the start, so that requests run in step, as in the paper's engine, "
        "which admits every ten decode steps; once as stated."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = (600.0, ("0", "1", "2")) if size == "full" else (180.0, ("0",))
        return [
            Cell(f"{name}.{policy}", vtc.site(policy), sent, vtc.plan(length_s), seeds)
            for name, sent in TRAFFICS.items()
            for policy in POLICIES.values()
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return vtc.observe(run, curves_of=())

    def report(self, results: Mapping[str, Result]) -> Report:
        claims: list[Claim] = []
        tables: list[Table] = []
        figures: list[Figure] = []
        for name, number in (("two", 5), ("eight", 6)):
            mine, spread = (
                {label: results[f"{cell}.{policy}"] for label, policy in POLICIES.items()}
                for cell in (name, f"{name}-spread")
            )
            paper = PAPER[name]
            average, apart = (
                {label: one.number("difference/avg") for label, one in found.items()}
                for found in (mine, spread)
            )
            noisy, oracle = (
                [found[label] / found["VTC"] for found in (average, apart)]
                for label in ("VTC (±50%)", "VTC (oracle)")
            )
            throughputs = [one.number("tokens_per_s") for one in mine.values()]
            claims += [
                Claim(
                    f"Table {number}: a prediction that is up to 50 % off shrinks the mean difference",
                    _ratio(paper["VTC (±50%)"][1], paper["VTC"][1]),
                    _both("VTC (±50%)", average, apart),
                    verdict(max(noisy) <= 0.6, partly=min(noisy) <= 0.6),
                    "How far plain VTC swings is a matter of how many requests are admitted at once: out of step it "
                    "swings little, and there is little to gain.",
                ),
                Claim(
                    f"Table {number}: an oracle shrinks it further",
                    _ratio(paper["VTC (oracle)"][1], paper["VTC"][1]),
                    _both("VTC (oracle)", average, apart),
                    verdict(
                        max(oracle) <= 0.4
                        and all(less <= more for less, more in zip(oracle, noisy, strict=True)),
                        partly=oracle[0] <= min(0.4, noisy[0]) or oracle[1] <= min(0.4, noisy[1]),
                    ),
                    "What is left is the one request by which counters must differ, and out of step plain VTC is near "
                    "that.",
                ),
                Claim(
                    f"Table {number}: throughput is unchanged",
                    " / ".join(f"{row[3]:,.0f}" for row in paper.values()) + " tokens/s",
                    " / ".join(f"{value:,.0f}" for value in throughputs) + " tokens/s",
                    verdict(max(throughputs) <= 1.02 * min(throughputs)),
                ),
            ]
            tables += [
                vtc.difference_table(f"Table {number}: {name} clients", mine, paper),
                vtc.difference_table(f"The same, requests out of step: {name} clients", spread, paper),
            ]
            figures.append(
                Figure(
                    f"{name}-difference",
                    f"Largest difference between the accumulated service of {name} overloaded clients. A difference "
                    "that stays is of the first seconds, before all are backlogged.",
                    vtc.accumulated(mine),
                    (6.0, 3.6),
                )
            )
        return Report(
            claims=claims,
            tables=tables,
            figures=figures,
            notes=[
                "Plain VTC charges an output when it is made, so a client that is behind by some units is given a "
                "request for each 256 of them, which cost 768: it is over-compensated, and the other is next. In step "
                "this swings up to a pool that is one client's alone; out of step there is room for one request at a "
                "time, the counters are looked at before each, and little is left for a prediction to gain."
            ],
        )


class Profiled(FromSenders):
    id = "vtc-tab4"
    title = "Another cost of service: profiled"
    source = "VTC, Table 4"
    about = (
        "As Figure 3, with the cost that the authors fitted to their engine. Differences are in tenths of its units: "
        "the paper's tables have them so (0.56 requests/s more for one client are 3,086 units/s by its formula, and "
        "its FCFS row says 317)."
    )
    POLICIES: ClassVar = {"FCFS": "fcfs", "VTC": "vtc", "VTC (oracle)": "vtc-oracle"}
    PAPER: ClassVar[Mapping[str, vtc.PaperRow]] = {
        "FCFS": (323.18, 317.13, 15.98, 876.0),
        "VTC": (137.27, 74.87, 2819.40, 900.0),
        "VTC (oracle)": (4.28, 0.34, 0.91, 893.0),
    }

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = (600.0, ("0", "1", "2")) if size == "full" else (180.0, ("0",))
        return [
            Cell(policy, vtc.site(policy, cost="profiled"), OVERLOAD, vtc.plan(length_s), seeds)
            for policy in self.POLICIES.values()
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        found = vtc.observe(run, cost="profiled", curves_of=())
        return {**found, "difference": vtc.tenths(vtc.difference(run, make_cost("profiled")))}

    def report(self, results: Mapping[str, Result]) -> Report:
        mine = {label: results[policy] for label, policy in self.POLICIES.items()}
        average = {label: one.number("difference/avg") for label, one in mine.items()}
        fair, oracle = average["VTC"] / average["FCFS"], average["VTC (oracle)"] / average["FCFS"]
        return Report(
            claims=[
                Claim(
                    "Under the profiled cost, VTC's mean difference is far below FCFS's",
                    _ratio(self.PAPER["VTC"][1], self.PAPER["FCFS"][1]),
                    _ratio(average["VTC"], average["FCFS"]),
                    verdict(fair <= 0.5, partly=fair < 1),
                ),
                Claim(
                    "With an oracle there is next to none left",
                    _ratio(self.PAPER["VTC (oracle)"][1], self.PAPER["FCFS"][1]),
                    _ratio(average["VTC (oracle)"], average["FCFS"]),
                    verdict(oracle <= 0.1, partly=oracle < fair),
                ),
            ],
            tables=[vtc.difference_table("Table 4: service difference, profiled cost", mine, self.PAPER)],
            figures=[vtc.difference_figure(mine, what=", profiled cost")],
        )


def _both(label: str, in_step: Mapping[str, float], out_of_step: Mapping[str, float]) -> str:
    """What a scheduler makes of VTC's mean difference."""
    inside, outside = (_ratio(found[label], found["VTC"]) for found in (in_step, out_of_step))
    return f"in step {inside}; out of step {outside}"


def _ratio(value: float, base: float) -> str:
    return f"{base:.1f} to {value:.1f}, {value / base:.0%}"
