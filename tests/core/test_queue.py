"""One replica's queue and books: what is charged to whom, who comes back first, and who waits for a prefix."""

import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.core import POLICIES, make_policy
from sglang_fair.core.cost import Linear, Quadratic
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.fcfs import Fcfs
from sglang_fair.core.job import Job
from sglang_fair.core.largest import EARLY, FEW
from sglang_fair.core.ledger import OTHERS, SYSTEM, Ledger
from sglang_fair.core.payers import Payers
from sglang_fair.core.policy import Policy
from sglang_fair.core.predicted import VtcOracle
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.vtc import Vtc
from tests.core.test_cost import EXAMPLES as COSTS
from tests.support.budget import examples
from tests.support.engine_model import EngineModel, Request, Traffic, cases, engine_of

QUEUE = settings(max_examples=examples(40))
ordered = pytest.mark.parametrize("name", ["fcfs", "lpm", "vtc", "dlpm"])


def new_queue(policy: Policy | None = None) -> FairQueue:
    return FairQueue(policy or Fcfs())


def arrive(queue: FairQueue, id: str, client: str = "a", **fields) -> Job:
    queue.arrive(job := Job(id, client, **{"max_output_tokens": 10, **fields}))
    return job


def admit(queue: FairQueue, job: Job, extend: int = 5, cached: int = 0) -> Job:
    queue.admit(job, extend_tokens=extend, cached_tokens=cached)
    return job


def offers(queue: FairQueue) -> list[str]:
    """Whom one pass offers, if the engine takes nobody."""
    queue.begin_pass()
    offered = []
    while (job := queue.next()) is not None:
        offered.append(job.id)
        queue.hold(job)
    return offered


# ---- what is charged


