"""Suspects: no request ends more than two replicas, and nothing is convicted but what ends them."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core import Router
from router.events import (
    Arrive,
    Difference,
    Done,
    Lift,
    PeerGone,
    Place,
    Progress,
    Refuse,
    Suspicion,
    Table,
    Tick,
    WorkerDown,
    WorkerDrain,
    WorkerHealth,
    WorkerUp,
)
from router.gateway.errors import ApiError
from router.gateway.replicas.retries import Failed, Retries
from router.placement.round_robin import RoundRobin
from router.suspects import (
    CLEAR_S,
    DOUBT_S,
    KNOWN,
    MOST_CONVICTIONS,
    MOST_DOUBTS,
    MOST_NAMES,
    MOST_WAITING,
    NEWCOMERS,
    PATIENCE_S,
    QUARANTINE_S,
    QUARANTINED,
    RECENT_S,
    Suspects,
    fingerprint,
)
from tests.support.budget import examples


@dataclass
class Asked:
    """A request, as its gateway has it."""

    client: str
    mark: str
    kills: bool
    retries: Retries = field(default_factory=lambda: Retries(9))
    attempts: int = 0
    worker: str = ""
    """Where it is; "": it waits."""
    has_begun: bool = False
    error: str = ""
    is_served: bool = False
    was_beside: bool = False
    """A killer came where it was on trial, because nothing else took requests."""

    @property
    def is_over(self) -> bool:
        return self.is_served or bool(self.error)


class Site:
    """A router, its workers, and a gateway: what each of them does to the others."""

    def __init__(self, workers: int) -> None:
        self.known = Suspects()
        self.router = Router(RoundRobin(), suspects=self.known)
        self.now_s = 0.0
        self.asked: dict[str, Asked] = {}
        self.dead: set[str] = set()
        self.deaths = 0
        self.names = [f"r{number}" for number in range(workers)]
        for name in self.names:
            self.tell(WorkerUp(name, f"http://{name}"))

    @property
    def suspects(self) -> dict:
        found = self.router.state()["suspects"]
        assert isinstance(found, dict)
        return found

    @property
    def quarantine(self) -> dict:
        return self.suspects["quarantine"]

    def tell(self, event) -> list:
        """What is answered, once the gateway has taken it."""
        found = [answer for _, answer in self.router.handle(event, self.now_s, b"g")]
        for answer in found:
            if isinstance(answer, Place):
                one = self.asked[answer.id.partition("/")[0]]
                assert not one.worker
                one.worker = answer.worker
                if one.kills and not answer.on_trial and self.all_are_held():
                    for other in self.at(answer.worker):
                        other.was_beside = True
            elif isinstance(answer, Refuse) and answer.id.partition("/")[0] in self.asked:
                one = self.asked[answer.id.partition("/")[0]]
                one.error = answer.code or "refused"
        return found

    def all_are_held(self) -> bool:
        workers = self.router.state()["workers"]
        assert isinstance(workers, dict)
        up = {name for name, one in workers.items() if one["state"] == "up"}
        return up <= self.known.held(self.now_s)

    def at(self, worker: str) -> list[Asked]:
        return [one for one in self.asked.values() if one.worker == worker and not one.is_over]

    def send(self, client: str, *, kills: bool = False, mark: str = "") -> Asked:
        name = str(len(self.asked))
        one = self.asked[name] = Asked(client, mark or fingerprint(client, name.encode()), kills)
        self.ask(name)
        return one

    def ask(self, name: str) -> None:
        one = self.asked[name]
        one.attempts += 1
        self.tell(
            Arrive(
                f"{name}/{one.attempts}",
                one.client,
                b"",
                exclude=one.retries.excluded,
                attempt=one.attempts - 1,
                fingerprint=one.mark,
                lost=len(one.retries.ended),
                goes_on=one.has_begun,
            )
        )

    def name_of(self, one: Asked) -> str:
        return next(name for name, other in self.asked.items() if other is one)

    def begin(self, one: Asked) -> None:
        one.has_begun = True
        self.tell(Progress(f"{self.name_of(one)}/{one.attempts}", 1))

    def serve(self, one: Asked) -> None:
        one.is_served, one.worker = True, ""
        self.tell(Done(f"{self.name_of(one)}/{one.attempts}", 1))

    def leave(self, one: Asked) -> None:
        """Its client does."""
        one.error, one.worker = "left", ""
        self.tell(Done(f"{self.name_of(one)}/{one.attempts}", outcome="aborted"))

    def die(self, worker: str, is_told_first: bool = False, is_sick: bool = True) -> None:
        """The worker ends, with all that it has."""
        self.deaths += 1
        self.dead.add(worker)
        if is_sick:
            self.tell(WorkerHealth(worker, False))
        lost = [(name, one) for name, one in self.asked.items() if one.worker == worker and not one.is_over]
        if is_told_first:
            self.tell(WorkerDown(worker))
        for name, one in lost:
            one.worker = ""
            suspicion = Suspicion(one.client, one.mark, len(one.retries.ended) + 1)
            self.tell(Done(f"{name}/{one.attempts}", outcome="failed", lost=suspicion))
            failed = Failed("lost", "broke", worker, is_suspect=True)
            try:
                one.retries.after(failed, has_begun=one.has_begun, can_go_on=True)
            except ApiError as error:
                one.error = error.code or ""
        for name, one in lost:
            if not one.is_over:
                self.ask(name)

    def restart(self, worker: str) -> None:
        self.dead.discard(worker)
        self.tell(WorkerUp(worker, f"http://{worker}"))
        self.tell(WorkerHealth(worker, True))

    def go(self, seconds: float) -> None:
        self.now_s += seconds
        self.tell(Tick())

    def settle(self) -> None:
        """Replicas come back, killers end them, all others are served."""
        for _ in range(1000):
            if all(one.is_over for one in self.asked.values()):
                return
            for worker in list(self.dead):
                self.restart(worker)
            self.go(RECENT_S)
            for worker in self.names:
                if any(one.kills for one in self.at(worker)):
                    self.die(worker)
            for one in list(self.asked.values()):
                if one.worker and not one.kills and not one.is_over:
                    self.serve(one)
        raise AssertionError([one for one in self.asked.values() if not one.is_over])


POLITE, ODD = ("p0", "p1"), ("k0", "k1")


class AnyMixture(RuleBasedStateMachine):
    """Killers and others in any order, replicas that die of killers alone and come back."""

    @initialize(workers=st.integers(2, 5))
    def begins(self, workers: int) -> None:
        self.site = Site(workers)
        for client in POLITE:
            self.site.serve(self.site.send(client))

    @rule(client=st.sampled_from(POLITE))
    def asks(self, client: str) -> None:
        self.site.send(client)

    @rule(client=st.sampled_from(ODD))
    def kills(self, client: str) -> None:
        self.site.send(client, kills=True)

    @rule(seconds=st.sampled_from([0.1, RECENT_S, DOUBT_S]))
    def goes_on(self, seconds: float) -> None:
        self.site.go(seconds)

    @rule(pick=st.integers(0, 1 << 20), is_whole=st.booleans())
    def answers(self, pick: int, is_whole: bool) -> None:
        running = [
            one for one in self.site.asked.values() if one.worker and not one.kills and not one.is_over
        ]
        if running:
            one = running[pick % len(running)]
            (self.site.serve if is_whole else self.site.begin)(one)

    @rule(pick=st.integers(0, 1 << 20), is_told_first=st.booleans())
    def dies(self, pick: int, is_told_first: bool) -> None:
        doomed = [name for name in self.site.names if any(one.kills for one in self.site.at(name))]
        if doomed:
            self.site.die(doomed[pick % len(doomed)], is_told_first)

    @precondition(lambda self: self.site.dead)
    @rule(pick=st.integers(0, 1 << 20))
    def restarts(self, pick: int) -> None:
        dead = sorted(self.site.dead)
        self.site.restart(dead[pick % len(dead)])

    @invariant()
    def none_ends_three_and_only_killers_are_convicted(self) -> None:
        for one in self.site.asked.values():
            assert len(one.retries.ended) <= 2
            assert one.kills or one.error != KNOWN
        for client, case in self.site.quarantine.items():
            assert client in ODD or not case["convictions"], case

    def teardown(self) -> None:
        if hasattr(self, "site"):
            self.site.settle()
            for one in self.site.asked.values():
                is_excused = one.was_beside or one.has_begun or one.error == "refused"
                assert one.is_served is not one.kills or is_excused, one


TestAnyMixture = pytest.mark.slow(AnyMixture.TestCase)
TestAnyMixture.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)


# -- single rules


def convicted(site: Site, client: str = "k0") -> None:
    """A killer of `client` ends two replicas."""
    one = site.send(client, kills=True)
    for _ in range(2):
        site.die(one.worker)
        for worker in list(site.dead):
            site.restart(worker)
        site.go(RECENT_S)
    assert one.error == "replicas_ended"


def known(workers: int = 3, *clients: str) -> Site:
    """A site that has served these clients."""
    site = Site(workers)
    for client in ("p0", "k0", *clients):
        site.serve(site.send(client))
    return site


def test_a_suspect_waits_until_all_else_is_clear_and_nothing_else_comes() -> None:
    site = known(3)
    lost = site.send("p0")
    for one in [site.send("p1") for _ in range(5)]:
        if one.worker == lost.worker:
            site.begin(one)
    site.die(lost.worker)
    site.go(RECENT_S)
    assert not lost.worker, "at each other replica something is not clear"
    (held,) = site.known.held(site.now_s)
    assert all(site.send("p1").worker != held for _ in range(4))
    for one in site.at(held):
        site.begin(one)
    assert lost.worker == held
    assert site.suspects["trials"] == {held: site.name_of(lost) + "/2"}
    assert all(site.send("p1").worker != held for _ in range(4))
    site.begin(lost)
    assert held in {site.send("p1").worker for _ in range(4)}
    site.die(held)
    assert not site.quarantine, "it was clear"
    assert site.suspects["counts"]["doubts"] == 1


@pytest.mark.parametrize("count", [1, 9, 40])
def test_a_client_s_killers_end_as_many_replicas_as_the_bound_says(count: int) -> None:
    site = known(12)
    killers = [site.send("k0", kills=True) for _ in range(count)]
    polite = [site.send("p0") for _ in range(8)]
    site.settle()
    assert all(one.is_served for one in polite)
    assert all(one.error in ("replicas_ended", KNOWN, QUARANTINED) for one in killers)
    first = min(count, 12)
    assert site.deaths <= first + min(count, MOST_CONVICTIONS)
    assert [*site.quarantine] == ["k0"]
    assert site.quarantine["k0"]["is_refused"] is (count > 1)


def test_what_was_convicted_is_refused_and_its_client_is_served_one_at_a_time() -> None:
    site = known(3)
    convicted(site)
    mark = next(one.mark for one in site.asked.values() if one.kills)
    assert site.send("k0", mark=mark).error == KNOWN
    asked = [site.send("k0") for _ in range(MOST_WAITING + 2)]
    assert [one.worker for one in asked] == ["r0"] + [""] * (MOST_WAITING + 1)
    assert [one.error for one in asked] == [""] * (MOST_WAITING + 1) + [QUARANTINED]
    site.begin(asked[0])
    assert not asked[1].worker, "the one before has not ended"
    site.serve(asked[0])
    assert asked[1].worker == "r0", "always the same"
    assert site.send("p0").worker not in ("", "r0"), "another client"
    site.tell(Lift("l", "k0"))
    assert not site.quarantine
    assert isinstance(site.tell(Lift("l", "k0"))[0], Refuse)
    assert all(site.send("k0").worker not in ("", "r0") for _ in range(3)), "where one is on trial"


def test_a_quarantine_ends_by_itself() -> None:
    site = known(3)
    convicted(site)
    site.go(QUARANTINE_S - 2 * RECENT_S)
    assert [site.send("k0").worker for _ in range(2)] == ["r0", ""]
    site.go(2 * RECENT_S)
    assert not site.quarantine
    assert all(site.send("k0").worker for _ in range(3))


def test_after_a_newcomer_s_conviction_newcomers_are_served_one_at_a_time() -> None:
    site = known(3)
    convicted(site, "fresh")
    assert site.suspects["newcomers"]
    first, second, old = (site.send(client) for client in ("n1", "n2", "p0"))
    assert (bool(first.worker), bool(second.worker), bool(old.worker)) == (True, False, True)
    site.serve(first)
    assert second.worker
    assert all(site.send("n1").worker for _ in range(3)), "it has finished one"
    site.tell(Lift("l", NEWCOMERS))
    assert site.send("n3").worker


def test_what_breaks_at_a_worker_that_drains_is_no_evidence() -> None:
    site = known(3)
    lost = site.send("p0")
    site.die(lost.worker)
    site.go(RECENT_S)
    site.tell(WorkerDrain(lost.worker))
    site.die(lost.worker)
    assert not site.quarantine
    assert not any(site.suspects["counts"][name] for name in ("convictions", "doubts"))


def test_a_suspect_that_its_client_leaves_is_a_doubt_and_its_like_is_on_trial() -> None:
    site = known(3)
    for _ in range(MOST_DOUBTS):
        one = site.send("k0", mark="same")
        if not one.retries.ended and not site.suspects["trials"]:
            site.die(one.worker)
            site.restart(next(iter(site.dead)))
            site.go(RECENT_S)
        assert site.suspects["trials"]
        assert "k0" not in site.quarantine
        for _ in range(2):  # of doubts within a moment one counts
            site.leave(one)
            one = site.send("k0", mark="same")
        site.leave(one)
        site.go(DOUBT_S)
    assert site.quarantine["k0"]["doubts"] == MOST_DOUBTS
    assert not site.quarantine["k0"]["convictions"]


def test_who_waits_for_a_trial_is_known_to_its_gateway_and_goes_with_it() -> None:
    site = known(2)
    lost = site.send("p0")
    other = site.send("p0")
    name = site.name_of(lost) + "/2"
    site.die(lost.worker)
    assert other.worker
    assert not lost.worker
    assert site.tell(Arrive(name, "p0", b"", exclude=("r0", "r1")))[0].retry, "no other is left"
    lost.error = ""
    lost.attempts -= 1
    site.ask(site.name_of(lost))
    [told] = site.tell(Table("t", (name,)))
    assert isinstance(told, Difference)
    assert told.held == (name,)
    assert not told.missing
    assert name in site.tell(Table("t", ()))[0].unsettled
    site.tell(PeerGone())
    assert not site.suspects["waiting"]


def test_a_suspect_does_not_wait_for_ever_for_a_replica() -> None:
    site = known(2)
    lost = site.send("p0")
    for worker in sorted(site.names, key=lambda name: name == lost.worker):
        site.die(worker)
    site.go(PATIENCE_S - 1)
    assert not lost.error
    site.go(1)
    assert lost.error == "refused"
    site = known(2)
    lost = site.send("p0")
    site.send("p1")
    site.die(lost.worker)
    site.go(CLEAR_S)
    assert lost.worker, "what is not clear has been there for long enough"


def test_what_is_remembered_is_bounded() -> None:
    suspects = Suspects()
    for number in range(MOST_NAMES + 9):
        suspects.served(str(number))
        for ended in (1, 2):
            lost = Suspicion(str(number), str(number), ended)
            suspects.ended(Done(str(number), outcome="failed", lost=lost), "r0", 0.0)
    assert {len(found) for found in (suspects._served, suspects._lost, suspects._cases)} == {MOST_NAMES}
