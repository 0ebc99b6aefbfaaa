"""DLPM, Figure 11: from five clients to fifty at the same total rate."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments import style
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
from workloads.experiments.dlpm_fig7_setting import observe
from workloads.experiments.program_senders import sender, tot
from workloads.experiments.senders import FromSenders, traffic
from workloads.records import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

COUNTS = (5, 10, 20, 35, 50)
POLICIES = {"dlpm": "DLPM", "lpm": "LPM", "vtc": "VTC"}
LOAD = 1.5
INSTRUCTIONS = 1000


def crowd(count: int) -> Traffic:
    """So many clients with trees of two branches, at `LOAD` times what the GPU does together."""
    rate = dlpm.TOT2.rate_per_s(LOAD / count)
    return traffic(
        "tot", *(sender(f"client {k}", tot(2, instructions=INSTRUCTIONS), rate) for k in range(count))
    )


class Figure11(FromSenders):
    id = "dlpm-fig11"
    title = "From 5 to 50 clients at the same total rate"
    source = "DLPM, Figure 11"
    about = (
        "Llama-3.2-3B on one A10G, 200 s, trees of thoughts of two branches at 1.5 times what the GPU does. Each "
        "client puts 1,000 tokens of its own before all its questions, so that more clients mean more prefixes; the "
        "paper does not tell its workload."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        length_s, seeds = (200.0, ("0", "1", "2")) if full else (40.0, ("0",))
        return [
            Cell(
                f"{policy}.{count}",
                dlpm.a10g("rr", policy=policy, quantum=dlpm.TOT2.charged),
                crowd(count),
                dlpm.plan(length_s),
                seeds,
            )
            for policy in POLICIES
            for count in (COUNTS if full else (COUNTS[0], COUNTS[-1]))
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        found = observe(run)
        del found["clients"]
        return found

    def report(self, results: Mapping[str, Result]) -> Report:
        counts = [count for count in COUNTS if f"dlpm.{count}" in results]
        rate = {name: result.number("service_rate") for name, result in results.items()}
        to_lpm = [rate[f"dlpm.{count}"] / rate[f"lpm.{count}"] for count in counts]
        to_vtc = [rate[f"dlpm.{count}"] / rate[f"vtc.{count}"] for count in counts]
        falls = {
            policy: rate[f"{policy}.{counts[-1]}"] / rate[f"{policy}.{counts[0]}"] for policy in POLICIES
        }
        return Report(
            claims=[
                Claim(
                    "DLPM has LPM's service rate, however many clients there are",
                    "comparable",
                    f"{min(to_lpm):.2f} to {max(to_lpm):.2f}×",
                    verdict(min(to_lpm) >= 0.95, partly=min(to_lpm) >= 0.85),
                    "With as many clients as trees under way, a turn for each client means a turn for each tree, and "
                    "the first in line is no longer the one whose thoughts are cached.",
                ),
                Claim(
                    "VTC is below at every number of clients",
                    "consistently lower",
                    f"DLPM {min(to_vtc):.2f} to {max(to_vtc):.2f}× VTC",
                    verdict(min(to_vtc) >= 1.05, partly=max(to_vtc) >= 1.05),
                    "It is below, but by little where few clients take turns: the cache still holds their trees, and "
                    "VTC's hit rate comes close to DLPM's. It falls behind as clients are added.",
                ),
                Claim(
                    "DLPM and LPM lose a little with more clients, VTC nothing",
                    "slight decrease; VTC flat",
                    ", ".join(
                        f"{label} {falls[policy]:.2f}× at {counts[-1]} clients"
                        for policy, label in POLICIES.items()
                    ),
                    verdict(
                        all(0.8 <= falls[policy] <= 1.0 for policy in ("dlpm", "lpm"))
                        and 0.97 <= falls["vtc"] <= 1.03,
                        partly=all(0.8 <= falls[policy] <= 1.0 for policy in ("dlpm", "lpm")),
                    ),
                    "It is VTC that loses most: with more clients that take turns more trees are under way at once, "
                    f"and its hit rate falls from {_hits(results, 'vtc', counts[0]):.2f} to "
                    f"{_hits(results, 'vtc', counts[-1]):.2f}, DLPM's from {_hits(results, 'dlpm', counts[0]):.2f} to "
                    f"{_hits(results, 'dlpm', counts[-1]):.2f}.",
                ),
            ],
            tables=[
                Table(
                    "Client-side service, units/s (lowest to highest seed), and hit rates",
                    (
                        "clients",
                        *POLICIES.values(),
                        *(f"hit rate, {label}" for label in POLICIES.values()),
                        *(f"difference, {label}, units" for label in POLICIES.values()),
                    ),
                    [
                        (
                            count,
                            *(results[f"{policy}.{count}"].shown("service_rate") for policy in POLICIES),
                            *(results[f"{policy}.{count}"].shown("hit_rate") for policy in POLICIES),
                            *(results[f"{policy}.{count}"].shown("difference") for policy in POLICIES),
                        )
                        for count in counts
                    ],
                )
            ],
            figures=[
                Figure(
                    "clients",
                    "Client-side service over the number of clients.",
                    lambda canvas: _draw(canvas, counts, rate),
                    (6.0, 3.6),
                )
            ],
        )


def _hits(results: Mapping[str, Result], policy: str, count: int) -> float:
    return results[f"{policy}.{count}"].number("hit_rate")


def _draw(canvas: "Canvas", counts: Sequence[int], rate: Mapping[str, float]) -> None:
    [axes] = style.panels(canvas, 1)
    curves = {
        label: (counts, [rate[f"{policy}.{count}"] for count in counts]) for policy, label in POLICIES.items()
    }
    style.scheduler_lines(axes, curves, marker="o")
    style.label(axes, "clients", "service rate, units/s")
