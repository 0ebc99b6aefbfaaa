"""Who pays for a shared prefix: the rules against a model that keeps each block's history by itself."""

import json
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.common.weights import Weights
from sglang_fair.core import POLICIES, make_policy, options_of
from sglang_fair.core.cost import Linear
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.job import Job
from sglang_fair.core.largest import Extremes
from sglang_fair.core.ledger import SYSTEM
from sglang_fair.core.newcomers import AT_ONCE
from sglang_fair.core.payers import EQUAL, FIRST, PER_USE, Payers, Swing, path_of
from sglang_fair.core.predictor import MeanOfLast
from sglang_fair.core.queue import FairQueue
from tests.support.budget import examples
from tests.support.engine_model import EngineCase, cases, run, traced

pytestmark = pytest.mark.slow  # together

PAYERS = settings(max_examples=examples(80))
ON_THE_ENGINE = settings(PAYERS, max_examples=examples(30))
both = pytest.mark.parametrize("rule", [EQUAL, PER_USE])
every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
QUANTA = st.sampled_from([1, 3, 10, 25, 80, 400])


# ---- the rules, literally


@dataclass
class Block:
    price: float
    uses: Counter[str]
    paid: dict[str, float]
    settled: int = 1


@dataclass
class Literal:
    """One history for each block; `charges` are what each client was charged for blocks, transfers included."""

    rule: str
    size: int
    blocks: dict[object, Block] = field(default_factory=dict)
    charges: Counter[str] = field(default_factory=Counter)

    def request(self, client: str, path: list, cached: int, prompt: int, price: float) -> None:
        for block in path[: cached // self.size]:
            if block in self.blocks:
                self.use(client, self.blocks[block])
        for number, name in enumerate(path):
            begin, end = number * self.size, (number + 1) * self.size
            computed = end - max(begin, cached)
            if end <= prompt and computed > 0 and (begin >= cached or name not in self.blocks):
                units = computed * price
                self.blocks[name] = Block(units, Counter([client]), {client: units})
        self.charges[client] += (prompt - cached) * price

    def use(self, client: str, block: Block) -> None:
        if client in block.uses and self.rule == EQUAL:
            return
        block.uses[client] += 1
        total = block.uses.total()
        if self.rule == PER_USE and total < block.settled * 9 / 8:
            return
        for name, uses in block.uses.items():
            due = block.price * uses / total
            self.charges[name] += due - block.paid.get(name, 0.0)
            block.paid[name] = due
        block.settled = total


@dataclass
class Ours:
    """`Payers`, given whole requests, in chunks."""

    payers: Payers
    charges: Counter[str] = field(default_factory=Counter)

    def request(
        self, client: str, path: list, cached: int, prompt: int, price: float, chunk: int = 0
    ) -> None:
        transfers = self.payers.used(client, path, cached)
        assert sum(transfers.values()) == 0
        for name, units in transfers.items():
            self.charges[name] += units
        at, carried = cached, 0.0
        while at < prompt:
            stop = min(prompt, at + (chunk or prompt))
            carried = self.payers.computed(client, path, at, stop, (stop - at) * price, carried)
            at = stop
        self.charges[client] += (prompt - cached) * price


TOKENS = st.lists(st.integers(0, 1), max_size=14)
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from("abcd"), TOKENS, st.integers(0, 14), st.sampled_from([1.0, 2.0]), st.integers(0, 5)
    ),
    max_size=40,
)


@both
@PAYERS
@given(requests=REQUESTS, size=st.integers(1, 4))
def test_runs_of_blocks_are_charged_like_their_blocks(rule, requests, size):
    """Whatever is computed, hit, split, cut into chunks, and computed again: and all pay for all that was computed."""
    literal, ours = Literal(rule, size), Ours(Payers(rule, size))
    for client, tokens, cached, price, chunk in requests:
        path, cached = path_of(None, tokens, size), min(cached, len(tokens))
        literal.request(client, path, cached, len(tokens), price)
        ours.request(client, path, cached, len(tokens), price, chunk)
        for name in "abcd":
            assert ours.charges[name] == pytest.approx(literal.charges[name], abs=1e-9)
    computed = sum((len(tokens) - min(cached, len(tokens))) * p for _, tokens, cached, p, _ in requests)
    assert sum(ours.charges.values()) == pytest.approx(computed)
    assert_consistent(ours.payers)