class Square:
    """A cost that grows faster than its tokens, and with both kinds at once."""

    def __call__(self, extend_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        return (extend_tokens + 2 * output_tokens) ** 2

    def dearest(self, input_tokens: int, output_tokens: int, owed_tokens: int) -> tuple[float, float]:
        return input_tokens**2, 4 * owed_tokens * (input_tokens + output_tokens)


PIECES = st.lists(st.tuples(st.sampled_from(["extend", "emit"]), st.integers(0, 9)), max_size=20)


@QUEUE
@given(first=st.integers(0, 9), pieces=PIECES, cost=st.sampled_from([Linear(0.25, 0), Square(), *COSTS]))
def test_charges_sum_to_the_cost_of_what_was_given(first, pieces, cost):
    """However it was cut into chunks and steps; to the policy and to the books."""
    queue = FairQueue(Vtc(), cost)
    job = admit(queue, arrive(queue, "1", max_output_tokens=1000), extend=first)
    for kind, tokens in pieces:
        if kind == "extend":
            queue.account.extend(job, tokens)
        else:
            queue.account.emit(job, tokens)
    extend = first + sum(tokens for kind, tokens in pieces if kind == "extend")
    output = sum(tokens for kind, tokens in pieces if kind == "emit")
    usage = queue.account.ledger.usage("a")
    assert (usage.extend_tokens, usage.output_tokens) == (extend, output)
    assert (job.extend_tokens, job.output_tokens) == (extend, output)
    assert usage.service == pytest.approx(cost(extend, output))
    assert queue.policy.counters() == {"a": pytest.approx(cost(extend, output))}


@QUEUE
@given(
    limits=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    runs=st.lists(st.integers(0, 4), max_size=6),
    policy=st.sampled_from([Vtc, lambda: Dlpm(quantum=10), VtcOracle]),
    cost=st.sampled_from([Linear(), Linear(0.25, 0.5), Square()]),
)
def test_emitting_for_all_is_emitting_for_one_after_the_other(limits, runs, policy, cost):
    """Books, counters, what is owed, and what was not asked for; jobs of three clients and one of the server's."""
    both = []
    for at_once in (True, False):
        queue = FairQueue(policy(), cost)
        jobs = [
            admit(
                queue, arrive(queue, str(n), "abc"[n % 3], max_output_tokens=limit, expected_output_tokens=5)
            )
            for n, limit in enumerate(limits)
        ]
        jobs.append(admit(queue, arrive(queue, "probe", system=True)))
        for tokens in runs:
            if at_once:
                queue.account.emit_each(jobs, tokens)
            else:
                for job in jobs:
                    queue.account.emit(job, tokens)
        usage = {client: queue.account.ledger.usage(client) for client in ("a", "b", "c", SYSTEM)}
        owed = dict(queue.account._owed_tokens)
        written = [(job.output_tokens, job.unasked_tokens) for job in jobs]
        both.append((usage, queue.account.ledger.total, queue.policy.counters(), owed, written))
    assert both[0] == both[1]


def test_output_past_the_limit_is_the_servers():
    queue = new_queue(Vtc())
    job = admit(queue, arrive(queue, "1", max_output_tokens=3), extend=5)
    queue.account.emit(job, 2)
    queue.account.emit(job, 4)
    assert (job.output_tokens, job.unasked_tokens) == (3, 3)
    assert queue.account.ledger.usage(SYSTEM).output_tokens == 3
    assert queue.policy.counters() == {"a": 5 + 2 * 3}
    queue.account.emit(job, -1)
    assert queue.account.ledger.total.output_tokens == 6


# ---- ends


def test_what_cannot_be_is_refused():
    queue = new_queue()
    job = arrive(queue, "1")
    with pytest.raises(ValueError, match="request 1 is already here"):
        arrive(queue, "1")
    admit(queue, job)
    with pytest.raises(ValueError, match="request 1 is already here"):
        arrive(queue, "1")
    with pytest.raises(ValueError, match="request 1 does not wait"):
        admit(queue, job)


# ---- retraction


@ordered
def test_a_retracted_request_comes_first_and_is_never_held_back(name):
    """Not by a deficit, not by a counter, not by a longer prefix, not by earlier requests of others."""
    queue = new_queue(make_policy(name, quantum=10))
    arrive(queue, "early", "b")
    job = admit(queue, arrive(queue, "big"), extend=1000)
    queue.account.emit(job, 10)
    arrive(queue, "hot", "b", prefix_tokens=99)
    queue.retract(job)
    queue.rematch(job)
    assert offers(queue)[0] == "big"
    assert queue.is_waiting("big")


def test_a_prompt_retracted_between_its_chunks_is_paid_for_by_its_client():
    """Regression: what had never been computed was the server's. 100 tokens, 10 cached and 30 computed; then 20 are
    cached, and at the next attempt 60, of which others have computed 20; and then all."""
    queue = FairQueue(Vtc(), Quadratic(d=100.0))
    job = admit(queue, arrive(queue, "1", prompt_tokens=100), extend=30, cached=10)
    queue.retract(job)
    admit(queue, job, extend=20, cached=20)  # up to where it was
    queue.retract(job)
    admit(queue, job, extend=15, cached=60)
    queue.retract(job)
    admit(queue, job, extend=35, cached=50)  # 25 for the second time, 10 for the first
    queue.account.extend(job, 15)
    queue.account.emit(job, 2)
    queue.retract(job)
    admit(queue, job, extend=52, cached=50)  # the output too
    system, usage = queue.account.ledger.usage(SYSTEM), queue.account.ledger.usage("a")
    assert (system.extend_tokens, usage.extend_tokens) == (20 + 25 + 52, 30 + 15 + 10 + 15)
    assert (usage.cached_tokens, usage.requests) == (10 + 20, 1)
    assert queue.policy.counters()["a"] == pytest.approx(Quadratic(d=100.0)(70, 2, 30))
    assert queue.account.largest.ever.prompt_tokens == 100


def test_a_retracted_request_may_be_aborted_or_passed_over():
    queue = new_queue(Vtc())
    one, two = (admit(queue, arrive(queue, id)) for id in "12")
    queue.retract(one)
    queue.retract(two)
    assert offers(queue) == ["1", "2"]
    queue.leave("1")
    assert offers(queue) == ["2"]
    queue.begin_pass()
    queue.hold(queue.next())
    queue.leave("2")
    assert offers(queue) == []
    assert (queue._clients, queue.policy.counters()) == ({}, {})


# ---- the server's own work


@ordered
def test_system_work_goes_first_and_is_nobodys(name):
    queue = new_queue(make_policy(name, quantum=10))
    arrive(queue, "1")
    probe = arrive(queue, "probe", "a", system=True)
    assert offers(queue)[0] == "probe"
    admit(queue, probe, extend=4, cached=2)
    queue.account.emit(probe, 3)
    assert not probe.output_tokens
    queue.finish("probe")
    system = queue.account.ledger.usage(SYSTEM)
    assert (system.extend_tokens, system.output_tokens, system.cached_tokens, system.requests) == (4, 3, 2, 1)
    assert queue.account.ledger.usage("a").requests == 0
    assert all(counter == 0 or counter == 10 for counter in queue.policy.counters().values())
    assert queue.account.largest_input_tokens == queue.account.largest_owed_tokens == 0


@ordered
def test_looking_up_a_held_probe_does_not_make_it_a_clients_job(name):
    """An engine looks prefixes up before it begins the next pass, while those passed over are still held."""
    queue = new_queue(make_policy(name, quantum=10))
    probe = arrive(queue, "probe", "nobody", system=True)
    assert offers(queue) == ["probe"]
    probe.prefix_tokens = 3
    queue.rematch(probe)
    assert offers(queue) == ["probe"]
    queue.leave("probe")
    assert offers(queue) == []


# ---- what else


@pytest.mark.parametrize("name", ["vtc", "drr", "dlpm"])
def test_a_request_that_unblocks_others_goes_first_within_its_client_only(name):
    plain, urgent = new_queue(make_policy(name, quantum=10)), new_queue(make_policy(name, quantum=10))
    orders = []
    for queue, unblocks in ((plain, 0), (urgent, 3)):
        for number in range(12):
            client = "ab"[number % 2]
            arrive(queue, f"{client}{number}", client, unblocks=unblocks if number in (6, 8) else 0)
        order = []
        queue.begin_pass()
        while (job := queue.next()) is not None:
            admit(queue, job, extend=7)
            order.append(job.id)
        orders.append(order)
    for id in [id for id in orders[0] if id[0] == "b"]:
        assert orders[1].index(id) <= orders[0].index(id) + 1  # ties go to the older request
    assert [id for id in orders[1] if id[0] == "a"] == ["a6", "a8", "a0", "a2", "a4", "a10"]


def test_what_was_charged_ahead_comes_back_by_the_weight_it_was_taken_by():
    queue = new_queue(VtcOracle())
    job = admit(queue, arrive(queue, "1", max_output_tokens=100, expected_output_tokens=100))
    assert queue.policy.counters() == {"a": 5 + 200}
    arrive(queue, "2")
    queue.account.set_weights({"a": 4.0})
    assert queue.policy.counters() == {"a": 5 + 200 / 4}
    queue.account.emit(job, 1)
    queue.finish("1")
    assert queue.policy.counters() == {"a": 5 + 2 / 4}


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=examples(20))
@given(case=cases(), seed=st.integers(0, 2**20))
def test_nothing_is_lost_whatever_happens(name, case, seed):
    """With retractions, aborts, probes, shared prefixes and chunks: between steps a request waits for another
    one's tokens only while a prompt is in chunks, and when nobody sends any more, everybody is served."""
    queue, random = new_queue(make_policy(name, quantum=20)), Random(seed)
    replica = engine_of(case, queue)
    traffic = Traffic(case)
    sent = 0
    for step in range(25):
        traffic.step(replica)
        if step % 8 == 3:
            sent += 1
            replica.arrive(Request(f"probe{sent}", "a", (-sent,), 1, 1, system=True))
        running = [job.id for job in queue.running()]
        if running and random.random() < 0.3:
            replica.retract(random.choice(running))
        replica.step()
        assert queue.account.ledger.ok
        if replica._chunked is None:
            assert not any(replica.admission.is_being_computed(job) for job in queue.waiting())
    alive = sorted(job.id for job in (*queue.waiting(), *queue.running()))
    ended = len(replica.ended)
    for _ in range(5000):
        if not len(queue) and not any(queue.running()):
            break
        replica.step()
    assert sorted(replica.ended[ended:]) == alive
    assert len(set(replica.ended)) == len(replica.ended)
    assert queue.account.ledger.ok
    for client in case.clients:
        assert queue.account.ledger.usage(client).service == pytest.approx(replica.service[client])
    assert (queue._clients, replica.admission._prefixes._computing, list(queue._first)) == ({}, {}, [])
    assert (queue.account.running, queue.account._owed_tokens) == ({}, {})


