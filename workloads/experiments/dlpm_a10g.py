"""DLPM, Figures 1 and 8 to 12: smaller experiments, on A10Gs."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from statistics import fmean, median

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.claims import Part, Table, at_least, at_most, graded
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Row, TrafficSpec, medians
from workloads.experiments.dlpm_setting import CHAT, DEFAULT, JUDGE, SCHEDULERS, SHIPPED, TOT2, TOT3
from workloads.experiments.senders import CHAT as CHATTING
from workloads.experiments.senders import QUESTION_TOKENS, judge, sender, tot, traffic
from workloads.plots import Figure, Panel, average, between, largest
from workloads.records import Run
from workloads.session import Plan


def longest(result: Result, *clients: str) -> float:
    return max(largest(result.curve("response_s", one)) for one in clients)


# ---- Figure 1: Q^u swept, with VTC and LPM as end points

QUANTA_U = (100, 1_000, 5_000, 20_000, 100_000, 500_000)


class Figure1(dlpm.A10GExperiment):
    id = "dlpm-fig1"
    title = "Throughput against fairness: Q^u from small to large"
    source = "DLPM, Figure 1"
    about = """Llama-3.2-3B on one A10G, 240 s. Four clients send trees of thoughts, three of two branches and one of
        four, together more than the GPU can do; the paper does not describe its workload. Unfairness is the largest
        difference of actual service between two clients that both wait."""
    lengths_s = (240.0, 60.0)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        rate = TOT2.rate_per_s(2.0 / 3)
        good = (sender(f"client {k}", tot(2), rate) for k in range(3))
        trees = traffic("tot", *good, sender("client 3", tot(4), rate, well_behaved=False))
        for quantum in QUANTA_U if full else QUANTA_U[1::2]:
            site = dlpm.a10g("rr", policy="dlpm", quantum=float(quantum))
            yield Row(f"dlpm.{quantum}", site, trees, f"DLPM, Q^u = {quantum:,}")
        for policy in ("vtc", "lpm"):
            yield Row(policy, dlpm.a10g("rr", policy=policy), trees, policy.upper())

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        speed = {name: result["tokens_per_s"] for name, result in at.items()}
        gap = {name: result["difference"] for name, result in at.items()}
        quanta = {name: int(name[5:]) for name in at if name.startswith("dlpm.")}
        closed = {name: (gap["lpm"] - gap[name]) / (gap["lpm"] - gap["vtc"]) for name in quanta}
        fair = [name for name in quanta if closed[name] >= 0.9]
        best = max(fair or quanta, key=lambda name: (speed[name], name))
        won = (speed[best] - speed["vtc"]) / (speed["lpm"] - speed["vtc"])
        part, vtc_part = (speed[name] / speed["lpm"] for name in (best, "vtc"))
        yield graded(
            part >= 0.95 and closed[best] >= 0.9, won >= 0.4 and closed[best] >= 0.8
        ).claim(f"""Some Q^u has about LPM's throughput at close to VTC's fairness | a new Pareto frontier |
            Q^u = {quanta[best]:,}: {part:.0%} of LPM's throughput (VTC {vtc_part:.0%}), {closed[best]:.0%} of
            the way from LPM's difference to VTC's | It is far beyond the line from VTC to LPM, but a part of
            LPM's throughput comes from serving one client's largest tree alone, and no fair scheduler can
            have that part.""")
        least, *_, most = quanta
        faster, wider = speed[most] / speed[least], gap[most] / gap[least]
        hits = [at[name]["hit_rate"] for name in (least, "lpm", "vtc")]
        yield graded(
            faster >= 1.05 and wider >= 1.5, faster >= 1.05 or wider >= 1.5
        ).claim(f"""A larger Q^u raises throughput and loosens fairness | both | from Q^u = {quanta[least]:,}
            to {quanta[most]:,} throughput {faster:.2f}×, difference {wider:.1f}× | Throughput has little room
            to rise: within its turn a client's requests are ordered by prefix, whatever Q^u is, so the
            smallest has a hit rate of {hits[0]:.2f}, LPM {hits[1]:.2f} and VTC {hits[2]:.2f}.""")
        columns = """scheduler | tokens/s = tokens_per_s | hit rate = hit_rate |
            largest difference, units = difference | bound, units = bound | Jain, actual = jain_actual"""
        yield medians("Medians over seeds (lowest to highest)", columns, at.values())
        points = {"DLPM": list(quanta), "VTC": ["vtc"], "LPM": ["lpm"]}
        lines = {
            label: ([gap[one] for one in of], [speed[one] for one in of]) for label, of in points.items()
        }
        x, bottom = "largest difference of service, units (less is fairer)", 0.95 * min(speed.values())
        caption = "Throughput and the largest difference of service between clients that wait."
        frontier = Panel("tokens/s", lines, x, swept=True, log="x", bottom=bottom)
        yield Figure("frontier", caption, [[frontier]])


# ---- Figure 8: conversations on two replicas; two clients flood, one of them calms down midway

CHAT_RUNNING = 64
NORMAL, FLOOD = 0.12, 0.8
"""Of what the cluster does. Until the middle all ask for 1.84 times that, then for 1.16 times."""
GOOD, CALMS, FLOODS = ("client 0", "client 1"), "client 2", "client 3"


class Figure8(dlpm.A10GExperiment):
    id = "dlpm-fig8"
    title = "Conversations: two clients flood, one of them calms down midway"
    source = "DLPM, Figure 8"
    about = f"""Llama-3.2-3B on two A10G that run {CHAT_RUNNING} requests at a time. Conversations have the lengths
        of Chatbot Arena's (made from a seed). Clients 0 and 1 ask for {NORMAL:.0%} of what the cluster does each,
        clients 2 and 3 for {FLOOD:.0%} each, client 2 from the middle of the 200 s on for {NORMAL:.0%}. The paper
        does not state its rates."""
    lengths_s = (200.0, 40.0)
    curves = (20.0, 4.0)
    seeds = SEEDS[:1]

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        normal, flood = (CHAT.rate_per_s(2 * part) for part in (NORMAL, FLOOD))
        sent = traffic(
            "chat",
            *(sender(name, CHATTING, normal) for name in GOOD),
            sender(CALMS, CHATTING, (flood, length_s / 2), (normal, length_s), well_behaved=False),
            sender(FLOODS, CHATTING, flood, well_behaved=False),
        )
        fields: Json = CHAT.quanta | {"max_running": CHAT_RUNNING}
        for name, one in SCHEDULERS.items():
            yield Row(name, dlpm.a10g(name, 2, **fields), sent, one.label)
        yield Row(DEFAULT, dlpm.a10g("d2lpm", 2, **fields | SHIPPED.fields), sent, SHIPPED.label)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        good_s = {name: longest(result, *GOOD) for name, result in at.items()}
        floods_s = {name: longest(result, FLOODS) for name, result in at.items()}
        calmed_s = {name: _calmed_s(result) for name, result in at.items()}
        yield at_most(
            max(good_s["vtc"], good_s["d2lpm"]) / good_s["rr"], 0.2, 0.5
        ).claim(f"""Under LPM clients 0 and 1 wait long; VTC and D2LPM protect them | high response times; low
            under VTC and D2LPM | longest mean in 20 s: RR+LPM {good_s["rr"]:.1f} s, VTC {good_s["vtc"]:.1f}
            s, D2LPM {good_s["d2lpm"]:.1f} s""")
        yield at_least(floods_s["vtc"], 40, 10).claim(f"""Under VTC the flooding clients wait long | up to 80
            s | {floods_s["vtc"]:.0f} s (D2LPM {floods_s["d2lpm"]:.0f} s) | How long depends on how far they
            are above their share, and for how long.""")
        ours_s, vtc_s = calmed_s["d2lpm"], calmed_s["vtc"]
        shown = {name: "–" if wait_s is None else f"{wait_s:.1f}" for name, wait_s in calmed_s.items()}
        waits = ", ".join(f"{at[name].cell.title} {wait} s" for name, wait in shown.items())
        yield graded(
            ours_s is not None and ours_s <= 2,
            ours_s is not None and vtc_s is not None and ours_s <= 0.5 * vtc_s,
        ).claim(f"""D2LPM keeps the client fast that has calmed down | consistently low, as clients 0 and 1 |
            mean of what it sends in the quarter after that: {waits} | When it calms down its queue is long,
            and its own requests are ordered by prefix, then by arrival: under every scheduler, what it sends
            afterwards waits for what it sent before. Under D2LPM that takes less time the less it had sent
            above its share, which the paper does not state; what ships serves more, so the queue is
            shorter.""")
        columns = """scheduler | clients 0 and 1, longest mean = good |
            client 2 in the quarter after it calms down, mean = calmed | client 3, longest mean = floods |
            tokens/s = tokens_per_s | hit rate = hit_rate | difference, units = difference"""
        title = "Response times, s, and throughput"
        yield medians(title, columns, at.values(), good=good_s, calmed=calmed_s, floods=floods_s)
        caption = """Response time and client-side service in 20 s windows. Client 2 calms down in the middle.
            Requests that still wait when the run ends have no response time, so curves fall towards the end."""
        yield Figure("time", caption, dlpm.over_time(at.values(), ("response_s", "service")))


def _calmed_s(result: Result) -> float | None:
    """Mean response time of client 2 in the quarter of the run after it calms down; None where nothing is served."""
    length_s = result.cell.plan.duration_s
    served = between(result.curve("response_s", CALMS), length_s / 2, 0.75 * length_s)
    return fmean(served) if served else None


# ---- Figure 9: trees of thoughts, one client with questions ten times as long

TREE_PROGRAMS = 24
QUANTUM, WORKER_QUANTUM = 5_000.0, 40_000.0
"""Q^w is the paper's largest (Figure 10). By the rule of Figure 7 it would be 876,000 units here: three minutes of
a worker, for which one client's trees may stand in line at the one that holds them."""
LONG, SHORT = "client 0", ("client 1", "client 2")


