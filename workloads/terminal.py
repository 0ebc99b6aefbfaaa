"""What the commands of this package have in common: how they show progress, and how they are interrupted."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.live import Live
from rich.text import Text

from workloads.session import Plan, SessionProgress

FILE_COLUMNS = 180
"""Width of tables that go to a file or a pipe."""

LINE_S = 10.0
"""Interval between two lines of progress, where there is no terminal."""


def progress_line(progress: SessionProgress, plan: Plan) -> str:
    state = "draining" if progress.now_s > plan.duration_s else f"of {plan.duration_s:g} s"
    return (
        f"  {progress.now_s:4.0f} s {state}: {progress.programs_done}/{progress.programs_due} programs, "
        f"{progress.ok} requests done, {progress.in_flight} under way, {progress.failed} failed, "
        f"{progress.output_tokens} tokens"
    )


@contextmanager
def progress_view(console: Console, plan: Plan) -> Iterator[Callable[[SessionProgress], None]]:
    """Shows how far a load is: in place on a terminal, else in a line every `LINE_S`."""
    next_s = LINE_S

    def show(progress: SessionProgress) -> None:
        nonlocal next_s
        line = Text(progress_line(progress, plan))
        if console.is_terminal:
            live.update(line)
        elif progress.now_s >= next_s:
            console.print(line)
            next_s = progress.now_s + LINE_S

    with Live(Text(""), console=console, transient=True, refresh_per_second=2) as live:
        yield show


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
