"""At What Cost?, experiments 1 and 2: what VTC counts as service decides what clients with short requests get."""

from collections.abc import Mapping, Sequence

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
    verdict,
)
from workloads.experiments.curves import variation
from workloads.experiments.senders import FromSenders, even, sender, traffic
from workloads.records import Run
from workloads.windows import Windows, regular_times

COST_MODEL = f"h100/llama-2-7b:{vtc.STEP_OVERHEAD}"

TRAFFICS = {
    "exp1": traffic("exp1", sender("client 1", even(120), 256, 256), sender("client 2", even(240), 256, 256)),
    "exp2": traffic(
        "exp2", sender("client 1", even(180), 256, 256), sender("client 2", even(22.5), 2048, 2048)
    ),
}
"""In experiment 2 both ask for 2304 units/s of linear service."""

COSTS = {"linear": "linear", "quadratic": "quadratic:d=1000", "tiered": "tiered:threshold=1024"}

RUNS = (
    ("exp1", "linear"),
    ("exp1", "quadratic"),
    ("exp2", "linear"),
    ("exp2", "quadratic"),
    ("exp2", "tiered"),
)


class CostFunctions(FromSenders):
    id = "cost-functions"
    title = "Linear, quadratic and tiered cost of service"
    source = "At What Cost?, experiments 1 and 2, Figures 1 to 5"
    about = (
        "Llama-7b on an H100, pool of 60 000 tokens, at most 16 requests at a time. Experiment 1: 2 and 4 "
        "requests/s of 256 + 256 tokens. Experiment 2: 3 requests/s of 256 + 256 and 0.375 requests/s of 2048 + 2048. "
        "The engine has 10 ms of overhead a step, which gives the paper's service in experiment 1. "
        "Tiered (twice the price for prompts of more than 1024 tokens) is named in the paper and not evaluated there."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = (600.0, ("0", "1", "2")) if size == "full" else (180.0, ("0",))
        return [
            Cell(
                f"{sent}.{cost}",
                vtc.site(
                    "vtc",
                    cost_model=COST_MODEL,
                    kv_tokens=60_000,
                    max_running=16,
                    cost=COSTS[cost],
                ),
                TRAFFICS[sent],
                vtc.plan(length_s),
                seeds,
            )
            for sent, cost in RUNS
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        own = Windows(run, cost=make_cost(cell.site.cost))
        times = regular_times(cell.plan.duration_s, step_s=vtc.SAMPLE_S)
        rates = own.service_rate(times)
        found = vtc.observe(run)
        found["curves"]["own_rate"] = {name: list(rates[name] or ()) for name in own.clients}
        return {**found, "own": {"service": own.service(0.0, cell.plan.duration_s)}}

    def report(self, results: Mapping[str, Result]) -> Report:
        first = {name: _rate(result) for name, result in results.items()}
        second = {name: _rate(result, "client 2") for name, result in results.items()}
        alone, lost, back = first["exp1.linear"], first["exp2.linear"], first["exp2.quadratic"]
        even_linear = second["exp2.linear"] / lost
        own = {
            name: result.number("own/service/client 2") / result.number("own/service/client 1")
            for name, result in results.items()
        }
        swings = [
            variation(results["exp2.quadratic"].curve("own_rate", name), 60.0)
            for name in ("client 1", "client 2")
        ]
        gap = vtc.largest_gap(results["exp1.linear"], "client 1", "client 2")
        drift, usual = (results[f"exp1.{cost}"].number("accumulated/max") for cost in ("quadratic", "linear"))
        return Report(
            claims=[
                Claim(
                    "Figure 1: experiment 1, linear cost, both receive the same",
                    "equal, as in VTC's Figure 3; service about twice that paper's",
                    f"within {gap:.0%} in 60 s windows; client 1 {alone:.0f} units/s",
                    verdict(gap <= 0.1, partly=gap <= 0.25),
                ),
                Claim(
                    "Figure 2: experiment 2, linear cost, both receive the same",
                    "nearly identical",
                    f"client 2 {even_linear:.2f}× client 1",
                    verdict(0.9 <= even_linear <= 1.1, partly=0.8 <= even_linear <= 1.25),
                ),
                Claim(
                    "Figure 2: but client 1, whose requests stay the same, receives less than in experiment 1",
                    "about 200 units/s less",
                    f"{alone - lost:.0f} units/s less ({lost / alone:.0%} of experiment 1)",
                    verdict(100 <= alone - lost <= 400, partly=alone > lost),
                    "How much is lost depends on what long contexts cost the engine beside the overhead of a step.",
                ),
                Claim(
                    "Figure 3: with the quadratic cost both receive the same by that cost",
                    "roughly equal",
                    f"client 2 {own['exp2.quadratic']:.2f}× client 1",
                    verdict(
                        0.85 <= own["exp2.quadratic"] <= 1.15, partly=0.7 <= own["exp2.quadratic"] <= 1.4
                    ),
                ),
                Claim(
                    "Figure 3: client 2's rate swings more",
                    "larger spikes and dips",
                    f"{swings[1]:.1%} to {swings[0]:.1%} (standard deviation over mean)",
                    verdict(swings[1] > swings[0]),
                    "In 60 s windows of counted tokens both are smooth.",
                ),
                Claim(
                    "Figure 4: with the quadratic cost client 1 is back near its service in experiment 1",
                    "near experiment 1",
                    f"{back:.0f} units/s, {back / alone:.0%} of experiment 1 (linear cost: {lost / alone:.0%})",
                    verdict(0.9 <= back / alone <= 1.1, partly=back > lost),
                    "The quadratic cost with d = 1000 takes more from long requests than they cost this engine.",
                ),
                Claim(
                    "Figure 5: experiment 1 with the quadratic cost, the accumulated difference is low",
                    "as low as VTC's",
                    f"at most {drift:,.0f} units, {drift / usual:.2f}× that with the linear cost",
                    verdict(drift <= 1.25 * usual, partly=drift <= 2 * usual),
                ),
            ],
            tables=[
                Table(
                    "Service in the run, and its division",
                    (
                        "experiment",
                        "cost",
                        "client 1, linear units/s",
                        "client 2, linear units/s",
                        "client 2 / client 1, linear",
                        "client 2 / client 1, own cost",
                        "tokens/s",
                    ),
                    [
                        (
                            sent,
                            cost,
                            first[f"{sent}.{cost}"],
                            second[f"{sent}.{cost}"],
                            second[f"{sent}.{cost}"] / first[f"{sent}.{cost}"],
                            own[f"{sent}.{cost}"],
                            results[f"{sent}.{cost}"].shown("tokens_per_s"),
                        )
                        for sent, cost in RUNS
                    ],
                )
            ],
            figures=[
                Figure(
                    "linear",
                    "Received service rate by the linear cost: experiment 1, experiment 2, and experiment 2 under the "
                    "quadratic and the tiered cost (Figures 1b, 2 and 4).",
                    vtc.rates(
                        {
                            "1, linear": results["exp1.linear"],
                            "2, linear": results["exp2.linear"],
                            "2, quadratic": results["exp2.quadratic"],
                            "2, tiered": results["exp2.tiered"],
                        }
                    ),
                    (11.0, 3.2),
                ),
                vtc.difference_figure({"VTC": results["exp1.linear"]}, what=", experiment 1"),
            ],
        )


def _rate(result: Result, client: str = "client 1") -> float:
    """Linear service of a client, units/s."""
    return result.number(f"clients/{client}/service") / result.cell.plan.duration_s
