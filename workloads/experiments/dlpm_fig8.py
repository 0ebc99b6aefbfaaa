"""DLPM, Figure 8: multi-turn conversations on two replicas; two clients flood, one of them calms down midway."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from workloads.experiments import dlpm_setting as dlpm
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
from workloads.experiments.curves import between, largest
from workloads.experiments.dlpm_fig7_setting import SCHEDULERS
from workloads.experiments.program_senders import CHAT, sender
from workloads.experiments.senders import FromSenders, traffic
from workloads.records import Run

REPLICAS = 2
MAX_RUNNING = 64
NORMAL, FLOOD = 0.12, 0.8
"""Of what the cluster does. Until the middle all ask for 1.84 times that, then for 1.16 times."""
GOOD, CALMS, FLOODS = ("client 0", "client 1"), "client 2", "client 3"


def conversations(replicas: int, length_s: float) -> Traffic:
    """Clients 0 and 1 send as usual, 2 and 3 flood, 2 until the middle of the run."""
    normal, flood = (dlpm.CHAT.rate_per_s(part * replicas) for part in (NORMAL, FLOOD))
    return traffic(
        "chat",
        *(sender(name, CHAT, normal) for name in GOOD),
        sender(CALMS, CHAT, (flood, length_s / 2), (normal, length_s), well_behaved=False),
        sender(FLOODS, CHAT, flood, well_behaved=False),
    )


class Figure8(FromSenders):
    id = "dlpm-fig8"
    title = "Conversations: two clients flood, one of them calms down midway"
    source = "DLPM, Figure 8"
    about = (
        "Llama-3.2-3B on two A10G that run 64 requests at a time. Conversations have the lengths of Chatbot Arena's "
        "(made from a seed). Clients 0 and 1 ask for 12 % of what the cluster does each, clients 2 and 3 for 80 % "
        "each, client 2 from the middle of the 200 s on for 12 %. The paper does not tell its rates."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        length_s = 200.0 if full else 40.0
        return [
            Cell(
                name,
                dlpm.a10g(name, REPLICAS, **dlpm.CHAT.quanta | {"max_running": MAX_RUNNING}),
                conversations(REPLICAS, length_s),
                dlpm.plan(length_s),
            )
            for name in SCHEDULERS
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return dlpm.observe_curves(run, window_s=20.0, step_s=4.0)

    def report(self, results: Mapping[str, Result]) -> Report:
        labels = {name: scheduler.label for name, scheduler in SCHEDULERS.items()}
        length_s = results["d2lpm"].cell.plan.duration_s
        good = {
            name: max(largest(result.curve("response_s", one)) for one in GOOD)
            for name, result in results.items()
        }
        floods = {name: largest(result.curve("response_s", FLOODS)) for name, result in results.items()}
        calmed = {
            name: fmean(served) if served else None
            for name, result in results.items()
            for served in [between(result.curve("response_s", CALMS), length_s / 2, 0.75 * length_s)]
        }
        fair, strict = calmed["d2lpm"], calmed["vtc"]
        return Report(
            claims=[
                Claim(
                    "Under LPM clients 0 and 1 wait long; VTC and D2LPM protect them",
                    "high response times; low under VTC and D2LPM",
                    f"longest mean in 20 s: RR+LPM {good['rr']:.1f} s, VTC {good['vtc']:.1f} s, "
                    f"D2LPM {good['d2lpm']:.1f} s",
                    verdict(
                        max(good["vtc"], good["d2lpm"]) <= 0.2 * good["rr"],
                        partly=max(good["vtc"], good["d2lpm"]) <= 0.5 * good["rr"],
                    ),
                ),
                Claim(
                    "Under VTC the flooding clients wait long",
                    "up to 80 s",
                    f"{floods['vtc']:.0f} s (D2LPM {floods['d2lpm']:.0f} s)",
                    verdict(floods["vtc"] >= 40, partly=floods["vtc"] >= 10),
                    "How long depends on how far they are above their share, and for how long.",
                ),
                Claim(
                    "D2LPM keeps the client fast that has calmed down",
                    "consistently low, as clients 0 and 1",
                    "mean of what it sends in the quarter after that: "
                    + ", ".join(f"{labels[name]} {_shown(calmed[name])}" for name in results),
                    verdict(
                        fair is not None and fair <= 2.0,
                        partly=fair is not None and strict is not None and fair <= 0.5 * strict,
                    ),
                    "It calms down with a queue of a minute, and its own requests go by prefix, then by arrival: what "
                    "it sends as a calm client waits for what it sent before, under every scheduler. Under D2LPM it "
                    "is the sooner through with it the fewer it had sent above its share; the paper does not tell.",
                ),
            ],
            tables=[
                Table(
                    "Response times, s, and throughput",
                    (
                        "scheduler",
                        "clients 0 and 1, longest mean",
                        "client 2 in the quarter after it calms down, mean",
                        "client 3, longest mean",
                        "tokens/s",
                        "hit rate",
                        "difference, units",
                    ),
                    [
                        (
                            labels[name],
                            good[name],
                            calmed[name],
                            floods[name],
                            result.shown("tokens_per_s"),
                            result.shown("hit_rate"),
                            result.shown("difference"),
                        )
                        for name, result in results.items()
                    ],
                )
            ],
            figures=[
                Figure(
                    "time",
                    "Response time and client-side service in 20 s windows. Client 2 calms down in the middle. "
                    "What the run's end left waiting has no response time, so curves fall towards the end.",
                    dlpm.over_time(
                        {labels[name]: result for name, result in results.items()}, ("response_s", "service")
                    ),
                    (13.0, 5.0),
                )
            ],
        )


def _shown(seconds: float | None) -> str:
    return "nothing served" if seconds is None else f"{seconds:.1f} s"
