"""VTC, Figures 7 and 8: Poisson arrivals, requests of unlike lengths."""

from collections.abc import Mapping, Sequence

from workloads.experiments import vtc_setting as vtc
from workloads.experiments.contract import Cell, Claim, Figure, Json, Report, Result, Size, verdict
from workloads.experiments.senders import FromSenders, poisson, sender, traffic
from workloads.records import Run

SHAPES: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "short-long": ((64, 64), (256, 256)),
    "in-out": ((64, 512), (512, 64)),
}
"""(input, output) of client 1 and of client 2, in tokens: Figure 7 and Figure 8."""


class Lengths(FromSenders):
    id = "vtc-fig7-8"
    title = "Requests of unlike lengths at random times"
    source = "VTC, Figures 7 and 8"
    about = (
        "Poisson arrivals of 480 and 90 requests/min. Figure 7: 64 + 64 and 256 + 256 tokens; "
        "Figure 8: 64 + 512 and 512 + 64 tokens."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = (600.0, ("0", "1", "2")) if size == "full" else (180.0, ("0",))
        return [
            Cell(
                f"{name}.{policy}",
                vtc.site(policy),
                traffic(
                    name,
                    sender("client 1", poisson(480), *first),
                    sender("client 2", poisson(90), *second),
                ),
                vtc.plan(length_s),
                seeds,
            )
            for name, (first, second) in SHAPES.items()
            for policy in ("vtc", "fcfs")
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return vtc.observe(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        claims: list[Claim] = []
        figures: list[Figure] = []
        for name, figure in (("short-long", "Figure 7"), ("in-out", "Figure 8")):
            fair, fifo = results[f"{name}.vtc"], results[f"{name}.fcfs"]
            most, other = fair.number("accumulated/max"), fifo.number("accumulated/max")
            grows = vtc.growth(fifo)
            claims += [
                Claim(
                    f"{figure}: VTC's difference is bounded",
                    f"flat; at most 2U = {vtc.BOUND:,} units",
                    f"at most {most:,.0f} units",
                    verdict(most <= vtc.BOUND),
                ),
                Claim(
                    f"{figure}: FCFS's is not",
                    "grows steadily",
                    f"{other:,.0f} units, {other / most:.0f}× VTC's; at the end {grows:.2f}× that of half time",
                    verdict(other > 3 * most and grows >= 1.5, partly=other > most),
                ),
            ]
            both = {"VTC": fair, "FCFS": fifo}
            figures += [
                Figure(f"{name}-rate", f"{figure}: received service rate.", vtc.rates(both), (8.0, 3.4)),
                Figure(
                    f"{name}-difference",
                    f"{figure}: largest difference between clients' accumulated service.",
                    vtc.accumulated(both, bound=vtc.BOUND),
                    (6.0, 3.6),
                ),
            ]
        return Report(claims=claims, figures=figures)
