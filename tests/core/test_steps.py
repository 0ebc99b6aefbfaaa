"""The rule that shares an engine's time: its bound under adversaries, that nobody's prompts starve, and its chunks."""

from collections import Counter
from collections.abc import Callable
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.common.weights import Weights
from sglang_fair.core import POLICIES, make_policy
from sglang_fair.core.fcfs import Fcfs
from sglang_fair.core.job import Job
from sglang_fair.core.ledger import SYSTEM
from sglang_fair.core.step_times import FIRST_CHUNK_TOKENS, LEAST_CHUNK_TOKENS
from sglang_fair.core.steps import (
    ALONE,
    BACKLOGGED,
    LEAST_SHARE,
    LONGEST_STEP_S,
    MIXED,
    RECENT_S,
    Steps,
    make_steps,
)
from tests.support.budget import examples
from tests.support.steps import Clients, Engine, Sender

STALL_S = 0.1
DECODE_S, TOKEN_S = 0.01, 0.0001
"""How long a decode step takes, and each token of a step for prompts."""
SLACK_S = 1e-9
NAMES = tuple("abcdefgh")


class AnyOrder(Fcfs):
    """For no policy's order is promised: each pass has another first request, one of `first` if they wait."""

    def __init__(self, seed: int, first: str | None = None) -> None:
        super().__init__()
        self.random, self.first, self.jobs, self.drawn = Random(seed), first, list[Job](), None

    def arrive(self, job: Job) -> None:
        self.jobs.append(job)

    def leave(self, job: Job) -> None:
        self.jobs.remove(job)
        self.drawn = None

    def release(self) -> None:
        self.drawn = None

    def pick(self) -> Job | None:
        if self.drawn is None and self.jobs:
            self.drawn = self.random.choice(
                [job for job in self.jobs if job.client == self.first] or self.jobs
            )
        return self.drawn


