"""The scheduler's clock: one reading per iteration, the same on all ranks, never back."""

import pickle
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("sglang")]


def ticking(start: float, by: float = 1.0) -> Any:
    times: Iterator[float] = count(start, by)
    return lambda: next(times)


def test_a_lone_rank_reads_its_own() -> None:
    from sglang_fair.overlay.clock import Clock

    clock = Clock(is_shared=False, read=ticking(5.0))
    requests = [object()]
    assert clock.advance(requests) is requests
    first = clock.now_s
    clock.advance([])
    assert clock.now_s == first + 1


def test_ranks_agree_whatever_their_own_clocks_say() -> None:
    from sglang_fair.overlay.clock import Clock

    leading, following = Clock(is_shared=True, read=ticking(70.0)), Clock(is_shared=True, read=ticking(9e6))
    for requests in (["a"], [], ["b", "c"]):
        sent = [*requests, leading.reading()]
        received = pickle.loads(pickle.dumps(sent))
        assert leading.advance(sent) == following.advance(received) == requests
        assert leading.now_s == following.now_s >= 70.0
    before_s = following.now_s
    assert following.advance([]) == []
    assert following.now_s == before_s, "without a reading it stands still"


def test_a_reading_that_comes_late_does_not_turn_it_back() -> None:
    from sglang_fair.overlay.clock import Clock, Reading

    clock = Clock(is_shared=True)
    assert clock.advance([Reading(8.0), "request", Reading(7.0)]) == ["request"]
    assert clock.now_s == 8.0


@pytest.mark.parametrize(
    ("leads", "received", "is_busy", "sent"),
    [
        (True, ["request"], False, 1),
        (True, [], True, 1),
        (True, [], False, 0),
        (False, ["request"], True, 0),
        (False, None, True, 0),
    ],
)
def test_the_leading_rank_sends_the_time_while_there_is_something_to_do(
    leads: bool, received: list[Any] | None, is_busy: bool, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle scheduler broadcasts nothing, as before."""
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

    from sglang_fair.overlay.clock import Clock, Reading, TimedReceiver

    parallel = "sglang.srt.managers.scheduler_components.request_receiver.get_parallel"
    alone = SimpleNamespace(attn_dp_enabled=False, enable_dp_attention=False, tp_size=1)
    monkeypatch.setattr(parallel, lambda: alone)
    names = (
        "recv_from_tokenizer", "recv_from_rpc", "recv_skipper", "input_blocker", "mm_receiver", "server_args",
        "model_config", "max_recv_per_poll", "stream_output", "get_last_batch",
    )  # fmt: skip
    more = [one.name for one in fields(SchedulerRequestReceiver) if one.default is MISSING]
    stock = SchedulerRequestReceiver(
        **dict.fromkeys([*names, *more], None) | ({"ps": alone} if "ps" in more else {})
    )
    timed = TimedReceiver.of(stock, Clock(is_shared=True), leads=leads, is_busy=lambda: is_busy)
    found = timed._broadcast_reqs_across_ranks(received)
    assert sum(isinstance(each, Reading) for each in found or ()) == sent
    assert [each for each in found or () if not isinstance(each, Reading)] == (received or [])


def test_a_step_that_was_only_waited_for_says_nothing_of_its_length() -> None:
    """An overlapped loop: each step's result comes in the iteration after its launch."""
    from sglang_fair.overlay.batch import Step, StepTimes

    times, step = StepTimes(), Step(decoded=True, requests=3)
    assert times.tick(0.0) == []
    times.launched()
    assert times.tick(0.1) == []
    times.launched()
    times.done(step)
    assert times.tick(0.2) == [(step, pytest.approx(0.2))]
    times.done(step)
    assert times.tick(0.21) == [(replace(step, requests=0), pytest.approx(0.01))]
