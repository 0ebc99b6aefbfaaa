"""Starts and tiers: who is ahead of its share, by the definition written out; and what is gained by trying."""

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.shares import Shares
from sglang_fair.common.weights import Weights

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


@dataclass
class Written:
    """The definition, by looking at all requests."""

    ahead: float
    virtual: float = 0.0
    start: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waiting: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Client and cost."""

    def of(self, client: str) -> list[str]:
        return [name for name, one in self.waiting.items() if one[0] == client]

    def arrive(self, name: str, client: str, cost: float) -> None:
        if not self.of(client):
            self.start[client] = max(self.virtual, self.start[client])
        self.waiting[name] = client, cost
        self.go_on()

    def go(self, name: str) -> None:
        client, cost = self.waiting.pop(name)
        gone = self.start[client]
        self.start[client] += cost
        self.go_on(gone)

    def end(self, client: str, more: float) -> None:
        self.start[client] += more
        if self.of(client):
            self.start[client] = max(self.virtual, self.start[client])
        self.go_on()

    def go_on(self, gone: float = 0.0) -> None:
        starts = [self.start[client] for client in WEIGHTS if self.of(client)]
        self.virtual = max(self.virtual, min(starts, default=gone))

    def is_ahead(self, client: str) -> bool:
        return self.start[client] > self.virtual + self.ahead + 1e-9


@given(st.integers(0, 2**32), st.sampled_from([5.0, 50.0, 1e9]))
def test_tiers_are_those_of_the_definition(seed: int, ahead: float) -> None:
    """Whatever comes, goes, gives up and costs more or less."""
    rng, written = Random(seed), Written(ahead)
    shares = Shares(ahead, Weights(WEIGHTS))
    models: dict[str, str] = {}
    running: dict[str, tuple[str, float]] = {}
    for number in range(80):
        name, step = str(number), rng.random()
        waiting = list(written.waiting)
        if step < 0.5:
            client, models[name] = rng.choice("abc"), rng.choice("mn")
            cost = shares.cost(client, rng.randrange(0, 40), rng.randrange(0, 10))
            shares.wait(client, models[name], cost)
            written.arrive(name, client, cost)
        elif step < 0.75 and waiting:
            name = rng.choice(waiting)
            running[name] = client, cost = written.waiting[name]
            shares.go(client, cost, models[name])
            written.go(name)
        elif step < 0.82 and waiting:
            name = rng.choice(waiting)
            client, cost = written.waiting.pop(name)
            shares.withdraw(client, models[name], cost)
            written.go_on()
        elif running:
            client, cost = running.pop(rng.choice(list(running)))
            more = shares.cost(client, rng.uniform(1, 80), 0.0) - cost
            shares.end(client, more)
            written.end(client, more)
        assert shares.virtual == pytest.approx(written.virtual)
        for client in WEIGHTS:
            if written.of(client):
                assert shares.is_ahead(client) == written.is_ahead(client)
                assert set(shares.models(client)) == {models[name] for name in written.of(client)}
                before = sum(one[1] for one in written.waiting.values() if one[0] == client)
                behind = written.start[client] + before - written.virtual - ahead
                assert abs(behind) < 1e-6 or shares.tier(client) == int(behind > 0)


@given(st.integers(0, 2**32), st.integers(2, 5), st.sampled_from([10.0, 100.0]))
def test_no_client_starves_and_those_that_always_wait_are_served_alike(
    seed: int, clients: int, ahead: float
) -> None:
    """An adversary picks among those of tier 0, and never the first client if it can help it. Its request waits for at
    most `ahead` and one request of each other client."""
    rng, shares = Random(seed), Shares(ahead)
    names = [chr(97 + number) for number in range(clients)]
    waiting: dict[str, list[float]] = {name: [] for name in names}
    served: dict[str, float] = dict.fromkeys(names, 0.0)
    since, most = dict(served), 20.0

    def send(client: str) -> None:
        waiting[client].append(rng.uniform(1, most))
        shares.wait(client, "m", waiting[client][-1])

    for name in 4 * names:
        send(name)
    for _ in range(300):
        urgent = [name for name in names if not shares.is_ahead(name)]
        client = rng.choice([name for name in urgent if name != "a"] or urgent)
        cost = waiting[client].pop(0)
        shares.go(client, cost, "m")
        shares.end(client, 0.0)
        served[client] += cost
        if client == "a":
            since = dict(served)
        for other in names[1:]:
            assert served[other] - since[other] <= 2 * (ahead + most), "what a waits for"
        assert max(served.values()) - min(served.values()) <= ahead + 2 * most
        send(client)


def test_models_that_no_worker_serves_do_not_hold_virtual_time_up() -> None:
    shares = Shares(ahead=100.0)
    shares.wait("stuck", "n", 10.0)
    shares.serve({"m"})
    for _ in range(50):
        shares.wait("c", "m", 90.0)
        assert not shares.is_ahead("c")
        shares.go("c", 90.0, "m")
    assert shares.virtual > 4000
    shares.serve(None)
    assert shares.tier("stuck") == 0
    assert shares.virtual > 4000, "it never falls"


def test_only_clients_that_owe_are_remembered() -> None:
    shares = Shares(ahead=100.0, most_owing=1_500)
    for number in range(2000):
        shares.wait(str(number), "m", 50.0)
        shares.go(str(number), 50.0, "m")
        shares.end(str(number), 0.0)
    assert len(shares) == 1500, "all have had 50 beyond the time at which none had anything"
    for _ in range(3):
        shares.go("x", 50.0)
        shares.end("x", 0.0)
    assert len(shares) <= 1500
    assert shares.start("0") == shares.virtual, "who owes nothing is forgotten first"
    assert shares.start("x") == 150.0


@pytest.mark.parametrize("ahead", [0.0, -1.0, float("nan")])
def test_ahead_is_a_positive_number(ahead: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Shares(ahead)
