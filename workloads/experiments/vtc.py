"""VTC, Figures 3 to 10, 15, 16 and 19, Tables 4 to 6: two to eight clients with requests of given lengths."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from statistics import fmean

from sglang_fair.core.cost import make_cost
from workloads.experiments import vtc_setting as vtc
from workloads.experiments.claims import Claim, Part, Table, at_least, at_most, graded
from workloads.experiments.contract import Cell, Json, Result, Row, TrafficSpec, medians
from workloads.experiments.senders import even, on_off, poisson
from workloads.experiments.vtc_setting import BOUND, IN_STEP, LENGTH_S, TOKENS, WINDOW_S
from workloads.plots import Figure, average, variation
from workloads.records import Run

RPM = (90, 180)
"""Both clients ask for more than half of what the engine serves, one for twice as much as the other."""


def overload(waiting: int = 0) -> TrafficSpec:
    return vtc.sent("overload", *(even(rpm, waiting) for rpm in RPM))


class Overload(vtc.VtcExperiment):
    id = "vtc-fig3"
    title = "Two clients, both overloaded, one sends twice as much"
    source = "VTC, Figures 3a and 3b"
    about = f"""{RPM[0]} and {RPM[1]} requests/min of {TOKENS} input and {TOKENS} output tokens, evenly spaced, for
        {LENGTH_S:.0f} s."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        return [vtc.row(policy, policy, overload()) for policy in ("vtc", "fcfs")]

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        fair, fcfs = at["vtc"], at["fcfs"]
        most, grows = fair["accumulated/max"], fcfs["accumulated/end"] / fcfs["accumulated/half"]
        gap = vtc.largest_gap(fair, "client 1", "client 2")
        ratio = fcfs["clients/client 2/service"] / fcfs["clients/client 1/service"]
        yield graded(most <= BOUND).claim(f"""VTC bounds the difference between backlogged clients, however
            long they are backlogged | flat; at most 2U = {BOUND:,} units | at most {most:,.0f} units""")
        yield at_least(grows, 1.7, 1.3).claim(f"""FCFS's difference grows with time | grows steadily | at the
            end {grows:.2f}× that of half time""")
        yield at_most(gap, 0.1, 0.25).claim(f"""Under VTC both receive the same rate at any time
            ({WINDOW_S:.0f} s windows) | equal | within {gap:.1%} | A batch is admitted as one client's or the
            other's, and a window holds only some batches.""")
        yield graded(ratio >= 1.8).claim(f"""FCFS serves more to whoever sends more | as their rates, 2 : 1 |
            {ratio:.2f} : 1""")
        columns = """scheduler | client 1, units = clients/client 1/service |
            client 2, units = clients/client 2/service | largest difference, units = accumulated/max |
            tokens/s = tokens_per_s"""
        yield medians("Service received in the run", columns, at.values())
        difference = vtc.accumulated(fair, fcfs, bound=BOUND)
        yield Figure("difference", "Largest difference between clients' accumulated service.", difference)
        yield received_rates(at)


def received_rates(at: Mapping[str, Result]) -> Figure:
    drawn = vtc.rates({one.cell.title: one for one in at.values()})
    return Figure("rate", f"Received service rate in {WINDOW_S:.0f} s windows.", drawn)


# ---- Figures 4, 5, 6 and 9: clients that ask for less than their share, now and then, or more and more


BELOW_SHARE_RPM = (15, 30, 90)
ON_OFF_RPM, OVERLOADED_ON_OFF_RPM = (30, 120), (120, 180)
"""Client 1 sends at its rate every other minute, client 2 all the time."""
STEADY_RPM, RAMP_RPM = 30, (12, 120)
LONGER_S = LENGTH_S, 300.0


