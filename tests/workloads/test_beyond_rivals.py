"""Others' rules: each does what its paper says, and serves everybody."""

import numpy as np
import pytest

from router.placement.contract import Request
from router.radix import Match
from sglang_fair.common.weights import Weights
from sglang_fair.core.job import Job
from sglang_fair.core.queue import FairQueue
from sglang_fair.sim.cache import PrefixCache
from tests.support.worker_view import View
from workloads.clients import SCENARIOS, SMALL
from workloads.experiments.beyond_placement import at_shares
from workloads.programs import PackedCodec
from workloads.session import Plan
from workloads.simulation import Site, simulate
from workloads.simulation.rivals import BLOCK_TOKENS, FEW, RIVALS, DualMap, TailLru


def packed(*tokens: int) -> bytes:
    return np.array(tokens, "<u4").tobytes()


# ---- DualMap

WORKERS = [View(f"w{k}") for k in range(8)]
NOWHERE = Match(0, (), {})


def ask(dualmap: DualMap, tokens: bytes, match: Match = NOWHERE, workers=WORKERS) -> str:
    return dualmap.place(Request("r", "c", tokens, len(tokens) // 4), match, workers, 0.0)


def test_a_prefix_has_two_candidates_and_the_holder_gets_it_while_it_is_in_time():
    article = packed(*range(2 * BLOCK_TOKENS))
    loads = [[View(f"w{k}", prefill_tokens=1000 * (k != best)) for k in range(8)] for best in range(8)]
    pair = {ask(DualMap(), article, workers=each) for each in loads}
    assert len(pair) == 2
    assert all(ask(DualMap(), article + packed(9, tail), workers=loads[3]) in pair for tail in range(20))
    holder, other = sorted(pair)
    for waits, chosen in ((50_000, holder), (70_000, other)):  # 5 s are 65,000 tokens
        workers = [View(f"w{k}", prefill_tokens=waits * (f"w{k}" == holder)) for k in range(8)]
        match = Match(BLOCK_TOKENS, (holder,), {holder: BLOCK_TOKENS})
        assert ask(DualMap(), article, match, workers) == chosen


def test_a_prefix_of_most_prompts_is_made_longer():
    dualmap, system = DualMap(), packed(*range(BLOCK_TOKENS))
    chosen = [ask(dualmap, system + packed(*[chat] * BLOCK_TOKENS)) for chat in range(200)]
    assert len(set(chosen[:FEW])) <= 2
    assert len(set(chosen[FEW:])) == 8


# ---- orders


def served(name: str, jobs: list[Job], *, units: float = 100.0) -> str:
    """The names of `jobs`, which wait together, in the order in which they are served."""
    queue = FairQueue(RIVALS[name](1e9, Weights()))
    for job in jobs:
        queue.arrive(job)
    found = ""
    while (job := queue.next()) is not None:
        found += job.id
        queue.admit(job, extend_tokens=int(units), cached_tokens=0)
        queue.finish(job.id)
        queue.begin_pass()
    return found


def job(name: str, prefix: int, program: str = "", prompt: int = 100) -> Job:
    return Job(name, "client", prompt, interaction=program or name, prefix_tokens=prefix)


@pytest.mark.parametrize("name", ["klpm", "klpm-fair"])
def test_one_of_four_is_the_oldest_and_the_others_have_the_longest_prefix(name):
    assert served(name, [job(one, prefix) for prefix, one in enumerate("abcdefgh")]) == "hgfaedcb"


def test_programs_are_served_as_they_would_end_if_all_were_served_at_once():
    # The second program is smaller, so it ends first, although the first one has the longer prefixes.
    large, small = [job(one, 50, "1", 400) for one in "ab"], [job(one, 10, "2", 100) for one in "cd"]
    assert served("justitia", large + small) == "cdab"
    assert served("justitia", [job(one, 60, "2", 400) for one in "cd"] + large) == "cdab"


# ---- T-LRU


def test_the_tails_of_conversations_go_first_and_no_more_of_them():
    cache = PrefixCache(1, TailLru(3), events=False)

    def say(*tokens: int) -> None:
        node = cache.match(packed(*tokens), len(tokens))
        cache.insert(packed(*tokens), len(tokens), node)

    def cached(*tokens: int) -> int:
        return cache.match(packed(*tokens), len(tokens)).end

    old, new = (1, 2, 3, 4, 5, 6), (11, 12, 13, 14, 15, 16)
    for talk in (old, new):
        say(*talk[:3])
        say(*talk)
    cache.evict(3)
    assert (cached(*old), cached(*new)) == (3, 6)
    cache.evict(3)
    assert (cached(*old), cached(*new)) == (3, 3), "its first part would not be computed in time"
    say(*new)  # so the other one is the least recently used
    cache.evict(3)
    assert (cached(*old), cached(*new)) == (3, 3)
    cache.evict(3)
    assert (cached(*old), cached(*new)) == (0, 3)


# ---- what a scheduler would have at another's shares


def test_throughput_at_equal_shares_is_not_what_serving_one_group_more_brings():
    mine = {"good": (100.0, 50.0), "others": (400.0, 50.0)}
    unfair = {
        "good": (50.0, 25.0),
        "others": (600.0, 75.0),
    }  # more of those whose prompts are cached, no more work
    assert at_shares(mine, unfair) == pytest.approx(1.0)
    assert at_shares(mine, {"good": (120.0, 40.0), "others": (480.0, 60.0)}) == pytest.approx(500 / 550)


# ---- all of them


@pytest.mark.parametrize(
    "fields",
    [{"placement": "dualmap", "policy": "lpm"}, *({"policy": name} for name in RIVALS), {"tail_tokens": 512}],
    ids=str,
)
def test_everybody_is_served(fields):
    site = Site(**{"replicas": 2, "placement": "d2lpm-queue", "kv_tokens": 20_000, "stall_ms": 0.0, **fields})
    clients = SCENARIOS["judge-s1"].clients(scale=SMALL, rate_per_s=3.0, codec=PackedCodec())
    run = simulate(site, clients, Plan(3.0, drain_s=None))
    assert len(run.programs) > 20
    assert {one.outcome for one in run.programs} == {"ok"}
