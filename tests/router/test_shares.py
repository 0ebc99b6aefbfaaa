"""Tags: who is ahead of its share, by the definition written out; and what nobody gains by trying."""

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.fronts import STEPS
from router.placement.shares import Shares
from sglang_fair.common.weights import Weights

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


@dataclass
class Written:
    """The definition, by looking at all requests."""

    ahead: float
    virtual: float = 0.0
    start: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waiting: dict[str, tuple[str, bool, float, int, float]] = field(default_factory=dict)
    """Client, late or not, deadline, number and cost."""
    arrivals: int = 0

    def of(self, client: str) -> list[str]:
        return [name for name, one in self.waiting.items() if one[0] == client]

    def arrive(self, name: str, client: str, cost: float, deadline_s: float) -> None:
        if not self.of(client):
            self.start[client] = max(self.virtual, self.start[client])
        self.arrivals += 1
        self.waiting[name] = client, False, deadline_s, self.arrivals, cost / WEIGHTS[client]
        self.go_on()

    def go(self, name: str) -> None:
        client, *_, cost = self.waiting.pop(name)
        gone = self.start[client]
        self.start[client] += cost
        self.go_on(gone)

    def end(self, client: str, more: float) -> None:
        self.start[client] += more / WEIGHTS[client]
        if self.of(client):
            self.start[client] = max(self.virtual, self.start[client])
        self.go_on()

    def miss(self, name: str) -> None:
        client, _, *rest = self.waiting[name]
        self.waiting[name] = client, True, *rest

    def go_on(self, gone: float = 0.0) -> None:
        starts = [self.start[client] for client in WEIGHTS if self.of(client)]
        self.virtual = max(self.virtual, min(starts, default=gone))

    def tier(self, name: str) -> int:
        own = self.waiting[name]
        before = [one for one in self.waiting.values() if one[:2] == own[:2] and one[2:4] < own[2:4]]
        tag = self.start[own[0]] + sum(one[4] for one in before)
        return int(tag > self.virtual + self.ahead + 1e-9)


@given(st.integers(0, 2**32), st.sampled_from([5.0, 50.0, 1e9]))
def test_tiers_are_those_of_the_definition(seed: int, ahead: float) -> None:
    """Those of a client in the order of its deadlines, whatever comes, goes, is late, gives up and costs more."""
    rng, written = Random(seed), Written(ahead)
    shares = Shares(ahead, Weights(WEIGHTS))
    costs: dict[str, float] = {}
    told: dict[str, int] = {}
    running: dict[str, str] = {}
    for number in range(80):
        name, step = str(number), rng.random()
        waiting = list(written.waiting)
        if step < 0.5:
            client, prompt, output = rng.choice("abc"), rng.randrange(0, 40), rng.randrange(0, 10)
            costs[name], deadline_s = max(1.0, prompt + 2 * output), number + rng.choice([1.0, 30.0, 500.0])
            told[name] = shares.arrive(name, client, rng.choice("mn"), prompt, output, deadline_s)
            written.arrive(name, client, costs[name], deadline_s)
        elif step < 0.75 and waiting:
            name = rng.choice(waiting)
            running[name] = written.waiting[name][0]
            shares.go(name)
            written.go(name)
        elif step < 0.82 and waiting:
            name = rng.choice(waiting)
            shares.withdraw(name)
            written.waiting.pop(name)
            written.go_on()
        elif step < 0.9 and waiting:
            name = rng.choice(waiting)
            shares.miss(name)
            written.miss(name)
        elif running:
            name = rng.choice(list(running))
            took = rng.uniform(1, 80)
            shares.end(name, took, 0.0)
            written.end(running.pop(name), took - costs[name])
        for _ in range(30):
            shares.serve(None)
        told.update(shares.drain_changed())
        assert shares.virtual == pytest.approx(written.virtual)
        for name in written.waiting:
            assert shares.tier(name) == told[name] == written.tier(name)


