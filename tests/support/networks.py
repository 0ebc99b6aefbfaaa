"""Networks of a test's own: whether this process may make them, and how it goes to one."""

import ctypes
import subprocess

CLONE_NEWNET = 0x40000000


def join(pid: int) -> None:
    """The calling thread goes to the network of that process."""
    with open(f"/proc/{pid}/ns/net") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def may_unshare() -> bool:
    """Whether it may make a network and mount files there (unshare -rmn)."""
    return _succeeds("ip link set lo up && mount --bind /dev/null /etc/resolv.conf")


def may_join_two() -> bool:
    """Whether it may join two of them (ip link add type veth, nsenter)."""
    return may_unshare() and _succeeds("ip link add one type veth peer name other && command -v nsenter")


def _succeeds(script: str) -> bool:
    """In a network of its own."""
    try:
        done = subprocess.run(["unshare", "-rmn", "sh", "-c", script], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0
