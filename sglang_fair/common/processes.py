"""A process that begins, and a child process that must not outlive the process that started it."""

import ctypes
import logging
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

PARENT = "SGLANG_FAIR_PARENT"
"""The environment variable in which a process tells its child the process id to live and die with."""


def child_environment() -> dict[str, str]:
    """This process's environment, for a child that calls `die_with_parent` or `die_with_supervisor`.

    It names us as the parent. Otherwise a child whose parent dies while it still imports would take the process
    that adopts it for its parent, and live on.
    """
    return {**os.environ, PARENT: str(os.getpid())}


def die_with_supervisor() -> None:
    """As `die_with_parent`, if the parent gave this process its `child_environment`.

    Without one it was started by a shell or an init system, and lives on when that ends.
    """
    if PARENT in os.environ:
        die_with_parent()


def begin(level: str, *, outlives_parent: bool) -> None:
    """Of a program: what it logs from this level on goes to stderr, and it ends with its parent or does not."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if not outlives_parent:
        die_with_parent()


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Has the kernel send this process `signal_number` when its parent dies. Does nothing outside Linux.

    Linux ties this to the thread that started the process (prctl(2)): a supervisor should start its
    children from a thread that lives as long as it does.
    """
    named = os.environ.pop(PARENT, None)  # it is not our children's parent
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if named is None else int(named)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent:  # it died before we had asked the kernel
        os.kill(os.getpid(), signal_number)
