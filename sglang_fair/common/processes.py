"""How our processes hang together: a child that must not outlive the process that started it."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Has the kernel send this process `signal_number` when its parent dies; on Linux only, else nothing.

    Linux ties this to the thread that started the process (prctl(2)): a supervisor should start its
    children from a thread that lives as long as it does.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), signal_number)
