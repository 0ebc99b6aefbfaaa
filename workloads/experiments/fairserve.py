"""FairServe: a crowd of users and a few abusers, and three applications that ask for more than there is.

The study's volumes are not published, and neither are model, GPU, pool and limits of its evaluation. Here 1,000 users
with log-normal rates, 99 of 100 below 100 calls a minute, send interactions of six applications to eight A100. Rates
and pools are such that the cluster is overloaded in little more than the surge: with a full A100's pool it would hold
forty seconds of work before it counts as full.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import ClassVar

from workloads.apps import BY_NAME, Crowd, client, service
from workloads.arrivals import EvenArrivals, PhasedArrivals
from workloads.clients import Client
from workloads.experiments.claims import Part, Table, at_least, graded
from workloads.experiments.contract import Cell, Json, Result, Row, Scheduler, Simulated, TrafficSpec, medians
from workloads.records import Run
from workloads.served import totals
from workloads.session import Plan
from workloads.simulation import Site

LENGTH_S = 300.0
USERS = 1000
ABUSERS, LEAST_ABUSE, MOST_ABUSE = 5, 150.0, 1500.0
ABUSED = "app12"
SURGE, SURGE_FACTOR = 0.1, 6.0
REPLICAS, KV_TOKENS = 8, 65_536
TIMEOUT_S = 120.0
"""A user gives an interaction up that takes longer."""
RPM = 10
"""The fixed limit of the baseline, in calls a minute."""
LIMITS: Mapping[str, Json] = {"user": 20, "apps": {"*": 20}}
"""What 99 of 100 users stay below in their busiest minute, by a run without throttle."""


_OIT = {"throttle": "oit", "limits": LIMITS}
LITERAL = "lead=inf,charge=on_finish,literal=true"
SCHEDULERS: Mapping[str, Scheduler] = {
    "rpm": Scheduler("RPM", {"policy": "fcfs", "throttle": "rpm", "limits": {"user": RPM}}),
    "vtc": Scheduler("VTC", {"policy": "vtc"}),
    "fs-w": Scheduler("FS(W)", {"policy": "wsc", "policy_options": "lead=0"}),
    "fs": Scheduler("FS(W+I)", {"policy": "wsc", **_OIT}),
    "literal": Scheduler(
        "FS(W+I), by the letter",
        {"policy": "wsc", "policy_options": LITERAL, **_OIT, "limits": {**LIMITS, "counts": "arrivals"}},
    ),
    "dlpm": Scheduler("WSC-DLPM + OIT", {"policy": "wsc-dlpm", **_OIT}),
}


def site(name: str) -> Site:
    """A100 with Llama-3.1-8B, prompts first as in the paper."""
    given: Json = {"replicas": REPLICAS, "kv_tokens": KV_TOKENS, "placement": "least_tokens", "stall_ms": 0.0}
    return Site(**given, **SCHEDULERS[name].fields)


def plan(duration_s: float, sample_s: float, timeout_s: float) -> Plan:
    """Interactions begin for so long; the run goes on until all have ended or were given up."""
    return Plan(
        duration_s,
        drain_s=None,
        connections_per_client=1_000_000,
        sample_s=sample_s,
        token_step_s=5.0,
        program_timeout_s=timeout_s,
        waits=True,
    )


def served(apps: Mapping[str, Mapping[str, Json]]) -> list[tuple[float, float]]:
    """The service of each application's answered calls, plain and in average calls of the application."""
    plain = [(app, service(one["prompt_tokens"], one["output_tokens"])) for app, one in apps.items()]
    return [(units, units / BY_NAME[app].normal_cost) for app, units in plain]


PLAIN = """Plain service is the tokens of answered calls, cached ones too, where an output token counts twice;
    normalised it is divided by what an average call of the application costs."""


def fairness(
    results: Iterable[Result], what: str, ratios: Callable[[Mapping[str, Json]], Sequence[float | None]]
) -> Table:
    """Ratios of plain and of normalised service; a dash where a run has nothing to divide by."""
    rows = []
    for result in results:
        both = zip(*map(ratios, result.runs), strict=True)
        rows.append([result.cell.title, *(None if None in found else median(found) for found in both)])
    title = f"Fairness in plain and in normalised service: {what}; medians over seeds"
    return Table(title, "scheduler | plain, in tokens | normalised, in average calls", rows)


