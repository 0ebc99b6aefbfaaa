"""What follows an attempt that failed: each way of failing, for each thing that a client may have by then."""

from typing import Any

import pytest

from router.events import Refuse
from router.gateway.errors import ApiError
from router.gateway.replicas.retries import MAX_MISDIRECTED, Failed, Retries
from router.suspects import KNOWN, QUARANTINED

BROKEN = Failed("lost", "broken pipe", "r0")
SILENT = Failed("lost", "TimeoutError", "r0", fell_silent=True)
CUT = Failed("cut", worker="r0")
NOTHING, CONTINUABLE, FIXED = (
    {"has_begun": False},
    {"has_begun": True, "can_go_on": True},
    {"has_begun": True, "can_go_on": False},
)
"""What the client has."""


def lost(worker: str, reason: str = "x", *, is_suspect: bool = False) -> Failed:
    return Failed("lost", reason, worker, is_suspect)


def refused(reason: str, **more: Any) -> Failed:
    return Failed("refused", reason, refuse=Refuse("x", reason, **more))


def gave_up(retries: Retries, failed: Failed, sent: dict[str, bool]) -> tuple[int, object, int | None, str]:
    with pytest.raises(ApiError) as caught:
        retries.after(failed, **sent)
    error, retry_after = caught.value, caught.value.headers.get("retry-after")
    return error.status, error.code, None if retry_after is None else int(retry_after), error.message


@pytest.mark.parametrize("failed", [BROKEN, SILENT])
@pytest.mark.parametrize("sent", [NOTHING, CONTINUABLE])
def test_after_a_loss_another_replica_serves_or_continues(failed: Failed, sent: dict[str, bool]) -> None:
    retries = Retries(3, 2)
    assert retries.after(failed, **sent) == 0.0
    assert retries.excluded == ("r0",)


@pytest.mark.parametrize("failed", [BROKEN, CUT, Failed("misdirected", "it has b", "r0")])
def test_an_answer_that_has_begun_and_cannot_be_continued_ends_in_an_error(failed: Failed) -> None:
    assert gave_up(Retries(3), failed, FIXED)[:2] == (502, "replica_lost")
    *_, message = gave_up(Retries(3), BROKEN, FIXED)
    assert message == "the stream was lost midway: worker r0: broken pipe"


def test_a_new_attempt_avoids_all_that_failed_and_a_continuation_only_the_last() -> None:
    retries = Retries(5, 2)
    retries.after(lost("r0"), **NOTHING)
    retries.after(lost("r1"), **NOTHING)
    assert retries.excluded == ("r0", "r1")
    retries.after(lost("r2"), **CONTINUABLE)
    assert retries.excluded == ("r2",)


def test_attempts_are_counted() -> None:
    retries = Retries(2, 9)
    retries.after(BROKEN, **NOTHING)
    status, code, retry_after_s, message = gave_up(retries, lost("r1", "reset"), NOTHING)
    assert (status, code, retry_after_s) == (502, "no_replica", 1)
    assert message == "no replica could serve the request; tried r0, r1; the last: worker r1: reset"
    assert gave_up(Retries(1), BROKEN, CONTINUABLE)[:2] == (502, "replica_lost")


@pytest.mark.parametrize(("sent", "code"), [(NOTHING, "no_replica"), (CONTINUABLE, "replica_lost")])
def test_a_request_that_silences_replicas_gets_no_further_one(sent: dict[str, bool], code: str) -> None:
    assert gave_up(Retries(3, 1), SILENT, sent)[:2] == (502, code)
    retries = Retries(9, 2)
    retries.after(SILENT, **sent)
    retries.after(BROKEN, **sent)  # a loss of another kind does not count
    assert gave_up(retries, SILENT, sent)[:2] == (502, code)


@pytest.mark.parametrize(("sent", "code"), [(NOTHING, "replicas_ended"), (CONTINUABLE, "replica_lost")])
def test_a_request_that_two_replicas_did_not_survive_gets_no_third(sent: dict[str, bool], code: str) -> None:
    retries = Retries(9)
    retries.after(lost("r0", is_suspect=True), **sent)
    retries.after(BROKEN, **sent)  # it was never there
    assert gave_up(retries, lost("r1", is_suspect=True), sent)[:3] == (502, code, None)
    assert retries.ended == ("r0", "r1")


def test_whatever_stops_a_stream_that_has_begun_is_told_in_it() -> None:
    for failed in (
        Failed("mismatch", "worker r1: its text is not that of its tokens"),
        Failed("no descriptors", "Too many open files"),
        Failed("unplaced", "no router answers"),
        refused("no worker is up", retry=True),
    ):
        retries = Retries(3, 2)
        retries.after(BROKEN, **CONTINUABLE)
        status, code, retry_after_s, message = gave_up(retries, failed, CONTINUABLE)
        assert (status, code, retry_after_s) == (502, "replica_lost", None)
        assert message.startswith("the stream was lost midway: ")
    retries = Retries(3, 2)
    retries.after(BROKEN, **CONTINUABLE)
    *_, message = gave_up(retries, Failed("mismatch", "worker r1: other words"), CONTINUABLE)
    assert message == "the stream was lost midway: worker r0: broken pipe; worker r1: other words"


@pytest.mark.parametrize(
    ("failed", "status", "code", "retry_after_s"),
    [
        (Failed("no descriptors", "Too many open files"), 503, "overloaded", 1),
        (Failed("unplaced", "no router answers"), 503, "router_unavailable", 1),
        (refused("no worker is up", retry=True), 503, "refused", 1),
        (refused("it can never be served", retry=False), 503, "refused", None),
        (refused("too many wait", retry=True, is_full=True), 429, "overloaded", 1),
        (refused("it was convicted", retry=False, code=KNOWN), 422, KNOWN, None),
        (refused("later", retry=True, code=QUARANTINED, retry_after_s=8.5), 503, QUARANTINED, 9),
    ],
)
def test_a_client_that_has_nothing_is_told_whose_fault_it_is(
    failed: Failed, status: int, code: str, retry_after_s: int | None
) -> None:
    assert gave_up(Retries(3), failed, NOTHING)[:3] == (status, code, retry_after_s)


def test_a_router_that_has_nobody_left_to_name_is_not_the_reason() -> None:
    retries = Retries(3)
    retries.after(BROKEN, **NOTHING)
    status, code, _, message = gave_up(retries, refused("no worker", retry=True), NOTHING)
    assert (status, code) == (502, "no_replica")
    assert message.endswith("tried r0; the last: worker r0: broken pipe")


def test_what_was_cut_for_a_swap_goes_on_and_nobody_is_blamed() -> None:
    retries = Retries(1, 1)
    for _ in range(20):
        for sent in (NOTHING, CONTINUABLE):
            assert retries.after(CUT, **sent) == 0.0
    assert retries.excluded == ()


def test_a_replica_with_another_model_is_asked_again_later_and_not_for_ever() -> None:
    retries = Retries(2, 1)
    other = Failed("misdirected", "it has b", "r0")
    waits = [retries.after(other, **NOTHING) for _ in range(MAX_MISDIRECTED)]
    assert waits == sorted(waits)
    assert 0 < waits[0] < 0.1
    assert 5.0 < sum(waits) < 20.0, "a router hears from agents every second"
    assert retries.excluded == ()
    assert retries.after(other, **NOTHING) == 0.0
    assert retries.excluded == ("r0",)
    status, _, _, message = gave_up(retries, Failed("misdirected", "it has b", "r1"), NOTHING)
    assert (status, "it has b" in message) == (502, True)