# ---- what people read


def test_backlogs_are_numbered():
    """The same number at two times: the client waited all the time between."""
    queue = new_queue(Vtc())

    def backlog() -> int | None:
        return queue.status()["clients"]["a"]["backlog"]

    arrive(queue, "1")
    first = backlog()
    arrive(queue, "2")
    queue.leave("1")
    assert backlog() == first
    admit(queue, queue.find("2"))
    assert backlog() is None
    arrive(queue, "3")
    assert backlog() > first


def test_the_bound_follows_what_was_seen():
    queue = new_queue(Dlpm(quantum=7))
    assert queue.account.bound() == 2 * 7
    admit(queue, arrive(queue, "1", max_output_tokens=30), extend=50)
    admit(queue, arrive(queue, "2", max_output_tokens=20), extend=10)
    admit(queue, arrive(queue, "3", "b", max_output_tokens=40), extend=10)
    assert (queue.account.largest_input_tokens, queue.account.largest_owed_tokens) == (50, 50)
    assert queue.account.bound() == 2 * (50 + 2 * 50 + 7)
    queue.finish("1")
    admit(queue, arrive(queue, "4", max_output_tokens=25), extend=10)
    assert queue.account.largest_owed_tokens == 50
    assert new_queue().account.bound() is None


def test_one_huge_limit_loosens_the_bound_for_a_while():
    """Regression: for ever. Here its request ends at once, and others wait one after the other, so that somebody
    always does. What is read holds for intervals that end then, so it falls when b1 and the next one have left."""
    queue = new_queue(Dlpm(quantum=7))
    arrive(queue, "b0", "b0")
    assert queue.account.recent_bound() == 2 * 7
    arrive(queue, "b1", "b1")
    queue.leave("b0")
    huge = admit(queue, arrive(queue, "huge", max_output_tokens=10**6), extend=5)
    queue.account.emit(huge, 1)
    queue.finish("huge")
    seen = [queue.account.recent_bound()]
    loose = 2 * (5 + 2 * 10**6 + 7)
    for number in range(2, 7):
        arrive(queue, f"b{number}", f"b{number}")
        seen.append(queue.account.recent_bound())
        queue.leave(f"b{number - 1}")
    assert seen[:2] == [loose, loose], "b1 waited while it ran"
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 2 * 7
    assert (queue.account.largest_owed_tokens, queue.account.largest.ever.owed_tokens) == (0, 10**6)
    status = queue.status()
    assert (status["bound"], status["bound_since_start"]) == (2 * 7, loose)


