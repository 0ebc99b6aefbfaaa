"""The throttle in the router: each call is judged once, whoever asks how often and whatever restarts."""

from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from router.core import Router
from router.events import (
    MOST_BEGUN,
    Arrive,
    Begun,
    Done,
    Follow,
    Load,
    PeerGone,
    Place,
    Posted,
    ProtocolError,
    Query,
    Refuse,
    Running,
    SetLimits,
    Snapshot,
    WorkerDown,
    Workers,
    WorkerUp,
    decode_event,
    encode,
)
from router.gateway.routing.fleet import Fleet
from router.placement.d2lpm import D2lpm
from router.throttling import SETTLE_S, Kind, Throttling
from sglang_fair.core.interactions import MOST_CALLS, MOST_OPEN, SILENCE_S, Interaction, Interactions
from sglang_fair.core.throttle import Rules
from tests.support.budget import examples

PROMPT = bytes(64)
LIMIT = 3


def router(kind: Kind = "oit", user: int | None = LIMIT, workers: str = "ab", **more: object) -> Router:
    made = Router(D2lpm(worker_quantum=1e9), throttling=Throttling(kind, Rules(user, **more)))  # type: ignore[arg-type]
    for worker in workers:
        made.handle(WorkerUp(worker, f"http://{worker}"), 0.0)
    return made


def fill(made: Router, now_s: float, part: float = 1.0, workers: str = "ab") -> None:
    for worker in workers:
        made.handle(Load(worker, round(1000 * part), 0, 1000), now_s)


def ask(
    made: Router, request: str, interaction: str = "", now_s: float = 0.0, **more: object
) -> Place | Refuse:
    arrive = Arrive(request, str(more.pop("client", "c")), PROMPT, interaction=interaction, **more)  # type: ignore[arg-type]
    ((_, answer),) = made.handle(arrive, now_s, b"g")
    assert isinstance(answer, Place | Refuse)
    return answer


def throttle(made: Router, now_s: float) -> dict:
    ((_, answer),) = made.handle(Query("q"), now_s)
    assert isinstance(answer, Snapshot)
    return answer.state["throttle"]  # type: ignore[return-value]


def test_only_first_calls_beyond_the_limit_are_refused_while_all_replicas_are_full() -> None:
    made = router()
    for number in range(10):
        assert isinstance(ask(made, f"before{number}", now_s=1.0), Place)
    fill(made, 2.0, workers="a")
    assert isinstance(ask(made, "one of two", now_s=2.0), Place)
    assert isinstance(ask(made, "other", "i", 2.0, client="d"), Place)
    fill(made, 3.0)
    refused = ask(made, "full", "j", 3.0)
    assert isinstance(refused, Refuse)
    assert (refused.code, refused.retry) == ("throttled_user", True)
    assert refused.retry_after_s == pytest.approx(58, abs=1.5)
    assert "limit is 3" in refused.reason
    assert "pressure 1.00" in refused.reason
    assert ask(made, "started", "i", 3.0, client="d").call == 2  # type: ignore[union-attr]
    seen = throttle(made, 4.0)
    assert seen["overloaded_for_s"] == pytest.approx(1.0)
    assert seen["refused"] == {"throttled_user": 1, "throttled_app": 0}
    assert seen["nearest"][0] == {"client": "c", "calls": 11, "limit": 3}
    assert throttle(made, 9.1)["overloaded_for_s"] is None, "replicas that say nothing are not overloaded"


def test_a_question_that_comes_again_and_further_attempts_are_the_same_call() -> None:
    made = router(workers="a")
    fill(made, 0.0, workers="a")
    for _ in range(3):
        assert ask(made, "1", "i") == Place("1", "a", "http://a", 0, 1)
    made.handle(Done("1", outcome="failed"), 0.1)
    for attempt in (1, 2):
        again = ask(made, f"1.{attempt}", "i", 0.2, attempt=attempt, begun=1)
        assert isinstance(again, Place)
        made.handle(Done(again.id), 0.3)
    assert throttle(made, 0.4)["nearest"] == [{"client": "c", "calls": 1, "limit": 3}]
    for number in (2, 3):
        ask(made, f"{number}", f"j{number}", 0.5)
    first = ask(made, "4", "k", 0.6)
    assert first == ask(made, "4", "k", 0.7), "the same answer, and not refused twice"
    assert throttle(made, 0.8)["refused"]["throttled_user"] == 1