def trees(replicas: int, *, factor: int = 10) -> TrafficSpec:
    """Three clients with trees of three branches at equal rates, together 1.5 times what the cluster does, the
    well-behaved two thirds of that; client 0's questions are `factor` times as long."""
    rate = TOT3.rate_per_s(1.5 * replicas / 3)
    return traffic(
        "tot",
        sender(LONG, tot(3, QUESTION_TOKENS * factor), rate, well_behaved=factor == 1),
        *(sender(name, tot(3), rate) for name in SHORT),
    )


class Figure9(dlpm.A10GExperiment):
    id = "dlpm-fig9"
    title = "Response time and service over time: trees of thoughts, one client with long questions"
    source = "DLPM, Figure 9"
    about = f"""Llama-3.2-3B on four A10G. Three clients send trees of three branches ({TOT3.requests} requests) at
        equal rates, {TREE_PROGRAMS} each; client 0's questions are ten times as long. Together they ask for 1.5
        times what the cluster does, which the paper does not state. All programs are run to their end. Q^u is
        {QUANTUM:,.0f} and Q^w {WORKER_QUANTUM:,.0f} units."""
    curves = (60.0, 10.0)
    seeds = SEEDS[:1]

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        replicas, programs = (4, TREE_PROGRAMS) if full else (2, 2)
        plan, sent = dlpm.plan(3600.0, programs, drain_s=None), trees(replicas)
        fields: Json = {"quantum": QUANTUM, "worker_quantum": WORKER_QUANTUM}
        for name, scheduler in SCHEDULERS.items():
            yield Row(name, dlpm.a10g(name, replicas, **fields), sent, scheduler.label, plan)
        yield Row(DEFAULT, dlpm.a10g("d2lpm", replicas, **fields | SHIPPED.fields), sent, SHIPPED.label, plan)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        ends = {name: at[name]["end_s"] for name in SCHEDULERS}
        first = min(ends, key=lambda name: (ends[name], name))
        later = {name: end / ends["d2lpm"] for name, end in ends.items()}
        waits = {name: longest(result, *SHORT) for name, result in at.items()}
        actual, seen = (
            {name: _long_over_short(result, what) for name, result in at.items()}
            for what in ("actual", "service")
        )
        moved = {name: at[name]["imbalance"] for name in ("preble", "d2lpm", "vtc")}
        yield graded(
            first == "d2lpm" and max(later["vtc"], later["preble"]) >= 1.5, later[first] >= 1 / 1.05
        ).claim(f"""D2LPM finishes first | up to 2× faster than VTC and Preble | {SCHEDULERS[first].label}
            first; VTC {later["vtc"]:.2f}×, Preble {later["preble"]:.2f}×, RR+LPM {later["rr"]:.2f}×, the
            shipped default {at[DEFAULT]["end_s"] / ends["d2lpm"]:.2f}× its time | The pool of an A10G holds
            129,000 tokens here, most of the trees under way, so little is computed twice under any scheduler, and
            there is little left to gain.""")
        yield at_most(
            max(abs(actual["d2lpm"] - 1), abs(actual["vtc"] - 1)), 0.15, 0.4
        ).claim(f"""VTC and D2LPM give all three the same actual service while all wait | equal | client 0
            over the others: D2LPM {actual["d2lpm"]:.2f}, VTC {actual["vtc"]:.2f} | At times a client waits
            for its own earlier thoughts, and then has no request to serve.""")
        yield graded(seen["d2lpm"] > 1.2).claim(f"""Client 0 is then seen to receive more, because its long
            prefixes are cached | more than the others | {seen["d2lpm"]:.1f}× the others' client-side service""")
        yield graded(
            min(waits["preble"], waits["rr"]) >= 2 * waits["d2lpm"],
            max(waits["preble"], waits["rr"]) >= 1.3 * waits["d2lpm"],
        ).claim(f"""Schedulers without fairness control keep the others waiting | Preble up to 600 s | clients
            1 and 2, longest mean in 60 s: D2LPM {waits["d2lpm"]:.0f} s, VTC {waits["vtc"]:.0f} s, Preble
            {waits["preble"]:.0f} s, RR+LPM {waits["rr"]:.0f} s | Our Preble does not pin a client to one GPU
            for long: it moves prefixes off a GPU that is much busier than another, as its public code does.""")
        yield at_least(moved["preble"], 2, 1.3).claim(f"""Preble leaves most of the cluster idle while client
            0's prefixes are pinned to one GPU | a quarter of the capacity from 300 to 600 s | over the whole
            run the busiest replica computes {moved["preble"]:.2f}× the average's prompt tokens (D2LPM
            {moved["d2lpm"]:.2f}×, VTC {moved["vtc"]:.2f}×) | As said above. What each replica did from 300 to
            600 s is not kept: over the run the work is shared evenly.""")
        columns = """scheduler | end, s = end_s | tokens/s until then = tokens_per_s | hit rate = hit_rate |
            longest mean response of clients 1 and 2, s = waits | actual service, client 0 : others = actual |
            client-side, client 0 : others = seen"""
        yield medians("The whole run", columns, at.values(), waits=waits, actual=actual, seen=seen)
        caption = """Response time, actual service and client-side service in 60 s windows, to each scheduler's
            end."""
        yield Figure("time", caption, dlpm.over_time(at.values()))


