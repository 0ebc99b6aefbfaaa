"""The emulated GPU's clock: when steps end, and how true the timing was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.sim.gpu_clock import GpuClock


class TestClock:
    steps = st.lists(st.tuples(st.floats(0.001, 1.0), st.floats(0.0, 2.0)), min_size=1, max_size=20)

    @given(steps)
    def test_steps_run_one_after_another_and_none_before_it_is_launched(
        self, steps: list[tuple[float, float]]
    ) -> None:
        clock, now_s, before_s, stalled_s = GpuClock(), 1.0, 1.0, 0.0
        for takes_s, later_s in steps:
            now_s += later_s
            end_s = clock.launch(takes_s, now_s=now_s, cpu_s=0.0, after_idle=False)
            assert end_s == pytest.approx(max(before_s, now_s) + takes_s)
            stalled_s += max(0.0, now_s - before_s) if before_s > 1.0 else 0.0
            before_s = end_s
        report = clock.report()
        assert report["steps"] == len(steps)
        assert report["busy_s"] == pytest.approx(sum(takes_s for takes_s, _ in steps))
        assert report["stalled_s"] == pytest.approx(stalled_s)

    def test_waiting_for_requests_is_no_stall(self) -> None:
        clock = GpuClock()
        clock.launch(1.0, now_s=0.0, cpu_s=5.0, after_idle=True)
        clock.launch(1.0, now_s=10.0, cpu_s=6.0, after_idle=True)
        clock.launch(1.0, now_s=11.5, cpu_s=6.25, after_idle=False)
        report = clock.report()
        assert (report["stalled_s"], report["scheduler_cpu_s"]) == (0.5, 0.25)

    def test_lateness(self) -> None:
        clock = GpuClock()
        assert clock.report()["late_p99_s"] is None
        for late_s in (0.0, 0.5, -1.0, 0.25):
            end_s = clock.launch(1.0, now_s=0.0, cpu_s=0.0, after_idle=False)
            clock.ended(end_s, now_s=end_s + late_s)
        report = clock.report()
        assert (report["late_s"], report["late_max_s"]) == (0.75, 0.5)
        assert report["late_p99_s"] in (0.25, 0.5)
