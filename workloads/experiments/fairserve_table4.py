"""FairServe, Table 4: three applications of one user each, which send far more than the GPU does, with a time-out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from workloads.apps import BY_NAME, client
from workloads.arrivals import EvenArrivals, PhasedArrivals
from workloads.clients import Client
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Simulated, Size, TrafficSpec
from workloads.experiments.fairserve_setting import SCHEDULERS, compared, served, site
from workloads.records import Run
from workloads.served import totals
from workloads.session import Plan

REQUESTS: Mapping[str, int] = {"app14": 269, "app7": 139, "app12": 448}
"""Interactions of each, as the paper's row "Requests" has them."""
MOST_CALLS = 3
BURST_S = 5.0
"""One application after the other sends all of its interactions within so long."""
TIMEOUT_S = 180.0


class Table4(Simulated):
    id = "fairserve-table4"

    def cells(self, size: Size) -> Sequence[Cell]:
        part, seeds = (1.0, SEEDS) if size == "full" else (0.15, SEEDS[:1])
        plan = Plan(
            len(REQUESTS) * BURST_S,
            drain_s=None,
            connections_per_client=1_000_000,
            sample_s=5.0,
            token_step_s=5.0,
            program_timeout_s=TIMEOUT_S,
            waits=True,
        )
        sent = {name: round(part * count) for name, count in REQUESTS.items()}
        return [
            Cell(
                name,
                replace(site(name), replicas=1, limits={}, throttle="none"),
                TrafficSpec("three", {"requests": sent}),
                plan,
                seeds,
                SCHEDULERS[name].label,
            )
            for name in ("rpm", "vtc", "fs-w", "fs", "dlpm")
        ]

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        made = []
        for place, (name, count) in enumerate(cell.traffic.arguments["requests"].items()):
            app = replace(BY_NAME[name], calls=(1, MOST_CALLS))
            burst = EvenArrivals(count / BURST_S)
            phases = [(burst, BURST_S)]
            if place:
                phases.insert(0, (EvenArrivals(1e-6, first_s=1e6), place * BURST_S))
            made.append(client(name, app, PhasedArrivals(phases), seed))
        return made

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        """What the application that got most got over the one that got least."""
        return {"fairness": [compared(result, _most_over_least) for result in results.values()]}

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        assert run.end is not None
        of = {name: totals(run, [name]).to_json() for name in REQUESTS}
        return {
            "apps": {
                name: {**one, "prompt_per_s": one["prompt_tokens"] / run.end.t_s} for name, one in of.items()
            },
            "wasted": sum(one["wasted"]["timed out"] for one in of.values()),
            "end_s": run.end.t_s,
        }


def _most_over_least(run: Mapping[str, Json]) -> tuple[float | None, float | None]:
    plain, normalised = zip(*served(run["apps"]).values(), strict=True)
    return tuple(max(got) / min(got) if min(got) else None for got in (plain, normalised))  # type: ignore[return-value]
