"""Silence is counted in the time in which the listener ran."""

from hypothesis import given
from hypothesis import strategies as st

from router.silence import ActiveClock

MOST_S = 2.0
steps = st.lists(st.floats(0, MOST_S), max_size=30)
pauses = st.floats(MOST_S + 0.01, 1e6)


@given(steps, st.floats(-1e6, 1e6))
def test_of_a_process_that_runs_it_is_a_clock(steps: list[float], now_s: float) -> None:
    clock = ActiveClock(MOST_S)
    began_s, first_s = now_s, clock.look(now_s)
    for step_s in steps:
        now_s += step_s
        assert abs(clock.look(now_s) - first_s - (now_s - began_s)) < 1e-6


@given(st.lists(st.one_of(steps, pauses), max_size=10))
def test_pauses_do_not_count(spans: list[list[float] | float]) -> None:
    clock, now_s, ran_s = ActiveClock(MOST_S), 0.0, 0.0
    first_s = clock.look(now_s)
    for span in spans:
        for step_s in span if isinstance(span, list) else (span,):
            now_s += step_s
            clock.look(now_s)
        ran_s += sum(span) if isinstance(span, list) else 0.0
    assert abs(clock.look(now_s) - first_s - ran_s) < 1e-3


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_it_never_goes_back_and_never_runs_ahead(looks: list[float]) -> None:
    """Whoever asks hands it a time that he has read a while ago."""
    clock = ActiveClock(MOST_S)
    shown = [clock.look(now_s) for now_s in looks]
    assert shown == sorted(shown)
    assert shown[-1] - shown[0] <= max(looks) - looks[0] + 1e-9