def test_a_debt_keeps_the_bound_loose_until_it_is_paid():
    """The request is over, everybody waits anew, and its client has still to wait for its own service to be matched."""
    queue = new_queue(Dlpm(quantum=7, newcomers=0))
    big = arrive(queue, "big")
    queue.begin_pass()
    assert queue.next() is big
    admit(queue, big, extend=100)
    queue.finish("big")
    for number in range(40):
        queue.begin_pass()
        job = arrive(queue, str(number), "b", max_output_tokens=1)
        assert queue.next() is job
        owes = queue.policy.deficit("a") < 0
        assert (queue.account.largest_input_tokens == 100) or not owes
        admit(queue, job, extend=10)
        queue.finish(job.id)
        queue.account.recent_bound()
    assert queue.account.recent_bound() == 2 * (10 + 2 * 1 + 7)


def test_what_the_bound_remembers_is_bounded():
    """Three thousand clients with one request each, and nobody reads."""
    queue = new_queue(Dlpm(quantum=7, remembered_clients=10))
    for number in range(3000):
        job = arrive(queue, str(number), f"client {number}")
        queue.begin_pass()
        assert queue.next() is job
        admit(queue, job, extend=10)
        queue.finish(str(number))
    assert len(queue.account.largest._alive) < 200


@ordered
@settings(QUEUE, max_examples=examples(20))
@given(case=cases())
def test_status_is_json_and_adds_up(name, case):
    queue = FairQueue(make_policy(name, quantum=20), payers=Payers("equal", 1))
    replica = EngineModel(queue, pool_tokens=case.pool_tokens, cache_tokens=case.cache_tokens)
    traffic = Traffic(case)
    for _ in range(10):
        traffic.step(replica)
        replica.step()
    status = json.loads(json.dumps(queue.status(), allow_nan=False))
    clients = status["clients"].values()
    for total in (
        "extend_tokens",
        "output_tokens",
        "cached_tokens",
        "service",
        "transferred_units",
        "waiting",
        "running",
    ):
        assert status["totals"][total] == pytest.approx(sum(client[total] for client in clients))
    assert status["conservation"]["ok"]
    assert status["bound"] == queue.account.bound()
    assert status["totals"]["waiting"] == len(queue)