class Metered(Engine):
    """An engine whose steps are for prompts, of one request, or for those that run, and that meters time itself. Where
    it `mixes`, a step for prompts is also a decode step for those that run."""

    def __init__(
        self,
        senders: list[Sender],
        seed: int = 0,
        unseen: int = 0,
        first: str | None = None,
        mixes: bool = False,
    ) -> None:
        """`unseen`: so many steps are over before the rule hears of the first one. The prompts of `first` go first."""
        self.weights = Weights({sender.name: sender.weight for sender in senders if sender.names})
        self.rule = Steps(STALL_S, self.weights, target_s=0, unseen=unseen, mixes=mixes)
        self.mixes = mixes
        super().__init__(
            senders, AnyOrder(seed, first), self.rule, seed=seed, step_s=lambda requests: DECODE_S
        )
        self.unseen = unseen
        self.backlogged: dict[str, bool] = {}
        """Whether the last prompt of a client had waited for long."""
        self.behind_s: Counter[str] = Counter()
        """By this engine's count: due less served since the client began to run, at least 0 at any time. Mixed steps
        count for those alone that are not backlogged."""
        self.worst_s = -inf
        """The largest of these, less what its bound allows."""
        self.growth_s = self.prefills_s = self.held_s = self.held_in_a_row_s = self.longest_hold_s = 0.0
        self.largest_share = 0.0
        self.prefill_steps = 0
        self.reports: list[Callable[[], None]] = []

    def step(self) -> None:
        self.begin()
        self.begun_s = self.now_s
        running = set(self.by_client())
        if not (batch := self.form(most=1)):
            self.held_in_a_row_s = self.held_in_a_row_s + DECODE_S if self.waiting else 0.0
            self.held_s += DECODE_S if self.waiting else 0.0
            self.longest_hold_s = max(self.longest_hold_s, self.held_in_a_row_s)
            self.meter(DECODE_S, running, dict.fromkeys(running, DECODE_S))
            self.decode()
            return
        (job,), self.held_in_a_row_s = batch, 0.0
        self.backlogged[job.client] = self.begun_s - job.arrived_s > BACKLOGGED * STALL_S
        decode_s = DECODE_S if self.mixes and running else 0.0
        length_s = job.prompt_tokens * TOKEN_S + decode_s
        self.prefills_s += length_s
        self.prefill_steps += 1
        late = [client for client in running if decode_s and self.backlogged.get(client)]
        served = dict.fromkeys(running, decode_s) | dict.fromkeys([*late, job.client], length_s)
        self.meter(length_s, running, served)
        ended = [] if self.left[job.id] else [job]
        if decode_s:
            for one in self.running.values():
                self.left[one.id] -= one is not job
            ended += [one for one in self.running.values() if one is not job and not self.left[one.id]]
        for one in ended:
            del self.running[one.id]

        def report() -> None:
            self.admission.computed([] if job in ended else [job])
            self.admission.step(length_s, {job.client: job.prompt_tokens}, decoded=int(decode_s > 0))
            for one in ended:
                self.end(one)

        self.report(report)

    def decode(self) -> None:
        assert self.running or not self.waiting, "the engine would stand still although a request waits"
        for job in self.running.values():
            self.left[job.id] -= 1
        ended = [job for job in self.running.values() if not self.left[job.id]]
        for job in ended:
            del self.running[job.id]

        def report() -> None:
            self.admission.step(DECODE_S, decoded=1)
            for job in ended:
                self.end(job)

        self.report(report)

    def report(self, report: Callable[[], None]) -> None:
        self.reports.append(report)
        if len(self.reports) > self.unseen:
            self.reports.pop(0)()

    def meter(self, length_s: float, running: set[str], served: dict[str, float]) -> None:
        self.now_s += length_s
        here = {*running, *served, *(job.client for job in self.waiting.values())}
        total = sum(map(self.weights.of, here))
        for client in list(self.behind_s):
            if client not in running:
                del self.behind_s[client]
        for client in running:
            share = max(LEAST_SHARE, self.weights.of(client) / total)
            self.largest_share = max(self.largest_share, share)
            served_s = served.get(client, 0.0)
            if served_s < length_s:
                self.growth_s = max(self.growth_s, share * length_s)
            behind_s = self.behind_s[client] + share * length_s - served_s
            self.behind_s[client] = max(0.0, behind_s)
            bound_s = STALL_S * LEAST_SHARE + (1 + self.unseen) * self.growth_s
            self.worst_s = max(self.worst_s, self.behind_s[client] - bound_s)


@st.composite
def senders(draw: st.DrawFn) -> list[Sender]:
    """A client that only runs, and others of every kind."""
    made = [Sender("victim", prompt=(10, 500), output=(1, 500), waiting=draw(st.integers(1, 2)))]
    for name in NAMES[: draw(st.integers(1, 6))]:
        shortest, longest = sorted(draw(st.tuples(*[st.integers(5, 1000)] * 2)))
        made.append(
            Sender(
                name,
                weight=draw(st.sampled_from([1.0, 1.0, 0.1, 3.0])),
                waiting=draw(st.integers(1, 12)),
                sends=draw(st.sampled_from([1.0, 0.5, 0.05])),
                prompt=(shortest, longest),
                output=(0, draw(st.sampled_from([0, 0, 1, 5, 100]))),
                aborts=draw(st.sampled_from([0.0, 0.0, 0.1])),
                names=draw(st.sampled_from([0, 1])),
            )
        )
    return made


@settings(max_examples=examples(100))
@given(senders(), st.integers(0, 2**20), st.booleans())
def test_nobody_who_runs_is_behind_by_more_than_the_bound(
    senders: list[Sender], seed: int, mixes: bool
) -> None:
    """By the engine's own meter, over every interval in which a client runs."""
    made = Metered(senders, seed, mixes=mixes).run(250)
    assert made.worst_s <= SLACK_S
    assert made.rule.largest_lag_s <= made.rule.bound_s + SLACK_S


