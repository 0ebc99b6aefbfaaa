"""FS-P1 to FS-P9, P11 and P12: what FairServe promises, on the router's core, on the queue and on a model of an engine.

    P1, P2     nothing is refused without overload, and never a call of an interaction that has begun
    P3, P4     the user's limit is asked before the app's; who is below both is never refused
    P5         an interaction is charged the sum of Equation 3, and an average call 1 / weight
    P6         counters never decrease, whatever comes and goes
    P7, P11    counters of clients that wait differ by U + lead, and what two of them got by 2(U + lead)
    P8         of one application WSC picks as VTC does
    P9         with an infinite lead no first call goes before one of an interaction that has begun
    P12        wsc-dlpm keeps DLPM's bound

Clients come and go, keep interactions open, retry, and use two gateways.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Router
from router.events import Arrive, Done, Load, Place, Refuse, WorkerUp
from router.placement.d2lpm import D2lpm
from router.throttling import Throttling
from sglang_fair.core import make_policy
from sglang_fair.core.interactions import MOST_CALLS, SILENCE_S
from sglang_fair.core.job import Job
from sglang_fair.core.normal import ENOUGH
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.throttle import Counts, Rules
from sglang_fair.core.vtc import Vtc
from sglang_fair.core.wsc import Wsc
from tests.core.test_wsc import Scaled, habits
from tests.support.budget import examples
from tests.support.steps import Sender

COUNTS: tuple[Counts, ...] = get_args(Counts)

USER, APPS = 6, {"chat": 3, "*": 4}
WORKERS = "ab"


# ---- calls at the router


@dataclass(frozen=True)
class Call:
    """One that came, what the router said, and what was known of its client before."""

    at_s: float
    client: str
    app: str
    is_over: bool
    """The cluster was overloaded."""
    is_started: bool
    """A call of its interaction was accepted, and that is under way."""
    of_user: int
    of_app: int
    """Calls of its client that were accepted within the minute before."""
    told_to_wait: bool
    """A call of its interaction was refused, and the time that it was told is not over."""
    answer: Place | Refuse

    @property
    def is_refused(self) -> bool:
        return isinstance(self.answer, Refuse)


@dataclass
class _Known:
    """The tests' own books of one interaction."""

    calls: int = 0
    under_way: int = 0
    silent_s: float = 0.0
    not_before_s: float = 0.0
    seen: dict[bytes, int] = field(default_factory=dict)
    """Calls of it that each gateway has seen accepted."""


