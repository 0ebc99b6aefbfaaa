"""What follows an attempt: each outcome, for each thing that a client may have by then."""

import pytest

from router.events import Refuse
from router.gateway.replicas.retries import (
    MAX_MISDIRECTED,
    ContinueElsewhere,
    CutOff,
    EndStream,
    Finish,
    GiveUp,
    Lost,
    Misdirected,
    Mismatch,
    NoDescriptorsLeft,
    Outcome,
    Retries,
    Sent,
    Served,
    Step,
    TryAnother,
    Unplaced,
)
from router.suspects import KNOWN, QUARANTINED

BROKEN = Lost("r0", "broken pipe")
SILENT = Lost("r0", "TimeoutError", fell_silent=True)
BEGUN = (Sent.CONTINUABLE, Sent.ALL_BUT_END, Sent.FIXED)


def after(outcome: Outcome, sent: Sent, tries: int = 3, max_silenced: int = 2) -> tuple[Step, Retries]:
    """What follows the first attempt."""
    retries = Retries(tries, max_silenced)
    return retries.after(outcome, sent), retries


def gave_up(step: Step) -> tuple[int, object, int | None, str]:
    assert isinstance(step, GiveUp)
    retry_after = step.error.headers.get("retry-after")
    retry_after_s = None if retry_after is None else int(retry_after)
    return step.error.status, step.error.code, retry_after_s, step.error.message


@pytest.mark.parametrize("sent", list(Sent))
def test_a_served_request_is_done(sent: Sent) -> None:
    assert after(Served(), sent)[0] == Finish()


@pytest.mark.parametrize("lost", [BROKEN, SILENT])
@pytest.mark.parametrize(
    ("sent", "step"),
    [(Sent.NOTHING, TryAnother()), (Sent.CONTINUABLE, ContinueElsewhere()), (Sent.ALL_BUT_END, EndStream())],
)
def test_after_a_loss_another_replica_serves_or_continues(lost: Lost, sent: Sent, step: Step) -> None:
    found, retries = after(lost, sent)
    assert found == step
    assert retries.excluded == ("r0",)


def test_an_answer_that_has_begun_and_cannot_be_continued_ends_in_an_error() -> None:
    status, code, _, message = gave_up(after(BROKEN, Sent.FIXED)[0])
    assert (status, code) == (502, "replica_lost")
    assert message == "the stream was lost midway: worker r0: broken pipe"


def test_a_new_attempt_avoids_all_that_failed_and_a_continuation_only_the_last() -> None:
    retries = Retries(5, 2)
    retries.after(Lost("r0", "x"), Sent.NOTHING)
    retries.after(Lost("r1", "x"), Sent.NOTHING)
    assert retries.excluded == ("r0", "r1")
    assert retries.after(Lost("r2", "x"), Sent.CONTINUABLE) == ContinueElsewhere()
    assert retries.excluded == ("r2",)


def test_attempts_are_counted() -> None:
    retries = Retries(2, 9)
    assert retries.after(BROKEN, Sent.NOTHING) == TryAnother()
    status, code, retry_after_s, message = gave_up(retries.after(Lost("r1", "reset"), Sent.NOTHING))
    assert (status, code, retry_after_s) == (502, "no_replica", 1)
    assert message == "no replica could serve the request; tried r0, r1; the last: worker r1: reset"
    assert gave_up(after(BROKEN, Sent.CONTINUABLE, tries=1)[0])[:2] == (502, "replica_lost")
    assert after(BROKEN, Sent.ALL_BUT_END, tries=1)[0] == EndStream(), "that takes no replica"


@pytest.mark.parametrize(("sent", "code"), [(Sent.NOTHING, "no_replica"), (Sent.CONTINUABLE, "replica_lost")])
def test_a_request_that_silences_replicas_gets_no_further_one(sent: Sent, code: str) -> None:
    assert gave_up(after(SILENT, sent, max_silenced=1)[0])[:2] == (502, code)
    retries = Retries(9, 2)
    assert not isinstance(retries.after(SILENT, sent), GiveUp)
    assert not isinstance(retries.after(BROKEN, sent), GiveUp), "a loss of another kind does not count"
    assert gave_up(retries.after(SILENT, sent))[:2] == (502, code)


