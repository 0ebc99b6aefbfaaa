"""Another network than this process has, and a cable between the two. This process is in one of its own (unshare)."""

import ctypes
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

from tests.support.waiting import wait_until

FRONT, BACK = "10.9.0.1", "10.9.0.2"
"""This process's end, and the other one."""

CLONE_NEWNET = 0x40000000


def run(*words: str) -> None:
    subprocess.run(words, check=True)


class Cable:
    """The other network, as long as a process sleeps in it, and the link to it."""

    def __init__(self) -> None:
        run("ip", "link", "set", "lo", "up")
        self._holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        pid = str(self._holder.pid)
        own = os.readlink("/proc/self/ns/net")
        wait_until(lambda: os.readlink(f"/proc/{pid}/ns/net") != own, "the other network")
        self.inside = ("nsenter", "--target", pid, "--net")
        run("ip", "link", "add", "front", "type", "veth", "peer", "name", "back", "netns", pid)
        run("ip", "address", "add", f"{FRONT}/24", "dev", "front")
        run(*self.inside, "ip", "address", "add", f"{BACK}/24", "dev", "back")
        run(*self.inside, "ip", "link", "set", "lo", "up")
        run("ip", "link", "set", "front", "up")
        self.set("up")

    def socket(self, family: int, kind: int) -> socket.socket:
        """A socket of the other network."""

        def make() -> socket.socket:
            with open(f"/proc/{self._holder.pid}/ns/net") as network:
                if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return socket.socket(family, kind)

        with ThreadPoolExecutor(1) as thread:  # which alone goes there, and ends
            return thread.submit(make).result()

    def set(self, state: str) -> None:
        """up or down, at the far end: this one keeps its address, at which processes here reach each other."""
        run(*self.inside, "ip", "link", "set", "back", state)

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