class BelowShare(vtc.VtcExperiment):
    id = "vtc-fig4"
    title = "Two clients below their share, one overloaded"
    source = "VTC, Figure 4"
    about = f"""{BELOW_SHARE_RPM[0]}, {BELOW_SHARE_RPM[1]} and {BELOW_SHARE_RPM[2]} requests/min of {TOKENS} +
        {TOKENS} tokens, evenly spaced; the third is backlogged."""
    lengths_s = LONGER_S

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        return [vtc.row("vtc", "vtc", vtc.sent("below-share", *map(even, BELOW_SHARE_RPM)))]

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        run = at["vtc"]
        served = [run[f"clients/client {k}/service"] for k in (1, 2, 3)]
        ratio, rest = served[1] / served[0], served[2] / sum(served)
        p90_s = max(run[f"clients/client {k}/response_s/p90"] for k in (1, 2))
        first_s, last_s = (in_third(run, third, "response_s", 3) for third in (0, 2))
        yield graded(1.9 <= ratio <= 2.1).claim(f"""Clients below their share are served as they ask |
            services 1 : 2 | 1 : {ratio:.2f}""")
        yield at_most(p90_s, 5, 10).claim(f"""They are served at once | immediately | P90 of the response time
            {p90_s:.2f} s | A request waits for the next one to finish when the pool is full.""")
        yield graded(rest > 1 / 3).claim(f"""The overloaded client takes the rest (work conservation) | more
            than 1/3 | {rest:.0%} of the service""")
        yield graded(last_s > 1.5 * first_s).claim(f"""The overloaded client's response time rises | rises all
            the time | from {first_s:.0f} s in the first third to {last_s:.0f} s in the last""")
        yield vtc.rates_and_responses(run)


class OnOff(vtc.VtcExperiment):
    id = "vtc-fig5"
    title = "A client below its share that comes and goes"
    source = "VTC, Figure 5"
    about = f"""Client 1 sends {ON_OFF_RPM[0]} requests/min every other minute, client 2 {ON_OFF_RPM[1]} requests/min
        all the time."""
    lengths_s = LONGER_S

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        return [vtc.row("vtc", "vtc", vtc.sent("on-off", on_off(ON_OFF_RPM[0]), even(ON_OFF_RPM[1])))]

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        run = at["vtc"]
        varies = variation(vtc.total_rate(run), WINDOW_S)
        middles = range(90, int(run.cell.plan.duration_s) - 60, 120)  # of the OFF phases, s
        (times, total), (_, other) = vtc.total_rate(run), run.curve("rate", "client 2")
        part = [
            None if one is None or not every else one / every for one, every in zip(other, total, strict=True)
        ]
        off_share = fmean(average((times, part), middle - 1, middle + 1) for middle in middles)
        quick_s, slow_s = (run[f"clients/client {k}/response_s/mean"] for k in (1, 2))
        yield at_most(varies, 0.05, 0.1).claim(f"""The total service rate stays the same | constant | varies
            by {varies:.1%} (standard deviation over mean)""")
        yield at_least(off_share, 0.85, 0.7).claim(f"""In OFF phases the other takes all | all of it |
            {off_share:.0%} in the windows of OFF phases | What client 1 sent at the end of an ON phase is
            still being answered.""")
        yield graded(
            quick_s <= 5 and quick_s < slow_s / 5, quick_s < slow_s / 2
        ).claim(f"""The client below its share is served fast | low latency | {quick_s:.1f} s in the mean, the
            other {slow_s:.0f} s""")
        yield vtc.rates_and_responses(run)


class OnOffOverload(vtc.VtcExperiment):
    id = "vtc-fig6"
    title = "A client above its share that comes and goes"
    source = "VTC, Figure 6"
    about = f"""Client 1 sends {OVERLOADED_ON_OFF_RPM[0]} requests/min every other minute, client 2
        {OVERLOADED_ON_OFF_RPM[1]} requests/min all the time. Client 1 never catches up in its OFF phases, so it is
        backlogged all the time."""
    lengths_s = LONGER_S

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        arrivals = on_off(OVERLOADED_ON_OFF_RPM[0]), even(OVERLOADED_ON_OFF_RPM[1])
        return [vtc.row("vtc", "vtc", vtc.sent("on-off-overload", *arrivals))]

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        run = at["vtc"]
        ratio = run["clients/client 2/service"] / run["clients/client 1/service"]
        gap = vtc.largest_gap(run, "client 1", "client 2")
        yield graded(
            1 / 1.05 <= ratio <= 1.05 and gap <= 0.15, 1 / 1.2 <= ratio <= 1.2
        ).claim(f"""A client that stays backlogged in its OFF phases receives as much as the other | equal
            rates in all phases | 1 : {ratio:.2f}; in {WINDOW_S:.0f} s windows within {gap:.0%} | Where client
            1's backlog is served before its next ON phase, the other takes the rest.""")
        yield vtc.rates_and_responses(run)