@pytest.mark.parametrize(
    ("sent", "code"), [(Sent.NOTHING, "replicas_ended"), (Sent.CONTINUABLE, "replica_lost")]
)
def test_a_request_that_two_replicas_did_not_survive_gets_no_third(sent: Sent, code: str) -> None:
    retries = Retries(9)
    retries.after(Lost("r0", "reset", is_suspect=True), sent)
    assert not isinstance(retries.after(BROKEN, sent), GiveUp), "it was never there"
    assert gave_up(retries.after(Lost("r1", "reset", is_suspect=True), sent))[:3] == (502, code, None)
    assert retries.ended == ("r0", "r1")


@pytest.mark.parametrize("sent", BEGUN)
def test_whatever_stops_a_stream_that_has_begun_is_told_in_it(sent: Sent) -> None:
    for outcome in (
        Mismatch("worker r1: the other replica answers in other words"),
        NoDescriptorsLeft("Too many open files"),
        Unplaced("no router answers"),
        Refuse("x", "no worker is up", retry=True),
    ):
        retries = Retries(3, 2)
        retries.after(BROKEN, Sent.CONTINUABLE)
        status, code, retry_after_s, message = gave_up(retries.after(outcome, sent))
        assert (status, code, retry_after_s) == (502, "replica_lost", None)
        assert message.startswith("the stream was lost midway: ")
    retries = Retries(3, 2)
    retries.after(BROKEN, Sent.CONTINUABLE)
    *_, message = gave_up(retries.after(Mismatch("worker r1: other words"), sent))
    assert message == "the stream was lost midway: worker r0: broken pipe; worker r1: other words"


@pytest.mark.parametrize(
    ("outcome", "status", "code", "retry_after_s"),
    [
        (NoDescriptorsLeft("Too many open files"), 503, "overloaded", 1),
        (Unplaced("no router answers"), 503, "router_unavailable", 1),
        (Refuse("x", "no worker is up", retry=True), 503, "refused", 1),
        (Refuse("x", "it can never be served", retry=False), 503, "refused", None),
        (Refuse("x", "too many wait", retry=True, is_full=True), 429, "overloaded", 1),
        (Refuse("x", "it was convicted", retry=False, code=KNOWN), 422, KNOWN, None),
        (Refuse("x", "later", retry=True, code=QUARANTINED, retry_after_s=8.5), 503, QUARANTINED, 9),
    ],
)
def test_a_client_that_has_nothing_is_told_whose_fault_it_is(
    outcome: Outcome, status: int, code: str, retry_after_s: int | None
) -> None:
    assert gave_up(after(outcome, Sent.NOTHING)[0])[:3] == (status, code, retry_after_s)


def test_a_router_that_has_nobody_left_to_name_is_not_the_reason() -> None:
    _, retries = after(BROKEN, Sent.NOTHING)
    status, code, _, message = gave_up(retries.after(Refuse("x", "no worker", retry=True), Sent.NOTHING))
    assert (status, code) == (502, "no_replica")
    assert message.endswith("tried r0; the last: worker r0: broken pipe")


def test_what_was_cut_for_a_swap_goes_on_and_nobody_is_blamed() -> None:
    retries = Retries(1, 1)
    for _ in range(20):
        assert retries.after(CutOff("r0"), Sent.NOTHING) == TryAnother()
        assert retries.after(CutOff("r0"), Sent.CONTINUABLE) == ContinueElsewhere()
    assert retries.after(CutOff("r0"), Sent.ALL_BUT_END) == EndStream()
    assert retries.excluded == ()


def test_a_replica_with_another_model_is_asked_again_later_and_not_for_ever() -> None:
    retries = Retries(2, 1)
    waits = []
    for _ in range(MAX_MISDIRECTED):
        step = retries.after(Misdirected("r0", "it has b"), Sent.NOTHING)
        assert isinstance(step, TryAnother)
        waits.append(step.after_s)
    assert waits == sorted(waits)
    assert waits[0] < 0.1
    assert 5.0 < sum(waits) < 20.0, "a router hears from agents every second"
    assert retries.excluded == ()
    assert retries.after(Misdirected("r0", "it has b"), Sent.NOTHING) == TryAnother()
    assert retries.excluded == ("r0",)
    status, _, _, message = gave_up(retries.after(Misdirected("r1", "it has b"), Sent.NOTHING))
    assert (status, "it has b" in message) == (502, True)
