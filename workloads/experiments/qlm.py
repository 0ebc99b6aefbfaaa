"""QLM's figures on simulated clusters: one model, several models, unlike replicas, unlike requests, and overheads."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from sglang_fair.bench.queue import measure as measure_calls
from sglang_fair.bench.queue import measure_plan
from workloads.deadlines.run import Outcome, attained, measure, percentile
from workloads.deadlines.traffic import Stream
from workloads.experiments.claims import Part, Table, at_least, at_most, graded
from workloads.experiments.contract import Cell, Json, Measured, Result, Row, TrafficSpec, medians
from workloads.experiments.qlm_setting import (
    A10,
    A100,
    ONE_MODEL,
    PAPER_REPLICAS,
    SYSTEMS,
    TRACE,
    W_B,
    Deadlines,
    columns,
    other,
    points,
    qlm,
    ratio,
    row,
    rule,
    run_of,
    swept,
    systems,
    w_a,
    w_b,
    with_fleet,
    without_eviction,
)
from workloads.plots import Figure, Panel
from workloads.session import Plan
from workloads.simulation import Site

MODEL = next(iter(ONE_MODEL))
RESERVES = 0.5
"""So much that no answer finds memory missing."""

# ---- Figure 4

BATCH, CHATS, CHATS_PER_S, BEGIN_S, SLO_S = 300, 80, 1.0, 10.0, 5.0
LONG = 4.0
"""Answers of the batch in multiples of ShareGPT's."""


class Blocking(Deadlines):
    id = "qlm-fig4"
    title = "Who evicts does not wait behind a batch"
    source = "QLM, Figure 4"
    about = f"""One A100 with Vicuna-13B has {BATCH} Batch-2 requests at once. From {BEGIN_S:.0f} s on, {CHATS}
        interactive ones come at {CHATS_PER_S:.0f} a second, due within {SLO_S:.0f} s. Batch answers are ShareGPT's,
        or {LONG:.0f} times as long, so that hardly one of them ends meanwhile. Waiting is until the first token,
        without the time of a prefill. Without eviction interactive requests still go first; a third replica serves
        in order of arrival."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        fleet = qlm(1, new_token_ratio=RESERVES)
        without = without_eviction(fleet)
        sites = {
            "eviction": ("with eviction", fleet),
            "rule": ("with eviction, deadline", rule(fleet)),
            "none": ("without eviction", without),
            "fcfs": ("in order of arrival", replace(without, policy="fcfs", policy_options="")),
        }
        for outputs in (1.0, LONG) if full else (LONG,):
            batch = Stream(MODEL, "batch-2", 1e4, count=BATCH if full else 80, outputs=outputs)
            count = CHATS if full else 10
            chats = Stream(MODEL, "interactive", CHATS_PER_S, from_s=BEGIN_S, count=count, slo_s=SLO_S)
            suffix, more = (".long", ", long answers") if outputs > 1 else ("", "")
            for name, (label, site) in sites.items():
                yield row(f"{name}{suffix}", site, [batch, chats], None, label + more)

    def measure(self, cell: Cell, outcome: Outcome) -> Mapping[str, Json]:
        """Waiting is until the first token, less the time of a prefill alone: `alone_s` of the replica's model."""
        alone, chats = (
            outcome.replicas[0].cost,
            [one for one in outcome.served if one.asked.slo_class == "interactive"],
        )
        alone_s = [alone.prefill_s([(one.asked.prompt_tokens, 0)]) for one in chats]
        waits = [
            max(1e-3, (one.ttft_s or 0.0) - least_s) for one, least_s in zip(chats, alone_s, strict=True)
        ]
        return {
            **measure(outcome),
            "wait_p50_s": percentile(waits, 0.5),
            "wait_p99_s": percentile(waits, 0.99),
            "wait_mean_s": sum(waits) / len(waits),
        }

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        with_s, without_s, fcfs_s = (
            at[f"{name}.long"]["wait_mean_s"] for name in ("eviction", "none", "fcfs")
        )
        times = without_s / with_s
        yield graded(times >= 50, times > 2).claim(f"""Eviction makes the wait of
            interactive requests many times shorter | 100 to 1000 times | {times:,.0f} times on
            average ({with_s:.2f} s in place of {without_s:.1f} s); {fcfs_s / with_s:,.0f} times against order
            of arrival | Interactive requests wait for requests of their own class too, which no eviction
            takes back, and without eviction they are still first when memory is free.""")
        head = """replica | wait, mean, s = wait_mean_s | wait, P50, s = wait_p50_s | wait, P99, s = wait_p99_s |
            in time = classes/interactive/attained | evictions = evictions | batch done, s = end_s"""
        yield medians("Interactive requests", head, at.values())
        yield {"wait_ratio_eviction": times}


