"""A prefix that several clients need: which client pays for it, and what does each get?"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments import style
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import SEEDS, Cell, Json, Measured, Result, Size, TrafficSpec
from workloads.records import Records
from workloads.simulation import describe
from workloads.simulation.run import Simulation

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

RULES = ("first", "equal", "per-use")
PREFIX_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS = 4096, 200, 100
RATE_PER_S = 1.2
"""Of each client: what all ask for is nearly twice what the GPU does."""
REQUESTS = {"early": 4, "late": 4, "often": 12, "alone": 4}
FIRST_S = {"early": 0.0, "late": 0.3, "often": 0.4, "alone": 0.2}
SHARING = ("early", "late", "often")
QUANTUM = 4_000.0
LENGTH_S = 120.0


def readers() -> TrafficSpec:
    """Three clients ask about the same documents one after another, the fourth about others."""
    return TrafficSpec(
        "shared",
        {
            "senders": [
                {
                    "name": name,
                    "shape": {
                        "kind": "shared",
                        "prefix": PREFIX_TOKENS,
                        "of": "library" if name in SHARING else "own",
                        "input": INPUT_TOKENS,
                        "output": OUTPUT_TOKENS,
                        "requests": requests,
                    },
                    "arrivals": {"even": RATE_PER_S, "first_s": FIRST_S[name]},
                    "well_behaved": True,
                }
                for name, requests in REQUESTS.items()
            ]
        },
    )


class Payers(dlpm.A10GExperiment):
    id = "beyond-payers"

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = (LENGTH_S, SEEDS) if size == "full" else (30.0, SEEDS[:1])
        return [
            Cell(
                rule,
                dlpm.a10g("rr", policy="dlpm", quantum=QUANTUM, payer=rule),
                readers(),
                dlpm.plan(length_s),
                seeds,
            )
            for rule in RULES
        ]

    def run(self, cell: Cell, seed: str) -> Measured:
        """Simulate, and also keep the replica's own accounts, which say who paid whom."""
        clients = self.clients(cell, seed)
        manifest = describe(cell.site, clients, cell.plan, seed=seed, workload=cell.traffic.name)
        with Records(None, manifest) as records:
            simulation = Simulation(cell.site, clients, cell.plan, records, seed=seed)
            simulation.run()
            [replica] = simulation.replicas
            books = replica.queue.status()
            found = dict(self.measure(cell, records.run))
        paid = {name: books["clients"][name] for name in REQUESTS}
        charged = {name: one["service"] + one["transferred_units"] for name, one in paid.items()}
        found["books"] = {
            name: {
                "computed": one["service"],
                "transferred": one["transferred_units"],
                "charged": charged[name],
                "waiting": one["waiting"],
            }
            for name, one in paid.items()
        }
        found["charged_difference"] = max(charged.values()) - min(charged.values())
        found["bound"] = books["bound"]
        return Measured(found, simulation.cluster.now_s)

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        speed = {rule: results[rule].number("tokens_per_s") for rule in RULES}
        work = {
            rule: sum(results[rule].number(f"books/{name}/computed") for name in REQUESTS) for rule in RULES
        }
        return {
            "least_speed": min(speed.values()) / speed["first"],
            "least_work": min(work.values()) / work["first"],
            "books": [{"cell": rule, "client": name} for rule in RULES for name in REQUESTS],
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"clients": Drawing(lambda canvas: _draw(canvas, results), (10.0, 3.4))}


def _draw(canvas: "Canvas", results: Mapping[str, Result]) -> None:
    panels = {
        "books/{}/computed": "computed, units",
        "books/{}/charged": "charged, units",
        "clients/{}/service_rate": "client-side service, units/s",
    }
    colours = {name: style.client_colour(place) for place, name in enumerate(REQUESTS)}
    for axes, (path, unit) in zip(style.panels(canvas, len(panels)), panels.items(), strict=True):
        heights = {name: [results[rule].number(path.format(name)) for rule in RULES] for name in REQUESTS}
        style.bars(axes, RULES, heights, unit=unit, colours=colours, legend=axes is canvas.axes[0])
