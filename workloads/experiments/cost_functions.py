"""At What Cost?, experiments 1 and 2: what VTC counts as service decides what clients with short requests get."""

from collections.abc import Mapping, Sequence

from sglang_fair.core.cost import make_cost
from workloads.experiments import vtc_setting as vtc
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import Cell, Json, Result, Size
from workloads.experiments.curves import variation
from workloads.experiments.senders import even, sender, traffic
from workloads.records import Run
from workloads.windows import Windows, regular_times

COST_MODEL = f"h100/llama-2-7b:{vtc.STEP_OVERHEAD}"
KV_TOKENS, MAX_RUNNING = 60_000, 16
SHORT, LONG = 256, 2048
"""Input and output tokens of a request."""
RPM = {"exp1": (120, 240), "exp2": (180, 22.5)}
"""Of client 1 and of client 2. In experiment 2 client 2's requests are long, and both ask for 2304 units/s of linear
service."""

TRAFFICS = {
    name: traffic(
        name,
        sender("client 1", even(RPM[name][0]), SHORT, SHORT),
        sender("client 2", even(RPM[name][1]), length, length),
    )
    for name, length in (("exp1", SHORT), ("exp2", LONG))
}

QUADRATIC_D, TIERED_TOKENS = 1000, 1024
COSTS = {
    "linear": "linear",
    "quadratic": f"quadratic:d={QUADRATIC_D}",
    "tiered": f"tiered:threshold={TIERED_TOKENS}",
}

RUNS = (
    ("exp1", "linear"),
    ("exp1", "quadratic"),
    ("exp2", "linear"),
    ("exp2", "quadratic"),
    ("exp2", "tiered"),
)


class CostFunctions(vtc.VtcExperiment):
    id = "cost-functions"

    def cells(self, size: Size) -> Sequence[Cell]:
        return [
            vtc.cell(
                f"{sent}.{cost}",
                "vtc",
                TRAFFICS[sent],
                *vtc.extent(size),
                cost_model=COST_MODEL,
                kv_tokens=KV_TOKENS,
                max_running=MAX_RUNNING,
                cost=COSTS[cost],
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

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        quadratic = results["exp2.quadratic"]
        return {
            "runs": [{"cell": f"{sent}.{cost}", "sent": sent, "cost": cost} for sent, cost in RUNS],
            "first": {name: _rate(result, "client 1") for name, result in results.items()},
            "second": {name: _rate(result, "client 2") for name, result in results.items()},
            "gap": vtc.largest_gap(results["exp1.linear"], "client 1", "client 2"),
            "swings": [
                variation(quadratic.curve("own_rate", name), vtc.WINDOW_S)
                for name in ("client 1", "client 2")
            ],
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        drawn = {f"{name[3]}, {name[5:]}": one for name, one in results.items() if name != "exp1.quadratic"}
        return {
            "linear": vtc.rates(drawn, (11.0, 3.2)),
            "difference": vtc.accumulated({"VTC": results["exp1.linear"]}),
        }


def _rate(result: Result, client: str) -> float:
    """Linear service of a client, units/s."""
    return result.number(f"clients/{client}/service") / result.cell.plan.duration_s
