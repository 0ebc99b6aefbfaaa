"""Deadlines within a fair share: what flooding buys, how evenly service is shared, prefixes, interactions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from router.workers import ExpectedOutputs
from workloads.deadlines.run import Outcome, Served, attained, by, measure, percentile
from workloads.deadlines.traffic import Stream
from workloads.experiments.claims import Part, at_least, graded
from workloads.experiments.contract import Cell, Json, Result, Row, medians
from workloads.experiments.qlm_setting import ONE_MODEL, Deadlines, qlm, ratio, row, rule
from workloads.simulation import Site

REPLICAS = 4
MODEL = next(iter(ONE_MODEL))
LIGHT, LIGHT_SLO_S = "light", 2.0
FLOODS = 3
FLOOD_SLO_S = 1.0
FLOOD_PER_S = 20.0
LIGHT_PER_S = 0.5
FLOOD_S = 90.0
GAP_CLIENTS = ("urgent", "patient")
PREFIXES, PREFIX_TOKENS = 60, 1_500
PREFIX_PER_S = 16.0
PREFIX_REQUESTS = 2_000
CALLS = 3
CHATS_PER_S = 6.0
CALLS_A_MINUTE = 30


def ours(replicas: int = REPLICAS) -> Site:
    """Shares in the router and in the replicas."""
    return rule(qlm(replicas, shares=True))


class Shared(Deadlines):
    id = "beyond-deadlines"
    title = "Deadlines within a fair share"
    source = "beyond the papers; QLM and DLPM"
    about = f"""{REPLICAS} A100 with Vicuna-13B under placement `deadline`, or the paper's `qlm`, and policy `slo`. A
        light client sends {LIGHT_PER_S:.1f} requests a second, due within {LIGHT_SLO_S:.0f} s; {FLOODS} others send
        {FLOOD_PER_S:.0f} a second each and claim {FLOOD_SLO_S:.0f} s for all of them. Two clients that flood one
        replica, of which one claims {FLOOD_SLO_S:.0f} s and the other an hour. Queues of requests that share
        {PREFIXES} prefixes of {PREFIX_TOKENS:,} tokens, more than a cache holds. Interactions of {CALLS} calls while
        all replicas are overloaded and clients may begin {CALLS_A_MINUTE} calls a minute."""

    lengths_s = (FLOOD_S, 20.0)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        def stream(slo_class: str, rate_per_s: float, client: str, **more: Any) -> Stream:
            return Stream(MODEL, slo_class, rate_per_s, until_s=length_s, client=client, **more)

        floods = [*(f"flood {number}" for number in range(FLOODS)), *GAP_CLIENTS]
        flood = [stream("batch-1", FLOOD_PER_S, name, slo_s=FLOOD_SLO_S) for name in floods]
        light = stream("interactive", LIGHT_PER_S, LIGHT, slo_s=LIGHT_SLO_S)
        beside, gap = [light, *flood[:FLOODS]], [flood[FLOODS], replace(flood[-1], slo_s=3600.0)]
        shared = [Stream(MODEL, "batch-1", PREFIX_PER_S, prefixes=PREFIXES, prefix_tokens=PREFIX_TOKENS)]
        chats = [
            stream("interactive", CHATS_PER_S, "chats", calls=CALLS),
            stream("batch-2", FLOOD_PER_S, "batch", calls=CALLS),
        ]
        paper, requests = qlm(REPLICAS), PREFIX_REQUESTS if full else 150
        oit, rpm = (replace(ours(), throttle=one, limits={"user": CALLS_A_MINUTE}) for one in ("oit", "rpm"))
        yield row("flood", ours(), beside, None, "deadline, within shares")
        yield row("flood.paper", paper, beside, None, "QLM")
        yield row("gap", ours(1), gap, None, "two clients")
        yield row("prefixes", ours(), shared, requests, "prefixes")
        yield row("plain", paper, shared, requests, "prefixes, QLM")
        yield row("chats", oit, chats, None, "by overload and interaction")
        yield row("chats.rpm", rpm, chats, None, "a fixed limit")

    def measure(self, cell: Cell, outcome: Outcome) -> Mapping[str, Json]:
        served = outcome.served
        clients = by(served, lambda one: one.asked.client)
        prompt_tokens = sum(one.asked.prompt_tokens for one in served)
        found = {
            **measure(outcome),
            "clients": {
                name: {
                    "attained": attained(some),
                    "p99_s": percentile([one.ttft_s for one in some if one.ttft_s is not None], 0.99),
                    "requests": len(some),
                    "refused": sum(one.is_refused for one in some),
                }
                for name, some in clients.items()
            },
            "hit_rate": sum(one.cached_tokens for one in served) / max(1, prompt_tokens),
            "refused": sum(one.is_refused for one in served),
            "cut": _cut(served),
        }
        if cell.name.startswith("gap"):
            queues: Json = outcome.cluster.routers[0].state()["queues"]
            ahead = float(queues["ahead"])
            found |= _gap([clients[name] for name in GAP_CLIENTS], ahead)
        return found

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        light = f"clients/{LIGHT}/attained"
        ours, paper, gap = at["flood"][light], at["flood.paper"][light], at["gap"]["gap_over_bound"]
        hits = ratio(at, "", "prefixes", "plain", "hit_rate")
        cut, refused, cut_rpm = at["chats"]["cut"], at["chats"]["refused"], at["chats.rpm"]["cut"]
        yield at_least(ours, 0.99, 0.9).claim(f"""Deadlines cannot be bought by flooding | | {ours:.1%} of the
            light client's requests are in time; under `qlm` {paper:.1%} | Prompts are computed in steps of up
            to a second, and a request that comes during one may wait for the next one, too.""")
        yield graded(gap <= 1).claim(f"""Whatever deadlines they claim, two clients are served alike | | the
            difference is {gap:.2f} of what is promised""")
        yield graded(hits >= 1.1, hits > 1).claim(f"""Who chooses by the cache among those that are due
            together finds more in it | | {hits:.2f}× the cached tokens of `qlm` | With as many prefixes as
            this, most of them are found again in order of arrival too.""")
        yield graded(cut == 0).claim(f"""No interaction that has begun is cut | | {cut:.0f} calls, while
            {refused:,.0f} first calls are refused; a fixed limit cuts {cut_rpm:,.0f}""")
        columns = f"""rule | light, in time = {light} | light, P99 s = clients/{LIGHT}/p99_s |
            requests/s = throughput_per_s | evictions = evictions"""
        yield medians("Beside a flood", columns, [at["flood"], at["flood.paper"]])
        columns = """part | requests = requests | in time = attained | requests/s = throughput_per_s |
            hit rate = hit_rate | refused = refused | calls cut = cut"""
        yield medians("All parts", columns, at.values())
        yield {
            "light_attained_under_flood": ours,
            "light_attained_paper": paper,
            "gap_over_bound": gap,
            "hits_over_paper": hits,
            "interactions_cut": cut,
        }


def _cut(served: Sequence[Served]) -> int:
    """Interactions of which a call after the first was refused."""
    return sum(one.is_refused and one.asked.call > 1 for one in served)


def _expected(served: Sequence[Served]) -> Mapping[str, float]:
    """Of each answer, by name, what the router expected when the request came."""
    outputs, found = ExpectedOutputs(), dict[str, float]()
    ends = [(one.ended_s, 0, one) for one in served if one.ended_s is not None]
    for _, comes, one in sorted(
        [*ends, *((one.asked.at_s, 1, one) for one in served)], key=lambda event: event[:2]
    ):
        if comes:
            found[one.asked.id] = outputs.of(one.asked.client, one.asked.most_tokens)
        else:
            outputs.learn(one.asked.client, one.output_tokens)
    return found


def _cost(one: Served, at_s: float, expected: Mapping[str, float]) -> float:
    """What a request that was sent counts: what was expected, and what it took once it is over."""
    is_over = one.ended_s is not None and one.ended_s <= at_s
    return one.asked.prompt_tokens + 2.0 * (one.asked.output_tokens if is_over else expected[one.asked.id])


def _gap(clients: Sequence[Sequence[Served]], ahead: float) -> Mapping[str, Json]:
    """Of two clients that wait all the time: the largest difference of what was counted, over what is promised."""
    placed = [sorted(one.placed_s for one in some if one.placed_s is not None) for some in clients]
    waits_until_s = min(max(one.asked.at_s for one in some) for some in clients)
    first_s = max(times[len(times) // 20] for times in placed)
    expected = _expected([one for some in clients for one in some])
    gap = in_flight = 0.0
    base: float | None = None
    for step in range(int(first_s) + 1, int(waits_until_s)):
        at_s = float(step)
        sent = [
            [one for one in some if one.placed_s is not None and one.placed_s <= at_s] for some in clients
        ]
        counted = [sum(_cost(one, at_s, expected) for one in some) for some in sent]
        running = [
            sum(_cost(one, 1e18, expected) for one in some if one.ended_s is None or one.ended_s > at_s)
            for some in sent
        ]
        difference = counted[0] - counted[1]
        base = difference if base is None else base
        gap, in_flight = max(gap, abs(difference - base)), max(in_flight, *running)
    largest = sum(max(_cost(one, 1e18, expected) for one in some) for some in clients)
    bound = ahead + largest + in_flight
    return {"gap_units": gap, "bound_units": bound, "ahead_units": ahead, "gap_over_bound": gap / bound}