# ---- the ledger


def test_a_full_ledger_folds_the_oldest_and_loses_nothing():
    ledger = Ledger(max_clients=5)
    ledger.record(SYSTEM, extend=1)
    for number in range(50):
        ledger.record(f"client{number}", extend=10, output=1, service=12.0, requests=1)
        if number > 10:
            ledger.record("client10", cached=1)
        ledger.transfer("client10", 3.0)
        ledger.transfer(f"client{number // 2}", -3.0)
    accounts = ledger.accounts()
    assert len(accounts) <= 6
    assert {SYSTEM, OTHERS, "client10", "client49"} <= set(accounts)
    assert sum(usage.extend_tokens for usage in accounts.values()) == ledger.total.extend_tokens == 501
    assert sum(usage.service for usage in accounts.values()) == ledger.total.service
    assert sum(usage.transferred_units for usage in accounts.values()) == ledger.total.transferred_units == 0
    assert sum(usage.requests for usage in accounts.values()) == 50
    assert ledger.usage("never seen").service == 0
    assert "never seen" not in ledger.accounts()


def test_checks_are_counted_and_the_first_mismatch_is_kept():
    ledger = Ledger()
    assert ledger.check()
    ledger.record("a", extend=5, output=2)
    assert not ledger.check()
    ledger.engine_counted(extend=4)
    assert not ledger.check()
    ledger.engine_counted(extend=1, output=2)
    assert ledger.check()
    assert (ledger.checks, ledger.mismatches) == (4, 2)
    assert ledger.first_mismatch == {
        "charged_extend_tokens": 5,
        "engine_extend_tokens": 0,
        "charged_output_tokens": 2,
        "engine_output_tokens": 0,
    }
    assert not ledger.ok, "a difference that went away was an error all the same"
    assert json.loads(json.dumps(FairQueue(Fcfs()).status()))["conservation"]["first_mismatch"] is None


def test_a_reading_asks_after_many_debts_only_when_many_were_admitted_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, asked, owes = new_queue(Dlpm(quantum=1)), [], Dlpm.owes
    monkeypatch.setattr(Dlpm, "owes", lambda policy, client: (asked.append(client), owes(policy, client))[1])

    def serve(client: str) -> None:
        queue.arrive(job := Job(client, client, 9, 1))
        queue.admit(job, extend_tokens=9, cached_tokens=0)
        queue.finish(client)

    for number in range(2 * FEW):
        serve(f"in debt {number}")
    queue.account.recent_bound()
    asked.clear()
    for _ in range(10):
        queue.account.recent_bound()
    assert asked == []
    for number in range(2 * FEW // EARLY + 1):
        serve(f"later {number}")
    asked.clear()
    queue.account.recent_bound()
    assert len(asked) > 2 * FEW
