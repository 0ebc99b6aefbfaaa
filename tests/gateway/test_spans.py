"""The spans of a request, from what is remembered of it: each within its parent, whatever clocks and replicas say."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.core import Router
from router.events import Arrive, Done, Explain, Place, WorkerUp
from router.gateway.record import Exchange, RequestRecord, Try, shown_try
from router.gateway.spans import (
    OWN,
    Child,
    Told,
    below,
    error_of_attempt,
    error_of_request,
    is_settled,
    of_attempt,
    of_request,
)
from router.placement import build
from router.wire import pack_tokens
from sglang_fair.core import make_policy
from sglang_fair.core.job import Job
from sglang_fair.core.record import Record
from sglang_fair.core.waits import BATCH, MEMORY

PLACED_S, ENDED_S = 100.25, 110.0


def attempt(**changes: Any) -> Try:
    return replace(Try("id", 100.0, "r0", PLACED_S, 105.0, ENDED_S, 8, outcome="ok"), **changes)


def of_replica(*, retracted: bool = False, ends: str = "finished") -> dict[str, Any]:
    """A real record's: it came at 0 s, was admitted at 2, its prompt was computed at 5, and it ended at 9 s."""
    record, job = Record(make_policy("dlpm")), Job("id", "c", 40, 10, extend_tokens=32, cached_tokens=8)
    running = Job("other", "c")
    record.tick(0.0)
    record.arrive(running)
    record.admit(running)
    record.arrive(job)
    record.tick(0.5)
    record.end_pass(BATCH)
    record.tick(2.0)
    if ends == "left":
        record.leave(job)
    else:
        record.admit(job)
        record.tick(5.0)
        if ends == "finished":
            record.computed(job)
        if retracted:
            record.retract(job)
            record.tick(6.0)
            record.admit(job)
        record.tick(9.0)
        job.output_tokens = 10
        record.finish(job, "finished" if ends == "finished" else "aborted")
    record.tick(10.0)
    [found] = record.find("id")
    json.dumps(found)
    return found


def of_router(*, refused: bool = False) -> dict[str, Any]:
    """A real router's: it came at 50 s."""
    made = Router(build("d2lpm-queue"), name="d2lpm-queue", page_size=4)
    for name in () if refused else ("r0", "r1"):
        made.handle(WorkerUp(name, f"http://{name}"), 0.0)
    for id, at_s in (("before", 1.0), ("id", 50.0)):
        made.handle(Arrive(id, "c", pack_tokens(range(40)), 10, request="name"), at_s, b"g")
        made.handle(Done(id), at_s + 1, b"g")
    ((_, answer),) = made.handle(Explain("q", "id", None), 60.0, b"g")
    [found] = answer.placements  # type: ignore[union-attr]
    return found


def told(replica: Any, router: Any = None, **changes: Any) -> Told:
    known = {**shown_try(attempt(), ENDED_S), "router": router, "replica": replica, "replica_error": ""}
    return Told(**{"attempt": known, "router_error": "", "asked_s": 110.0, "answered_s": 110.5, **changes})


def children(one: Try, known: Told | None) -> dict[str, Child]:
    return {span.name: span for span in below(one, known)}


# ---- times


def test_a_served_request_is_placement_waiting_prefill_and_decode() -> None:
    found = children(attempt(), told([of_replica()], of_router()))
    assert list(found) == ["placement", "waiting", "prefill", "decode"]
    assert [span.service for span in found.values()] == ["router", "replica", "replica", "replica"]
    lengths = {name: span.ended_s - span.began_s for name, span in found.items()}
    assert lengths == pytest.approx({"placement": 0, "waiting": 2, "prefill": 3, "decode": 4})
    assert found["placement"].began_s == pytest.approx(100.125), "in the middle of the wait for the router"
    # It came 10 s before the answer, which was made between 110.0 and 110.5 s, and not before it was placed.
    assert found["waiting"].began_s == pytest.approx((PLACED_S + 100.5) / 2)
    assert found["waiting"].ended_s == found["prefill"].began_s
    assert found["prefill"].ended_s == found["decode"].began_s


@pytest.mark.parametrize(
    ("ends", "names"), [("left", ["waiting"]), ("in its prompt", ["waiting", "prefill"])]
)
def test_what_did_not_happen_has_no_span(ends: str, names: list[str]) -> None:
    [_, *found] = below(attempt(), told([of_replica(ends=ends)]))
    assert [span.name for span in found] == names
    assert found[-1].attributes[OWN + "outcome"] == "aborted"
    assert all(OWN + "outcome" not in span.attributes for span in found[:-1])


def test_a_wait_after_a_retraction_is_in_the_time_of_the_answer() -> None:
    found = children(attempt(), told([of_replica(retracted=True)]))
    assert found["waiting"].ended_s - found["waiting"].began_s == pytest.approx(2)
    assert found["decode"].ended_s - found["decode"].began_s == pytest.approx(4)
    assert found["waiting"].attributes[OWN + "waited_again_s"] == 1
    assert found["waiting"].attributes[OWN + f"waited_for_s.{MEMORY}"] == 1


def test_an_attempt_that_was_not_placed_has_a_placement_alone() -> None:
    one = attempt(placed_s=None, worker="", outcome="refused", reason="no worker is up", ended_s=101.0)
    [placement] = below(one, told(None, of_router(refused=True)))
    assert 100.0 <= placement.began_s <= placement.ended_s <= 101.0
    assert placement.attributes[OWN + "refused"] == "no worker is up"
    assert error_of_attempt(one) == "no worker is up"


