"""A prefix that several clients need: who pays for it, and what does each get?"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments import style
from workloads.experiments.contract import (
    Cell,
    Claim,
    Figure,
    Json,
    Measured,
    Report,
    Result,
    Size,
    Table,
    Traffic,
    medians,
    verdict,
)
from workloads.experiments.dlpm_fig7_setting import observe
from workloads.experiments.senders import FromSenders
from workloads.records import Records, Run
from workloads.simulation import describe
from workloads.simulation.cluster import Simulation

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


def readers() -> Traffic:
    """Three clients ask about the same documents one after another, the fourth about others."""
    return Traffic(
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


class Payers(FromSenders):
    id = "beyond-payers"
    title = "Prefixes shared between clients: who pays"
    source = "beyond the papers; a question that DLPM §9 leaves open"
    about = (
        "Llama-3.2-3B on one A10G under DLPM for 120 s. Documents of 4,096 tokens; for each, `early` sends 4 requests "
        "of 200 + 100 tokens, `late` 4 and `often` 12 about the same document 0.3 and 0.4 s later, and `alone` 4 "
        "about a document of its own: nearly twice what the GPU does. Charged service is what was computed for a "
        "client and what the rule makes it pay to others or get from them."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s = 120.0 if size == "full" else 30.0
        return [
            Cell(
                rule,
                dlpm.a10g("rr", policy="dlpm", quantum=QUANTUM, payer=rule),
                readers(),
                dlpm.plan(length_s),
                ("0", "1", "2") if size == "full" else ("0",),
            )
            for rule in RULES
        ]

    def run(self, cell: Cell, seed: str) -> Measured:
        """With the replica's own books, which say who paid whom."""
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
        return Measured(found, simulation.now_s)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return observe(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        def at(rule: str, name: str, what: str) -> float:
            return results[rule].number(f"books/{name}/{what}")

        def seen(rule: str, name: str) -> float:
            return results[rule].number(f"clients/{name}/service_rate")

        burden = {
            rule: at(rule, "early", "computed") / max(at(rule, "late", "computed"), 1.0) for rule in RULES
        }
        gaps = {rule: results[rule].number("charged_difference") for rule in RULES}
        bounds = {rule: results[rule].number("bound") for rule in RULES}
        gain = seen("equal", "early") / seen("first", "early")
        given = {
            rule: {name: at(rule, name, "transferred") for name in ("often", "late")} for rule in RULES[1:]
        }
        speed = {rule: results[rule].number("tokens_per_s") for rule in RULES}
        work = {rule: sum(at(rule, name, "computed") for name in REQUESTS) for rule in RULES}
        return Report(
            claims=[
                Claim(
                    "Under every rule the charged service of clients that wait stays within its bound",
                    "our own question",
                    ", ".join(f"{rule} {gaps[rule]:,.0f} of {bounds[rule]:,.0f} units" for rule in RULES),
                    verdict(all(gaps[rule] <= bounds[rule] for rule in RULES)),
                ),
                Claim(
                    "Under `first` whoever asks first pays for all; equal parts give that client more requests",
                    "our own question",
                    f"early's client-side service {gain:.2f}× under equal; computed for early over late: "
                    f"{burden['first']:.2f} under first, {burden['equal']:.2f} under equal",
                    verdict(gain >= 1.1 and burden["first"] >= 2, partly=gain >= 1.1 or burden["first"] >= 2),
                    "In overload DLPM does not serve in order of arrival: who has credit computes the document, and "
                    "that is a different client each time, so `first` evens out by itself.",
                ),
                Claim(
                    "per-use makes the client pay most that asks most about a document",
                    "our own question",
                    "often and late pay others: "
                    + ", ".join(
                        f"{rule} {paid['often']:,.0f} and {paid['late']:,.0f} units"
                        for rule, paid in given.items()
                    ),
                    verdict(
                        given["per-use"]["often"] > max(given["equal"]["often"], given["per-use"]["late"]),
                        partly=given["per-use"]["often"] > given["equal"]["often"],
                    ),
                    "Whoever computes the document is paid back by the others, and that is often `often` itself.",
                ),
                Claim(
                    "The rule costs no throughput",
                    "our own question",
                    f"client-side {min(speed.values()) / speed['first']:.2f}× that of `first` at worst, computed "
                    f"{min(work.values()) / work['first']:.2f}×",
                    verdict(
                        min(speed.values()) >= 0.97 * speed["first"],
                        partly=min(work.values()) >= 0.97 * work["first"],
                    ),
                    "The GPU does as much. But under `first` the client that asks most about a document has it for "
                    "nothing and so gets most requests, nearly all cached; made to pay its part it gets fewer, and "
                    "the time goes to requests that take more computing.",
                ),
            ],
            tables=[
                Table(
                    "Medians over seeds, thousands of units in the run",
                    (
                        "rule",
                        "client",
                        "computed",
                        "transferred",
                        "charged",
                        "client-side, units/s",
                        "finished programs",
                    ),
                    [
                        (
                            rule,
                            name,
                            at(rule, name, "computed") / 1000,
                            at(rule, name, "transferred") / 1000,
                            at(rule, name, "charged") / 1000,
                            seen(rule, name),
                            results[rule].shown(f"clients/{name}/finished"),
                        )
                        for rule in RULES
                        for name in REQUESTS
                    ],
                ),
                medians(
                    "The rules",
                    "rule",
                    {
                        "tokens/s": "tokens_per_s",
                        "hit rate": "hit_rate",
                        "difference of charged service, units": "charged_difference",
                        "bound, units": "bound",
                    },
                    {rule: results[rule] for rule in RULES},
                ),
            ],
            figures=[
                Figure(
                    "clients",
                    "What was computed for each client, what it was charged, and what it saw.",
                    lambda canvas: _draw(canvas, results),
                    (10.0, 3.4),
                )
            ],
        )


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
