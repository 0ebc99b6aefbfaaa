"""What the page shows is what the replicas counted: with restarts, clients that nobody names, and floods of names."""

import json
from collections import Counter
from math import inf

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st
from msgspec.structs import replace

from router.events import Done, Suspicion
from router.suspects import Suspects
from sglang_fair.common.weights import Weights
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.queue import FairQueue
from sglang_fair.dashboard.history import EXTEND, MOST_NAMED, SERVICE, Followed, History
from sglang_fair.dashboard.model import FORGOTTEN_AFTER_S, ROWS, SPANS, WINDOW, WINDOW_S, Model, fair_shares
from sglang_fair.dashboard.reading import (
    OTHERS,
    SYSTEM,
    ClientReading,
    Front,
    GatewayReading,
    Reading,
    ReplicaReading,
    ReplicaReport,
    Status,
    Totals,
    Worker,
    gateway_reading,
    replica_reading,
)
from sglang_fair.dashboard.view import View
from tests.support.budget import examples
from tests.support.engine_model import EngineModel, Traffic, cases

NAMES = st.sampled_from("abcdefg")
EVERY_S = 2.0


# ---- counters that go back


class Source:
    """A replica's counters: the truth, and a report that names the `most` clients that were served most."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.begin()

    def begin(self) -> None:
        self.given: Counter[str] = Counter()
        self.folded = 0

    def fold(self, name: str) -> None:
        """The ledger drops a client."""
        self.folded += self.given.pop(name, 0)

    def report(self) -> ReplicaReport:
        named = dict(self.given.most_common(self.most))
        clients = {
            name: ClientReading(extend_tokens=units, service=float(units), requests=units)
            for name, units in named.items()
        }
        if self.folded:
            clients[OTHERS] = ClientReading(extend_tokens=self.folded, service=float(self.folded))
        total = self.given.total() + self.folded
        return ReplicaReport("dlpm", clients, Totals(extend_tokens=total, service=float(total)))


EVENTS = st.one_of(
    st.tuples(st.just("give"), NAMES, st.integers(1, 100)),
    st.tuples(st.just("look"), st.none(), st.none()),
    st.tuples(st.just("fold"), NAMES, st.none()),
    st.tuples(st.just("restart"), st.none(), st.none()),
)


@given(events=st.lists(EVENTS, max_size=60), most=st.integers(1, 8))
def test_what_was_gained_is_what_the_totals_say_whatever_is_named(events, most):
    source, counters = Source(most), Followed()
    counters.take(source.report(), 0.0)
    gained, since_look, unseen = 0.0, 0, 0
    for kind, name, units in [*events, ("look", None, None)]:
        match kind:
            case "give":
                source.given[name] += units
                since_look += units
            case "fold":
                source.fold(name)
            case "restart":
                unseen += since_look  # nobody has looked at it
                before = source.given.total() + source.folded - since_look
                source.begin()
                since_look = 0
                if not before:  # nothing tells this restart from none
                    continue
            case "look":
                gain = counters.take(source.report(), 0.0)
                assert gain is not None
                parts = [*gain.values()]
                assert all((part >= 0).all() for part in parts)
                assert sum(part[SERVICE] for part in parts) == sum(part[EXTEND] for part in parts)
                gained += sum(part[SERVICE] for part in parts)
                if not unseen:
                    assert sum(part[SERVICE] for part in parts) == since_look
                since_look, unseen = 0, 0
    assert gained >= 0


REPORTS = st.builds(
    lambda clients, total: ReplicaReport("x", clients, total),
    st.dictionaries(
        NAMES, st.builds(ClientReading, extend_tokens=st.integers(0, 99), service=st.floats(0, 99))
    ),
    st.builds(Totals, extend_tokens=st.integers(0, 99), service=st.floats(0, 99)),
)


@given(reports=st.lists(REPORTS, max_size=6))
def test_a_report_that_contradicts_itself_gains_nobody_more_than_its_totals(reports):
    counters, before = Followed(), None
    for report in reports:
        gain, now = counters.take(report, 0.0), report.totals.extend_tokens
        if gain is not None:
            parts = [*gain.values()]
            assert all((part >= 0).all() for part in parts)
            assert sum(part[EXTEND] for part in parts) == (now if now < before else now - before)
        before = now


def test_a_client_that_rises_into_the_list_did_not_get_all_of_it_just_now():
    source, counters = Source(most=1), Followed()
    source.given.update(a=100, b=90)
    counters.take(source.report(), 0.0)
    source.given["b"] += 20
    gain = counters.take(source.report(), 0.0)
    assert gain is not None
    assert gain["b"][SERVICE] == 0
    assert gain[OTHERS][SERVICE] == 20


# ---- difference beside bound


def report_of(queue: FairQueue, most: int = 1000) -> ReplicaReport:
    """What a replica with this queue says at /fair."""
    raw = msgspec.json.encode({"policy": "dlpm", **queue.status(most)})
    found = replica_reading("r0", 200, raw)["r0"].report
    assert found is not None
    return found


@settings(max_examples=examples(60))
@given(
    case=cases(), every=st.integers(1, 5), weights=st.dictionaries(NAMES, st.sampled_from([0.5, 1.0, 3.0]))
)
def test_the_difference_that_is_shown_never_passes_the_bound_of_a_queue_that_keeps_it(case, every, weights):
    queue = FairQueue(Dlpm(quantum=20, newcomers=0, weights=Weights(weights)))
    engine = EngineModel(
        queue, pool_tokens=case.pool_tokens, cache_tokens=case.cache_tokens, step_tokens=case.step_tokens
    )
    traffic, followed, largest = Traffic(case), Followed(), 0.0
    for step in range(case.steps):
        traffic.step(engine)
        engine.step()
        if step % every == 0:
            followed.report = report = report_of(queue)
            followed.note_waits(2.0 * step)
            difference = followed.difference
            if difference is not None:
                assert report.bound is not None
                assert difference <= report.bound + 1e-6
                largest = max(largest, difference / report.bound)
    target(largest)


def test_who_lasts_and_what_is_compared_after_a_restart_and_a_new_weight():
    def look(at_s, **rows):
        one.report = replace(report_of(FairQueue(Dlpm(quantum=20))), clients=rows)
        one.note_waits(at_s, restarted=at_s == 30)

    one = Followed()
    look(0, a=ClientReading(backlog=1), b=ClientReading(backlog=2))
    assert one.difference is None
    look(10, a=ClientReading(backlog=1, service=90.0), b=ClientReading(backlog=2, service=10.0))
    assert one.difference == 80
    shared = ClientReading(backlog=2, service=10.0, transferred_units=30.0)
    look(11, a=ClientReading(backlog=1, service=90.0, transferred_units=-30.0), b=shared)
    assert one.difference == 60, "since 10: what counts is what was charged"
    heavier = ClientReading(backlog=1, service=100.0, weight=3.0)
    look(20, a=heavier, b=ClientReading(backlog=3, service=10.0))
    assert one.difference is None
    assert one.lasting(0) == ["a"]
    assert one.lasting(20) == ["a", "b"]
    look(30, a=ClientReading(backlog=1), b=ClientReading(backlog=3))
    assert (one.difference, one.lasting(29)) == (None, [])
    one.report = None
    assert (one.difference, one.lasting(31)) == (None, [])


# ---- fair shares

WANTED = st.dictionaries(NAMES, st.one_of(st.just(inf), st.floats(0, 1000)), min_size=1)
SOME_WEIGHTS = st.dictionaries(NAMES, st.sampled_from([0.25, 1.0, 2.0, 5.0]))


@given(total=st.floats(0, 2000), wanted=WANTED, weights=SOME_WEIGHTS)
def test_fair_shares_are_weighted_max_min(total, wanted, weights):
    shares = fair_shares(total, wanted, weights)
    width = {name: weights.get(name, 1.0) for name in wanted}
    assert sum(shares.values()) == pytest.approx(min(total, sum(wanted.values())), abs=1e-6)
    assert all(0 <= share <= wanted[name] for name, share in shares.items())
    for name, share in shares.items():  # who wants more has no less, by weight, than anybody
        if share < wanted[name] - 1e-6:
            assert all(share / width[name] >= shares[one] / width[one] - 1e-6 for one in shares)


# ---- over time


@given(
    gains=st.lists(st.tuples(st.floats(0.1, 400), st.integers(0, 1000)), max_size=50),
    step_s=st.sampled_from([5.0, 60.0]),
)
def test_a_history_loses_nothing_and_counts_nothing_twice(gains, step_s):
    history, now_s, total = History(step_s, 10_000), 1000.0, 0.0
    history.look(now_s, now_s, {})
    for lasted_s, units in gains:
        since_s, now_s = now_s, now_s + lasted_s
        history.look(since_s, now_s, {})
        history.gained(since_s, now_s, "r0", {name: np.full(6, float(units)) for name in ("a", OTHERS)})
        total += units
    buckets = history.buckets()
    numbers = [bucket.number for bucket in buckets]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    for name in ("a", OTHERS):
        assert sum(
            bucket.clients[name][SERVICE] for bucket in buckets if name in bucket.clients
        ) == pytest.approx(total)
    assert sum(bucket.replicas["r0"][SERVICE] for bucket in buckets if bucket.replicas) == pytest.approx(
        2 * total
    )
    assert sum(bucket.observed_s for bucket in buckets) == pytest.approx(now_s - 1000.0)
    assert all(bucket.observed_s <= step_s + 1e-6 for bucket in buckets)


def test_a_time_in_which_nobody_answered_is_a_gap():
    model = Model()
    for at_s in [*range(0, 60, 2), *range(120, 180, 2)]:
        model.take(reading(a=at_s * 10), 10_000.0 + at_s)
    rates = dict(zip(model.view().times, model.view().clients[0].rates, strict=True))
    assert rates[10_000.0 + 90] is None
    assert rates[10_000.0 + 30] == pytest.approx(10)
    assert rates[10_000.0 + 150] == pytest.approx(10)


# ---- the whole view


def reading(
    *, replicas: int = 1, waiting: int = 1, state: str = "up", backlog: int | None = 1, **service: float
) -> Reading:
    """Replicas that have served this to each client."""
    total = sum(service.values())
    clients = {
        name: ClientReading(
            extend_tokens=int(units),
            cached_tokens=int(units),
            service=float(units),
            requests=int(units) // 10,
            waiting=waiting,
            backlog=backlog,
        )
        for name, units in service.items()
    }
    report = ReplicaReport(
        "dlpm",
        clients,
        Totals(
            extend_tokens=int(total), cached_tokens=int(total), service=float(total), waiting=len(clients)
        ),
        bound=1000.0,
    )
    names = [f"r{number}" for number in range(replicas)]
    status = Status(
        Front(fallback=state == "router down"),
        "d2lpm",
        {name: Worker(f"http://{name}", in_flight=3) for name in names},
    )
    known = None if state in ("down", "denied") else status
    return Reading(GatewayReading(state, known), {name: ReplicaReading("ok", report) for name in names})


def after(*readings: Reading, model: Model | None = None) -> View:
    model = model or Model()
    for number, one in enumerate(readings):
        model.take(one, 50_000.0 + EVERY_S * number)
    return model.view()


def test_rates_shares_waits_and_hits():
    steps = [reading(replicas=2, a=10 * step, b=30 * step) for step in range(20)]
    view = after(*steps)
    rows = {one.name: one for one in view.clients}
    assert rows["a"].rate == pytest.approx(10)  # 10 units in 2 s at each of two replicas
    assert rows["b"].share == pytest.approx(0.75)
    assert rows["a"].fair_share == rows["b"].fair_share == pytest.approx(0.5)
    assert rows["a"].wait_s == pytest.approx(2)  # two wait, and one is admitted a second
    assert rows["a"].hit_rate == pytest.approx(0.5)
    assert view.rate == pytest.approx(40)
    assert view.health == "ok"
    assert view.of_bound == pytest.approx(19 * 20 / 1000)


def test_who_did_not_wait_is_due_what_it_took_and_the_rest_is_the_others():
    def at(step: int) -> Reading:
        made = reading(a=10 * step, b=45 * step, c=45 * step)
        report = made.replicas["r0"].report
        assert report is not None
        report.clients["a"] = replace(report.clients["a"], waiting=0, backlog=None)
        return made

    rows = {one.name: one for one in after(*map(at, range(20))).clients}
    assert rows["a"].fair_share == pytest.approx(0.1)
    assert rows["b"].fair_share == pytest.approx(0.45)


def test_nobody_admitted_is_a_wait_that_is_longer():
    [row] = after(*[reading(a=5)] * 10).clients
    assert row.wait_is_longer
    assert row.wait_s == pytest.approx(18)


@pytest.mark.parametrize(
    ("found", "health", "about"),
    [
        (reading(state="down"), "gateway down", "gateway"),
        (reading(state="denied"), "denied", "gateway"),
        (reading(state="router down"), "router down", "router"),
        (reading(replicas=0), "trouble", "router"),
        (Reading(reading().gateway, {"r0": ReplicaReading("silent")}), "trouble", "r0"),
        (Reading(reading().gateway, {"r0": ReplicaReading("denied")}), "trouble", "r0"),
        (Reading(reading().gateway, {"r0": ReplicaReading("no overlay")}), "ok", "r0"),
    ],
)
def test_what_is_wrong_is_told_apart(found, health, about):
    view = after(found)
    assert view.health == health
    assert [note.about for note in view.notes] == [about]


def test_a_silent_replica_has_no_numbers_and_goes_on_where_it_was_unless_it_was_restarted():
    model = Model()
    model.take(reading(a=100), 50_000.0)
    model.take(Reading(reading().gateway, {"r0": ReplicaReading("silent")}), 50_002.0)
    silent = model.view().replicas[0]
    assert (silent.state, silent.waiting, silent.bound, silent.difference, silent.rate) == (
        "silent",
        *[None] * 4,
    )
    model.take(reading(a=140), 50_004.0)
    view = model.view()
    assert view.clients[0].rate == pytest.approx(10)
    assert view.health == "ok"
    model.take(reading(a=20), 50_006.0)
    assert "was restarted" in model.view().notes[0].text
    assert model.view().clients[0].rate == pytest.approx((40 + 20) / 6)


def test_replicas_come_and_go_and_are_forgotten():
    model = Model()
    for number in range(200):
        one = reading(a=number).replicas["r0"]
        model.take(
            Reading(reading().gateway, {f"r{number}": one}), 50_000.0 + number * FORGOTTEN_AFTER_S / 20
        )
        assert [replica.name for replica in model.view().replicas] == [f"r{number}"]
    assert len(model._followed) < 25


def test_a_tenants_file_that_is_bad_is_said():
    good = reading(a=1).gateway.status
    assert good is not None
    bad = replace(good, gateway=Front(tenants={"error": "tenants.yaml:3:1: no"}))
    view = after(Reading(GatewayReading("up", bad), {}))
    assert any("tenants.yaml:3:1" in note.text for note in view.notes)
    assert view.weights == "file"


def test_a_client_in_quarantine_is_said_with_the_reason():
    suspects = Suspects()
    for at_s in (0.0, 6.0, 12.0):
        suspects.ended(Done("q1", outcome="failed", lost=Suspicion("mallory", "f00d", 2)), "r1", at_s)
    status = {"gateway": {}, "workers": {"r1": {}}, "suspects": suspects.state(12.0)}
    view = after(Reading(gateway_reading(200, json.dumps(status).encode()), reading().replicas))
    [text] = [note.text for note in view.notes if note.about == "router"]
    assert text.startswith(
        "mallory is in quarantine for 10 min more, and its requests are served one at a time: "
    )
    assert "q1 at r1" in text
    assert view.health == "ok"


@pytest.mark.slow
def test_ten_thousand_names_are_eight_rows_and_a_sum():
    model = Model()
    for look in range(12):
        flood = {f"x{number}": float(look) for number in range(10_000)}
        model.take(reading(a=200 * look, b=100 * look, **flood), 50_000.0 + EVERY_S * look)
    for span in SPANS:
        view = model.view(span)
        assert len(view.clients) == ROWS
        assert [one.name for one in view.clients[:2]] == ["a", "b"]
        assert view.others is not None
        assert view.others.clients == 10_002 - ROWS
        assert sum(one.share for one in view.clients) + view.others.share == pytest.approx(1)
        assert len(msgspec.json.encode(view)) < 100_000
    for history in model._histories.values():
        folded = history.buckets()[: -WINDOW if history.step_s == 5.0 else None]
        assert all(len(bucket.clients) <= MOST_NAMED + 1 for bucket in folded)


@given(order=st.lists(st.permutations("abcdefghijkl"), min_size=1, max_size=10))
def test_a_client_that_stays_keeps_its_colour(order):
    model, service, slots = Model(), Counter("abcdefghijkl"), dict[str, int]()
    for number, names in enumerate(order):
        for place, name in enumerate(names):
            service[name] += 100 * place * number
        model.take(reading(**service), 50_000.0 + number * EVERY_S)
        shown = {one.name: one.slot for one in model.view().clients}
        assert len(set(shown.values())) == len(shown) == ROWS
        assert all(slots[name] == slot for name, slot in shown.items() if name in slots)
        slots = shown


def test_the_system_is_no_client():
    made = reading(a=10)
    report = made.replicas["r0"].report
    assert report is not None
    report.clients[SYSTEM] = ClientReading(extend_tokens=99)
    view = after(made, made)
    assert [one.name for one in view.clients] == ["a"]
    assert view.others is None


def test_a_clock_that_goes_back_is_no_time_and_a_window_forgets():
    model = Model()
    for at_s, units in ((50_000.0, 0), (50_002.0, 20), (49_000.0, 40), (50_004.0, 60)):
        model.take(reading(a=units), at_s)
    assert model.view().clients[0].rate == pytest.approx(60 / 4)
    model.take(reading(a=60), 50_004.0 + WINDOW_S)
    assert model.view().clients[0].rate == 0


# ---- what peers may answer


@given(body=st.one_of(st.binary(max_size=60), st.just(b'{"clients":{}}'), st.just(b"[" * 50_000)))
def test_any_answer_is_a_state(body):
    assert replica_reading("r0", 200, body)["r0"].state == "silent"
    assert gateway_reading(200, body).state == "down"


def test_several_schedulers_of_a_replica_are_shown_each():
    one = {"policy": "dlpm", "clients": {"a": {"service": 3.0}}, "totals": {}}
    found = replica_reading("r0", 200, msgspec.json.encode({"data_parallel": [one, one]}))
    assert {name: each.state for name, each in found.items()} == {"r0.0": "ok", "r0.1": "ok"}
    status = Status(Front(), workers={"r0": Worker("http://r0", "draining")})
    view = after(Reading(GatewayReading("up", status), found))
    assert [each.state for each in view.replicas] == ["draining", "draining"]