def test_a_gateway_without_a_router_places_itself() -> None:
    """What the router is told later is no reason."""
    [placement, *_] = below(attempt(is_fallback=True), told(None, of_router()))
    assert (placement.service, placement.began_s, placement.ended_s) == ("gateway", 100.0, PLACED_S)
    assert placement.attributes == {OWN + "why": "gateway", OWN + "worker.worker": "r0"}


anything = st.floats(allow_nan=True, allow_infinity=True) | st.none() | st.integers() | st.text(max_size=3)


@given(
    parts=st.fixed_dictionaries(
        dict.fromkeys(("waited_s", "waited_again_s", "prefill_s", "decode_s", "came_s_ago"), anything)
    ),
    held=anything,
    at=st.lists(st.floats(0, 1e6), min_size=3, max_size=3).map(sorted),
    asked=st.lists(st.floats(-1e6, 1e7), min_size=2, max_size=2).map(sorted),
)
def test_every_span_lies_within_its_parents_whatever_is_said(
    parts: dict[str, Any], held: Any, at: list[float], asked: list[float]
) -> None:
    one = attempt(asked_s=at[0], placed_s=at[1], ended_s=at[2])
    record, placement = {**of_replica(), **parts}, {**of_router(), "waited_s": held}
    known = told([record, record], placement, asked_s=asked[0], answered_s=asked[1])
    found = list(below(one, known))
    assert found[0].name == "placement"
    assert at[0] <= found[0].began_s <= found[0].ended_s <= at[1]
    until_s = at[1]
    for span in found[1:]:
        if span.name == "waiting":
            until_s = at[1]  # of the next record
        assert until_s <= span.began_s <= span.ended_s <= at[2]
        until_s = span.ended_s


@example([1.5735321220671672, 1.05, 16.573532122067167], 9.05, 0.0, 0.0, 0.0, 1.0)  # rounding leaves no room
@given(
    lengths=st.lists(st.floats(0.001, 100), min_size=3, max_size=3),
    upload_s=st.floats(0, 10),
    download_s=st.floats(0, 10),
    later_s=st.floats(0, 100),
    there_s=st.floats(0, 5),
    back_s=st.floats(0, 5),
)
def test_the_replicas_part_is_where_it_was_but_for_what_the_questions_took(
    lengths: list[float], upload_s: float, download_s: float, later_s: float, there_s: float, back_s: float
) -> None:
    """Honest clocks, of whatever origin: no further off than half of what is not known."""
    waited_s, prefill_s, decode_s = lengths
    came_s = PLACED_S + upload_s
    ended_s = came_s + sum(lengths) + download_s
    asked_s = ended_s + later_s
    age_s = asked_s + there_s - came_s
    parts = {"waited_s": waited_s, "waited_again_s": 0.0, "prefill_s": prefill_s, "decode_s": decode_s}
    record = {**of_replica(), **parts, "came_s_ago": age_s}
    known = told([record], asked_s=asked_s, answered_s=asked_s + there_s + back_s)
    found = children(attempt(ended_s=ended_s), known)
    unknown_s = min(upload_s + download_s, there_s + back_s)
    assert abs(found["waiting"].began_s - came_s) <= unknown_s / 2 + 1e-6
    assert found["decode"].ended_s - found["waiting"].began_s == pytest.approx(sum(lengths))


# ---- what they say


def served(outcome: str, **changes: Any) -> Exchange:
    record = RequestRecord()
    exchange = record.came("chat", "my-name")
    exchange.client, exchange.model, exchange.input_tokens = "alice", "llama", 12
    record.enter(exchange)
    one = record.tried(exchange, "asked")
    record.placed(exchange, one, Place("id", "r0", "http://r0", 3), itself=False)
    for name, value in changes.items():
        setattr(exchange, name, value)
    record.ended(exchange, outcome)
    return exchange


def test_what_a_request_came_to() -> None:
    ours = {
        "request": "my-name", "kind": "chat", "client": "alice", "outcome": "ok",
        "retries": 0, "resumes": 0, "fallback": False,
    }  # fmt: skip
    assert of_request(served("ok", status=200, cached_tokens=8, output_tokens=5)) == {
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "llama",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.usage.output_tokens": 5,
        **{OWN + name: value for name, value in ours.items()},
    }


@pytest.mark.parametrize(
    ("outcome", "said", "error"),
    [
        ("ok", {}, None),
        ("refused", {"status": 429, "error": "overloaded: too many"}, None),
        ("left", {}, None),
        ("failed", {"status": 502, "error": "no_replica: all died"}, "no_replica: all died"),
        ("failed", {}, "failed"),
    ],
)
def test_only_what_the_server_did_wrong_is_an_error(
    outcome: str, said: dict[str, Any], error: str | None
) -> None:
    assert error_of_request(served(outcome, **said)) == error
    assert error_of_attempt(attempt(outcome="left")) is None
    assert error_of_attempt(attempt(outcome="failed", reason="it answered 503")) == "it answered 503"


def test_who_could_not_be_asked_is_named() -> None:
    shown = shown_try(attempt(), ENDED_S)
    known = told(None, router_error="no answer")
    known.attempt["replica_error"] = "this replica is gone"  # type: ignore[index]
    said = of_attempt(attempt(), shown, known)
    assert [said[OWN + name] for name in ("replica_error", "router_error", "worker")] == [
        "this replica is gone", "no answer", "r0",
    ]  # fmt: skip
    assert "not asked" in str(of_attempt(attempt(), shown, None)[OWN + "replica_error"])
    assert [span.name for span in below(attempt(), None)] == ["placement"]


def test_a_replica_is_asked_again_while_it_has_the_request() -> None:
    running = {**of_replica(), "state": "running"}
    assert is_settled([told([of_replica()]), told(None)])
    assert not is_settled([told([of_replica(), running])])