def assert_consistent(payers: Payers) -> None:
    known = [block for segment in payers._segments for block in segment.blocks]
    assert sorted(known) == sorted(payers._segment_of)
    assert all(payers._segment_of[b] is segment for segment in payers._segments for b in segment.blocks)
    assert payers._entries == sum(segment.entries() for segment in payers._segments)
    for segment in payers._segments:
        assert segment.total == sum(segment.uses.values())
        assert sum(segment.shares.values()) == pytest.approx(1)


# ---- each rule by itself

PROMPT = path_of(None, list(range(64)), 1)


def test_settlements_grow_apart():
    """Or each use of a popular prefix would touch all its users."""
    payers, settled = Payers(PER_USE, 1), 0
    payers.computed("a", PROMPT, 0, 64, 64.0)
    for use in range(1000):
        settled += bool(payers.used(f"client{use % 100}", PROMPT, 64))
    assert 10 < settled < 60


@both
def test_what_the_server_computed_is_free(rule):
    ours = Ours(Payers(rule, 4))
    ours.request("a", path := path_of(None, list(range(16)), 4), 0, 16, 1.0)
    ours.payers.lost(path, 6, 16)
    ours.request("b", path, 4, 4, 1.0)
    assert ours.charges == {"a": 14, "b": 2}
    ours.request("b", path, 16, 16, 1.0)
    parts = {"a": 14 - 2, "b": 2 + 2} if rule == EQUAL else {"a": 16 - 4 * 2 / 3 - 2, "b": 4 * 2 / 3 + 2}
    assert ours.charges == pytest.approx(parts)
    assert_consistent(ours.payers)


@both
def test_the_prefixes_used_longest_ago_are_forgotten(rule):
    ours = Ours(Payers(rule, 1, max_entries=100))
    for number in range(200):
        path = path_of(None, [0] * 5 + [number] * 20, 1)
        ours.request(f"client{number % 7}", path, 5 if number else 0, 25, 1.0)
        assert ours.payers._entries <= 100
        assert_consistent(ours.payers)
    assert path[0] in ours.payers._segment_of, "the common part is used all the time"
    before = Counter(ours.charges)
    ours.request("late", path_of(None, [0] * 5 + [3] * 20, 1), 25, 25, 1.0)
    assert ours.charges["late"] < 5, "nothing is charged for what is forgotten"
    ours.request("huge", path_of(None, list(range(1000)), 1), 0, 1000, 1.0)
    assert ours.payers._entries <= 100
    assert sum(ours.charges.values()) == pytest.approx(sum(before.values()) + 1000)


@both
def test_only_so_many_share(rule):
    ours = Ours(Payers(rule, 1, max_users=3))
    for client in "abcdef":
        ours.request(client, PROMPT, 0 if client == "a" else 64, 64, 1.0)
    assert ours.charges == pytest.approx(
        {**dict.fromkeys("abc", 64 / 3), **dict.fromkeys("def", 0)}, abs=1e-9
    )


def test_paths_name_prefixes():
    tokens = list(range(200))
    path = path_of("root", tokens)
    assert len(path) == 3
    assert path == path_of("root", tokens[:192]) == path_of("root", [*tokens[:192], 7])
    assert path == path_of("root", memoryview(array("q", tokens)))
    assert path[:2] == path_of("root", [*tokens[:128], *tokens[:64]])[:2]
    assert not set(path) & set(path_of("other root", tokens))
    assert not set(path) & set(path_of("root", [7, *tokens[1:]]))
    assert path_of("root", tokens[:63]) == []


# ---- in the queue


def queue_of(rule: str, policy: str = "vtc", **options) -> FairQueue:
    return FairQueue(make_policy(policy, quantum=100), payers=Payers(rule, 1), **options)


def serve(
    queue: FairQueue, client: str, cached: int, tokens: int = 64, *, ends: bool = True, **fields
) -> Job:
    number = queue._arrivals + 1
    job = Job(str(number), client, max_output_tokens=4, **fields)
    queue.arrive(job)
    queue.begin_pass()
    assert queue.next() is not None
    queue.admit(job, extend_tokens=tokens - cached, cached_tokens=cached, path=PROMPT[:tokens])
    if ends:
        queue.finish(job.id)
    return job


