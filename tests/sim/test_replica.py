"""The simulated replica: its books, its memory, its jumps over decode steps, and the real scheduler beside it."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sglang_fair.core import make_policy
from sglang_fair.core.admission import BLOCK_TOKENS
from sglang_fair.core.cost import Linear, Quadratic
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.fcfs import Fcfs
from sglang_fair.core.payers import Payers
from sglang_fair.core.predicted import VtcOracle
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.rpm import Rpm
from sglang_fair.core.step_times import LEAST_CHUNK_TOKENS
from sglang_fair.core.steps import Steps
from sglang_fair.core.vtc import Vtc
from sglang_fair.sim.answers import answer
from sglang_fair.sim.replica import Event, Finished, Progress, Refused, Removed, Replica, Settings, SimRequest
from tests.support import fork_server
from tests.support.budget import examples
from tests.support.sim_traces import LOADS, Traced


@dataclass(frozen=True)
class Seconds:
    """A linear cost model."""

    base_s: float = 0.010
    extend_token_s: float = 1e-4
    request_s: float = 1e-5
    context_token_s: float = 1e-7

    def prefill_s(
        self, extends: Sequence[tuple[int, int]], requests: int = 0, context_tokens: int = 0
    ) -> float:
        decode_s = self.request_s * requests + self.context_token_s * context_tokens
        return self.base_s + self.extend_token_s * sum(extend for extend, _ in extends) + decode_s

    def decode_s(self, requests: int, context_tokens: int, steps: int = 1) -> float:
        context = context_tokens * steps + requests * (steps * (steps - 1) // 2)
        return steps * (self.base_s + self.request_s * requests) + self.context_token_s * context


STEP = Seconds(1.0, 0.0, 0.0, 0.0)
"""Every step takes a second."""

SMALL = Settings(kv_tokens=4096, page_tokens=4, max_running=12, chunked_prefill_tokens=64, ignore_eos=False)


def packed(*tokens: int) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def request(id: str, prompt: int | bytes = 10, output: int = 4, client: str = "a", **fields) -> SimRequest:
    tokens = (
        prompt if isinstance(prompt, bytes) else packed(*(Random(id).randrange(1000) for _ in range(prompt)))
    )
    fields.setdefault("max_output_tokens", output)
    return SimRequest(id, client, tokens, output, **fields)


def new(settings: Settings = SMALL, policy=None, cost=STEP, **fields) -> Replica:
    return Replica(FairQueue(policy or Fcfs()), cost, settings, **fields)


def drain(replica: Replica, until_s: float = 1e9) -> list[Event]:
    told: list[Event] = []
    while replica.next_s <= until_s:
        told += replica.advance(replica.next_s)
    return told


def ended(request: SimRequest, t_s: float, written: int, *, aborted: bool = False) -> Finished:
    """Its end after `written` tokens of its answer, none of its prompt cached before."""
    said = answer(request.tokens, written) if written else b""
    return Finished(request.id, t_s, written, 0, len(request.tokens) // 4, aborted, said)


def finished(events: Sequence[Event]) -> dict[str, Finished]:
    return {event.id: event for event in events if isinstance(event, Finished)}


# ---- one request


def test_a_request_takes_a_prefill_step_and_a_decode_step_for_each_further_token():
    replica = new(events=False)
    asked = request("r", 10, 4)
    assert replica.arrive(asked, 5.0) == []
    assert replica.next_s == 5.0
    assert drain(replica) == [Progress("r", 6.0, 1), ended(asked, 9.0, 4)]
    assert (replica.meters.prefill_steps, replica.meters.decode_steps, replica.meters.busy_s) == (1, 3, 4.0)
    assert replica.next_s == inf


def test_a_run_of_decode_steps_is_one_jump():
    replica = new(replace(SMALL, progress_steps=1000))
    replica.arrive(request("r", 10, 500), 0.0)
    times = []
    while replica.next_s < inf:
        times.append(replica.next_s)
        replica.advance(replica.next_s)
    assert times == [0.0, 1.0, 500.0]


def test_progress_is_told_as_often_as_asked():
    replica = new(replace(SMALL, progress_steps=3), events=False)
    replica.arrive(request("r", 10, 9), 0.0)
    progress = [event for event in drain(replica) if isinstance(event, Progress)]
    assert [(event.t_s, event.output_tokens) for event in progress] == [(1.0, 1), (4.0, 4), (7.0, 7)]


def test_an_engine_cuts_one_prompt_at_a_time():
    """A step has room for a short prompt beside a long one. When that is not taken, because the short one waits for
    what the long one computes, it is not for the beginning of a second long one."""
    chunk = 4 * BLOCK_TOKENS
    replica = Replica(
        FairQueue(Dlpm()), STEP, replace(SMALL, chunked_prefill_tokens=chunk), steps=Steps(100.0)
    )
    first = request("first", 3 * chunk, 1, "a")
    told = replica.arrive(first, 0.0)
    told += drain(replica, 0.5)
    part = first.tokens[: 4 * (chunk + BLOCK_TOKENS)]
    for one in (request("short", part, 1, "b"), request("second", 2 * chunk, 1, "c")):
        told += replica.arrive(one, 0.5)
    told += drain(replica)
    replica.check_pool()
    assert [event.id for event in told if isinstance(event, Finished)] == ["short", "first", "second"]


@pytest.mark.parametrize(("mixed_chunk", "ends_s"), [(False, 7.0), (True, 6.0)])
def test_in_a_mixed_step_those_that_run_write_a_token_too(mixed_chunk, ends_s):
    replica = new(replace(SMALL, mixed_chunk=mixed_chunk), events=False)
    told = replica.arrive(request("runs", 10, 6), 0.0)
    told += drain(replica, 1.5)
    told += replica.arrive(request("comes", 10, 1), 1.5)
    told += drain(replica)
    assert {id: event.t_s for id, event in finished(told).items()} == {"runs": ends_s, "comes": 3.0}


@pytest.mark.parametrize("prompt", [40, 900, 2500])
def test_in_a_replica_that_mixes_a_prompt_does_not_wait_for_the_end_of_another_client_s(prompt):
    """Whether it is shorter than a chunk or longer, it is computed in the step after the one under way, and hardly more
    with it; the prompt that was cut goes on in that step too."""
    settings = Settings(kv_tokens=1_000_000, page_tokens=4, mixed_chunk=True)
    replica = new(settings, Dlpm(), Seconds(0.01, 1e-4, 0.0, 0.0), steps=Steps(0.1, mixes=True))
    for number in range(8):
        replica.arrive(request(f"flood{number}", 9_000, 16, "flood"), 0.0)
    replica.arrive(request("before", 10, 50, "light"), 0.0)
    told = drain(replica, 2.0)
    assert "before" in finished(told), "its steps were short"
    replica.advance(2.0)
    under_way_s, chunked = replica.next_s - 2.0, replica._chunked
    assert chunked is not None
    before = chunked.computed
    replica.arrive(request("light", prompt, 4, "light"), 2.0)
    told = drain(replica, 3.0)
    (first_s,) = (event.t_s for event in told if isinstance(event, Progress) and event.id == "light")
    longest_s = 0.01 + 1e-4 * (max(LEAST_CHUNK_TOKENS, 1.125 * prompt) + 2 * BLOCK_TOKENS)
    assert first_s - 2.0 <= under_way_s + longest_s + 0.01
    assert chunked.computed > before


def test_the_next_turn_finds_the_prompt_and_the_answer_in_the_cache():
    replica = new(events=False)
    first = request("first", 41, 20)
    replica.arrive(first, 0.0)
    drain(replica)
    again = first.tokens + answer(first.tokens, 20) + packed(1, 2, 3)
    replica.arrive(request("again", again, 2), 100.0)
    # 41 + 20 tokens, of which the last one was never in the pool; whole pages of 4
    assert finished(drain(replica))["again"].cached_tokens == 60
    replica.check_pool()


def test_the_last_token_of_a_prompt_is_always_computed():
    replica = new(events=False)
    tokens = packed(*range(64))
    for name in ("first", "again"):
        replica.arrive(request(name, tokens, 1), 0.0)
        ended = finished(drain(replica))
    assert ended["again"].cached_tokens == 60


def test_what_can_never_fit_is_refused_and_a_longer_answer_is_cut():
    replica = new(replace(SMALL, kv_tokens=400))
    (refused,) = replica.arrive(request("long", 395, 1), 0.0)
    assert refused == Refused("long", 0.0, "longer than the KV cache")
    replica.arrive(request("tight", 390, 100), 0.0)
    assert finished(drain(replica))["tight"].output_tokens == 5
    replica.check_pool()


def test_a_request_for_no_output_makes_one_token_that_nobody_pays_for():
    replica = new()
    replica.arrive(request("warm", 10, 0), 0.0)
    assert finished(drain(replica))["warm"].output_tokens == 1
    assert replica.queue.account.ledger.usage("a").output_tokens == 0
    assert replica.queue.account.ledger.ok


def test_a_policy_may_refuse_and_may_delay():
    refusing = new(policy=Rpm(limit=1))
    refusing.arrive(request("x", 10, 1), 0.0)
    (refused,) = refusing.arrive(request("y", 10, 1), 0.0)
    assert isinstance(refused, Refused)
    delaying = new(policy=Rpm(limit=1, excess="delay"), cost=Seconds())
    for name in ("x", "y"):
        delaying.arrive(request(name, 10, 1), 0.0)
    ended = finished(drain(delaying, 200.0))
    assert 60.0 <= ended["y"].t_s < 60.1


# ---- aborts


def test_a_waiting_request_is_given_up_at_once_and_a_running_one_after_its_next_step():
    replica = new(replace(SMALL, max_running=1), events=False)
    runs, waits = request("runs", 10, 30), request("waits", 10, 30)
    replica.arrive(runs, 0.0)
    replica.arrive(waits, 0.0)
    drain(replica, 1.0)
    (waited,) = replica.abort("waits", 4.5)
    assert waited == ended(waits, 4.5, 0, aborted=True)
    assert replica.abort("runs", 4.5) == []
    assert replica.abort("nobody", 4.5) == []
    assert drain(replica) == [ended(runs, 6.0, 6, aborted=True)]
    assert replica.queue.account.ledger.ok
    replica.check_pool()


def test_a_request_is_given_up_inside_its_prompt():
    replica = new(events=False)
    asked = request("long", 200, 9)
    replica.arrive(asked, 0.0)
    replica.advance(0.0)
    replica.advance(1.0)
    replica.abort("long", 1.5)
    assert drain(replica) == [ended(asked, 2.0, 0, aborted=True)]
    assert replica.cache.tokens == 64  # the second chunk went with it
    assert replica.queue.account.ledger.ok
    replica.check_pool()


# ---- memory


# ---- any traffic

POLICIES: tuple[Callable[[], object], ...] = (
    Fcfs, Vtc, lambda: Dlpm(quantum=50.0), VtcOracle, lambda: make_policy("lpm"),
    lambda: make_policy("drr", quantum=60.0),
)  # fmt: skip

CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**20),
        "kv_tokens": st.sampled_from([320, 480, 1200]),
        "page_tokens": st.sampled_from([1, 4, 16]),
        "max_running": st.sampled_from([2, 6, 40]),
        "chunked_prefill_tokens": st.sampled_from([None, 16, 48]),
        "ignore_eos": st.booleans(),
        "gap_s": st.sampled_from([0.0, 0.01, 0.08]),
        "longest": st.sampled_from([3, 60, 200]),
        "prompt": st.sampled_from([40, 240]),
        "stall_s": st.sampled_from([None, 0.001, 0.1]),
        "mixed_chunk": st.booleans(),
    }
)


def play(
    case: dict, policy, progress_steps: int, cost=None, payers=None, says_weights=False
) -> tuple[Replica, list[Event]]:
    """Random requests and aborts at random times, to the end; memory is audited at each event."""
    random = Random(case["seed"])
    settings = Settings(
        **{
            key: value
            for key, value in case.items()
            if key not in ("seed", "gap_s", "longest", "stall_s", "prompt")
        },
        progress_steps=progress_steps,
        new_token_ratio=0.9,
        least_new_token_ratio=0.0,
        ratio_decay_steps=3,
    )
    queue = FairQueue(policy, cost or Linear(), payers=payers)
    steps = (
        Steps(stall_s, mixes=settings.mixed_chunk)
        if (stall_s := case.get("stall_s")) and policy.shares_steps
        else None
    )
    replica = Replica(queue, Seconds(), settings, steps=steps)
    told: list[Event] = []
    now_s = 0.0
    families = [[random.randrange(9) for _ in range(40)] for _ in range(3)]
    for number in range(40):
        now_s += random.choice([0.0, case["gap_s"], 3 * case["gap_s"] * random.random()])
        told += drain(replica, now_s)
        head = random.choice(families)[: random.randrange(41)]
        tokens = packed(
            *head, *(random.randrange(1000) for _ in range(random.randint(1, case.get("prompt", 40))))
        )
        most = random.randint(1, case["longest"])
        one = request(str(number), tokens, random.randint(1, most), "abc"[number % 3], max_output_tokens=most)
        if says_weights:
            one = one._replace(
                weight=random.choice([None, 0.5, 1.0, 4.0]), weight_version=number + random.randrange(9)
            )
        told += replica.arrive(one, now_s)
        if random.random() < 0.15:
            told += replica.abort(str(random.randrange(number + 1)), now_s)
        replica.check_pool()
    while replica.next_s < inf:
        told += replica.advance(replica.next_s)
        replica.check_pool()
    return replica, told


@hypothesis_settings(max_examples=examples(25))
@given(CASES, st.sampled_from(POLICIES), st.sampled_from([None, Quadratic(d=64.0)]), st.booleans())
def test_a_jump_is_the_same_as_its_steps(case, policy, cost, says_weights):
    """Same events at the same times, same charges, same meters, whether 50 steps are taken at once, or each alone; and
    whatever weights the requests bring."""
    (jumping, jumps), (stepping, steps) = (
        play(case, policy(), most, cost, says_weights=says_weights) for most in (50, 1)
    )
    assert told(jumps) == told(steps)
    assert jumping.queue.account.ledger.accounts() == stepping.queue.account.ledger.accounts()
    assert jumping.queue.policy.counters() == pytest.approx(stepping.queue.policy.counters())
    for replica in (jumping, stepping):
        replica.meters.decode_s = round(replica.meters.decode_s, 9)
    assert jumping.meters == stepping.meters


def told(events: Sequence[Event]) -> list[Event]:
    """All but the progress after the first token."""
    seen: Counter[str] = Counter()
    kept = []
    for event in events:
        if isinstance(event, Progress):
            seen[event.id] += 1
            if seen[event.id] > 1:
                continue
        kept.append(event)
    return kept


@hypothesis_settings(max_examples=examples(25))
@given(CASES, st.sampled_from(POLICIES), st.booleans())
def test_every_request_ends_once_and_nothing_is_lost(case, policy, shared_prices):
    replica, events = play(
        case, policy(), 7, payers=Payers(rule="equal", block_tokens=4) if shared_prices else None
    )
    ends = Counter(event.id for event in events if isinstance(event, Finished | Refused))
    assert ends == Counter(str(number) for number in range(40))
    assert [event.t_s for event in events] == sorted(event.t_s for event in events)
    ledger = replica.queue.account.ledger
    assert ledger.ok
    assert ledger.engine_extend_tokens == replica.meters.extend_tokens
    assert ledger.engine_output_tokens == replica.meters.output_tokens
    assert sum(event.output_tokens for event in finished(events).values()) == replica.meters.output_tokens
    for event in finished(events).values():
        first = [p for p in events if isinstance(p, Progress) and p.id == event.id]
        assert event.aborted or (first and first[0].output_tokens == 1)
    assert len(replica.queue) == 0
    assert not list(replica.queue.running())
    assert replica.cache.locked_tokens == 0


def test_the_random_traffic_reaches_every_rule():
    """Otherwise the laws above say little."""
    met: Counter[str] = Counter()
    for seed in range(10):
        case = {
            "seed": seed, "kv_tokens": 320, "page_tokens": 4, "max_running": 6, "chunked_prefill_tokens": 16,
            "ignore_eos": False, "gap_s": 0.08, "longest": 200,
        }  # fmt: skip
        replica, events = play(case, Dlpm(quantum=50.0), 7)
        met["retractions"] += replica.meters.retractions
        met["cached"] += replica.meters.cached_tokens
        met["removed"] += sum(isinstance(event, Removed) for event in events)
        met["aborted"] += sum(event.aborted for event in finished(events).values())
    assert min(met[name] for name in ("retractions", "cached", "removed", "aborted")) > 5, met


# ---- the real scheduler


@pytest.mark.engine
@pytest.mark.parametrize("name", LOADS)
def test_the_real_scheduler_admits_the_same_requests_with_the_same_cached_tokens(name, real_traces):
    """SGLang's scheduler, tree cache and allocator without a model, beside the simulated replica, call by call."""
    real = real_traces[name]
    simulated = Traced(LOADS[name]).simulate()
    assert simulated == real
    assert {"admit", "finish"} <= {call[0] for call in real}


@pytest.fixture(scope="module")
def real_traces() -> dict[str, list[list]]:
    ended = fork_server.run("-m", "tests.support.sim_traces")
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])