class Isolation(vtc.VtcExperiment):
    id = "vtc-fig9"
    title = "One client sends more and more"
    source = "VTC, Figure 9"
    about = f"""Client 1 sends {STEADY_RPM} requests/min; client 2's rate rises in a straight line from {RAMP_RPM[0]} to
        {RAMP_RPM[1]} requests/min."""
    lengths_s = LONGER_S

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        ramp = {"kind": "ramp", "rpm": RAMP_RPM[0], "to_rpm": RAMP_RPM[1], "over_s": length_s}
        return [vtc.row("vtc", "vtc", vtc.sent("ramp", even(STEADY_RPM), ramp))]

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        thirds = ((0, 1), (2, 1), (2, 2))
        before_s, after_s, other_s = (in_third(at["vtc"], third, "response_s", k) for third, k in thirds)
        yield graded(
            after_s <= 5 and after_s < other_s / 3, after_s < other_s / 2
        ).claim(f"""The well-behaved client's response time is about the same, however much the other sends |
            roughly unchanged | {before_s:.2f} s in the first third, {after_s:.2f} s in the last; the other's
            {other_s:.0f} s then | Once the pool is full, a request waits for another to finish.""")
        yield vtc.rates_and_responses(at["vtc"])


def in_third(run: Result, third: int, what: str, k: int, margin_s: float = 0.0) -> float:
    """The mean of client k's curve in a third of the run, without so much at both ends."""
    length_s = run.cell.plan.duration_s / 3
    within = third * length_s + margin_s, (third + 1) * length_s - margin_s
    return average(run.curve(what, f"client {k}"), *within)


# ---- Figures 7 and 8: Poisson arrivals, requests of unlike lengths

POISSON_RPM = (480, 90)
SHAPES = {"short-long": ("Figure 7", ((64, 64), (256, 256))), "in-out": ("Figure 8", ((64, 512), (512, 64)))}
"""(input, output) of client 1 and of client 2, in tokens."""


class Lengths(vtc.VtcExperiment):
    id = "vtc-fig7-8"
    title = "Requests of unlike lengths at random times"
    source = "VTC, Figures 7 and 8"
    about = f"""Poisson arrivals of {POISSON_RPM[0]} and {POISSON_RPM[1]} requests/min. Figure 7: 64 + 64 and 256 + 256
        tokens; Figure 8: 64 + 512 and 512 + 64 tokens."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for name, (_, tokens) in SHAPES.items():
            for policy in ("vtc", "fcfs"):
                sent = vtc.sent(name, *map(poisson, POISSON_RPM), tokens=tokens)
                yield vtc.row(f"{name}.{policy}", policy, sent)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        for shape, (figure, _) in SHAPES.items():
            fair, fcfs = at[f"{shape}.vtc"], at[f"{shape}.fcfs"]
            least, most = fair["accumulated/max"], fcfs["accumulated/max"]
            times, grows = most / least, fcfs["accumulated/end"] / fcfs["accumulated/half"]
            yield graded(least <= BOUND).claim(f"""{figure}: VTC's difference is bounded | flat; at most 2U =
                {BOUND:,} units | at most {least:,.0f} units""")
            yield graded(times > 3 and grows >= 1.5, times > 1).claim(f"""{figure}: FCFS's is not | grows
                steadily | {most:,.0f} units, {times:.0f}× VTC's; at the end {grows:.2f}× that of half time""")
            both, caption = {"VTC": fair, "FCFS": fcfs}, f"{figure}: received service rate."
            yield Figure(f"{shape}-rate", caption, vtc.rates(both))
            caption = f"{figure}: largest difference between clients' accumulated service."
            yield Figure(f"{shape}-difference", caption, vtc.accumulated(fair, fcfs, bound=BOUND))