def test_books_and_counters_follow_the_transfers():
    queue = queue_of(EQUAL, "lcf")
    serve(queue, "a", 0, ends=False)
    serve(queue, "b", 64, ends=False)
    serve(queue, "b", 64, ends=False)
    assert queue.policy.counters() == {"a": 32, "b": 32}
    usage = {client: queue.account.ledger.usage(client) for client in "ab"}
    assert (usage["a"].service, usage["a"].transferred_units) == (64, -32)
    assert (usage["b"].service, usage["b"].transferred_units) == (0, 32)
    status = json.loads(json.dumps(queue.status()))
    assert status["clients"]["b"]["transferred_units"] == 32
    assert status["totals"]["transferred_units"] == 0
    assert (status["payer"], FairQueue(make_policy("lcf")).status()["payer"]) == (EQUAL, FIRST)
    assert queue.account.ledger.total.transferred_units == 0


@both
def test_the_server_neither_pays_nor_is_paid(rule):
    queue = queue_of(rule, "lcf")
    job = serve(queue, "a", 0, ends=False)
    serve(queue, "probe", 64, system=True)
    queue.retract(job)
    # The rest was lost, and is computed by the server's choice.
    queue.admit(job, extend_tokens=32, cached_tokens=32, path=PROMPT[:64])
    serve(queue, "b", 64, ends=False)
    assert queue.policy.counters() == {"a": 48, "b": 16}
    assert queue.account.ledger.usage(SYSTEM).transferred_units == 0
    assert queue.account.ledger.usage("probe").transferred_units == 0


@every_policy
@both
def test_who_is_gone_stays_forgotten_when_it_is_refunded(name, rule):
    """Three hundred clients that compute a prefix each, use each other's, and leave."""
    options = {"remembered_clients": 2} if "remembered_clients" in options_of(name) else {}
    queue = FairQueue(make_policy(name, quantum=50, **options), payers=Payers(rule, 1))
    for number in range(300):
        queue.tick(60.0 * number)
        serve(queue, f"client{number}", 64 if number % 10 else 0)
        assert queue.account.ledger.total.transferred_units == pytest.approx(0, abs=1e-9)
    assert len(queue.policy.counters()) <= 2 + AT_ONCE
    assert queue._clients == {}


# ---- on the engine


def with_sharing(case: EngineCase) -> EngineCase:
    """Every client draws from the same prompts."""
    loads = tuple(replace(load, private=False, shared_tokens=load.shared_tokens + 3) for load in case.loads)
    return replace(
        case, loads=loads, pool_tokens=case.pool_tokens + 3, cache_tokens=max(64, case.cache_tokens)
    )


@every_policy
@both
@settings(PAYERS, max_examples=examples(10))
@given(case=cases())
def test_transfers_move_charges_and_create_none(name, rule, case):
    case = with_sharing(case)
    replica = run(case, make_policy(name, quantum=20), payers=Payers(rule, 1))
    ledger = replica.queue.account.ledger
    assert ledger.check()
    assert sum(usage.transferred_units for usage in ledger.accounts().values()) == pytest.approx(0, abs=1e-6)
    for client in case.clients:
        assert ledger.usage(client).service == pytest.approx(replica.service[client])
        assert ledger.usage(client).service + ledger.usage(client).transferred_units >= -1e-9
    assert_consistent(replica.queue.account.payers)


@pytest.mark.slow
@every_policy
@both
@settings(PAYERS, max_examples=examples(10))
@given(case=cases())
def test_without_sharing_every_rule_is_the_first(name, rule, case):
    loads = tuple(replace(load, private=True) for load in case.loads)
    case = replace(case, loads=loads)
    plain = run(case, make_policy(name, quantum=20))
    ruled = run(case, make_policy(name, quantum=20), payers=Payers(rule, 1))
    assert ruled.admissions == plain.admissions
    assert ruled.queue.policy.counters() == plain.queue.policy.counters()
    assert all(usage.transferred_units == 0 for usage in ruled.queue.account.ledger.accounts().values())


@both
@ON_THE_ENGINE
@given(
    case=cases(),
    quantum=QUANTA,
    borrow=st.sampled_from([0.0, 0.3, 1e6]),
    predictor=st.none() | st.builds(MeanOfLast),
    weights=st.sampled_from([{}, {"a": 2.0, "c": 0.5}]),
)
def test_dlpm_bounds_the_charged_service(rule, case, quantum, borrow, predictor, weights):
    policy = Dlpm(quantum=quantum, borrow=borrow, predictor=predictor, weights=Weights(weights))
    trace = traced(with_sharing(case), policy, Linear(), weights, Payers(rule, 1))
    bound = trace.replica.queue.account.bound()
    assert trace.gap_between_backlogged() <= bound + 1e-6
    assert trace.lag_of_backlogged() <= bound + 1e-6