def _abuser_over_user(run: Mapping[str, Json]) -> list[float | None]:
    users, [abused], heard = served(run["apps"]), served({ABUSED: run["bad"]}), run["good"]["heard_users"]
    user = [sum(one) / heard if heard else 0.0 for one in zip(*users, strict=True)]
    return [
        units / run["bad"]["users"] / each if each else None for units, each in zip(abused, user, strict=True)
    ]


def _most_over_least(run: Mapping[str, Json]) -> list[float | None]:
    return [max(got) / min(got) if min(got) else None for got in zip(*served(run["apps"]), strict=True)]


class Crowded(Simulated):
    schedulers: Sequence[str] = tuple(SCHEDULERS)
    surges: ClassVar[Mapping[str, float]] = {"": SURGE}
    """Parts of the time with overload, by the end of a cell's name."""
    lengths_s = (LENGTH_S, 40.0)

    def plan(self, length_s: float) -> Plan:
        return plan(length_s, max(length_s / 10, 1.0), TIMEOUT_S)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for suffix, surge in self.surges.items():
            crowd = TrafficSpec("crowd", {"users": USERS if full else 60, "surge": surge})
            for name in ("rpm", "fs") if suffix else self.schedulers:
                yield Row(f"{name}{suffix}", site(name), crowd, SCHEDULERS[name].label)

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        given = cell.traffic.arguments
        made = Crowd(
            users=given["users"],
            median_rpm=0.008 * USERS / given["users"],
            spread=2.0,
            abusers=ABUSERS,
            least_abuse=LEAST_ABUSE,
            most_abuse=MOST_ABUSE,
            abused=ABUSED,
            surge=given["surge"],
            surge_factor=SURGE_FACTOR,
        )
        return made.clients(seed, cell.plan.duration_s)

    def fairness(self, at: Mapping[str, Result]) -> Table:
        what = "what an abuser got over what a user got"
        return fairness((at[name] for name in self.schedulers), what, _abuser_over_user)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        assert run.end is not None
        clients = run.manifest.clients.items()

        def of(app: object = None, *kinds: bool) -> dict[str, Json]:
            names = [k for k, one in clients if one["well_behaved"] in kinds and app in (None, one["app"])]
            return totals(run, names)

        found = {"good": of(None, True), "bad": of(None, False), "all": of(None, True, False)}
        return {
            **found,
            "apps": {
                app: of(app, True)
                for app in sorted({one["app"] for _, one in clients if one["well_behaved"]})
            },
            "end_s": run.end.t_s,
            "prompt_per_s": found["all"]["prompt_tokens"] / run.end.t_s,
            "decode_per_s": found["all"]["output_tokens"] / run.end.t_s,
        }