@dataclass
class Traffic:
    """Minutes of calls of three clients, one of which floods, at a router whose workers are full at times."""

    seed: int
    gateways: tuple[bytes, ...] = (b"g",)
    retries: bool = True
    counts: Counts = "accepted"
    known: dict[tuple[str, str, str], _Known] = field(default_factory=dict)
    minutes: dict[tuple[str, str | None], deque[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.router = Router(
            D2lpm(worker_quantum=1e9),
            throttling=Throttling("oit", Rules(USER, APPS, counts=self.counts)),
        )
        for worker in WORKERS:
            self.router.handle(WorkerUp(worker, f"http://{worker}"), 0.0)

    def calls(self, most: int = 400) -> Iterator[Call]:
        random, which = Random(self.seed), Random(self.seed + 1)
        running: list[tuple[str, tuple[str, str, str], bool]] = []
        now_s, is_full = 0.0, False
        over = dict.fromkeys(WORKERS, False)
        for number in range(most):
            now_s += random.choice([0.0, 0.1, 0.5, 2.0])
            if random.random() < 0.02:
                is_full = not is_full
            for worker in WORKERS:
                used = 1000 if is_full else random.choice([100, 900])
                over[worker] = used >= (850 if over[worker] else 950)
                self.router.handle(Load(worker, used, 0, 1000), now_s)
            while running and random.random() < 0.5:
                self.end(*running.pop(random.randrange(len(running))), now_s)
            client = random.choice(["a", "b", *["flood"] * 4])
            app = random.choice(["chat", "code"])
            id = random.choice(["", *map(str, range(4)), str(number), str(number)])
            is_last = random.random() < 0.2
            peer = which.choice(self.gateways)
            call = self.ask(str(number), (client, app, id), is_last, peer, now_s, all(over.values()))
            if not call.is_refused:
                running.append((str(number), (client, app, id), is_last))
                if self.retries and random.random() < 0.3:
                    self.retry(str(number), (client, app, id), is_last, peer, now_s)
            yield call

    def ask(
        self,
        request: str,
        name: tuple[str, str, str],
        is_last: bool,
        peer: bytes,
        now_s: float,
        is_over: bool,
    ) -> Call:
        client, app, id = name
        own = self.known.setdefault(name, _Known())
        if not own.under_way and own.silent_s + SILENCE_S <= now_s:
            own.calls = 0
        arrive = Arrive(
            request, client, bytes(64), app=app, interaction=id, last=is_last, begun=self.begun(own, peer)
        )
        ((_, answer),) = self.router.handle(arrive, now_s, peer)
        assert isinstance(answer, Place | Refuse)
        call = Call(
            now_s, client, app, is_over,
            bool(id) and 0 < own.calls < MOST_CALLS,
            self.count((client, None), now_s), self.count((client, app), now_s),
            bool(id) and now_s < own.not_before_s,
            answer,
        )  # fmt: skip
        if isinstance(answer, Refuse):
            own.not_before_s = max(own.not_before_s, now_s + (answer.retry_after_s or 0.0))
            return call
        for key in ((client, None), (client, app)):
            self.minutes.setdefault(key, deque()).append(now_s)
        own.calls = own.calls % MOST_CALLS + 1
        own.under_way += 1
        own.seen[peer] = own.calls
        return call

    def begun(self, own: _Known, peer: bytes) -> int:
        return min(own.seen.get(peer, 0), own.calls)

    def retry(
        self, request: str, name: tuple[str, str, str], is_last: bool, peer: bytes, now_s: float
    ) -> None:
        """The same call at another worker: let in, whatever the limits, and counted by nobody."""
        client, app, id = name
        again = Arrive(
            f"{request} again", client, bytes(64), app=app, interaction=id, last=is_last,
            attempt=1, begun=self.begun(self.known[name], peer),
        )  # fmt: skip
        ((_, answer),) = self.router.handle(again, now_s, peer)
        assert isinstance(answer, Place)
        self.router.handle(Done(f"{request} again", outcome="failed"), now_s, peer)

    def end(self, request: str, name: tuple[str, str, str], is_last: bool, now_s: float) -> None:
        self.router.handle(Done(request), now_s)
        own = self.known[name]
        own.under_way -= 1
        own.silent_s = now_s
        if is_last:
            own.calls = 0

    def count(self, key: tuple[str, str | None], now_s: float) -> int:
        times_s = self.minutes.setdefault(key, deque())
        while times_s and times_s[0] + 60 <= now_s:
            times_s.popleft()
        return len(times_s)


ROUTER = settings(max_examples=examples(25))
seeds = st.integers(0, 2**32)


@ROUTER
@given(seeds, st.sampled_from(COUNTS))
def test_fs_p1_to_p4(seed: int, counts: Counts) -> None:
    """Without overload nothing is refused, and no call of an interaction that has begun ever is. The user's limit is
    asked before the app's, and who is below both is never refused. Under overload a client has at most its limit of
    first calls a minute, whatever it sends."""
    firsts: dict[tuple[str, str | None], list[float]] = {}
    for call in Traffic(seed, counts=counts).calls():
        limit_of_app = APPS.get(call.app, APPS["*"])
        assert not call.is_refused or (call.is_over and not call.is_started)
        if not call.told_to_wait and counts == "accepted":
            if isinstance(call.answer, Refuse):
                limit = "throttled_user" if call.of_user >= USER else "throttled_app"
                assert call.answer.code == limit
            assert not call.is_refused or call.of_user >= USER or call.of_app >= limit_of_app
        if call.is_over and not call.is_refused and not call.is_started:
            for key, most in (((call.client, None), USER), ((call.client, call.app), limit_of_app)):
                times_s = firsts.setdefault(key, [])
                times_s.append(call.at_s)
                assert sum(call.at_s < at_s + 60 for at_s in times_s) <= most


@ROUTER
@given(seeds)
def test_two_gateways_decide_as_one(seed: int) -> None:
    one = [call.answer for call in Traffic(seed).calls()]
    assert [call.answer for call in Traffic(seed, (b"g", b"h")).calls()] == one


def test_this_traffic_is_throttled() -> None:
    """Or the properties above would hold of anything."""
    calls = [call for seed in range(5) for call in Traffic(seed).calls()]
    codes = {call.answer.code for call in calls if isinstance(call.answer, Refuse)}
    assert codes == {"throttled_user", "throttled_app"}
    full = [call for call in calls if call.is_over and call.of_user >= USER]
    assert sum(call.is_started for call in full) > 20
    assert sum(call.told_to_wait for call in full) > 5


# ---- charges


def learn(
    policy: Wsc, app: str, stage: str, extend_tokens: int, output_tokens: int, client: str = "x"
) -> None:
    """So many calls that it is known."""
    for _ in range(ENOUGH):
        policy.normal.learn(client, app, stage, extend_tokens, output_tokens)


STAGES = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=5)


@settings(max_examples=examples(60))
@given(
    means=STAGES,
    calls=STAGES,
    charge=st.sampled_from(["incremental", "on_finish"]),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    prices=st.sampled_from([(1.0, 1.0, 2.0), (1.0, 2.0, 1.0), (0.5, 3.0, 0.0)]),
    seed=seeds,
)
def test_fs_p5_an_interaction_is_charged_the_sum_of_its_calls_over_what_is_normal(
    means: list[tuple[int, int]],
    calls: list[tuple[int, int]],
    charge: str,
    weight: float,
    prices: tuple[float, float, float],
    seed: int,
) -> None:
    """Equation 3, with the weight that each call had at its admission. What is normal moves while it runs, its prompt
    is computed in pieces, its output comes token by token, and it is taken back and computed again: nothing is charged
    twice, and nothing not at all. The books stay in tokens."""
    random = Random(seed)
    of_input, of_system, of_output = prices
    policy = Wsc(
        input_price=of_input, system_price=of_system, output_price=of_output, charge_when=charge, spread=1e6
    )
    policy.weights.set("a", weight)
    for stage, (extend, output) in enumerate(means):
        learn(policy, "app", str(stage), extend, output)
    queue = FairQueue(policy)
    queue.arrive(Job("kept", "a", 1, 1, call=1))  # or its client would be forgotten
    expected = plain = 0.0
    for number, (prompt, output) in enumerate(calls):
        stage = str(number % len(means))
        system = random.randint(0, prompt)
        job = Job(
            str(number), "a", prompt, output + 5,
            app="app", stage=stage, call=number + 1, interaction="i", system_tokens=system,
        )  # fmt: skip
        before = policy.counters()["a"]
        queue.arrive(job)
        cost = of_input * prompt + (of_system - of_input) * system + of_output * output
        charged = cost / policy.normal.weight("app", stage) / weight
        first = random.randint(1, prompt)
        queue.admit(job, extend_tokens=first, cached_tokens=0)
        learn(policy, "app", stage, random.randint(1, 3000), random.randint(1, 100), client=f"y{number}")
        if first < prompt:
            queue.account.extend(job, prompt - first)
        taken_back = random.randint(0, output)
        for made in range(output):
            if made == taken_back:
                queue.retract(job)
                learn(policy, "app", stage, random.randint(1, 3000), 1, client=f"z{number}")
                queue.admit(job, extend_tokens=prompt + made, cached_tokens=0)
            if random.random() < 0.5:
                queue.account.emit(job, 1)
            else:
                queue.account.emit_each([job], 1)
        if charge == "on_finish":
            assert policy.counters()["a"] == before
        queue.finish(job.id)
        assert policy.counters()["a"] - before == pytest.approx(charged, abs=1e-6)
        expected += charged
        plain += prompt + 2 * output
    assert policy.counters()["a"] == pytest.approx(expected, abs=1e-6)
    assert queue.account.ledger.usage("a").service == pytest.approx(plain)
    assert queue.account._owed_tokens == {}


@settings(max_examples=examples(60))
@given(seeds, st.sampled_from(["incremental", "on_finish"]), st.sampled_from([0.0, 2.0, inf]))
def test_fs_p6_no_counter_ever_decreases(seed: int, charge: str, lead: float) -> None:
    """Not even of a client that was forgotten and comes again: it is lifted to the level of those who wait."""
    random = Random(seed)
    policy = Wsc(charge_when=charge, lead=lead)
    queue = FairQueue(policy)
    last: dict[str, float] = {}
    for number in range(250):
        client = random.choice("abcd")
        waiting = list(queue.jobs())
        running = list(queue.account.running.values())
        match random.randrange(6):
            case 0 | 1:
                waits = {job.client for job in waiting if not job.repeating}
                level = min((policy.counters()[other] for other in waits), default=0.0)
                queue.arrive(Job(str(number), client, random.randint(1, 50), 20, call=random.choice([1, 2])))
                assert policy.counters()[client] >= level
            case 2 if waiting:
                queue.leave(random.choice(waiting).id)
            case 3:
                queue.begin_pass()
                if (job := queue.next()) is not None:
                    queue.admit(job, extend_tokens=job.prompt_tokens, cached_tokens=0)
            case 4 if running:
                queue.account.emit_each(running, 1)
            case 5 if running:
                job = random.choice(running)
                if random.random() < 0.3:
                    queue.retract(job)
                else:
                    queue.finish(job.id)
        for one, counter in policy.counters().items():
            assert counter >= last.get(one, 0.0) - 1e-9
            last[one] = counter


# ---- bounds


@settings(max_examples=examples(60))
@given(
    st.lists(habits, min_size=2, max_size=4),
    st.integers(0, 2**20),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.sampled_from(["incremental", "on_finish"]),
)
def test_fs_p7_and_p11_counters_of_who_waits_differ_by_a_batch_and_the_lead(
    kinds: list[Sender], seed: int, lead: float, charge: str
) -> None:
    """The lead theorem. Clients come late, go and come back, with interactions that they have kept open."""
    made = Scaled(Wsc(lead=lead, charge_when=charge), kinds, seed).run(150)
    assert made.worst_gap <= made.largest_batch() + lead + 1e-6
    bound = made.queue.account.bound()
    assert (bound is None) == (charge == "on_finish")
    assert made.difference <= (bound or 2 * (made.worst_batch + lead)) + 1e-6


@settings(max_examples=examples(40))
@given(seeds)
def test_fs_p8_of_one_application_it_picks_as_vtc(seed: int) -> None:
    """Counters are VTC's over w, which is held still here, and a power of two, so that nothing is rounded."""
    random = Random(seed)
    policy, vtc = Wsc(lead=0), Vtc()
    learn(policy, "app", "s", 32, 16)
    w = policy.normal.weight("app", "s")
    assert w == 64
    policy.ended = lambda job: None  # type: ignore[method-assign]
    queues = FairQueue(policy), FairQueue(vtc)
    for number in range(250):
        match random.randrange(4):
            case 0 | 1:
                client, prompt, output = random.choice("abcd"), random.randint(1, 50), random.randint(1, 9)
                for queue in queues:
                    job = Job(str(number), client, prompt, output, app="app", stage="s", call=number % 3)
                    queue.arrive(job)
            case 2:
                picked = []
                for queue in queues:
                    queue.begin_pass()
                    if (found := queue.next()) is not None:
                        queue.admit(found, extend_tokens=found.prompt_tokens, cached_tokens=0)
                        picked.append(found.id)
                assert len(set(picked)) <= 1
                assert len(picked) in (0, 2)
            case 3:
                running = [job.id for job in queues[0].running()]
                ends = random.choice([None, *running])
                for queue in queues:
                    queue.account.emit_each([job for job in queue.running() if job.output_tokens < 9], 1)
                    if ends is not None:
                        queue.finish(ends)
        scaled = {client: counter * w for client, counter in policy.counters().items()}
        assert scaled == vtc.counters()


@settings(max_examples=examples(25))
@given(st.lists(habits, min_size=2, max_size=4), st.integers(0, 2**20))
def test_fs_p9_with_an_infinite_lead_interactions_that_have_begun_go_first(
    kinds: list[Sender], seed: int
) -> None:
    made = Scaled(Wsc(lead=inf), kinds, seed).run(120)
    assert made.begun_passed_over == 0
    assert made.queue.account.bound() is None


@settings(max_examples=examples(30))
@given(st.lists(habits, min_size=2, max_size=4), st.integers(0, 2**20), st.sampled_from([0.5, 2.0, 20.0]))
def test_fs_p12_with_normalised_charges_dlpm_keeps_its_bound(
    kinds: list[Sender], seed: int, quantum: float
) -> None:
    policy = make_policy("wsc-dlpm", quantum=quantum)
    made = Scaled(policy, kinds, seed).run(200)
    bound = made.queue.account.bound()
    assert bound is not None
    assert made.difference <= bound + 1e-6