# ---- Figure 5

DRAINED = ("b1-mistral-7b", "b1-llama-70b", "b2-vicuna-13b")
EACH = 300


class Drain(Deadlines):
    id = "qlm-fig5"
    title = "Loading models as deadlines come is slow"
    source = "QLM, Figure 5"
    about = f"""{EACH} requests of each of three models come at once to few A100s, which hold one model at a time.
        QLM serves groups of one model; EDF takes one request after the other and loads what it needs."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        models = {model: W_B[model] for model in DRAINED}
        streams = [Stream(model, "batch-2", 1000.0, count=EACH if full else 40) for model in DRAINED]
        for replicas in (2, 4) if full else (2,):
            fleet = qlm(replicas, models)
            yield row(f"grouped.{replicas}", fleet, streams, None, f"groups (QLM), {replicas}")
            names = ("rule", "edf", "affine")
            yield from systems(names, f"{replicas}", fleet, streams, None, f"{{}}, {replicas}")

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        edf, affine = (
            min(ratio(at, n, name, "grouped", "end_s") for n in swept(at)) for name in ("edf", "affine")
        )
        yield graded(edf >= 2).claim(f"""EDF by request takes many times as long as groups until the queue is
            empty | models are loaded again and again | {edf:.1f} times at least; {affine:.1f} times, if it
            prefers workers that have the model""")
        head = "system | seconds = end_s | models loaded = swaps | part of the time computing = busy_part"
        yield medians("Until the queue is empty, by the number of A100s", head, at.values())
        yield {"edf_drain_over_grouped": edf}


# ---- Figures 9 and 10: one model, three classes (W_A)

SWEEP_REPLICAS = 2
RATES = (8.0, 12.0, 16.0, 20.0, 26.0)
"""Requests a second of all classes together."""
SWEPT = ("qlm", "deadline", "edf", "fcfs_models", "shepherd")
MOST_MET = 0.9
"""Where QLM meets so many, it is compared."""


class Sweep(Deadlines):
    id = "qlm-fig9-10"
    title = "One model, three classes"
    source = "QLM, Figures 9 and 10"
    about = f"""W_A on {SWEEP_REPLICAS} A100 with Vicuna-13B: traces of {TRACE:,} requests, a third of each class, at
        {RATES[0]:.0f} to {RATES[4]:.0f} requests a second. QLM is compared at the rates where it is in time for
        {MOST_MET:.0%}: its throughput and goodput at the highest of them. Goodput is requests in time, a second,
        until the last answer is complete. SHEPHERD's batches are as large as memory allows if every answer is the
        longest possible one, and do not change while they run. Here and below `deadline` is this project's own
        placement, beside the paper's method."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for rate in RATES if full else RATES[-1:]:
            most = TRACE if full else 400
            yield from systems(SWEPT, f"{rate:.0f}", qlm(SWEEP_REPLICAS), w_a(rate), most)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        rates = swept(at)
        over = {name: {rate: points(at, rate, "qlm", name) for rate in rates} for name in SWEPT[2:]}
        met = [rate for rate in rates if at[f"qlm.{rate}"]["attained"] >= MOST_MET] or rates[:1]
        busiest, widest = met[-1], max(met, key=over["fcfs_models"].__getitem__)
        speed = ratio(at, busiest, "qlm", "fcfs_models", "throughput_per_s")
        goodput = ratio(at, busiest, "qlm", "fcfs_models", "goodput_per_s")
        beside_shepherd = ratio(at, busiest, "qlm", "shepherd", "throughput_per_s")
        over_fcfs, over_edf = over["fcfs_models"][widest], min(over["edf"].values())
        over_shepherd = max(over["shepherd"][rate] for rate in met)
        yield at_least(speed, 1.0, 0.95).claim(f"""QLM's throughput is at least that of FCFS | 1.2× |
            {speed:.2f}× at {busiest} requests/s | Both do the same work and neither idles, so order cannot
            make it faster; what eviction computes or copies again costs a little.""")
        yield graded(goodput >= 1.2, goodput > 1.0).claim(f"""Its goodput is higher | 1.2× | {goodput:.2f}× at
            {busiest} requests/s | A third of the requests has an hour, and is in time in any order.""")
        yield graded(beside_shepherd >= 1.3).claim(f"""Its throughput is higher than SHEPHERD's | 1.5× |
            {beside_shepherd:.2f}× at {busiest} requests/s""")
        yield at_least(over_fcfs, 40, 10).claim(f"""Where QLM is in time, FCFS is not | 40 to 90 points |
            {over_fcfs:.0f} points at {widest} requests/s | A third of the requests has an hour, and a queue
            that is as long as a trace makes it does not take that long: FCFS can miss at most the other two
            thirds.""")
        yield at_least(over_shepherd, 50, 20).claim(f"""Nor is SHEPHERD | 50 to 90 points |
            {over_shepherd:.0f} points at most | A third of the requests has an hour, and SHEPHERD is in time
            for them too.""")
        yield at_least(over_edf, 0, -2).claim(f"""EDF by request is never more in time | QLM is ahead by
            eviction | {over_edf:+.1f} points at least | With one model EDF by request is close to the best
            order there is, and groups are an approximation of it.""")
        labels = [SYSTEMS[name][0] for name in SWEPT]
        for title, path, other_path, word in (
            ("In time", "attained", "classes/interactive/attained", "interactive"),
            ("Requests a second, and those in time", "throughput_per_s", "goodput_per_s", "in time"),
        ):
            head = " | ".join(["requests/s", *labels, *(f"{label}, {word}" for label in labels[:-1])])
            lines = [
                [float(rate), *columns(at, SWEPT, rate, path), *columns(at, SWEPT[:-1], rate, other_path)]
                for rate in rates
            ]
            yield Table(title, head, lines)
        xs = [float(rate) for rate in rates]
        curves = {
            SYSTEMS[name][0]: (xs, [100 * at[f"{name}.{rate}"]["attained"] for rate in rates])
            for name in SWEPT
        }
        caption = "Part of the requests whose first token is in time, by requests a second."
        yield Figure("attained", caption, [[Panel("in time, %", curves, "requests/s", swept=True)]])
        yield {
            "throughput_over_fcfs": speed,
            "goodput_over_fcfs": goodput,
            "throughput_over_shepherd": beside_shepherd,
            "points_over_fcfs": over_fcfs,
            "points_over_shepherd": over_shepherd,
            "points_over_edf": over_edf,
        }


