"""Which workers are well: those that answer, and whose schedulers do not hang behind a server that answers."""

from hypothesis import given
from hypothesis import strategies as st

from router.gateway.replicas.health import FORWARD_TIMEOUTS, HANGS, INTERVAL_S, Liveness, Scheduler, Watch

TIMEOUT_S = 5.0
seconds = st.floats(0, 100)
schedulers = st.lists(st.builds(Scheduler, seconds, seconds, st.booleans()), max_size=3).map(tuple)


@given(st.lists(st.none() | st.tuples(st.integers(0, 2), schedulers), max_size=12))
def test_a_worker_is_well_unless_it_has_said_twice_in_a_row_that_it_hangs(
    told: list[tuple[int, tuple[Scheduler, ...]] | None],
) -> None:
    """None: it answers without a report, as a replica does that was started anew without the overlay."""
    watch, in_a_row, given_up = Watch(TIMEOUT_S), 0, 0
    for now_s, report in enumerate(told):
        in_flight, all_of_it = report or (0, ())
        hangs = any(
            one.ran_s_ago > TIMEOUT_S
            or one.passed_s_ago > TIMEOUT_S * (FORWARD_TIMEOUTS if one.computes else 1)
            for one in all_of_it
        )
        in_a_row = in_a_row + 1 if hangs and (in_flight or in_a_row) else 0
        watch.answered("a", True, float(now_s), report and Liveness(*report))
        fallen = watch.decide(["a"], float(now_s))
        given_up += bool(fallen)
        assert bool(fallen) is (in_a_row == HANGS), "said once"
        assert watch.is_well("a") is (in_a_row < HANGS)


def test_what_is_no_report() -> None:
    odd = b'{"in_flight":1,"schedulers":[{}]}'
    for body in (b"", b"ok", b"{}", b"\xff", b'{"in_flight": 1}', b"[" * 100_000, odd):
        assert Liveness.read(body) is None


def test_silence_is_counted_from_the_last_byte() -> None:
    watch = Watch(TIMEOUT_S)
    assert watch.decide(["a", "b"], 0.0) == frozenset()
    for second in range(1, 6):
        watch.heard("a", float(second))
        assert watch.decide(["a", "b"], float(second)) == frozenset()
    assert watch.decide(["a", "b"], 6.0) == {"b"}
    assert (watch.is_well("a"), watch.is_well("b")) == (True, False)
    assert watch.decide(["a", "b"], 7.0) == frozenset(), "said once"
    watch.heard("b", 7.0)
    assert not watch.is_well("b"), "bytes of an old answer are no answer"
    watch.answered("b", True, 7.5)
    assert watch.is_well("b")


def test_refusals_and_503() -> None:
    watch = Watch(TIMEOUT_S)
    watch.refused("a", 0.0)
    assert watch.is_well("a")
    watch.refused("a", 0.1)
    assert not watch.is_well("a")
    assert watch.decide(["a"], 4.0) == frozenset(), "refusing is not silence"
    watch.answered("a", True, 4.2)
    assert watch.is_well("a")
    watch.answered("a", False, 4.3)
    assert not watch.is_well("a")
    watch.decide([], 4.4)
    assert watch.is_well("a"), "a worker that was forgotten begins anew"


def test_a_gateway_that_slept_blames_nobody() -> None:
    watch = Watch(TIMEOUT_S)
    now_s = 0.0
    watch.decide(["a"], now_s)
    assert watch.decide(["a"], now_s + 60.0) == frozenset()
    now_s += 60.0
    for _ in range(5):
        now_s += INTERVAL_S
        assert watch.decide(["a"], now_s) == frozenset()
    assert watch.decide(["a"], now_s + INTERVAL_S) == {"a"}
