"""VTC, Figure 16: clients of unlike weights."""

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
    medians,
    verdict,
)
from workloads.experiments.senders import FromSenders, even, sender, traffic
from workloads.records import Run

RATES_RPM = (48, 48, 72, 96)
WEIGHTS = {"client 1": 1.0, "client 2": 2.0, "client 3": 3.0, "client 4": 4.0}


class Weighted(FromSenders):
    id = "vtc-fig16"
    title = "Weights of 1 : 2 : 3 : 4"
    source = "VTC, Figure 16"
    about = "Four overloaded clients, 48, 48, 72 and 96 requests/min of 256 + 256 tokens, without and with weights."

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = (600.0, ("0", "1", "2")) if size == "full" else (180.0, ("0",))
        senders = (sender(name, even(rpm), 256, 256) for name, rpm in zip(WEIGHTS, RATES_RPM, strict=True))
        sent = traffic("four", *senders)
        return [
            Cell("equal", vtc.site("vtc"), sent, vtc.plan(length_s), seeds),
            Cell("weighted", vtc.site("vtc", client_weights=WEIGHTS), sent, vtc.plan(length_s), seeds),
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return vtc.observe(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        equal, weighted = (_parts(results[name]) for name in ("equal", "weighted"))
        off = max(
            abs(part / (weight / sum(WEIGHTS.values())) - 1)
            for part, weight in zip(weighted, WEIGHTS.values(), strict=True)
        )
        uneven = max(equal) / min(equal) - 1
        return Report(
            claims=[
                Claim(
                    "Without weights all receive the same",
                    "equal",
                    " : ".join(f"{part / equal[0]:.2f}" for part in equal),
                    verdict(uneven <= 0.05, partly=uneven <= 0.15),
                ),
                Claim(
                    "With weights they receive in proportion",
                    "1 : 2 : 3 : 4",
                    " : ".join(f"{part / weighted[0]:.2f}" for part in weighted),
                    verdict(off <= 0.1, partly=off <= 0.2),
                ),
            ],
            tables=[
                medians(
                    "Service received in the run, units",
                    "policy",
                    {name: f"clients/{name}/service" for name in WEIGHTS},
                    {"VTC": results["equal"], "weighted VTC": results["weighted"]},
                )
            ],
            figures=[
                Figure(
                    "rate",
                    "Received service rate in 60 s windows.",
                    vtc.rates({"VTC": results["equal"], "weighted VTC": results["weighted"]}),
                    (8.4, 3.4),
                )
            ],
        )


def _parts(result: Result) -> list[float]:
    """Each client's part of the service."""
    services = [result.number(f"clients/{name}/service") for name in WEIGHTS]
    return [service / sum(services) for service in services]
