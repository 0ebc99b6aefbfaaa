"""What the commands have in common towards whoever runs them."""

from types import FrameType
from typing import NoReturn

from workloads.session import Plan, SessionProgress

FILE_COLUMNS = 180
"""Width of tables that go into a file."""


def progress_line(progress: SessionProgress, plan: Plan) -> str:
    """Where a run stands, in a line."""
    state = "draining" if progress.now_s > plan.duration_s else f"of {plan.duration_s:g} s"
    return (
        f"  {progress.now_s:4.0f} s {state}: {progress.programs_done}/{progress.programs_due} programs, "
        f"{progress.ok} requests done, {progress.in_flight} under way, {progress.failed} failed, "
        f"{progress.output_tokens} tokens"
    )


def interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """For `signal.signal`: to be asked to end is as Ctrl-C."""
    raise KeyboardInterrupt
