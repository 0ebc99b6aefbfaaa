"""VTC, Figures 3a and 3b: two clients that both ask for more than there is."""

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
    Traffic,
    medians,
    verdict,
)
from workloads.experiments.senders import FromSenders, even, sender, traffic
from workloads.records import Run


def overload(waiting: int = 0) -> Traffic:
    """Both above half of what the engine serves, one twice the other."""
    return traffic(
        "overload",
        sender("client 1", even(90, waiting), 256, 256),
        sender("client 2", even(180, waiting), 256, 256),
    )


OVERLOAD = overload()


class Overload(FromSenders):
    id = "vtc-fig3"
    title = "Two clients, both overloaded, one sends twice as much"
    source = "VTC, Figures 3a and 3b"
    about = "90 and 180 requests/min of 256 input and 256 output tokens, evenly spaced, for 10 minutes."

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = (600.0, ("0", "1", "2")) if size == "full" else (180.0, ("0",))
        return [
            Cell(policy, vtc.site(policy), OVERLOAD, vtc.plan(length_s), seeds) for policy in ("vtc", "fcfs")
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return vtc.observe(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        fair, fifo = results["vtc"], results["fcfs"]
        most, grows = fair.number("accumulated/max"), vtc.growth(fifo)
        gap = vtc.largest_gap(fair, "client 1", "client 2")
        share = vtc.ratio_of_service(fifo, "client 2", "client 1")
        return Report(
            claims=[
                Claim(
                    "VTC bounds the difference between backlogged clients, however long they are backlogged",
                    f"flat; at most 2U = {vtc.BOUND:,} units",
                    f"at most {most:,.0f} units",
                    verdict(most <= vtc.BOUND),
                ),
                Claim(
                    "FCFS's difference grows with time",
                    "grows steadily",
                    f"at the end {grows:.2f}× that of half time",
                    verdict(grows >= 1.7, partly=grows >= 1.3),
                ),
                Claim(
                    "Under VTC both receive the same rate at any time (60 s windows)",
                    "equal",
                    f"within {gap:.1%}",
                    verdict(gap <= 0.1, partly=gap <= 0.25),
                    "A batch is admitted as one client's or the other's, and a window holds only some batches.",
                ),
                Claim(
                    "FCFS serves more to whoever sends more",
                    "as their rates, 2 : 1",
                    f"{share:.2f} : 1",
                    verdict(share >= 1.8),
                ),
            ],
            tables=[
                medians(
                    "Service received in the run",
                    "scheduler",
                    {
                        "client 1, units": "clients/client 1/service",
                        "client 2, units": "clients/client 2/service",
                        "largest difference, units": "accumulated/max",
                        "tokens/s": "tokens_per_s",
                    },
                    {"VTC": fair, "FCFS": fifo},
                )
            ],
            figures=[
                vtc.difference_figure({"VTC": fair, "FCFS": fifo}, bound=vtc.BOUND),
                Figure(
                    "rate",
                    "Received service rate in 60 s windows.",
                    vtc.rates({"VTC": fair, "FCFS": fifo}),
                    (8.0, 3.4),
                ),
            ],
        )