@both
@ON_THE_ENGINE
@given(case=cases(), quantum=QUANTA)
def test_counters_stay_within_what_the_bound_counts(rule, case, quantum):
    case = with_sharing(case)
    seen: list[tuple[float, float, float]] = []

    def watch(replica):
        def look() -> None:
            queue = replica.queue
            largest = queue.account.largest.recent
            u = largest.input_units + dearest_output_units(queue, largest)
            for account in queue.policy._deficits.values():
                assert account.units >= -(u + queue.account._swing.most_charged) - 1e-6
                assert account.refund <= queue.account._swing.most_refunded + 1e-6
                seen.append((account.units, u, account.refund))

        return look

    run(case, Dlpm(quantum=quantum), watch=watch, payers=Payers(rule, 1))
    assert seen


def test_the_theorems_own_u_is_not_enough():
    """A client that worked off what it computed, and is then refunded, has more credit than a quantum."""
    queue = FairQueue(Dlpm(quantum=4), payers=Payers(EQUAL, 1))
    paths = [path_of(number, list(range(10)), 1) for number in range(50)]

    def send(client: str, path: list, cached: int = 0) -> None:
        queue.arrive(job := Job(str(queue._arrivals), client))
        queue.begin_pass()
        assert queue.next() is not None
        queue.admit(job, extend_tokens=10 - cached, cached_tokens=cached, path=path)
        queue.finish(job.id)

    for path in paths:
        send("a", path)
    while queue.policy.deficit("a") <= 0:
        send("others", [])
    for path in paths:
        send("b", path, 10)
    while queue.policy.deficit("b") <= 0:
        send("others", [])
    largest = queue.account.largest.ever
    plain = queue.policy.bound(largest.input_units, dearest_output_units(queue, largest))
    for number in range(100):
        for client in "ab":
            queue.arrive(Job(f"{client}{number}", client))
    before = queue.account.ledger.usage("b").service
    served = 0
    while queue.account.ledger.usage("b").service <= before + 10:
        queue.begin_pass()
        job = queue.next()
        queue.admit(job, extend_tokens=10, cached_tokens=0)
        served += 10 if job.client == "a" else -10
    assert plain < served <= queue.account.bound()


@both
def test_what_clients_pay_each_other_in_turn_does_not_add_up(rule):
    """Who is served again and again has no more credit or debt than the last exchanges left."""
    queue = queue_of(rule, "dlpm")
    for number in range(100):
        path = path_of(number, list(range(10)), 1)
        for at, client in enumerate("ab" if number % 20 < 10 else "ba"):
            queue.arrive(job := Job(f"{number}{client}", client))
            queue.begin_pass()
            assert queue.next() is job
            queue.admit(job, extend_tokens=1 if at else 10, cached_tokens=9 if at else 0, path=path)
    assert (queue.account._swing.most_charged, queue.account._swing.most_refunded) == (4.5, 4.5)


@pytest.mark.parametrize(("borrows", "most"), [(False, 5), (True, 10)])
def test_transfers_add_up_while_a_client_borrows(borrows, most):
    """Its counter is positive when a request is admitted, but for one that borrows."""
    queue = queue_of(EQUAL, "dlpm")
    queue.policy.borrows = lambda client: borrows
    for number in range(2):
        path = path_of(number, list(range(10)), 1)
        for client, cached in (("a", 0), ("b", 10)):
            queue.arrive(job := Job(f"{client}{number}", client))
            queue.admit(job, extend_tokens=10 - cached, cached_tokens=cached, path=path)
    assert queue.account._swing.most_charged == most


def test_a_forgotten_swing_is_the_farthest_one():
    swing = Swing(max_clients=1)
    swing.transferred("a", -5)
    swing.transferred("b", 7)
    swing.transferred("a", -1)
    assert (swing.most_refunded, swing.most_charged) == (6, 7)
    swing.transferred("a", 2)
    swing.charged("a", 1)
    swing.transferred("a", -1)
    assert swing.most_refunded == 6
    swing.admitted("a")
    swing.transferred("a", 6.5)
    assert swing.most_charged == 7
    swing.transferred("b", 1)
    assert swing.most_charged == 8


def dearest_output_units(queue: FairQueue, largest: Extremes) -> float:
    return queue.account._price.dearest(largest.prompt_tokens, largest.output_tokens, largest.owed_tokens)[1]