# ---- Figure 11

REPLICAS = 4
LARGE_BATCH, ALONE_S, CHATS_UNTIL_S, ABLATION_CHATS_PER_S = 1_200, 10.0, 90.0, 4.0


class Ablation(Deadlines):
    id = "qlm-fig11"
    title = "What each operation is worth with one model"
    source = "QLM, Figure 11"
    about = f"""{REPLICAS} A100 with Vicuna-13B get {LARGE_BATCH:,} Batch-2 requests at once, with answers {LONG:.0f}
        times as long as ShareGPT's, and {ALONE_S:.0f} s later interactive requests, {ABLATION_CHATS_PER_S:.0f} a
        second. QLM as it is, and without one operation at a time."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        fleet, scale = qlm(REPLICAS if full else 1, new_token_ratio=RESERVES), 1.0 if full else 0.25
        rate = ABLATION_CHATS_PER_S * scale
        streams = [
            Stream(MODEL, "batch-2", 1e4, count=round(LARGE_BATCH * scale), outputs=LONG),
            Stream(MODEL, "interactive", rate, from_s=ALONE_S, until_s=CHATS_UNTIL_S),
        ]
        without = {
            "all": ("QLM", fleet),
            "rule": ("deadline", rule(fleet)),
            "eviction": ("without eviction", without_eviction(fleet)),
            "swap": ("without swapping", with_fleet(fleet, swaps=False)),
            "pulling": ("without pulling", other("push", fleet, "slo")),
            "balance": ("assigned at random", other("spread", fleet, "slo", by="random")),
        }
        return [row(name, one, streams, None, label) for name, (label, one) in without.items()]

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        chats = "classes/interactive/attained"
        swap = points(at, "", "all", "swap")
        lost = (points(at, "", "all", name, chats) for name in ("eviction", "pulling", "balance"))
        eviction, pulling, random = lost
        yield at_least(eviction, 30, 5).claim(f"""Without eviction interactive requests are late | 80 points |
            {eviction:.0f} points of the interactive requests | Continuous batching ends some request every
            moment, and interactive ones are first when memory is free.""")
        yield graded(swap <= 2).claim(f"""Without swapping nothing is lost, as there is one model | 0 points |
            {swap:.1f} points""")
        yield graded(pulling >= 0 and random >= 0, pulling + random >= -2).claim(f"""Requests that are sent at
            once, or to a replica at random, lose too | pulling matters | {pulling:.0f} points without
            pulling, {random:.0f} if assigned at random, of the interactive requests | Replicas with the same
            policy take requests back themselves, so who is sent too early or elsewhere is not lost.""")
        head = f"""system | all = attained | interactive = {chats} | interactive, P99 s = classes/interactive/p99_s |
            requests/s = throughput_per_s | evictions = evictions"""
        yield medians("In time", head, at.values())
        yield {
            "points_lost_no_eviction": eviction,
            "points_lost_no_swap": swap,
            "points_lost_random": random,
        }


# ---- Figures 12 to 14: several models (W_B)

MODELS_RATES = (100.0, 400.0)
"""Batch-1 requests a second on the paper's 50 replicas."""
SMALL_REPLICAS = 4
SMALL_RATES = (4.0, 8.0, 20.0)
"""On few replicas, where models have to take turns."""
ABLATION_RATE = 8.0
SEVERAL = ("qlm", "rule", "edf", "affine", "shepherd")


