"""VTC, Figure 16: clients of unlike weights."""

from collections.abc import Mapping, Sequence

from workloads.experiments import vtc_setting as vtc
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import Cell, Json, Result, Size, by_label
from workloads.experiments.senders import even, sender, traffic

RPM = (48, 48, 72, 96)
WEIGHTS = {"client 1": 1.0, "client 2": 2.0, "client 3": 3.0, "client 4": 4.0}
LABELS = {"equal": "VTC", "weighted": "weighted VTC"}


class Weighted(vtc.VtcExperiment):
    id = "vtc-fig16"

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = vtc.extent(size)
        senders = (
            sender(name, even(rpm), vtc.TOKENS, vtc.TOKENS) for name, rpm in zip(WEIGHTS, RPM, strict=True)
        )
        sent = traffic("four", *senders)
        sites = {"equal": vtc.site("vtc"), "weighted": vtc.site("vtc", client_weights=WEIGHTS)}
        return [
            Cell(name, site, sent, vtc.plan(length_s), seeds, LABELS[name]) for name, site in sites.items()
        ]

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        equal, weighted = (_parts(results[name]) for name in LABELS)
        fair = [weight / sum(WEIGHTS.values()) for weight in WEIGHTS.values()]
        return {
            "uneven": max(equal) / min(equal) - 1,
            "off": max(abs(part / right - 1) for part, right in zip(weighted, fair, strict=True)),
            "over_first": {
                name: [part / parts[0] for part in parts]
                for name, parts in (("equal", equal), ("weighted", weighted))
            },
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"rate": vtc.rates(by_label(results), (8.4, 3.4))}


def _parts(result: Result) -> list[float]:
    """Each client's part of the service."""
    services = [result.number(f"clients/{name}/service") for name in WEIGHTS]
    return [service / sum(services) for service in services]