@given(st.integers(0, 2**32), st.integers(2, 5), st.sampled_from([10.0, 100.0]))
def test_nobody_starves_and_who_always_waits_is_served_alike(seed: int, clients: int, ahead: float) -> None:
    """Whatever deadlines say: an adversary picks among those of tier 0, and never the first client's if it can help
    it. Its request waits for at most `ahead` and one request of each other client."""
    rng, shares = Random(seed), Shares(ahead)
    names = [chr(97 + number) for number in range(clients)]
    waiting: dict[str, tuple[str, float]] = {}
    served: dict[str, float] = dict.fromkeys(names, 0.0)
    since: dict[str, float] = dict(served)
    number, most = 0, 20.0

    def send(client: str) -> None:
        nonlocal number
        number += 1
        cost = rng.uniform(1, most)
        waiting[str(number)] = client, cost
        shares.arrive(str(number), client, "m", cost, 0.0)

    for _ in range(4):
        for client in names:
            send(client)
    for _ in range(300):
        urgent = [name for name in waiting if shares.tier(name) == 0] or list(waiting)
        others = [name for name in urgent if waiting[name][0] != "a"] or urgent
        name = rng.choice(others)
        client, cost = waiting.pop(name)
        shares.go(name)
        shares.end(name, cost, 0.0)
        served[client] += cost
        if client == "a":
            since = dict(served)
        for other in names[1:]:
            assert served[other] - since[other] <= 2 * (ahead + most), "what a waits for"
        assert max(served.values()) - min(served.values()) <= ahead + 2 * most
        send(client)


def test_ids_that_come_twice_or_never_came() -> None:
    shares = Shares(ahead=100.0)
    assert shares.arrive("x", "c", "m", 50.0, 0.0) == shares.arrive("x", "d", "n", 5e6, 0.0) == 0
    assert (shares.lead("c"), shares.lead("d"), len(shares)) == (50, 0, 1)
    shares.go("x")
    shares.go("x")
    shares.withdraw("x")
    assert shares.lead("c") == 50, "it is served: nothing comes back"
    assert shares.arrive("x", "c", "m", 50.0, 0.0) == 0
    shares.end("x", 50.0, 0.0)
    for act in (shares.go, shares.withdraw):
        act("x")
    shares.end("x", 1e6, 0.0)
    assert shares.tier("x") is None
    assert shares.lead("c") == 50


def test_a_change_takes_a_bounded_time_however_much_it_pushes_out() -> None:
    shares = Shares(ahead=10_000.0)
    shares.arrive("other", "other", "m", 10.0, 0.0, 5.0)
    for number in range(5_000):
        shares.arrive(str(number), "c", "m", 1.0, 0.0, 1e6 + number)
    shares.arrive("large", "c", "m", 9_000.0, 0.0, 1.0)
    assert 0 < sum(shares.tier(str(number)) for number in range(5_000)) <= 5 * STEPS
    for _ in range(5_000 // STEPS):
        shares.drain_changed(1)
    assert sum(shares.tier(str(number)) == 0 for number in range(5_000)) == 1_001


def test_models_that_nobody_serves_do_not_hold_virtual_time_up() -> None:
    shares = Shares(ahead=100.0)
    shares.arrive("stuck", "stuck", "n", 10.0, 0.0)
    shares.serve({"m"})
    for number in range(50):
        shares.arrive(str(number), "c", "m", 90.0, 0.0)
        assert shares.tier(str(number)) == 0
        shares.go(str(number))
    assert shares.virtual > 4000
    shares.serve(None)
    assert shares.tier("stuck") == 0
    assert shares.virtual > 4000, "it never falls"


def test_only_who_owes_is_remembered() -> None:
    shares = Shares(ahead=100.0)
    for number in range(2000):
        name = str(number)
        shares.arrive(name, name, "m", 50.0, 0.0)
        shares.go(name)
        shares.end(name, 50.0, 0.0)
    assert shares.clients == 2000, "all have had 50 beyond the time at which nobody had anything"
    for number in range(3):
        shares.arrive(f"x{number}", "x", "m", 50.0, 0.0)
        shares.go(f"x{number}")
    assert shares.clients == 1


@pytest.mark.parametrize("ahead", [0.0, -1.0, float("nan")])
def test_ahead_is_a_positive_number(ahead: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Shares(ahead)