@settings(max_examples=examples(50))
@given(senders(), st.integers(0, 2**20))
def test_prompts_are_held_back_for_as_long_as_they_held_up(senders: list[Sender], seed: int) -> None:
    """Decode steps that the rule forces are paid for by prefill steps before them, and last for one step more."""
    made = Metered(senders, seed).run(250)
    if not made.prefill_steps or made.largest_share == 1:
        return
    rate = made.largest_share / (1 - made.largest_share)
    assert made.held_s <= rate * made.prefills_s + (made.prefill_steps + 1) * DECODE_S + SLACK_S
    longest_s = (STALL_S * LEAST_SHARE + made.growth_s) / (1 - made.largest_share) + DECODE_S
    assert made.longest_hold_s <= longest_s + SLACK_S


def test_a_heavy_client_that_was_here_leaves_the_others_their_shares() -> None:
    """Its weight is larger than a sum that has theirs as well can show."""
    steps = Clients(STALL_S, Weights({"gold": 1e17}))
    steps.come(*("runs", "sends", "gold"))
    steps.go("gold")
    steps.decode("runs")
    steps.step(0.0)
    while steps.may("sends"):
        steps.step(STALL_S, {"sends": 1000})
    behind_s = steps.lag_s("runs")
    steps.step(2 * behind_s, decoded=1)
    assert steps.lag_s("runs") == pytest.approx(0, abs=SLACK_S), "half of the time is due to it"
    assert steps.may("sends")


def test_a_client_s_own_prompts_are_not_held_for_itself() -> None:
    """But for another one that is behind they are."""
    steps = beside()
    steps.step(0.05, {"b": 100})
    assert steps.may("a")
    assert not steps.may("b")
    steps.come(*"cc")
    steps.decode("c")
    steps.step(DECODE_S, {"b": 100})
    steps.step(STALL_S, {"b": 100})
    assert not any(steps.may(client) for client in "abc")


def beside() -> Clients:
    """`a` runs, and `b` is here."""
    steps = Clients(STALL_S)
    steps.come(*"ab")
    steps.decode("a")
    steps.step(DECODE_S, {"a": 1})
    return steps


def test_nothing_is_saved_up() -> None:
    """Who ran alone for long is not behind later, and owes nothing."""
    steps = beside()
    steps.go("b")
    steps.step(100.0, decoded=1000)
    steps.come("b")
    steps.step(0.05, {"b": 100})
    assert steps.lag_s("a") == pytest.approx(0.025)
    assert not steps.may("b")


def test_who_sends_one_request_after_the_other_keeps_its_lag() -> None:
    """But for a short time only, and not more than the patience."""
    steps = beside()
    steps.step(0.05, {"b": 100})
    steps.end("a")
    assert steps.lag_s("a") == steps.patience_s
    steps.tick(RECENT_S / 2)
    steps.come("a")
    assert steps.lag_s("a") == steps.patience_s
    steps.go("a")
    steps.tick(2 * RECENT_S)
    steps.come("a")
    assert steps.lag_s("a") == 0


@settings(max_examples=examples(50))
@given(senders(), st.integers(0, 2**20))
def test_an_overlapped_engine_decides_a_step_earlier(senders: list[Sender], seed: int) -> None:
    """The rule hears of a step when the next one has begun; the bound has one step more."""
    quiet = [sender for sender in senders if not sender.aborts]
    made = Metered(quiet, seed, unseen=1).run(250)
    assert made.rule.largest_lag_s <= made.rule.bound_s + SLACK_S


