"""Several routers: which one decides for a client, and that each request is counted by exactly one that lives."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Router
from router.events import (
    Arrive,
    Begun,
    Difference,
    Done,
    Event,
    Follow,
    Place,
    Posted,
    WorkerDrain,
    WorkerHealth,
    Workers,
    WorkerUp,
)
from router.gateway.routing.fleet import Fleet
from router.gateway.routing.merged import added, merged, merged_workers
from router.gateway.routing.routers import BACK_S, Routers
from router.placement import build
from sglang_fair.core.interactions import Interaction
from tests.support.budget import examples

NAMES = ("tcp://a:1", "tcp://b:1", "tcp://c:1")
CLIENTS = [f"client {number}" for number in range(300)]


def up(name: str) -> WorkerUp:
    return WorkerUp(name, f"http://{name}")


# -- which one


def test_clients_are_spread_and_keep_to_their_router() -> None:
    routers = Routers(NAMES)
    for name in NAMES:
        assert routers.answers(name, 0.0)
    homes = {client: routers.first(client) for client in CLIENTS}
    assert min(Counter(homes.values()).values()) > 60
    assert routers.lost(NAMES[0])
    for client, home in homes.items():
        assert home == NAMES[0] or routers.first(client) == home, "only its own clients move"
    again = Routers(NAMES[::-1])
    for name in NAMES:
        again.answers(name, 0.0)
    assert {client: again.first(client) for client in CLIENTS} == homes, "all gateways agree"


def test_of_several_that_plan_only_the_first_is_asked() -> None:
    routers = Routers(NAMES)
    for name in NAMES:
        routers.answers(name, 0.0)
    homes = {client: routers.first(client) for client in CLIENTS}
    assert not routers.says(NAMES[1], plans=True)
    assert {client: routers.first(client) for client in CLIENTS} == homes
    assert routers.says(NAMES[0], plans=True), "it is named first"
    assert [routers.state(name) for name in NAMES] == ["up", "refused", "up"]
    assert {routers.first(client) for client in CLIENTS} == {NAMES[0], NAMES[2]}
    assert all(home == NAMES[1] or routers.first(client) == home for client, home in homes.items())
    routers.lost(NAMES[0])
    assert {routers.first(client) for client in CLIENTS} == {NAMES[2]}, "for good"
    routers.lost(NAMES[2])
    assert routers.first("client 0") is None
    assert routers.says(NAMES[0], plans=False)
    assert routers.first("client 0") == NAMES[1]


def test_a_router_says_that_it_plans_and_one_of_before_says_nothing() -> None:
    fleet = Fleet(lambda name: True, routers=NAMES[:2])
    first, second = (fleet.side(name) for name in NAMES[:2])
    for side in (first, second):
        side.answers(0.0)
    assert not second.plans(Workers("", (), plans=True))
    assert not second.is_refused
    assert first.plans(listing(Router(build("qlm"), name="qlm")))
    assert second.is_refused
    assert first.plans(listing(Router(build("d2lpm"), name="d2lpm")))
    assert not second.is_refused


def listing(router: Router) -> Workers:
    ((_, answer),) = router.handle(Follow(""), 0.0)
    assert isinstance(answer, Workers)
    return answer


def test_one_that_comes_and_goes_gets_its_clients_when_it_stays() -> None:
    routers = Routers(NAMES[:2])
    for name in NAMES[:2]:
        routers.answers(name, 0.0)
    client = next(client for client in CLIENTS if routers.first(client) == NAMES[0])
    assert routers.lost(NAMES[0])
    assert not routers.lost(NAMES[0]), "said once"
    assert routers.order(client) == [NAMES[1]]
    assert not routers.answers(NAMES[0], 10.0)
    assert (routers.state(NAMES[0]), routers.order(client)) == ("back", [NAMES[1], NAMES[0]])
    assert not routers.answers(NAMES[0], 10.0 + BACK_S - 0.1)
    assert not routers.lost(NAMES[0]), "no client was there"
    assert not routers.answers(NAMES[0], 11.0 + BACK_S), "it begins anew"
    assert routers.answers(NAMES[0], 11.0 + 2 * BACK_S)
    assert routers.order(client) == [NAMES[0], NAMES[1]]


def test_one_that_is_back_serves_where_there_is_no_other() -> None:
    routers = Routers(NAMES[:2])
    for name in NAMES[:2]:
        routers.answers(name, 0.0)
        routers.lost(name)
    assert routers.order("c") == []
    assert routers.first("c") is None
    routers.answers(NAMES[1], 5.0)
    assert routers.order("c") == [NAMES[1]]


@pytest.mark.parametrize("names", [(), ("a", "a")])
def test_routers_are_different_ones(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="routers must be different ones"):
        Routers(names)


# -- who counts what


def fleet_of(*names: str, **more: object) -> Fleet:
    made = Fleet(lambda worker: True, routers=names, **more)  # type: ignore[arg-type]
    for name in names:
        made.side(name).answers(0.0)
        made.side(name).learn(Workers("", (up("r0"), up("r1")), router=f"{name} first"))
    return made


class Site:
    """Cores of routers that a gateway talks to. Whether it reaches one is up to the test."""

    def __init__(self, *names: str) -> None:
        self.fleet = fleet_of(*names)
        self.cores = {name: self._core() for name in names}
        self.runs = dict.fromkeys(names, 1)
        self.reached = set(names)
        self.now_s = 0.0

    def _core(self) -> Router:
        made = Router(build("d2lpm"))
        for name in ("r0", "r1"):
            made.handle(up(name), 0.0)
        return made

    def tell(self, router: str | None, event: Event) -> None:
        if router in self.reached:
            self.cores[router].handle(event, self.now_s, b"g")

    def restart(self, name: str) -> None:
        self.cores[name] = self._core()
        self.runs[name] += 1

    def lose(self, name: str) -> None:
        self.reached.discard(name)
        self.fleet.side(name).lost()

    def find(self, name: str) -> None:
        self.reached.add(name)

    def beat(self) -> None:
        """Time passes; those that are reached answer, and are compared with."""
        self.now_s += BACK_S
        for name in self.reached:
            self.fleet.side(name).answers(self.now_s)
        for name in sorted(self.reached):
            side, core = self.fleet.side(name), self.cores[name]
            [(_, listed)] = core.handle(Follow(""), self.now_s, b"g")
            assert isinstance(listed, Workers)
            told = side.learn(
                Workers("", listed.workers, listed.draining, listed.sick, f"{name} {self.runs[name]}")
            )
            [(_, found)] = core.handle(side.table(""), self.now_s, b"g")
            assert isinstance(found, Difference)
            for event in (*told, *side.takeover(), *side.settle(found)):
                core.handle(event, self.now_s, b"g")


@settings(max_examples=examples(150))
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["place", "mute", "end", "cut", "heal", "restart", "beat"]), st.integers(0, 99)
        ),
        max_size=60,
    ),
    living=st.sets(st.sampled_from(NAMES), min_size=1),
)
def test_each_request_is_counted_by_one_router_that_lives(
    steps: list[tuple[str, int]], living: set[str]
) -> None:
    """Whatever was cut, healed, restarted and lost between them."""
    site, running = Site(*NAMES), []
    fleet = site.fleet
    for number, (what, at) in enumerate(steps):
        router = NAMES[at % len(NAMES)]
        arrive = Arrive(f"{number}", f"c{at}", bytes(64))
        if what in ("place", "mute"):
            decides = next(iter(fleet.routers.order(arrive.client)), None)
            if decides is None:
                place = fleet.place(arrive)
                assert place is not None
                fleet.begin(arrive, place, None)
                running.append(arrive.id)
                continue
            fleet.ask(arrive, decides)
            if what == "place":
                [(_, answer)] = site.cores[decides].handle(arrive, site.now_s, b"g")
                assert isinstance(answer, Place)
                fleet.begin(arrive, answer, decides)
                running.append(arrive.id)
            else:  # the question or its answer is lost, and so is what takes it back
                if at % 2:
                    site.cores[decides].handle(arrive, site.now_s, b"g")
                fleet.end(Done(arrive.id, outcome="failed"))
        elif what == "end" and running:
            done = Done(running.pop(at % len(running)), output_tokens=at)
            teller = fleet.end(done)
            if at % 3:
                site.tell(teller, done)
        elif what == "cut":
            site.lose(router)
        elif what == "heal":
            site.find(router)
        elif what == "restart":
            site.restart(router)
        elif what == "beat":
            site.beat()
    for name in NAMES:
        (site.find if name in living else site.lose)(name)
    for _ in range(4):
        site.beat()
    states = [site.cores[name].state() for name in living]
    assert sum(state["in_flight"] for state in states) == len(running)  # type: ignore[misc]
    assert sum(fleet.counted_by()[name] for name in living) == len(running)
    for name in living:
        [(_, found)] = site.cores[name].handle(fleet.side(name).table(""), site.now_s, b"g")
        assert found == Difference("", (), ())
    for worker in ("r0", "r1"):
        loads = [state["workers"][worker]["in_flight"] for state in states]  # type: ignore[index]
        assert sum(loads) == fleet.in_flight[worker]


def test_a_router_is_not_told_to_take_over_what_another_one_counts() -> None:
    fleet = fleet_of(*NAMES[:2])
    fleet.begin(Arrive("x", "c", b""), Place("x", "r0", "http://r0", 0), NAMES[0])
    assert fleet.side(NAMES[1]).settle(Difference("", ("x",), ())) == []
    assert fleet.side(NAMES[1]).settle(Difference("", (), ("x",))) == [Done("x", outcome="aborted")]


# -- workers, limits, interactions


def test_workers_are_those_of_the_routers_that_answer() -> None:
    fleet = fleet_of(*NAMES[:2])
    fleet.side(NAMES[0]).learn(Workers("", (up("r0"), up("r2")), router="tcp://a:1 first"))
    assert list(fleet.workers) == ["r0", "r1", "r2"]
    fleet.side(NAMES[0]).lost()
    assert list(fleet.workers) == ["r0", "r1"]
    fleet.side(NAMES[1]).lost()
    assert list(fleet.workers) == ["r0", "r1"], "while none answers, as they were"


def test_what_operators_ask_for_reaches_a_router_that_is_back() -> None:
    fleet = fleet_of(*NAMES[:2])
    fleet.side(NAMES[0]).lost()
    assert fleet.order(up("r9")) == [NAMES[1]]
    assert fleet.order(WorkerDrain("r0")) == [NAMES[1]]
    fleet.side(NAMES[0]).answers(9.0)
    told = fleet.side(NAMES[0]).learn(Workers("", (up("r0"), up("r1")), router="tcp://a:1 first"))
    assert told == [up("r9"), WorkerDrain("r0")]
    assert "r9" in fleet.workers
    assert fleet.draining == {"r0"}
    assert fleet.side(NAMES[0]).learn(Workers("", (up("r1"), up("r9")), router="tcp://a:1 first")) == []


def test_limits_reach_every_router_once() -> None:
    fleet = fleet_of(*NAMES[:2])
    posted, later = Posted(b"{}", 5.0, "s"), Posted(b'{"user": 1}', 6.0, "s")
    one, other = fleet.side(NAMES[0]), fleet.side(NAMES[1])
    workers = (up("r0"), up("r1"))

    def learn(side: object, run: str, limits: Posted | None) -> list[Event]:
        return side.learn(Workers("", workers, router=run, limits=limits))  # type: ignore[attr-defined,no-any-return]

    assert learn(one, "tcp://a:1 first", posted) == []
    assert learn(other, "tcp://b:1 first", None) == [posted]
    assert learn(other, "tcp://b:1 first", None) == [], "it was started with other rules"
    assert learn(one, "tcp://a:1 first", later) == []
    assert learn(other, "tcp://b:1 first", posted) == [later]
    assert learn(other, "tcp://b:1 second", None)[0] == later, "it was restarted"
    assert learn(one, "tcp://a:1 first", posted) == [later], "the latest hold"


def test_interactions_go_with_their_clients() -> None:
    under_way = [(Interaction(client, "chat", "i"), 2) for client in CLIENTS]
    fleet = fleet_of(*NAMES[:2], begun=lambda: under_way)
    homes = {client: fleet.routers.first(client) for client in CLIENTS}
    fleet.side(NAMES[0]).lost()
    [begun] = fleet.side(NAMES[1]).takeover()
    assert isinstance(begun, Begun)
    assert {row[0] for row in begun.interactions} == set(CLIENTS)
    fleet.side(NAMES[0]).answers(5.0)
    assert fleet.side(NAMES[0]).takeover() == []
    assert fleet.side(NAMES[0]).answers(5.0 + BACK_S)
    [begun] = fleet.side(NAMES[0]).takeover()
    assert isinstance(begun, Begun)
    assert {row[0] for row in begun.interactions} == {c for c, home in homes.items() if home == NAMES[0]}


def test_each_router_hears_of_a_worker_that_does_not_answer() -> None:
    sick: set[str] = set()
    fleet = Fleet(lambda worker: worker not in sick, routers=NAMES[:2])
    fleet.side(NAMES[0]).learn(Workers("", (up("r0"), up("r1")), router="a"))
    fleet.side(NAMES[1]).learn(Workers("", (up("r0"),), sick=("r0",), router="b"))
    sick.add("r0")
    assert fleet.side(NAMES[0]).health() == [WorkerHealth("r0", False)]
    assert fleet.side(NAMES[1]).health() == []


# -- as one


def test_snapshots_are_added() -> None:
    snapshots = []
    for number, client in enumerate(("a", "b"), 1):
        core = Router(build("d2lpm"))
        for name in ("r0", f"r{number}"):
            core.handle(up(name), 0.0)
        for request in range(number):
            core.handle(Arrive(f"{request}", client, bytes(64)), 0.0)
        snapshots.append(core.state())
    found = merged(snapshots)
    assert found["in_flight"] == found["decisions"] == 3
    assert sorted(found["workers"]) == ["r0", "r1", "r2"]  # type: ignore[call-overload]
    assert sum(row["in_flight"] for row in found["workers"].values()) == 3  # type: ignore[attr-defined]
    assert found["counts"]["arrived"] == 3  # type: ignore[index]
    assert set(found["deficits"]) == {"a", "b"}  # type: ignore[call-overload]
    assert merged(snapshots[:1]) == snapshots[0]
    assert added([1, None]) is None
    assert added([{"a": 1}, {"a": 2, "b": {"c": 3}}]) == {"a": 3, "b": {"c": 3}}


def test_lists_of_workers_are_joined() -> None:
    found = merged_workers(
        [
            Workers("n", (up("r1"), up("r0")), draining=("r0",), router="a"),
            Workers("n", (up("r2"),), sick=("r2",)),
        ]
    )
    assert [one.worker for one in found.workers] == ["r0", "r1", "r2"]
    assert (found.draining, found.sick) == (("r0",), ("r2",))