# ---- Figure 10: what clients ask for changes twice; LCF, which has no counter lift, makes up for old times

PHASE_S = 300.0
PHASES_RPM = ((30, 60, 30), (120, 60, 90))
"""Of client 1 and of client 2 in each phase; in the first, client 1 sends every other minute."""


class Shift(vtc.VtcExperiment):
    id = "vtc-fig10"
    title = "Traffic that shifts: what one client did not use is not made up for later"
    source = "VTC, Figure 10"
    about = f"""Three phases of {PHASE_S:.0f} s: client 1 sends {PHASES_RPM[0][0]} requests/min every other minute while
        client 2 sends {PHASES_RPM[1][0]} all the time; both send {PHASES_RPM[0][1]}, which is more than the engine
        serves; {PHASES_RPM[0][2]} and {PHASES_RPM[1][2]}. All {TOKENS} + {TOKENS} tokens."""
    lengths_s = (3 * PHASE_S, 360.0)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        first = [on_off(PHASES_RPM[0][0]), *map(even, PHASES_RPM[0][1:])]
        both = ([[length_s / 3, one] for one in each] for each in (first, map(even, PHASES_RPM[1])))
        sent = vtc.sent("shift", *({"kind": "phases", "phases": phases} for phases in both))
        return [vtc.row(policy, policy, sent) for policy in ("vtc", "lcf")]

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        asked = PHASES_RPM[0][1] / 60 * (TOKENS + 2 * TOKENS)
        rates = {
            name: [[in_third(one, phase, "rate", k, 30.0) for k in (1, 2)] for phase in range(3)]
            for name, one in at.items()
        }
        shares = {name: [one / (one + other) for one, other in found] for name, found in rates.items()}
        served = {name: found[1][0] / asked for name, found in rates.items()}
        fair, lifted = shares["vtc"][1], shares["lcf"][1]
        apart = max(abs(shares["vtc"][phase] - shares["lcf"][phase]) for phase in (0, 2))
        yield at_most(abs(fair - 0.5), 0.05, 0.1).claim(f"""When both overload, VTC serves them alike | equal
            rates | client 1 receives {fair:.0%}""")
        yield graded(
            served["lcf"] >= 0.97 and lifted >= fair + 0.04, lifted > fair
        ).claim(f"""LCF then favours client 1, whose counter lags behind from before | disproportionately
            client 1 | client 1 receives {served["lcf"]:.0%} of what it asks for, {lifted:.0%} of the whole;
            under VTC {served["vtc"]:.0%} and {fair:.0%} | It cannot receive more than it asks for.""")
        yield at_most(apart, 0.05, 0.1).claim(f"""Before and after, VTC and LCF are alike | similar | client
            1's shares differ by at most {100 * apart:.0f} points | Under VTC client 1 begins the last phase
            with a backlog, since it asked for more than its half; under LCF it has none.""")
        head = "scheduler | ON/OFF, % | overload, % | below its share, %"
        parts = [[at[name].cell.title, *(100 * part for part in found)] for name, found in shares.items()]
        yield Table("Client 1's part of the service, by phase", head, parts)
        yield received_rates(at)


# ---- Figure 15: how large the difference gets, by size of the pool and by length of requests

COST_MODEL = f"a100-80g/llama-2-13b:{vtc.STEP_OVERHEAD}"
POOLS: Mapping[str, tuple[int, int, int]] = {
    "pool-35k": (35_000, 512, 90),
    "pool-65k": (65_000, 512, 120),
    "length-256": (35_000, 256, 180),
    "length-768": (35_000, 768, 60),
}
"""KV pool, input and output tokens of a request, requests/min of client 1; client 2 sends twice as many."""
STARTS = {"": IN_STEP, ".spread": 0}
"""Requests that wait at the start, by the end of a cell's name: requests in step, and out of step."""