class Models(Deadlines):
    id = "qlm-fig12-14"
    title = "Several models"
    source = "QLM, Figures 12 to 14"
    about = f"""W_B: Batch-1 for Mistral-7B and Llama-70B (in four bits), Batch-2 for three models, as many requests
        of both. The paper's {PAPER_REPLICAS} A100 and its {TRACE:,} requests, at {MODELS_RATES[0]:.0f} and
        {MODELS_RATES[1]:.0f} Batch-1 requests a second; and {SMALL_REPLICAS}, fewer than there are models, at
        {SMALL_RATES[0]:.0f} to {SMALL_RATES[2]:.0f}, where operations are left out at {ABLATION_RATE:.0f}. Weights
        come from the host's memory with twenty gigabytes a second, or from disk with two."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        most, fleet = TRACE // 2 if full else 200, qlm(SMALL_REPLICAS, W_B)
        for rate in MODELS_RATES if full else ():
            many = qlm(PAPER_REPLICAS, W_B)
            yield from systems(SEVERAL, f"{PAPER_REPLICAS}.{rate:.0f}", many, w_b(rate))
        for rate in SMALL_RATES if full else (ABLATION_RATE,):
            yield from systems(SEVERAL, f"{SMALL_REPLICAS}.{rate:.0f}", fleet, w_b(rate), most)
        without = {
            "no-swap": ("each keeps its model", with_fleet(fleet, swaps=False)),
            "cold": ("models from disk", with_fleet(fleet, warm=False)),
            "no-eviction": ("without eviction", without_eviction(fleet)),
            "random": ("assigned at random", other("spread", fleet, "slo", by="random")),
        }
        for name, (label, one) in without.items():
            yield row(name, one, w_b(ABLATION_RATE), most, label)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        few = [name for name in swept(at) if name.startswith(f"{SMALL_REPLICAS}.")]
        many = [name for name in swept(at) if name not in few]
        edf = min(ratio(at, name, "qlm", "edf", "throughput_per_s") for name in few + many)
        affine = min(ratio(at, name, "qlm", "affine", "throughput_per_s") for name in few)
        met, met_few = (min(at[f"qlm.{name}"]["attained"] for name in names) for names in (many or few, few))
        yield graded(edf >= 3, edf > 1).claim(f"""QLM's throughput is several times EDF's | 3 to 4× |
            {edf:.1f}× at least; {affine:.1f}× on few replicas, if EDF prefers workers that have the model |
            At low rates both serve what comes.""")
        yield graded(met > 0.9, met > 0.75).claim(f"""Most requests are in time at all rates | more than 90%
            below five hundred a second | {met:.1%} at least; on few replicas {met_few:.1%} | Beyond what the
            replicas can serve no order is in time for all.""")
        base = f"qlm.{SMALL_REPLICAS}.{ABLATION_RATE:.0f}"
        served = ratio(at, "", base, "no-swap", "ended")
        cold = ratio(at, "", base, "cold", "throughput_per_s")
        yield graded(served >= 3, served > 1).claim(f"""Without swapping throughput is lost | 4× |
            {served:.2f}× as many requests are served if models take turns; {cold:.2f}× the throughput of
            loading them from disk | Four of five models have a replica without swapping, and groups make
            swaps so rare that a slow one costs little.""")
        labels = [SYSTEMS[name][0] for name in SEVERAL]
        head = " | ".join(["replicas", "Batch-1 requests/s", *labels])
        for title, path in (("In time", "attained"), ("Requests a second", "throughput_per_s")):
            lines = [[*map(float, name.split(".")), *columns(at, SEVERAL, name, path)] for name in few + many]
            yield Table(title, head, lines)
        parts = (base, "no-swap", "cold", "no-eviction", "random")
        head = """system | in time = attained | served = ended | requests/s = throughput_per_s |
            models loaded = swaps | seconds of loading = swap_s"""
        yield medians("Without one operation, on few replicas", head, [at[name] for name in parts])
        yield {"throughput_over_edf": edf, "attained": met, "throughput_lost_no_swap": served}


# ---- Figure 15: A10 beside A100

MIXED_REPLICAS = 6
MIX_RATE = 60.0
MIXED = ("qlm", "rule", "turn", "random")


class Hardware(Deadlines):
    id = "qlm-fig15"
    title = "Slow replicas beside fast ones"
    source = "QLM, Figure 15"
    about = f"""W_A for Mistral-7B on {MIXED_REPLICAS} replicas, of which some are A10s and the others A100s, at
        {MIX_RATE:.0f} requests a second. QLM learns how fast each is; the others send requests to replicas in turn
        or at random. The gain is in throughput until the last answer, over the better of the two."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for slow in (0, 1, 2, 3, 6) if full else (0, 3):
            gpus = [A10] * slow + [A100] * (MIXED_REPLICAS - slow)
            # A 13B in bf16 does not fit an A10.
            fleet = qlm(MIXED_REPLICAS, {"vicuna-13b": "mistral-7b"}, gpus=gpus)
            label = f"{{}}, {100 * slow / MIXED_REPLICAS:.0f}% A10"
            yield from systems(MIXED, f"{slow}", fleet, w_a(MIX_RATE), TRACE if full else 300, label)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        gains = {
            slow: min(ratio(at, slow, "qlm", name, "throughput_per_s") for name in ("turn", "random"))
            for slow in swept(at)
        }
        alike = ("0", f"{MIXED_REPLICAS}")
        mixed = max(gain for slow, gain in gains.items() if slow not in alike)
        pure = max(gain for slow, gain in gains.items() if slow in alike)
        yield graded(mixed / pure >= 2, mixed / pure > 1.1).claim(f"""QLM gains more where replicas are unlike
            | 2 to 5 times | {mixed / pure:.2f} times: {mixed:.2f}× where they are mixed, {pure:.2f}× where
            they are alike | Requests wait where they were sent to, but for no longer than the trace: how much
            slower an A10 is bounds the gain.""")
        yield Table(
            "Requests a second",
            """A10s, % | QLM | deadline | in turn | at random | gain | QLM, in time | deadline, in time | in turn, in
                time""",
            [
                [100 * int(slow) / MIXED_REPLICAS, *columns(at, MIXED, slow, "throughput_per_s"), gain,
                 *columns(at, MIXED[:3], slow)]
                for slow, gain in gains.items()
            ],
        )  # fmt: skip
        yield {"gain_mixed_over_pure": mixed / pure}


