"""Normalised service: what the lead bounds, what a liar gains, and what prefixes are worth."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from random import Random

from workloads.apps import BY_NAME, App, client
from workloads.arrivals import EvenArrivals
from workloads.clients import Client
from workloads.experiments.claims import Part, Table, at_least, graded
from workloads.experiments.contract import (
    Cell,
    Json,
    Measured,
    Result,
    Row,
    Simulated,
    TrafficSpec,
)
from workloads.experiments.fairserve import site
from workloads.programs import Program, Reply
from workloads.records import Records, Run
from workloads.session import Plan
from workloads.simulation import Site, describe
from workloads.simulation.run import Simulation

SPREADS = (2.0, 4.0, 8.0)
LENGTH_S = 240.0
OPEN, CALLS = 30, 20
"""Interactions that one client keeps open, and calls of each."""
LEAD = 2.0
PREFIXES, READERS = 12, 2
"""Applications, and clients of each."""
SYSTEM_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 4000, 200, 60
POOL_TOKENS = 32_768
"""Of the last part: the cache does not hold all prefixes."""
AT_ONCE = 24
MAX_RUNNING = 8
"""So that everybody always waits."""


class Watched(Simulation):
    """Also looks at the counters of clients that wait."""

    worst_gap = 0.0

    def _sample(self, count: int) -> None:
        super()._sample(count)
        for replica in self.replicas:
            counters = replica.queue.policy.counters()
            waiting = {job.client for job in replica.queue.waiting()}
            if len(waiting) == len(self._clients):
                values = [counters[name] for name in waiting]
                self.worst_gap = max(self.worst_gap, max(values) - min(values))


class Equity(Simulated):
    id = "beyond-equity"
    title = "What normalised service bounds, what a liar gains, what prefixes are worth"
    source = "beyond FairServe, which proves nothing"
    about = f"""Llama-3.1-8B on one A100 for {LENGTH_S:.0f} s under WSC, all clients in a closed loop. First, one
        client keeps {OPEN} interactions of {CALLS} calls open beside two with single calls. Then a client with light
        calls names the heaviest application, or does not. Last, {PREFIXES} applications with {SYSTEM_TOKENS:,}
        tokens of system prompt, of {READERS} clients each, over a cache of {POOL_TOKENS:,}."""

    lengths_s = (LENGTH_S, 30.0)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        def row(name: str, site: Site, traffic: str, at_once: Mapping[str, int], **more: Json) -> Row:
            plan = Plan(
                length_s, at_once=at_once, connections_per_client=1_000_000, sample_s=0.5, token_step_s=5.0
            )
            return Row(name, site, TrafficSpec(traffic, more), plan=plan)

        def wsc(options: str = "", policy: str = "wsc", **more: Json) -> Site:
            plain = replace(site("fs"), replicas=1, max_running=MAX_RUNNING, throttle="none", limits={})
            return replace(plain, policy=policy, policy_options=options, **more)

        many = {"many": OPEN, "one": AT_ONCE, "another": AT_ONCE}
        liars = {"honest": AT_ONCE, "liar": AT_ONCE, "heavy": AT_ONCE}
        shared = {f"user{number}": 4 for number in range(PREFIXES * READERS)}
        yield row("lead", wsc(f"lead={LEAD:g}"), "interactions", many)
        yield row("paper", wsc("lead=inf"), "interactions", many)
        for spread, who in product(SPREADS, ("honest", "liar")):
            yield row(f"{who}.{spread:g}", wsc(f"spread={spread:g}"), "liars", liars, lies=who == "liar")
        yield row("wsc", wsc(kv_tokens=POOL_TOKENS), "shared", shared)
        yield row("wsc-dlpm", wsc(policy="wsc-dlpm", kv_tokens=POOL_TOKENS), "shared", shared)

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        """All in a closed loop, so that everybody always waits."""
        match cell.traffic.name:
            case "interactions":
                chain_of = {name: CALLS if name == "many" else 1 for name in cell.plan.at_once}
                return [_chained(name, calls, seed) for name, calls in chain_of.items()]
            case "liars":
                light, heavy = BY_NAME["app12"], BY_NAME["app7"]
                lies = cell.traffic.arguments["lies"]
                return [
                    _sender("honest", light, seed),
                    replace(_sender("liar", light, seed), app=heavy.name if lies else light.name),
                    _sender("heavy", heavy, seed),
                ]
            case _:
                length = SYSTEM_TOKENS + OWN_TOKENS
                apps = [
                    App(f"app{number}", 1.0, length, OUTPUT_TOKENS, system_tokens=SYSTEM_TOKENS)
                    for number in range(PREFIXES)
                ]
                return [
                    _sender(name, apps[place % PREFIXES], seed)
                    for place, name in enumerate(cell.plan.at_once)
                ]

    def run(self, cell: Cell, seed: str) -> Measured:
        clients = self.clients(cell, seed)
        manifest = describe(cell.site, clients, cell.plan, seed=seed, workload=cell.traffic.name)
        with Records(None, manifest) as records:
            watched = Watched(cell.site, clients, cell.plan, records, seed=seed)
            watched.run()
        return Measured({**self.measure(cell, records.run), **_gap(watched)}, watched.cluster.now_s)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        assert run.end is not None
        got = {
            name: sum(
                (one.extend_tokens or 0) + 2 * one.output_tokens for one in run.requests if one.client == name
            )
            for name in run.manifest.clients
        }
        prompts = sum(one.prompt_tokens or 0 for one in run.requests if one.output_tokens)
        return {
            "service": got,
            "tokens_per_s": (prompts + sum(one.output_tokens for one in run.requests)) / run.end.t_s,
        }

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        lead, paper = at["lead"], at["paper"]
        gains = {
            spread: at[f"liar.{spread:g}"]["service/liar"] / at[f"honest.{spread:g}"]["service/liar"]
            for spread in SPREADS
        }
        most = max(gains.values())
        tokens = at["wsc-dlpm"]["tokens_per_s"] / at["wsc"]["tokens_per_s"]
        yield graded(lead["gap_over_bound"] <= 1).claim(f"""Counters of clients that wait differ by no more
            than a batch and the lead | | {lead["gap"]:.2f} average calls, {lead["gap_over_bound"]:.2f} of
            that""")
        yield graded(paper["gap_over_bound"] > 1).claim(f"""With the paper's rule, interactions first whatever
            they have had, by more | | {paper["gap"]:.1f} average calls, {paper["gap_over_bound"]:.1f} times
            that""")
        yield graded(
            all(gain <= spread**2 for spread, gain in gains.items()) and most <= 64
        ).claim(f"""A client that names the heaviest application gains no more than the spread allows | | at
            most {most:.2f} times its service""")
        yield at_least(tokens, 1.1, 1).claim(f"""Where prompts share a prefix WSC-DLPM serves more than WSC |
            | {tokens:.2f}× the tokens/s | The cache holds the applications' prefixes under either, since
            there are few of them.""")
        yield Table(
            "Medians over seeds",
            "spread | service of the liar over the same client's, honest | at most",
            [[spread, gain, spread**2] for spread, gain in gains.items()],
        )
        yield Table(
            """Fairness in plain and in normalised service, by the lead that interactions have: tokens of the client
                that keeps many open over those of another, and the largest difference of counters of clients that
                wait; medians over seeds""",
            "lead | plain, in tokens | normalised, in average calls",
            [
                [label, one["service/many"] / one["service/one"], one["gap"]]
                for label, one in ((f"lead {LEAD:g}", lead), ("infinite, as the paper has it", paper))
            ],
        )
        yield {
            "gap_over_bound": lead["gap_over_bound"],
            "gap_over_bound_paper": paper["gap_over_bound"],
            "liar_gain": most,
            "tokens_dlpm_over_wsc": tokens,
        }


def _gap(watched: Watched) -> dict[str, Json]:
    """The largest difference of counters, over a batch and the lead."""
    [replica] = watched.replicas
    account = replica.queue.account
    ever = account.largest.ever
    batch = ever.input_units + account.policy.price.dearest(0, 0, ever.owed_tokens)[1]  # type: ignore[union-attr]
    return {"gap": watched.worst_gap, "gap_over_bound": watched.worst_gap / (batch + LEAD)}


def _sender(name: str, app: App, seed: str) -> Client:
    return client(name, app, EvenArrivals(1.0), seed)


def _chained(name: str, calls: int, seed: str) -> Client:
    """Interactions of so many calls, one after the other."""
    app = BY_NAME["app12"]

    def program(index: int) -> Program:
        rng = Random(f"{seed}/{name}/{index}")
        for number in range(calls):
            reply: Reply = yield app.call(rng, "single", last=number == calls - 1)
            if not reply.ok:
                return

    return Client(name, program, EvenArrivals(1.0), seed, app=app.name)