def test_a_client_that_was_behind_and_runs_again_falls_back_from_the_patience_on() -> None:
    """Regression: each of its short requests was seen to run one step late, and the lag of all these steps added up."""
    steps = Clients(STALL_S, unseen=1)
    steps.come(*"aab")
    for _ in range(9):
        steps.decode("a")
        steps.step(DECODE_S, {"a": 1})
        steps.step(STALL_S, {"b": 100})  # begun before that was seen
        assert not steps.may("b")
        steps.again("a")
    assert STALL_S / 2 < steps.largest_lag_s <= steps.bound_s


def test_the_server_s_own_prompts_are_never_held() -> None:
    steps = beside()
    steps.step(0.09, {"b": 100})
    assert not steps.may("b")
    assert steps.may(SYSTEM)
    before_s = steps.lag_s("a")
    steps.step(0.09, {SYSTEM: 100})
    assert steps.lag_s("a") == before_s
    steps.step(0.1, {SYSTEM: 50, "b": 50})
    assert steps.lag_s("a") == pytest.approx(before_s + 0.025)


def test_who_joins_with_a_step_was_not_held_up_by_it() -> None:
    steps = shared()
    steps.decode("a")
    steps.step(0.05, {"a": 10, "b": 90})
    assert steps.lag_s("a") == 0
    steps.step(0.05, {"b": 100})
    assert steps.lag_s("a") == pytest.approx(0.025)


def test_in_a_mixed_step_those_who_run_are_served_for_a_decode_step() -> None:
    steps = beside()
    steps.step(0.1, decoded=10)
    steps.step(0.1, {"b": 100}, decoded=1)
    assert steps.lag_s("a") == pytest.approx(0.05 - 0.01)
    steps.step(0.015, {"b": 10}, decoded=1)
    assert steps.lag_s("a") == pytest.approx(0.04 + 0.0075 - 0.01)


def test_a_machine_that_stood_still_is_nobody_s_debt() -> None:
    steps = beside()
    steps.step(3600.0, {"b": 100})
    assert steps.lag_s("a") == LONGEST_STEP_S / 2


# ---- chunks


class Gpu:
    """Its steps take `base_s` and `token_s` for each prompt token."""

    def __init__(self, base_s: float, token_s: float) -> None:
        self.base_s, self.token_s = base_s, token_s

    def step_s(self, tokens: int) -> float:
        return self.base_s + self.token_s * tokens


def shared() -> Clients:
    steps = Clients(STALL_S)
    steps.come(*"ab")
    return steps


@settings(max_examples=examples(100))
@given(st.floats(0, 0.02), st.floats(2e-6, 4e-4), st.lists(st.integers(1, 200), max_size=20))
def test_chunks_come_to_take_the_stall_time(base_s: float, token_s: float, trickle: list[int]) -> None:
    """Whatever the engine's speed, and whatever small prompts come between."""
    gpu, steps = Gpu(base_s, token_s), shared()
    for tokens in trickle:
        steps.step(gpu.step_s(tokens), {"a": tokens})
    for _ in range(20):
        tokens = steps.chunk_tokens()
        assert tokens is not None
        steps.step(gpu.step_s(tokens), {"a": tokens})
    took_s = gpu.step_s(steps.chunk_tokens() or 0)
    assert took_s <= STALL_S * 1.05 or steps.chunk_tokens() == LEAST_CHUNK_TOKENS
    assert took_s >= STALL_S * 0.5 or steps.chunk_tokens() == LEAST_CHUNK_TOKENS
    for tokens in trickle:
        steps.step(gpu.step_s(tokens), {"a": tokens})
    again = steps.chunk_tokens() or 0
    assert again == LEAST_CHUNK_TOKENS or gpu.step_s(again) >= STALL_S * 0.4


