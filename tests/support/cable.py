"""Another network than this process has, and a cable between the two. This process is in one of its own (unshare)."""

import os
import subprocess

from tests.support.waiting import wait_until

FRONT, BACK = "10.9.0.1", "10.9.0.2"
"""This process's end, and the other one."""


def run(*words: str) -> None:
    subprocess.run(words, check=True)


class Cable:
    """The other network, as long as a process sleeps in it, and the link to it."""

    def __init__(self) -> None:
        run("ip", "link", "set", "lo", "up")
        self._holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        self.pid = self._holder.pid
        pid = str(self.pid)
        own = os.readlink("/proc/self/ns/net")
        wait_until(lambda: os.readlink(f"/proc/{pid}/ns/net") != own, "the other network")
        self.inside = ("nsenter", "--target", pid, "--net")
        run("ip", "link", "add", "front", "type", "veth", "peer", "name", "back", "netns", pid)
        run("ip", "address", "add", f"{FRONT}/24", "dev", "front")
        run(*self.inside, "ip", "address", "add", f"{BACK}/24", "dev", "back")
        run(*self.inside, "ip", "link", "set", "lo", "up")
        run("ip", "link", "set", "front", "up")
        self.set("up")

    def set(self, state: str) -> None:
        """up or down, at the far end: this one keeps its address, at which processes here reach each other."""
        run(*self.inside, "ip", "link", "set", "back", state)

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