class Pools(vtc.VtcExperiment):
    id = "vtc-fig15"
    title = "Larger pools and longer requests leave larger differences"
    source = "VTC, Figures 15a and 15b"
    about = f"""Llama-2-13b on an A100 80 GB, two overloaded clients, one sending twice as much. (a) pools of 35,000 and
        65,000 tokens, 512 + 512; (b) 256 + 256, 512 + 512 and 768 + 768 in 35,000. The engine has 10 ms of overhead a
        step, so that all rates overload it as in the paper. Once with {IN_STEP} requests of both waiting at the start,
        so that requests run in step, as in the paper's engine, which admits every ten decode steps; once as stated."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for (name, (pool, length, rpm)), (start, waiting) in product(POOLS.items(), STARTS.items()):
            arrivals = even(rpm, waiting), even(2 * rpm, waiting)
            sent = vtc.sent(name, *arrivals, tokens=[(length, length)] * 2)
            fields: Json = {"cost_model": COST_MODEL, "kv_tokens": pool, "max_running": 1024}
            yield vtc.row(f"{name}{start}", "vtc", sent, **fields)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        most = {name: result["accumulated/max"] for name, result in at.items()}
        bounds = {name: 2.0 * max(length, 2 * pool) for name, (pool, length, _) in POOLS.items()}
        used = max(most[name + start] / bound for name, bound in bounds.items() for start in STARTS)

        def times(more: str, less: str) -> tuple[float, float, str]:
            step, apart = (most[more + start] / most[less + start] for start in STARTS)
            return step, apart, f"{step:.2f}× in step, {apart:.2f}× out of step"

        *both, ours = times("pool-65k", "pool-35k")
        yield graded(min(both) >= 1.2, max(both) >= 1.2).claim(f"""15a: a larger pool varies more | 65,000
            above 35,000 | {ours}""")
        *both, ours = times("pool-35k", "length-256")
        yield graded(min(both) >= 1.1, max(both) >= 1.1).claim(f"""15b: longer requests vary more | 512 above
            256 | {ours} | One turn of a client is a request, so the difference is a few requests' worth; what
            is admitted at once decides how many.""")
        *both, ours = times("length-768", "pool-35k")
        alike = [0.75 <= one <= 1.33 for one in both]
        yield graded(all(alike), any(alike)).claim(f"""15b: 512 and 768 vary alike | the same, for the bound
            is reached | {ours}; {used:.0%} of 2U at most | One turn of a client is a request, so out of step
            the difference grows with its length; in step it is as many requests as end together. The
            theorem's bound, a pool that is all one client's, is far.""")
        yield graded(used <= 1).claim(f"Differences stay within the theorem | 2U | {used:.0%} of 2U at most")
        yield Table(
            "Largest difference of accumulated service",
            """pool, tokens | request, tokens | difference in step, units | difference out of step, units |
            bound 2U, units | tokens/s""",
            [
                [f"{pool:,}", f"{length} + {length}", at[name].shown("accumulated/max"),
                 at[f"{name}.spread"].shown("accumulated/max"), bounds[name], at[name].shown("tokens_per_s")]
                for name, (pool, length, _) in POOLS.items()
            ],
        )  # fmt: skip
        by_pool = {"35 000": at["pool-35k"], "65 000": at["pool-65k"]}
        lengths = {"256 + 256": "length-256", "512 + 512": "pool-35k", "768 + 768": "length-768"}
        by_length = {name: at[cell] for name, cell in lengths.items()}
        panels = [
            vtc.difference_panel(by_pool, title="512 + 512, by pool in tokens"),
            vtc.difference_panel(by_length, title="pool of 35 000, by length"),
        ]
        yield Figure("difference", "Difference of accumulated service, VTC, requests in step.", [panels])


# ---- Figure 16: clients of unlike weights

WEIGHTS = {f"client {k}": float(k) for k in (1, 2, 3, 4)}


class Weighted(vtc.VtcExperiment):
    id = "vtc-fig16"
    title = "Weights of 1 : 2 : 3 : 4"
    source = "VTC, Figure 16"
    about = f"""Four overloaded clients, 48, 48, 72 and 96 requests/min of {TOKENS} + {TOKENS} tokens, without and with
        weights."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        sent = vtc.sent("four", *map(even, (48, 48, 72, 96)))
        yield vtc.row("equal", "vtc", sent)
        yield vtc.row("weighted", "vtc", sent, "weighted VTC", client_weights=WEIGHTS)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        got = {name: [one[f"clients/{client}/service"] for client in WEIGHTS] for name, one in at.items()}
        parts = {name: [service / sum(all_) for service in all_] for name, all_ in got.items()}
        shown = {name: " : ".join(f"{one / all_[0]:.2f}" for one in all_) for name, all_ in parts.items()}
        due = [weight / sum(WEIGHTS.values()) for weight in WEIGHTS.values()]
        uneven = max(parts["equal"]) / min(parts["equal"]) - 1
        off = max(abs(part / right - 1) for part, right in zip(parts["weighted"], due, strict=True))
        yield at_most(uneven, 0.05, 0.15).claim(f"""Without weights all receive the same | equal |
            {shown["equal"]}""")
        yield at_most(off, 0.1, 0.2).claim(f"""With weights they receive in proportion | 1 : 2 : 3 : 4 |
            {shown["weighted"]}""")
        columns = " | ".join(["policy", *(f"{client} = clients/{client}/service" for client in WEIGHTS)])
        yield medians("Service received in the run, units", columns, at.values())
        yield received_rates(at)


