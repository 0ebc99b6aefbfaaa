"""Normalised service: what the lead bounds, what a liar gains, and what prefixes are worth."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from workloads.apps import BY_NAME, App, client
from workloads.arrivals import EvenArrivals
from workloads.clients import Client
from workloads.experiments.contract import SEEDS, Cell, Json, Measured, Result, Simulated, Size, TrafficSpec
from workloads.experiments.fairserve_setting import site
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

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = (LENGTH_S, SEEDS) if size == "full" else (30.0, SEEDS[:1])

        def cell(name: str, at: Site, traffic: str, at_once: Mapping[str, int], **more: Json) -> Cell:
            plan = Plan(
                length_s, at_once=at_once, connections_per_client=1_000_000, sample_s=0.5, token_step_s=5.0
            )
            return Cell(name, at, TrafficSpec(traffic, more), plan, seeds)

        def wsc(options: str = "", policy: str = "wsc", **more: Json) -> Site:
            plain = replace(site("fs"), replicas=1, max_running=MAX_RUNNING, throttle="none", limits={})
            return replace(plain, policy=policy, policy_options=options, **more)

        many = {"many": OPEN, "one": AT_ONCE, "another": AT_ONCE}
        liars = {"honest": AT_ONCE, "liar": AT_ONCE, "heavy": AT_ONCE}
        shared = {f"user{number}": 4 for number in range(PREFIXES * READERS)}
        return [
            cell("lead", wsc(f"lead={LEAD:g}"), "interactions", many),
            cell("paper", wsc("lead=inf"), "interactions", many),
            *(
                cell(f"{who}.{spread:g}", wsc(f"spread={spread:g}"), "liars", liars, lies=who == "liar")
                for spread in SPREADS
                for who in ("honest", "liar")
            ),
            cell("wsc", wsc(kv_tokens=POOL_TOKENS), "shared", shared),
            cell("wsc-dlpm", wsc(policy="wsc-dlpm", kv_tokens=POOL_TOKENS), "shared", shared),
        ]

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

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        gains = [
            {
                "spread": spread,
                "gain": results[f"liar.{spread:g}"].number("service/liar")
                / results[f"honest.{spread:g}"].number("service/liar"),
                "most": spread**2,
            }
            for spread in SPREADS
        ]
        rules = [
            {
                "label": label,
                "plain": results[name].number("service/many") / results[name].number("service/one"),
                "normalised": results[name].number("gap"),
            }
            for name, label in (("lead", f"lead {LEAD:g}"), ("paper", "infinite, as the paper has it"))
        ]
        return {
            "rules": rules,
            "gains": gains,
            "liar_gain": max(one["gain"] for one in gains),
            "within": all(one["gain"] <= one["most"] for one in gains),
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
