"""What the commands of this package have in common: how they show progress, and how they are interrupted."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rich.console import Console

from workloads.session import Plan, SessionProgress

FILE_COLUMNS = 180
"""Width of tables that go to a file or a pipe."""


def progress_line(progress: SessionProgress, plan: Plan) -> str:
    """How far a session is, in a line."""
    state = "draining" if progress.now_s > plan.duration_s else f"of {plan.duration_s:g} s"
    return (
        f"  {progress.now_s:4.0f} s {state}: {progress.programs_done}/{progress.programs_due} programs, "
        f"{progress.ok} requests done, {progress.in_flight} under way, {progress.failed} failed, "
        f"{progress.output_tokens} tokens"
    )


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that a command ends in order either way."""
    previous = signal.signal(signal.SIGTERM, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def make_console(*, stderr: bool = False) -> Console:
    """For tables, as wide as the terminal or `FILE_COLUMNS`."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else FILE_COLUMNS)


def interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """For `signal.signal`: a signal that counts as Ctrl-C."""
    raise KeyboardInterrupt