def _long_over_short(result: Result, what: str) -> float:
    """Client 0's service over the mean of the others', from the time when queues have formed to the last arrivals."""
    last_s = 0.75 * result.first["end_s"]
    since_s = min(60.0, last_s / 2)
    mine, *others = (average(result.curve(what, name), since_s, last_s) for name in (LONG, *SHORT))
    return mine / fmean(others)


# ---- Figure 10: what Q^w, which limits how long a client may stay at a worker, does to throughput and fairness

QUANTA_W = (2_000, 5_000, 10_000, 20_000, 40_000)
OTHERS = ("rr", "preble", "vtc", "cache-aware")
SIDES = {"a": "one misbehaving client", "b": "all well-behaved"}


class Figure10(dlpm.A10GExperiment):
    id = "dlpm-fig10"
    title = "Q^w: throughput and Jain's index"
    source = "DLPM, Figures 10a and 10b"
    about = f"""Figure 9's clients on four A10G for 160 s: (a) client 0's questions are ten times as long, (b) all
        alike. Q^u is what one tree is charged. Beside the paper's Q^w, {QUANTA_W[0]:,} to {QUANTA_W[4]:,}, larger
        ones: a tree costs {TOT3.charged_in_full:,.0f}."""
    lengths_s = (160.0, 40.0)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        replicas, quanta = (4, (*QUANTA_W, 200_000, 1_000_000)) if full else (2, (QUANTA_W[0], QUANTA_W[-1]))
        for side in SIDES if full else ("a",):
            sent, seeds = trees(replicas, factor=10 if side == "a" else 1), SEEDS[:1] if side == "b" else None
            runs = [(f"{quantum}", "d2lpm", f"{quantum:,}", float(quantum)) for quantum in quanta]
            runs += [(name, name, SCHEDULERS[name].label, TOT3.quanta["worker_quantum"]) for name in OTHERS]
            for name, scheduler, label, quantum in runs:
                site = dlpm.a10g(scheduler, replicas, quantum=TOT3.charged, worker_quantum=quantum)
                yield Row(f"{side}.{name}", site, sent, label, seeds=seeds)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        speed = {name: result["tokens_per_s"] for name, result in at.items()}
        swept = {side: [name for name in at if name[0] == side and name[2:].isdigit()] for side in SIDES}
        first, last, beyond = f"a.{QUANTA_W[0]}", f"a.{QUANTA_W[-1]}", swept["a"][-1]
        best = max((f"a.{name}" for name in OTHERS), key=lambda name: (speed[name], name))
        gain, more = speed[last] / speed[first], speed[beyond] / speed[last]
        label = {name: at[name].cell.title for name in (first, last, beyond, best)}
        why = f"""It keeps rising: a tree costs {TOT3.charged_in_full:,.0f} units here, so with {QUANTA_W[4]:,} a
            client still changes workers within each tree."""
        yield graded(gain >= 1.02 and more <= 1.02, gain >= 1.02).claim(f"""Throughput rises with Q^w, then
            stays | rises and saturates from {QUANTA_W[0]:,} to {QUANTA_W[4]:,} | {gain:.2f}× from
            {label[first]} to {label[last]}, {more:.2f}× from there to {label[beyond]} | {why}""")
        beside, largest_beside = speed[last] / speed[best], speed[beyond] / speed[best]
        yield graded(beside >= 1, largest_beside >= 1).claim(f"""Then it surpasses all other schedulers |
            surpasses all | {beside:.2f}× {label[best]}, the best other, at {label[last]} and
            {largest_beside:.2f}× at {label[beyond]} | A scheduler that places by prefix and load alone never
            has to move a client, and keeps more hits.""")
        before, after = at[first].values("jain"), at[last].values("jain")
        moves = sorted(new - old for old, new in zip(before, after, strict=True))
        yield graded(
            moves[0] >= -0.1 and moves[-1] <= -0.005, -0.1 <= median(moves) <= -0.005
        ).claim(f"""Jain's index of the client-side service falls a little as Q^w grows | 0.855 to 0.83 | by
            {median(moves):+.3f} in the median of the seeds ({moves[0]:+.3f} to {moves[-1]:+.3f}); runs with
            other seeds differ by {max(before) - min(before):.3f} | The index moves by less than runs with
            other seeds differ, and not with every seed downwards.""")
        if swept["b"]:
            alike = min(at[name]["jain"] for name in swept["b"])
            yield at_least(alike, 0.98, 0.95).claim(f"""Where all behave well, the index is 1 for every Q^w |
                consistently 1 | at least {alike:.3f} | Few large trees arrive in a run, not the same number
                of each client's.""")
        sides = [side for side in SIDES if swept[side]]
        columns = """Q^w, units, or scheduler | tokens/s = tokens_per_s | Jain's index = jain |
            of actual service = jain_actual | hit rate = hit_rate | imbalance = imbalance"""
        for side in sides:
            mine = [one for name, one in at.items() if name[0] == side]
            yield medians(f"({side}) {SIDES[side]}", columns, mine)

        def panel(side: str, y: str, path: str) -> Panel:
            names, title = swept[side], f"({side}) {SIDES[side]}" if path == "tokens_per_s" else ""
            lines = {"D2LPM": ([int(name[2:]) for name in names], [at[name][path] for name in names])}
            levels = {SCHEDULERS[name].label: at[f"{side}.{name}"][path] for name in OTHERS}
            return Panel(y, lines, "Q^w, units", title, levels=levels, swept=True, log="x")

        kinds = (("tokens/s", "tokens_per_s"), ("Jain's index", "jain"))
        caption = (
            "Throughput (above) and Jain's index (below) over Q^w; horizontal lines are the other schedulers."
        )
        yield Figure("quantum", caption, [[panel(side, *kind) for side in sides] for kind in kinds])