# ---- Figure 19, Tables 4 to 6: predicted outputs, and another cost function, when all are overloaded

EIGHT_RPM = (24, 24, 24, 36, 36, 36, 36, 36)
PREDICTING = ("vtc", "vtc-noisy", "vtc-oracle")
TABLE_5_6: Mapping[str, tuple[tuple[float, ...], ...]] = {
    "two": ((192.88, 103.77, 6981.24, 893), (33.98, 12.54, 111.94, 904), (5.87, 0.51, 1.71, 895)),
    "eight": ((322.16, 162.20, 5151.49, 875), (99.43, 66.32, 487.10, 875), (43.23, 36.34, 56.52, 875)),
}
"""Of each policy: maximum, mean and variance of the service difference, units/s, and tokens/s."""


class Prediction(vtc.VtcExperiment):
    id = "vtc-fig19"
    title = "Charging predicted outputs ahead shrinks the difference"
    source = "VTC, Figure 19, Tables 5 and 6"
    about = f"""{TOKENS} + {TOKENS} tokens, evenly spaced, overloaded: two clients ({RPM[0]} and {RPM[1]} requests/min),
        or eight ({EIGHT_RPM[0]} and {EIGHT_RPM[7]}). Once with {IN_STEP} requests of all waiting at the start, so that
        requests run in step, as in the paper's engine, which admits every ten decode steps; once as stated."""
    curves_of = ()

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for clients, (suffix, waiting) in product(TABLE_5_6, (("", IN_STEP), ("-spread", 0))):
            eight = vtc.sent("eight", *(even(rpm, waiting) for rpm in EIGHT_RPM))
            sent = overload(waiting) if clients == "two" else eight
            for policy in PREDICTING:
                yield vtc.row(f"{clients}{suffix}.{policy}", policy, sent)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        for table, clients in (("Table 5", "two"), ("Table 6", "eight")):
            yield from self._claims(at, table, clients)
            what = "The same, requests out of step"
            for title, suffix in ((table, ""), (what, "-spread")):
                ours = [at[f"{clients}{suffix}.{policy}"] for policy in PREDICTING]
                title = f"{title}: {clients} clients (service difference in units/s)"
                yield vtc.beside_paper(title, ours, TABLE_5_6[clients])
            caption = f"""Largest difference between the accumulated service of {clients} overloaded clients. A
                difference that stays is of the first seconds, before all are backlogged."""
            drawn = vtc.accumulated(*(at[f"{clients}.{policy}"] for policy in PREDICTING))
            yield Figure(f"{clients}-difference", caption, drawn)
        yield f"""Plain VTC charges an output when it is made, so a client that is behind gets one request for every
            {TOKENS} units, and each of these requests then costs {3 * TOKENS}: it gets too much, and then the other
            does. In step this swings up to a pool that is one client's alone; out of step there is room for one request
            at a time, the counters are looked at before each, and little is left for a prediction to gain."""

    def _claims(self, at: Mapping[str, Result], table: str, clients: str) -> Iterator[Claim]:
        plain, noisy, oracle = (at[f"{clients}.{policy}"] for policy in PREDICTING)
        apart = [at[f"{clients}-spread.{policy}"]["difference/avg"] for policy in PREDICTING]
        step = [one["difference/avg"] for one in (plain, noisy, oracle)]
        theirs = [row[1] for row in TABLE_5_6[clients]]
        in_step, out_of_step = ([one / means[0] for one in means] for means in (step, apart))

        paper = [f"{theirs[0]:.1f} to {mean:.1f}, {mean / theirs[0]:.0%}" for mean in theirs]
        ours = [
            f"""in step {step[0]:.1f} to {step[k]:.1f}, {in_step[k]:.0%}; out of step {apart[0]:.1f} to {apart[k]:.1f},
                {out_of_step[k]:.0%}"""
            for k in range(3)
        ]

        both = in_step[1], out_of_step[1]
        yield graded(max(both) <= 0.6, min(both) <= 0.6).claim(f"""{table}: a prediction that is up to 50 %
            off shrinks the mean difference | {paper[1]} | {ours[1]} | How far plain VTC swings depends on how
            many requests are admitted at once: out of step it swings little, and there is little to gain.""")
        less = [one[2] <= min(0.4, one[1]) for one in (in_step, out_of_step)]
        yield graded(all(less), any(less)).claim(f"""{table}: an oracle shrinks it further | {paper[2]} |
            {ours[2]} | What remains is the one request by which counters must differ, and out of step plain
            VTC is close to that.""")
        speeds = [one["tokens_per_s"] for one in (plain, noisy, oracle)]
        yield graded(max(speeds) <= 1.02 * min(speeds)).claim(f"""{table}: throughput is unchanged |
            {" / ".join(f"{row[3]:g}" for row in TABLE_5_6[clients])} tokens/s |
            {" / ".join(f"{speed:,.0f}" for speed in speeds)} tokens/s""")