def test_an_interaction_ends_with_its_last_answer() -> None:
    made = router("none")
    assert ask(made, "1", "i").call == 1  # type: ignore[union-attr]
    assert ask(made, "2", "i", last=True).call == 2  # type: ignore[union-attr]
    made.handle(Done("2", outcome="aborted"), 0.1)
    assert throttle(made, 0.1)["open_interactions"] == 1, "its user has no answer"
    ask(made, "3", "i", 0.2, last=True)
    made.handle(Done("3"), 0.3)
    assert throttle(made, 0.3)["open_interactions"] == 0
    assert ask(made, "4").call == 0, "one without a name has no number"  # type: ignore[union-attr]


@pytest.mark.parametrize("lost", ["worker", "gateway", "no worker"])
def test_a_call_that_is_lost_leaves_its_interaction_silent(lost: str) -> None:
    made = router(workers="" if lost == "no worker" else "a")
    ask(made, "1", "i")
    made.handle(WorkerDown("a") if lost == "worker" else PeerGone(), 1.0, b"g")
    assert throttle(made, 59.5)["open_interactions"] == 1
    made.handle(Arrive("2", "d", PROMPT, interaction="x"), 62.0, b"g")
    assert throttle(made, 62.0)["open_interactions"] == 1, "of the other client"


def test_a_router_that_was_restarted_cuts_nothing() -> None:
    made = router()
    fill(made, 0.0)
    for number in range(LIMIT):
        made.handle(Arrive(f"{number}", "c", PROMPT), 0.0)
    assert isinstance(ask(made, "new", "new"), Refuse)
    assert ask(made, "2nd", "served before", begun=1).call == 2  # type: ignore[union-attr]
    made.handle(Running("r", "c", PROMPT, worker="a", interaction="in flight", begun=4), 0.1)
    assert ask(made, "5th", "in flight", 0.2).call == 5  # type: ignore[union-attr]


def test_rpm_refuses_whatever_there_is_to_do() -> None:
    made = router("rpm")
    assert [type(ask(made, f"{n}", "i", float(n))) for n in range(5)] == [Place] * 3 + [Refuse] * 2
    assert isinstance(ask(made, "later", "i", 60.0), Place)


def test_tenants_have_limits_of_their_own() -> None:
    made = router(user=1)
    fill(made, 0.0)
    found = [
        ask(made, f"{n}", now_s=0.0, client="gold", most_calls=2, app="chat", app_calls=9) for n in range(3)
    ]
    assert [type(one) for one in found] == [Place, Place, Refuse]
    code = ask(made, "app", app="chat", client="x", most_calls=9, app_calls=1)
    assert isinstance(code, Place)
    code = ask(made, "app2", app="chat", client="x", most_calls=9, app_calls=1)
    assert isinstance(code, Refuse)
    assert code.code == "throttled_app"
    assert {"client": "gold", "calls": 2, "limit": 2} in throttle(made, 0.0)["nearest"]


def test_limits_are_replaced_while_it_runs() -> None:
    made = router(user=1)
    fill(made, 0.0)
    ask(made, "1")
    assert isinstance(ask(made, "2"), Refuse)
    ((_, answer),) = made.handle(SetLimits("l", b'{"user": 2, "high": 0.5, "low": 0.4}'), 0.0)
    assert isinstance(answer, Snapshot)
    assert answer.state["throttle"]["rules"]["user"] == 2  # type: ignore[index]
    assert isinstance(ask(made, "3"), Place)
    for bad, words in (
        (b"{", "truncated"),
        (b'{"user": 0}', "user"),
        (b'{"high": 2}', "high"),
        (b"[1]", "object"),
    ):
        ((_, answer),) = made.handle(SetLimits("l", bad), 0.0)
        assert isinstance(answer, Refuse)
        assert words in answer.reason
    assert throttle(made, 0.0)["rules"]["user"] == 2, "the old ones stay"
    ((_, answer),) = router("none").handle(SetLimits("l", b"{}"), 0.0)
    assert isinstance(answer, Refuse)