# ---- Figure 11: from five clients to fifty at the same total rate

COUNTS = (5, 10, 20, 35, 50)
INSTRUCTIONS = 1000


class Figure11(dlpm.A10GExperiment):
    id = "dlpm-fig11"
    title = f"From {COUNTS[0]} to {COUNTS[4]} clients at the same total rate"
    source = "DLPM, Figure 11"
    about = f"""Llama-3.2-3B on one A10G, 200 s, trees of thoughts of two branches at 1.5 times what the GPU does.
        Each client puts {INSTRUCTIONS:,} tokens of its own before all its questions, so that more clients mean more
        prefixes; the paper does not describe its workload."""
    lengths_s = (200.0, 40.0)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for policy in dlpm.POLICIES:
            for count in COUNTS if full else (COUNTS[0], COUNTS[-1]):
                rate, shape = TOT2.rate_per_s(1.5 / count), tot(2, instructions=INSTRUCTIONS)
                crowd = traffic("tot", *(sender(f"client {k}", shape, rate) for k in range(count)))
                site = dlpm.a10g("rr", policy=policy, quantum=TOT2.charged)
                yield Row(f"{policy}.{count}", site, crowd)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        found = dlpm.observe(run)
        del found["clients"]
        return found

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        counts = [count for count in COUNTS if f"dlpm.{count}" in at]
        rates, hits = (
            {name: [at[f"{name}.{count}"][path] for count in counts] for name in dlpm.POLICIES}
            for path in ("service_rate", "hit_rate")
        )
        to_lpm, to_vtc = (
            [one / other for one, other in zip(rates["dlpm"], rates[policy], strict=True)]
            for policy in ("lpm", "vtc")
        )
        falls = {policy: found[-1] / found[0] for policy, found in rates.items()}
        yield at_least(min(to_lpm), 0.95, 0.85).claim(f"""DLPM has LPM's service rate, however many clients
            there are | comparable | {min(to_lpm):.2f} to {max(to_lpm):.2f}× | With as many clients as trees
            under way, a turn for each client means a turn for each tree, and the first in line is no longer
            the one whose thoughts are cached.""")
        yield graded(min(to_vtc) >= 1.05, max(to_vtc) >= 1.05).claim(f"""VTC is below at every number of
            clients | consistently lower | DLPM {min(to_vtc):.2f} to {max(to_vtc):.2f}× VTC | It is below, but
            by little where few clients take turns: the cache still holds their trees, and VTC's hit rate
            comes close to DLPM's. It falls behind as clients are added.""")
        slight = all(0.8 <= falls[policy] <= 1 for policy in ("dlpm", "lpm"))
        yield graded(slight and 0.97 <= falls["vtc"] <= 1.03, slight).claim(f"""DLPM and LPM lose a little
            with more clients, VTC nothing | slight decrease; VTC flat |
            {", ".join((f"{dlpm.POLICIES[name]} {fall:.2f}× at {counts[-1]} clients" for name, fall in falls.items()))}
            | It is VTC that loses most: with more clients that take turns more trees are under way at once,
            and its hit rate falls from {hits["vtc"][0]:.2f} to {hits["vtc"][-1]:.2f}, DLPM's from
            {hits["dlpm"][0]:.2f} to {hits["dlpm"][-1]:.2f}.""")
        title = "Client-side service, units/s (lowest to highest seed), and hit rates"
        head = """clients | DLPM | LPM | VTC | hit rate, DLPM | hit rate, LPM | hit rate, VTC | difference, DLPM, units
            | difference, LPM, units | difference, VTC, units"""
        each = [*product(("service_rate", "hit_rate", "difference"), dlpm.POLICIES)]
        table = [[count, *(at[f"{policy}.{count}"].shown(what) for what, policy in each)] for count in counts]
        yield Table(title, head, table)
        lines = {dlpm.POLICIES[policy]: (counts, found) for policy, found in rates.items()}
        panel = Panel(y="service rate, units/s", x="clients", lines=lines, swept=True)
        yield Figure("clients", "Client-side service over the number of clients.", [[panel]])