# ---- Figure 16: mega prompts beside usual ones

MEGA_REPLICAS = 4
MEGA_WORK = 24.0
"""Requests a second without mega prompts; with them as many as are as much work."""
MEGA_COST = 6.0
"""Of a mega prompt, in usual requests."""
MEGA = ("qlm", "rule", "edf", "fcfs")


class Mega(Deadlines):
    id = "qlm-fig16"
    title = "Mega prompts"
    source = "QLM, Figure 16"
    about = f"""W_C: W_A on {MEGA_REPLICAS} A100, of which a part are mega prompts of three to four thousand tokens.
        One is as much work as {MEGA_COST:.0f} usual requests, so the more there are, the fewer requests come. The
        gain is in requests in time, over FCFS."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for part in (0.0, 0.1, 0.5, 1.0) if full else (0.1,):
            fewer = 1 + part * (MEGA_COST - 1)
            streams = w_a(MEGA_WORK / fewer, mega=part)
            most = round((TRACE if full else 200) / fewer)
            yield from systems(MEGA, f"{100 * part:.0f}", qlm(MEGA_REPLICAS), streams, most)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        gains = {int(part): points(at, part, "qlm", "fcfs") for part in swept(at)}
        few = max((gain for part, gain in gains.items() if 0 < part <= 10), default=0.0)
        many = max((gain for part, gain in gains.items() if part >= 50), default=0.0)
        yield graded(few > many, few > 0).claim(f"""The gain is largest for few mega prompts | largest for
            few, then shrinks | {few:.1f} points with few, {many:.1f} with many | Order helps as long as there
            is somebody who can wait; that does not depend on lengths alone.""")
        yield Table(
            "In time",
            "mega prompts, % | QLM | deadline | EDF | FCFS | points over FCFS",
            [[part, *columns(at, MEGA, f"{part}"), gain] for part, gain in gains.items()],
        )
        yield {"gain_few_over_many_mega": few / many if many > 0 else None}


# ---- Figure 17

QUEUE_REPLICAS = 4
QUEUE_RATES = (2.0, 8.0, 24.0)
"""Of each class; the higher, the longer the queue."""
QUEUED_UP = ("qlm", "rule", "edf", "fcfs", "shepherd")


class Queues(Deadlines):
    id = "qlm-fig17"
    title = "Several models, by the length of the queue"
    source = "QLM, Figure 17"
    about = f"""W_B on {QUEUE_REPLICAS} A100, fewer than there are models, at {QUEUE_RATES[0]:.0f} to
        {QUEUE_RATES[2]:.0f} requests a second of both classes each."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for rate in QUEUE_RATES if full else QUEUE_RATES[:2]:
            most = TRACE if full else 200
            yield from systems(QUEUED_UP, f"{rate:.0f}", qlm(QUEUE_REPLICAS, W_B), w_b(rate), most)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        rates = swept(at)
        over = {rate: {name: points(at, rate, "qlm", name) for name in QUEUED_UP[2:]} for rate in rates}
        best = [min(over[rate].values()) for rate in rates]
        by_request = max(min(over[rate]["edf"], over[rate]["fcfs"]) for rate in rates[1:])
        empty, long = best[0], max(best[1:])
        yield at_most(empty, 2, 10).claim(f"""With an empty queue QLM is no better than the best of the others
            | no gain | {empty:+.1f} points | Five models share fewer replicas, so even a short queue needs
            swaps.""")
        yield graded(long >= 40, long > 0).claim(f"""With a long queue it stays in time where the others do
            not | stays high | {long:+.0f} points over the best of all, {by_request:+.0f} over those that go
            by request | Half of the requests has an hour, so nobody misses more than the others; and
            SHEPHERD's whole batches load few models, too.""")
        labels = [SYSTEMS[name][0] for name in QUEUED_UP]
        head = " | ".join(["requests/s of each class", *labels, "points over the best"])
        parts = zip(rates, best, strict=True)
        yield Table("In time", head, [[float(r), *columns(at, QUEUED_UP, r), least] for r, least in parts])
        yield {"points_over_best_empty": empty, "points_over_best_long": long}