def test_chunks_are_bounded_while_another_client_is_here_or_was_lately() -> None:
    steps = Clients(STALL_S)
    assert steps.chunk_tokens() == ALONE * FIRST_CHUNK_TOKENS
    steps.come("a")
    assert steps.chunk_tokens() == ALONE * FIRST_CHUNK_TOKENS
    steps.come("b")
    assert steps.chunk_tokens() == FIRST_CHUNK_TOKENS
    steps.go("b")
    steps.tick(RECENT_S / 2)
    assert steps.chunk_tokens() == FIRST_CHUNK_TOKENS
    steps.tick(RECENT_S * 1.1)
    assert steps.chunk_tokens() == ALONE * FIRST_CHUNK_TOKENS


def test_a_step_that_once_took_too_long_is_forgotten_in_a_few() -> None:
    gpu, steps = Gpu(0.004, 5e-5), shared()
    steps.step(3.0, {"a": 500})
    assert steps.chunk_tokens() == LEAST_CHUNK_TOKENS
    for _ in range(6):
        tokens = steps.chunk_tokens() or 0
        steps.step(gpu.step_s(tokens), {"a": tokens})
    assert gpu.step_s(steps.chunk_tokens() or 0) == pytest.approx(STALL_S, rel=0.1)


@settings(max_examples=examples(100))
@given(st.floats(0.001, 0.02), st.floats(2e-6, 4e-4), st.integers(1, 7), st.integers(2, 40))
def test_mixed_steps_last_as_long_as_those_who_decode_pay_for(
    base_s: float, token_s: float, light: int, flood: int
) -> None:
    """Beside one client with many requests: a token of the others takes hardly longer than their share of the time
    needs. Where the flood decodes alone, steps are as long as ever."""
    gpu, steps = Gpu(base_s, token_s), Clients(STALL_S, mixes=True)
    for client in ["flood"] * flood + [f"light{number}" for number in range(light)]:
        steps.come(client)
        steps.decode(client)
    steps.come("flood")
    steps.step(10 * base_s, decoded=10, requests=flood + light)
    for _ in range(40):
        tokens = steps.chunk_tokens()
        assert tokens is not None
        steps.step(gpu.step_s(tokens), {"flood": tokens}, decoded=1)
    assert steps.whole_tokens() == int(steps._chunks.tokens), (
        "beside them no step is longer than the stall time"
    )
    most_s = min(STALL_S, MIXED * base_s * min(light + 1, 1 / LEAST_SHARE))
    took_s = gpu.step_s(steps.chunk_tokens() or 0)
    assert took_s <= max(most_s, 2 * base_s) * 1.05 or steps.chunk_tokens() == LEAST_CHUNK_TOKENS
    for number in range(light):
        steps.end(f"light{number}")
        steps.come(f"light{number}")
    assert (steps.chunk_tokens() or 0) == int(steps._chunks.tokens) == steps.whole_tokens() // ALONE


# ---- backlogged clients, where steps are mixed

LATE_S = 1.01 * BACKLOGGED * STALL_S


def backlogged(*clients: str) -> Clients:
    """Their prompts waited for long, and are decoding."""
    steps = Clients(STALL_S, mixes=True)
    steps.come(*clients, waited_s=LATE_S)
    steps.decode(*clients)
    steps.step(DECODE_S, decoded=1, requests=len(clients))
    return steps


def test_steps_are_long_while_all_clients_are_backlogged() -> None:
    """And no longer once one is here, or was lately, whose prompt did not wait for its turn."""
    steps = backlogged(*"abc")
    assert steps.chunk_tokens() == ALONE * FIRST_CHUNK_TOKENS
    steps.come("light")
    assert steps.chunk_tokens() == FIRST_CHUNK_TOKENS
    steps.go("light")
    assert steps.chunk_tokens() == FIRST_CHUNK_TOKENS
    steps.tick(1.1 * RECENT_S)
    assert steps.chunk_tokens() == ALONE * FIRST_CHUNK_TOKENS
    steps.come("a")
    assert steps.chunk_tokens() == ALONE * FIRST_CHUNK_TOKENS, "until its next prompt is admitted"
    steps.begin("a")
    assert steps.chunk_tokens() == FIRST_CHUNK_TOKENS
    steps.come("a", waited_s=LATE_S)
    steps.begin("a")
    assert steps.chunk_tokens() == ALONE * FIRST_CHUNK_TOKENS
    alternating = Clients(STALL_S)
    alternating.come(*"ab", waited_s=LATE_S)
    alternating.decode(*"ab")
    assert alternating.chunk_tokens() == FIRST_CHUNK_TOKENS, "there they need decode steps"