# ---- Figure 12: four clients with different programs

CHATS, TREES, JUDGES = ("chat 0", "chat 1"), "tot", "judge"
CHAT_PART, TREE_PART, JUDGE_PART = 0.1, 1.0, 0.4
"""Of what the GPU does of such programs alone: 1.6 together."""


class Figure12(dlpm.A10GExperiment):
    id = "dlpm-fig12"
    title = "Four clients with different programs"
    source = "DLPM, Figure 12"
    about = f"""Llama-3.2-3B on one A10G. Two clients hold conversations, one sends trees of three branches, one
        judgements of 2 dimensions (the paper names the trees only): {CHAT_PART:.0%}, {CHAT_PART:.0%},
        {TREE_PART:.0%} and {JUDGE_PART:.0%} of what the GPU does of each alone, for 240 s; then everything is run to
        its end."""
    lengths_s = (240.0, 40.0)
    curves = (60.0, 10.0)

    def plan(self, length_s: float) -> Plan:
        return dlpm.plan(length_s, drain_s=None)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        mixed = traffic(
            "mixed",
            *(sender(name, CHATTING, CHAT.rate_per_s(CHAT_PART)) for name in CHATS),
            sender(TREES, tot(3), TOT3.rate_per_s(TREE_PART), well_behaved=False),
            sender(JUDGES, judge(2), JUDGE.rate_per_s(JUDGE_PART)),
        )
        for policy, label in dlpm.POLICIES.items():
            yield Row(policy, dlpm.a10g("rr", policy=policy, quantum=JUDGE.charged), mixed, label)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        ends, jain = ({name: one[path] for name, one in at.items()} for path in ("end_s", "jain_actual"))
        waits = {name: longest(one, *CHATS, JUDGES) for name, one in at.items()}
        later = ends["dlpm"] / min(ends.values())
        yield at_most(later, 1.01, 1.05).claim(f"""DLPM finishes everything first | better than the other
            schedulers | DLPM {ends["dlpm"]:.0f} s, LPM {ends["lpm"]:.0f} s, VTC {ends["vtc"]:.0f} s | LPM
            keeps every hit; taking turns between clients costs some.""")
        yield at_least(waits["lpm"] / waits["dlpm"], 2, 1.2).claim(f"""Under LPM the client with trees keeps
            the others waiting; not under DLPM | significantly increased | longest mean in 60 s of the others:
            DLPM {waits["dlpm"]:.1f} s, LPM {waits["lpm"]:.1f} s, VTC {waits["vtc"]:.1f} s""")
        yield at_least(jain["vtc"] / jain["dlpm"], 1, 0.97).claim(f"""VTC distributes actual service more
            evenly than DLPM | more even | Jain's index VTC {jain["vtc"]:.3f}, DLPM {jain["dlpm"]:.3f}, LPM
            {jain["lpm"]:.3f} | Neither is above the other by more than seeds differ: the light clients get
            all they ask for.""")
        columns = """scheduler | end, s = end_s | tokens/s = tokens_per_s | hit rate = hit_rate |
            others' P50, s = p50_s | others' P99, s = p99_s | Jain, actual = jain_actual"""
        yield medians("Medians over seeds", columns, at.values())
        caption = "Response time and actual service in 60 s windows, to each scheduler's end."
        yield Figure("time", caption, dlpm.over_time(at.values(), ("response_s", "actual")))