class Abuse(Crowded):
    id = "fairserve-abuse"
    title = "Who is refused, what is cut, what is wasted"
    source = "FairServe, Figure 8a to c"
    about = f"""Llama-3.1-8B on {REPLICAS} A100 with {KV_TOKENS:,} tokens of cache each, for {LENGTH_S:.0f} s:
        {USERS:,} users with log-normal rates of interactions of six applications, and {ABUSERS} abusers with
        {LEAST_ABUSE:.0f} to {MOST_ABUSE:,.0f} calls a minute. In a part of the time all users together send
        {SURGE_FACTOR:.0f} times as much. RPM refuses every call beyond {RPM} a minute of a user; FS(W+I) first calls
        of interactions beyond {LIMITS["user"]}, while all replicas are overloaded. The paper names neither model,
        GPU nor limits."""
    schedulers = ("rpm", "fs", "literal", "dlpm")
    surges: ClassVar[Mapping[str, float]] = {"": SURGE, ".30": 0.3, ".100": 1.0}

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        rpm, fs = at["rpm"], at["fs"]
        lines = []
        for suffix, surge in self.surges.items():
            refuses, cuts = (at[f"{name}{suffix}"]["all/throttled"] for name in ("rpm", "fs"))
            lines.append([f"{surge:.0%}", refuses, cuts, refuses / cuts if cuts else None])
        throttled = rpm["all/throttled"] / fs["all/throttled"] if fs["all/throttled"] else None
        cut, wasted = fs["all/cut"], fs["all/wasted/throttled"]
        yield graded(
            throttled is None or throttled >= 10, throttled is not None and throttled > 2
        ).claim(f"""RPM throttles many times as many interactions as FS(W+I) | 21.15× | {rpm["all/throttled"]:,.0f}
            against {fs["all/throttled"]:,.0f}, with overload in {SURGE:.0%} of the time | The ratio is about
            how much of the time there is overload, and how much of what is refused comes from abusers, who
            are refused by both then; the paper says neither. The table has it over the part of overload.""")
        yield graded(cut == 0 and wasted == 0).claim(f"""FS(W+I) cuts no interaction and throttling wastes no
            token | none | {cut:.0f} cut, {wasted:,.0f} tokens""")
        rpm_wasted = rpm["all/wasted/throttled"]
        yield graded(rpm_wasted > 0).claim(f"""RPM wastes tokens of interactions that it cuts | 15,660 tokens
            on average | {rpm_wasted:,.0f} tokens of {rpm["all/cut"]:,.0f} interactions""")
        refused, rpm_refused = fs["good/refused_part"], rpm["good/refused_part"]
        yield graded(refused <= 0.01, refused < rpm_refused).claim(f"""FS(W+I) refuses hardly any call of
            users | only users above the normal range | {refused:.2%} of users' calls; RPM {rpm_refused:.2%} |
            A few users need more than the limit in the minute of the surge.""")
        what = "Interactions that were throttled, by the part of the time with overload; medians over seeds"
        yield Table(what, "overload | RPM | FS(W+I) | ratio", lines)
        columns = """scheduler | cell = cells | throttled = all/throttled | cut = all/cut |
            tokens wasted, throttled = all/wasted/throttled | tokens wasted, timed out = all/wasted/timed out |
            users' calls refused = good/refused_part | abusers' calls refused = bad/refused_part"""
        yield medians("Medians over seeds", columns, at.values(), cells={name: name for name in at})
        yield self.fairness(at)
        yield PLAIN
        yield {
            "throttled_rpm_over_fs": throttled,
            "cut_fs": cut,
            "wasted_fs_throttled": wasted,
            "wasted_rpm": rpm_wasted,
            "benign_refused_fs": refused,
        }


class Delay(Crowded):
    id = "fairserve-delay"
    title = "Users whose requests wait"
    source = "FairServe, Figure 8d"
    about = f"""The crowd of the other FairServe experiments, with overload in {SURGE:.0%} of the time. A user is
        delayed whose requests waited longer than 5 s on average before they were admitted, or given up."""
    schedulers = ("rpm", "vtc", "fs-w", "fs", "dlpm")

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        fs, vtc, rpm = (at[name]["good/delayed/5"] for name in ("fs", "vtc", "rpm"))
        yield graded(fs <= 0.03, fs <= vtc and fs <= rpm).claim(f"""Under FS(W+I) hardly any user is delayed |
            0.93% | {fs:.2%} | While users alone ask for more than the GPU does, somebody waits under every
            scheduler.""")
        yield graded(vtc >= 5 * fs and vtc > 0, vtc > fs).claim(f"""VTC delays several times as many | 10.67×
            | {vtc:.2%} of users | Both serve the user that was served least. What the abusers send waits in
            their own queue under VTC, and does not delay the others much.""")
        yield graded(rpm >= 20 * fs and rpm > 0, rpm > fs).claim(f"""RPM, which is first come, first served
            below its limit, delays most of them | 93× | {rpm:.2%} of users | Below the limits of the abusers'
            calls that are let in there is less load than under the others.""")
        columns = """scheduler | above 1 s = good/delayed/1 | above 5 s = good/delayed/5 |
            above 20 s = good/delayed/20 | TTFT, s = good/ttft_s"""
        yield medians(
            "Users whose requests waited longer, on average; medians over seeds", columns, at.values()
        )
        yield self.fairness(at)
        yield PLAIN
        yield {
            "delayed_fs": fs,
            "delayed_vtc_over_fs": vtc / fs if fs else None,
            "delayed_rpm_over_fs": rpm / fs if fs else None,
        }