def limits_of(made: Router) -> Posted | None:
    ((_, workers),) = made.handle(Follow(""), 0.0)
    assert isinstance(workers, Workers)
    return workers.limits


def test_limits_that_an_operator_has_set_outlive_the_router() -> None:
    made = router(user=1)
    assert limits_of(made) is None
    made.handle(SetLimits("l", b'{"user": 2}', 5.0), 0.0)
    posted = limits_of(made)
    assert posted is not None
    again = router(user=1)
    for _ in range(2):
        assert again.handle(decode_event(encode(posted)), 0.0) == []  # type: ignore[comparison-overlap]
        assert throttle(again, 0.0)["rules"]["user"] == 2
    assert (limits_of(again), throttle(again, 0.0)["posted_s"]) == (posted, 5.0)

    other = router(user=7)
    other.handle(posted, 0.0)
    assert throttle(other, 0.0)["rules"]["user"] == 7, "it was started with other limits on purpose"
    later = router(user=1)
    later.handle(SetLimits("l", b'{"user": 3}', 6.0), 0.0)
    later.handle(posted, 0.0)
    assert throttle(later, 0.0)["rules"]["user"] == 3, "what was set later holds"
    later.handle(SetLimits("l", b'{"user": 4}', 0.0), 0.0)
    assert limits_of(later) == Posted(b'{"user": 4}', pytest.approx(6.001), posted.start), (
        "in whose clock ever"
    )
    bad = router(user=1)
    for rules in (b"{", b"[]", b'{"user": 0}', b"[" * 100_000):
        bad.handle(Posted(rules, 9.0, posted.start), 0.0)
    assert throttle(bad, 0.0)["rules"]["user"] == 1
    none = router("none", user=1)
    none.handle(posted, 0.0)
    assert none.state()["counts"]["posted limits ignored"] == 1  # type: ignore[index]


def test_a_load_that_cannot_be_is_counted_and_ignored() -> None:
    made = router()
    fill(made, 0.0)
    for used, waiting, size in ((-1, 0, 10), (21, 0, 10), (1, -1, 10), (0, 0, 0)):
        made.handle(Load("a", used, waiting, size), 0.0)
    seen = throttle(made, 0.1)
    assert seen["bad_loads"] == 4
    assert seen["overloaded_for_s"] is not None, "what was said before holds"


class Remembering:
    """A gateway, without its sockets: what it remembers of interactions, and what it tells of them."""

    def __init__(self, peer: bytes) -> None:
        self.peer = peer
        self.interactions = Interactions()
        self.fleet = Fleet(lambda worker: True, lambda: self.interactions)
        self.hears_s: float | None = None
        """When it notices that the router is another one."""

    def meet(self, made: Router, run: int, now_s: float) -> None:
        self.interactions.tick(now_s)
        for told in self.fleet.side().learn(Workers("", (), router=str(run))):
            made.handle(told, now_s, self.peer)
        self.hears_s = None


def settling() -> Router:
    made = Router(D2lpm(worker_quantum=1e9), throttling=Throttling("oit", Rules(LIMIT), SETTLE_S))
    for worker in "ab":
        made.handle(WorkerUp(worker, f"http://{worker}"), 0.0)
    return made