def test_mixed_steps_hold_up_no_prompts_for_a_backlogged_client() -> None:
    """A step that could not be mixed does: a client whose requests cannot share one, for logprobs, stops no other's."""
    steps = backlogged(*"ab")
    for _ in range(20):
        steps.step(ALONE * STALL_S, {"b": 4000}, decoded=1)
        assert steps.may("b")
        assert steps.lag_s("a") == 0
    steps.step(STALL_S, {"b": 1000})
    assert not steps.may("b")


def test_a_backlogged_client_that_decodes_sets_no_pace() -> None:
    gpu, steps = Gpu(0.01, 1e-4), Clients(STALL_S, mixes=True)
    steps.come("late", waited_s=LATE_S)
    steps.come(*["flood"] * 9, "light")
    steps.decode("late", *["flood"] * 9)
    steps.step(DECODE_S, decoded=1, requests=10)

    def settled() -> int:
        for _ in range(40):
            steps.step(gpu.step_s(steps.chunk_tokens()), {"flood": steps.chunk_tokens()}, decoded=1)
        return steps.chunk_tokens()

    assert gpu.step_s(settled()) == pytest.approx(STALL_S, rel=0.1)
    steps.decode("light")
    assert gpu.step_s(settled()) <= 1.05 * MIXED * 3 * gpu.base_s


def test_what_a_retracted_request_or_a_shared_prefix_waited_for_was_not_its_turn() -> None:
    steps = backlogged("a")
    for job in (Job("", "b", retractions=1), Job("", "c", waited_for=object())):
        steps.arrive(job)
        steps.tick(2 * LATE_S)
        steps.admit(job)
        assert steps.chunk_tokens() == FIRST_CHUNK_TOKENS
        steps.finish(job, "finished")


@settings(max_examples=examples(50))
@given(senders(), st.integers(0, 2**20))
def test_no_flood_makes_a_client_backlogged_whose_prompts_are_first(senders: list[Sender], seed: int) -> None:
    """So it cannot lengthen the steps for one that keeps to its share: each of its prompts is next when it comes."""
    calm = Sender("calm", sends=0.2, prompt=(1, 2000), output=(1, 9))
    made = Metered([calm, *senders], seed, first="calm", mixes=True)
    for _ in range(200):
        made.step()
        assert not made.backlogged.get("calm")
        assert made.rule.chunk_tokens() <= ALONE * made.rule._chunks.tokens


# ---- where it applies


def test_short_prompts_that_take_long_do_not_make_all_steps_short() -> None:
    """One client's, in every fourth step: each has an image, say. The others' steps stay at half of what fits."""
    steps, computed = shared(), 0
    for number in range(400):
        tokens = steps.chunk_tokens()
        assert tokens is not None
        steps.step(tokens * 1e-5, {"b": tokens})
        computed += tokens
        if number % 4 == 0:
            steps.step(5 * STALL_S, {"a": 20})
    assert computed / 400 > STALL_S / 1e-5 / 2


def test_the_policies_that_share_service_share_steps() -> None:
    """The baselines are left as they are known, and 0 switches the rule off."""
    sharing = {name for name in POLICIES if make_steps(make_policy(name), 100.0) is not None}
    assert sharing == set(POLICIES) - {"fcfs", "rpm", "lpm", "lcf"}
    assert make_steps(make_policy("dlpm"), 0) is None
    for bad in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="stall_ms"):
            make_steps(make_policy("dlpm"), bad)