class Table3(Crowded):
    id = "fairserve-table3"
    title = "Throughput, time to first token, and who is served"
    source = "FairServe, Table 3 and Figure 9"
    about = f"""The crowd of the other FairServe experiments, with overload in {SURGE:.0%} of the time. Throughput is
        of answered calls, until the last interaction had ended. Served users got a final answer, of those who heard
        of the end of an interaction at all; provided is the same of interactions. The paper's text and its table
        differ: it says 1.05 times VTC's prompt throughput, and the table has 1.005."""
    schedulers = ("rpm", "vtc", "fs-w", "fs", "literal", "dlpm")

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        fs, vtc, rpm = at["fs"], at["vtc"], at["rpm"]

        def tokens(one: Result, app: str) -> float:
            return one[f"apps/{app}/prompt_tokens"] + one[f"apps/{app}/output_tokens"]

        prompts, prompts_rpm = (fs["prompt_per_s"] / other["prompt_per_s"] for other in (vtc, rpm))
        outputs, outputs_rpm = (fs["decode_per_s"] / other["decode_per_s"] for other in (vtc, rpm))
        ttft = rpm["good/ttft_s"] / fs["good/ttft_s"]
        users, rpm_users = fs["good/served_part"], rpm["good/served_part"]
        apps = [tokens(fs, app) / tokens(rpm, app) for app in fs.first["apps"] if tokens(rpm, app)]
        yield at_least(prompts, 1, 0.9).claim(f"""FS(W+I) computes as many prompt tokens as VTC | 1.005× |
            {prompts:.3f}× | VTC also answers the calls of abusers that FS(W+I) refuses, and the GPU is never
            idle for either.""")
        yield at_least(prompts_rpm, 1.05, 1).claim(f"""and more than RPM | 1.1× | {prompts_rpm:.3f}× | RPM
            refuses calls while the GPU has nothing to do; how many depends on the limit, which the paper does
            not say.""")
        yield at_least(outputs, 1, 0.9).claim(f"""The same holds of output tokens, beside VTC | 1.02× |
            {outputs:.3f}× | As for prompts.""")
        yield at_least(outputs_rpm, 1.3, 1).claim(f"""and beside RPM | 1.47× | {outputs_rpm:.3f}× | As for
            prompts.""")
        yield graded(ttft < 1).claim(f"""RPM has the shorter time to first token | 0.945× | {ttft:.3f}× | RPM
            is first come, first served: who comes behind a surge waits for all of it. The paper's text says
            that FairServe's time is the lower one, its table that RPM's is.""")
        yield graded(users >= 0.99, users > rpm_users).claim(f"""Under FS(W+I) nearly every user is served |
            1.0 | {users:.3f} | Interactions that take longer than {TIMEOUT_S:.0f} s are given up.""")
        yield graded(rpm_users <= 0.95, rpm_users < users).claim(f"""and under RPM not | 0.876 |
            {rpm_users:.3f} | A user is served who gets one final answer, and most of them have one short
            interaction.""")
        yield at_least(min(apps), 1, 0.9).claim(f"""No application fares worse than under RPM | 1.03 to 1.75×
            | {min(apps):.2f} to {max(apps):.2f}× | An application of which RPM refuses little loses what
            others gain.""")
        columns = """scheduler | prompt tokens/s = prompt_per_s | output tokens/s = decode_per_s |
            users' TTFT, s = good/ttft_s | served users = good/served_part |
            provided interactions = good/provided_part | abusers' calls refused = bad/refused_part"""
        yield medians("Medians over seeds", columns, at.values())
        yield self.fairness(at)
        yield f"""{PLAIN} Users get nearly all that they ask for, so an abuser gets what they leave, and a limit that
            holds always takes most of that."""
        yield {
            "prompt_fs_over_vtc": prompts,
            "prompt_fs_over_rpm": prompts_rpm,
            "decode_fs_over_vtc": outputs,
            "decode_fs_over_rpm": outputs_rpm,
            "ttft_rpm_over_fs": ttft,
            "served_users_fs": users,
            "served_users_rpm": rpm_users,
            "worst_app_over_rpm": min(apps),
        }