@settings(max_examples=examples(40))
@given(st.integers(0, 2**32))
def test_no_call_of_an_open_interaction_is_refused_whatever_restarts(seed: int) -> None:
    """Two gateways, replicas that die, a router that is restarted. A gateway notices that within `SETTLE_S`, and calls
    come before, of interactions that only the other gateway knows."""
    random = Random(seed)
    made, gateways = settling(), [Remembering(b"g"), Remembering(b"h")]
    for gateway in gateways:
        gateway.meet(made, 0, 0.0)
    opened: dict[Interaction, int] = {}
    silent_s: dict[Interaction, float] = {}
    running: list[tuple[str, Interaction, bool, Remembering]] = []
    refused = 0
    for step in range(300):
        now_s = step * 0.5
        if random.random() < 0.02:
            silent_s |= {name: now_s for _, name, *_ in running}
            made, running = settling(), []
            for gateway in gateways:
                gateway.hears_s = now_s + random.random() * SETTLE_S
        fill(made, now_s)
        for gateway in gateways:
            if gateway.hears_s is not None and gateway.hears_s <= now_s:
                gateway.meet(made, step, now_s)
        if running and random.random() < 0.7:
            request, name, is_last, gateway = running.pop(random.randrange(len(running)))
            made.handle(Done(request), now_s, gateway.peer)
            gateway.interactions.tick(now_s)
            gateway.interactions.end(name, is_answered=is_last)
            silent_s[name] = now_s
            if is_last:
                opened.pop(name, None)
        if random.random() < 0.03:
            worker = random.choice("ab")
            made.handle(WorkerDown(worker), now_s)
            made.handle(WorkerUp(worker, f"http://{worker}"), now_s)
        name = Interaction(random.choice("xyz"), "chat", str(random.randrange(step // 25 + 2)))
        gateway, is_last = random.choice(gateways), random.random() < 0.1
        gateway.interactions.tick(now_s)
        begun = gateway.interactions.calls(name)
        arrive = Arrive(
            f"{step}", name.client, PROMPT, app="chat", interaction=name.id, last=is_last, begun=begun
        )
        ((_, answer),) = made.handle(arrive, now_s, gateway.peer)
        if isinstance(answer, Refuse):
            refused += 1
            is_open = 0 < opened.get(name, 0) < MOST_CALLS and now_s - silent_s.get(name, now_s) < SILENCE_S
            assert not is_open
        else:
            opened[name] = opened.get(name, 0) + 1
            silent_s.pop(name, None)
            gateway.interactions.accepted(name, answer.call)
            running.append((answer.id, name, is_last, gateway))
    event(f"refused: {refused > 0}")


def test_a_router_that_was_restarted_believes_no_load_until_every_gateway_has_told() -> None:
    made = settling()
    for second in range(10):
        fill(made, 5.0 + second)
        assert isinstance(ask(made, str(second), f"{second}", 5.0 + second), Place)
        assert throttle(made, 5.0 + second)["overloaded_for_s"] is None
    fill(made, 15.0)
    assert isinstance(ask(made, "late", "late", 15.0), Refuse)


def test_what_a_gateway_remembers_closes_nothing_and_opens_within_the_bounds() -> None:
    made = router()
    fill(made, 0.0)
    for number in range(MOST_OPEN):
        assert isinstance(ask(made, f"{number}", f"{number}", 0.0, begun=1), Place)
        made.handle(Done(f"{number}"), 0.0, b"g")
    told = [("c", "", f"told {number}", 3, None) for number in range(MOST_BEGUN - 4)]
    odd = [
        ("d", "", name, calls, None) for name, calls in (("", 3), ("none", 0), ("two", 2), ("endless", 10**9))
    ]
    made.handle(decode_event(encode(Begun((*told, *odd)))), 0.0, b"h")
    assert throttle(made, 0.0)["open_interactions"] == MOST_OPEN + 2
    assert ask(made, "again", "7", 0.0).call == 3  # type: ignore[union-attr]
    assert isinstance(ask(made, "told", "told 1", 0.0), Refuse)
    assert ask(made, "two", "two", 0.0, client="d").call == 3  # type: ignore[union-attr]
    with pytest.raises(ProtocolError):
        decode_event(encode(Begun((*told, *odd, odd[0]))))
    assert throttle(made, 61.0)["open_interactions"] == 2, (
        "what is told and never goes on is closed by silence"
    )