# ---- Figures 19 and 20: what groups lose and cost

DELTA_RATE, DELTA_REPLICAS = 40.0, 4
QUEUED = 400_000
GROUPS, QUEUES = 400, 50


class Overhead(Deadlines):
    id = "qlm-fig19-20"
    title = "What groups lose, and what they cost"
    source = "QLM, Figures 19 and 20"
    about = f"""Groups of one to sixteen average batches (delta), on {DELTA_REPLICAS} A100: one model (W_A at
        {DELTA_RATE:.0f} requests a second) and several (W_B). The cost is CPU time on the machine that ran it: one
        plan of {GROUPS} groups on {QUEUES} queues for each group, and a request's arrival, pull and end, with
        {QUEUED:,} requests in the queue."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        most = TRACE if full else 300
        for delta in (1, 4, 16) if full else (1, 4):
            for kind, models, sent, part in (
                ("one", ONE_MODEL, w_a(DELTA_RATE), most),
                ("several", W_B, w_b(8.0), most // 2),
            ):
                fleet = qlm(DELTA_REPLICAS, models, options={"delta": float(delta)})
                yield row(f"{kind}.{delta}", fleet, sent, part, f"{kind}, {delta}")
        bench = TrafficSpec("bench", {"queued": QUEUED if full else 20_000})
        yield Row("cost", Site(), bench, "cost", Plan(10.0), ("1",))

    def run(self, cell: Cell, seed: str) -> Measured:
        if cell.traffic.name != "bench":
            return super().run(cell, seed)
        queued, began_s = cell.traffic.arguments["queued"], time.monotonic()
        size = (GROUPS, QUEUES) if queued == QUEUED else (GROUPS // 10, QUEUES // 5)
        plan, calls = measure_plan(*size, int(seed)), measure_calls("qlm", queued, int(seed))
        each_ms = sum(calls[f"{kind}_us_p50"] for kind in ("arrive", "pull", "end")) / 1e3
        per_group = queued / plan["groups"]
        found = {
            "plan_s": plan["plan_s"],
            "groups": calls["groups"],
            "requests_per_group": per_group,
            "calls_ms": each_ms,
            "ms_per_request": each_ms + 1e3 * plan["plan_s"] / per_group,
            "pull_us_p99": calls["pull_us_p99"],
        }
        return Measured(found, time.monotonic() - began_s)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        deltas, kinds, cost = swept(at), ("one", "several"), at["cost"]
        lost = max(points(at, "", f"{name}.{deltas[0]}", f"{name}.4") for name in kinds)
        each_ms = cost["ms_per_request"]
        yield at_most(lost, 2, 10).claim(f"""Groups of four batches lose nothing | near-zero loss | {lost:.1f}
            points against groups of one batch | With few replicas a group is a large part of what waits.""")
        yield at_most(each_ms, 5, 10).claim(f"""The cost of a request is small with four hundred thousand in
            the queue | 5 ms | {each_ms:.2f} ms, of which {cost["calls_ms"]:.2f} ms for its own calls; a plan
            takes {cost["plan_s"]:.1f} s | A plan is asked for once for each group.""")
        head = """models, delta | in time = attained | requests/s = throughput_per_s | plans = plans |
            models loaded = swaps"""
        yield medians("In time", head, [at[f"{name}.{delta}"] for name in kinds for delta in deltas])
        head = """queued, a group = requests_per_group | plan, s = plan_s | arrival, pull and end, ms = calls_ms |
            a request, ms = ms_per_request | pull, P99 µs = pull_us_p99"""
        yield medians("CPU time", head, [cost])
        yield {"loss_delta_4": lost, "ms_per_request": each_ms}


# ---- Figure 1

MOST_REPLICAS = 24
NEEDED = 0.99
ONE_RATE, SEVERAL_RATE = 6.0, 8.0


class Needed(Deadlines):
    id = "qlm-fig1"
    title = "How many replicas do"
    source = "QLM, Figure 1"
    about = f"""The fewest A100s, up to {MOST_REPLICAS}, with which {NEEDED:.0%} of the requests are in time:
        Llama-70B in four bits with interactive requests at {ONE_RATE:.0f} a second, and several models (W_B) at
        {SEVERAL_RATE:.0f} of both classes each."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        traffics = {
            "one": ({"llama-70b": "llama-2-70b-4bit"}, [Stream("llama-70b", "interactive", ONE_RATE)], 600),
            "several": (W_B, w_b(SEVERAL_RATE), 800),
        }
        more = {"most_replicas": MOST_REPLICAS if full else 4}
        for name in ("qlm", "deadline", "shepherd", "edf"):
            for kind, (models, sent, most) in traffics.items():
                label = f"{{}}, {kind}"
                yield from systems([name], kind, qlm(1, models), sent, most if full else 60, label, **more)

    def run(self, cell: Cell, seed: str) -> Measured:
        most_replicas = cell.traffic.arguments["most_replicas"]
        tried: dict[int, float] = {}

        def is_enough(replicas: int) -> bool:
            outcome = run_of(cell, seed, replace(cell.site, replicas=replicas))
            tried[replicas] = attained(outcome.served) or 0.0
            return tried[replicas] >= NEEDED

        low, high = 0, 1
        while not is_enough(high) and high < most_replicas:
            low, high = high, min(most_replicas, 2 * high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        found = {"replicas": high, "is_enough": tried[high] >= NEEDED, "attained": tried[high]}
        return Measured(found | {"tried": {str(n): met for n, met in sorted(tried.items())}}, 100.0)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        one, several = (ratio(at, kind, "qlm", "shepherd", "replicas") for kind in ("one", "several"))
        yield graded(one < 1, one <= 1).claim(f"""QLM needs fewer replicas than SHEPHERD for one model | fewer
            | {one:.2f} times as many | Both need as many as the work takes.""")
        yield graded(several < 1, several <= 1).claim(f"""And for several | fewer | {several:.2f} times as
            many | SHEPHERD's batches are of one model until they end, so it loads as few models as QLM does,
            and at this rate its lower throughput is enough. QLM, with as few replicas, has some requests wait
            for a model to come back.""")
        columns = "system, models | replicas = replicas | in time = attained"
        yield medians("Fewest replicas", columns, at.values())
        yield {"gpus_over_shepherd_one": one, "gpus_over_shepherd_several": several}
