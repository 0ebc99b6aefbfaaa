"""At What Cost?, experiments 1 and 2: what VTC counts as service decides what clients with short requests get."""

from collections.abc import Iterable, Iterator, Mapping

from sglang_fair.core.cost import make_cost
from workloads.experiments import vtc_setting as vtc
from workloads.experiments.claims import Part, Table, at_most, graded
from workloads.experiments.contract import Cell, Json, Result, Row
from workloads.experiments.senders import even
from workloads.plots import Figure, variation
from workloads.records import Run
from workloads.windows import Windows, regular_times

COST_MODEL = f"h100/llama-2-7b:{vtc.STEP_OVERHEAD}"
KV_TOKENS, MAX_RUNNING = 60_000, 16
SHORT, LONG = 256, 2048
"""Input and output tokens of a request."""
RPM = {"exp1": (120, 240), "exp2": (180, 22.5)}
"""Of client 1 and of client 2. In experiment 2 client 2's requests are long, and both ask for 2304 units/s of linear
service."""
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
    title = "Linear, quadratic and tiered cost of service"
    source = "At What Cost?, experiments 1 and 2, Figures 1 to 5"
    about = f"""Llama-7b on an H100, pool of {KV_TOKENS:,} tokens, at most {MAX_RUNNING} requests at a time. Experiment
        1: {RPM["exp1"][0]} and {RPM["exp1"][1]} requests/min of {SHORT} + {SHORT} tokens. Experiment 2:
        {RPM["exp2"][0]}
        requests/min of {SHORT} + {SHORT} and {RPM["exp2"][1]} requests/min of {LONG} + {LONG}. The engine has 10 ms of
        overhead a step, which gives the paper's service in experiment 1. Tiered (twice the price for prompts of more
        than {TIERED_TOKENS} tokens) is named in the paper and not evaluated there."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        given: Json = {"cost_model": COST_MODEL, "kv_tokens": KV_TOKENS, "max_running": MAX_RUNNING}
        for name, cost in RUNS:
            lengths = [(SHORT, SHORT), (SHORT, SHORT) if name == "exp1" else (LONG, LONG)]
            sent = vtc.sent(name, *map(even, RPM[name]), tokens=lengths)
            yield vtc.row(f"{name}.{cost}", "vtc", sent, **given, cost=COSTS[cost])

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        own = Windows(run, cost=make_cost(cell.site.cost))
        times = regular_times(cell.plan.duration_s, step_s=vtc.SAMPLE_S)
        rates = own.service_rate(times)
        found = vtc.observe(run)
        found["curves"]["own_rate"] = {name: list(rates[name] or ()) for name in own.clients}
        return {**found, "own": {"service": own.service(0.0, cell.plan.duration_s)}}

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        first, second = (
            {name: one[f"clients/client {k}/service"] / one.cell.plan.duration_s for name, one in at.items()}
            for k in (1, 2)
        )  # units/s of linear service
        alone, lost, back = (first[name] for name in ("exp1.linear", "exp2.linear", "exp2.quadratic"))
        quadratic, gap = at["exp2.quadratic"], vtc.largest_gap(at["exp1.linear"], "client 1", "client 2")
        yield at_most(gap, 0.1, 0.25).claim(f"""Figure 1: experiment 1, linear cost, both receive the same |
            equal, as in VTC's Figure 3; service about twice that paper's | within {gap:.0%} in
            {vtc.WINDOW_S:.0f} s windows; client 1 {alone:.0f} units/s""")
        ratio = second["exp2.linear"] / lost
        yield graded(0.9 <= ratio <= 1.1, 0.8 <= ratio <= 1.25).claim(f"""Figure 2: experiment 2, linear cost,
            both receive the same | nearly identical | client 2 {ratio:.2f}× client 1""")
        less = alone - lost
        yield graded(100 <= less <= 400, less > 0).claim(f"""Figure 2: but client 1, whose requests stay the
            same, receives less than in experiment 1 | about 200 units/s less | {less:.0f} units/s less
            ({lost / alone:.0%} of experiment 1) | How much is lost depends on what long contexts cost the
            engine beside the overhead of a step.""")
        own = quadratic["own/service/client 2"] / quadratic["own/service/client 1"]
        yield graded(0.85 <= own <= 1.15, 0.7 <= own <= 1.4).claim(f"""Figure 3: with the quadratic cost both
            receive the same by that cost | roughly equal | client 2 {own:.2f}× client 1""")
        swings = [variation(quadratic.curve("own_rate", f"client {k}"), vtc.WINDOW_S) for k in (1, 2)]
        yield graded(swings[1] > swings[0]).claim(f"""Figure 3: client 2's rate swings more | larger spikes
            and dips | {swings[1]:.1%} to {swings[0]:.1%} (standard deviation over mean) | In
            {vtc.WINDOW_S:.0f} s windows of counted tokens both are smooth.""")
        yield graded(0.9 <= back / alone <= 1.1, back > lost).claim(f"""Figure 4: with the quadratic cost
            client 1 is back near its service in experiment 1 | near experiment 1 | {back:.0f} units/s,
            {back / alone:.0%} of experiment 1 (linear cost: {lost / alone:.0%}) | The quadratic cost with d =
            {QUADRATIC_D} takes more from long requests than they cost this engine.""")
        drift = at["exp1.quadratic"]["accumulated/max"]
        times = drift / at["exp1.linear"]["accumulated/max"]
        yield at_most(times, 1.25, 2).claim(f"""Figure 5: experiment 1 with the quadratic cost, the
            accumulated difference is low | as low as VTC's | at most {drift:,.0f} units, {times:.2f}× that
            with the linear cost""")
        yield Table(
            "Service in the run, and its division",
            """experiment | cost | client 1, linear units/s | client 2, linear units/s | client 2 / client 1, linear |
            client 2 / client 1, own cost | tokens/s""",
            [
                [sent, cost, first[name], second[name], second[name] / first[name],
                 at[name]["own/service/client 2"] / at[name]["own/service/client 1"],
                 at[name].shown("tokens_per_s")]
                for sent, cost in RUNS
                for name in [f"{sent}.{cost}"]
            ],
        )  # fmt: skip
        caption = """Received service rate by the linear cost: experiment 1, experiment 2, and experiment 2 under the
            quadratic and the tiered cost (Figures 1b, 2 and 4)."""
        drawn = {f"{name[3]}, {name[5:]}": one for name, one in at.items() if name != "exp1.quadratic"}
        yield Figure("linear", caption, vtc.rates(drawn))
        caption = "Largest difference between clients' accumulated service, experiment 1."
        yield Figure("difference", caption, vtc.accumulated(at["exp1.linear"]))