# ---- Table 4: three applications of one user each, which send far more than the GPU does, with a time-out

REQUESTS: Mapping[str, int] = {"app14": 269, "app7": 139, "app12": 448}
"""Interactions of each, as the paper's row "Requests" has them."""
MOST_CALLS = 3
BURST_S = 5.0
"""One application after the other sends all of its interactions within so long."""
LONG_TIMEOUT_S = 180.0


class Table4(Simulated):
    id = "fairserve-table4"
    title = "Three applications that send more than the GPU does"
    source = "FairServe, Table 4"
    about = f"""Llama-3.1-8B on one A100. One user each of three applications sends {REQUESTS["app14"]},
        {REQUESTS["app7"]} and {REQUESTS["app12"]} interactions of up to {MOST_CALLS} calls, one application after
        the other within {BURST_S:.0f} s; one that takes longer than {LONG_TIMEOUT_S:.0f} s is given up. RPM is first
        come, first served here, as its limit refuses nothing. The paper says neither when the requests come nor how
        long the time-out is."""
    lengths_s = (len(REQUESTS) * BURST_S, len(REQUESTS) * BURST_S)

    def plan(self, length_s: float) -> Plan:
        return plan(length_s, 5.0, LONG_TIMEOUT_S)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        sent = {name: round((1.0 if full else 0.15) * count) for name, count in REQUESTS.items()}
        for name in Delay.schedulers:
            one = replace(site(name), replicas=1, limits={}, throttle="none")
            yield Row(name, one, TrafficSpec("three", {"requests": sent}), SCHEDULERS[name].label)

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        made = []
        for place, (name, count) in enumerate(cell.traffic.arguments["requests"].items()):
            app = replace(BY_NAME[name], calls=(1, MOST_CALLS))
            phases = [(EvenArrivals(count / BURST_S), BURST_S)]
            if place:
                phases.insert(0, (EvenArrivals(1e-6, first_s=1e6), place * BURST_S))
            made.append(client(name, app, PhasedArrivals(phases), seed))
        return made

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        assert run.end is not None
        apps, end_s = {name: totals(run, [name]) for name in REQUESTS}, run.end.t_s
        wasted = sum(one["wasted"]["timed out"] for one in apps.values())
        rates = {name: one | {"prompt_per_s": one["prompt_tokens"] / end_s} for name, one in apps.items()}
        return {"apps": rates, "wasted": wasted, "end_s": end_s}

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        rpm, vtc, fs = (at[name]["apps/app12/prompt_per_s"] for name in ("rpm", "vtc", "fs"))
        wasted, less, times = at["vtc"]["wasted"], at["fs"]["wasted"], vtc / rpm if rpm else None
        yield graded(times is None or times >= 10, times is not None and times > 1).claim(f"""VTC gives the
            light application many times what first come, first served does | 24× | {vtc:,.0f} against
            {rpm:,.0f} tokens/s | It depends on who comes first, which the paper does not say.""")
        yield at_least(fs / vtc, 1, 0.8).claim(f"""FS(W+I) gives it no less than VTC | 1.03× | {fs / vtc:.2f}×
            | VTC gives each user the same tokens, and FS(W) the same number of average calls, so the
            application with the short calls gets fewer tokens than under VTC once it has enough to send.""")
        yield graded(wasted >= 3 * less and wasted > 0, wasted > less).claim(f"""VTC wastes many times the
            tokens on interactions that are given up | 7.0× | {wasted:,.0f} against {less:,.0f} tokens |
            Within the lead interactions that have begun go first; beyond it they wait as under VTC.""")
        columns = [f"{app} answered = apps/{app}/answered" for app in REQUESTS]
        columns += [f"{app} prompt tokens/s = apps/{app}/prompt_per_s" for app in REQUESTS]
        head = " | ".join(["scheduler", *columns, "tokens wasted = wasted"])
        yield medians("Medians over seeds", head, at.values())
        what = "what the application that got most got over the one that got least"
        yield fairness(at.values(), what, _most_over_least)
        yield PLAIN
        yield {
            "app12_vtc_over_rpm": times,
            "app12_fs_over_vtc": fs / vtc,
            "wasted_vtc_over_fs": wasted / less if less else None,
        }