TABLE_4: Mapping[str, tuple[float, ...]] = {
    "fcfs": (323.18, 317.13, 15.98, 876),
    "vtc": (137.27, 74.87, 2819.40, 900),
    "vtc-oracle": (4.28, 0.34, 0.91, 893),
}


class Profiled(vtc.VtcExperiment):
    id = "vtc-tab4"
    title = "Another cost of service: profiled"
    source = "VTC, Table 4"
    about = """As Figure 3, with the cost that the authors fitted to their engine. Differences are in tenths of its
        units: the paper's tables have them so (0.56 requests/s more for one client are 3,086 units/s by its formula,
        and its FCFS row says 317)."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        return [vtc.row(policy, policy, overload(), cost="profiled") for policy in TABLE_4]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        found = vtc.observe(run, cost="profiled", curves_of=())
        return {**found, "difference": vtc.tenths(vtc.difference(run, make_cost("profiled")))}

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        fifo, fair, oracle = (at[name]["difference/avg"] for name in TABLE_4)
        theirs = [row[1] for row in TABLE_4.values()]
        yield graded(fair / fifo <= 0.5, fair < fifo).claim(f"""Under the profiled cost, VTC's mean difference
            is far below FCFS's | {theirs[0]:.1f} to {theirs[1]:.1f}, {theirs[1] / theirs[0]:.0%} | {fifo:.1f}
            to {fair:.1f}, {fair / fifo:.0%}""")
        yield graded(oracle / fifo <= 0.1, oracle < fair).claim(f"""With an oracle there is almost none left |
            {theirs[0]:.1f} to {theirs[2]:.1f}, {theirs[2] / theirs[0]:.0%} | {fifo:.1f} to {oracle:.1f},
            {oracle / fifo:.0%}""")
        title = "Table 4: service difference, profiled cost (service difference in units/s)"
        yield vtc.beside_paper(title, at.values(), TABLE_4.values())
        caption = "Largest difference between clients' accumulated service, profiled cost."
        yield Figure("difference", caption, vtc.accumulated(*at.values()))
