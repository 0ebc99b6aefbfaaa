"""Names that one process of this machine has at a time, and frees when it dies: how clusters share out what they use.

A name is that of an abstract Unix socket, which the kernel frees when the last process that has the socket is gone.
Linux only: elsewhere every name is free.
"""

import socket
import sys
from collections.abc import Iterable


class Marks:
    """The names of one kind (ports, GPUs) that this process has, until `close` or its death."""

    def __init__(self, kind: str) -> None:
        """Takes none yet."""
        self._kind = kind
        self._held: dict[str, socket.socket] = {}

    def take(self, name: str) -> bool:
        """Takes `name`. False if this process or another one has it."""
        if name in self._held:
            return False
        if not sys.platform.startswith("linux"):
            return True
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            mark.bind(f"\0sglang-fair/{self._kind}/{name}")
        except OSError:
            mark.close()
            return False
        self._held[name] = mark
        return True

    def give_back(self, *names: str) -> None:
        """Frees `names`; those that this process does not have are ignored."""
        for name in names:
            if name in self._held:
                self._held.pop(name).close()

    def descriptors(self, names: Iterable[str]) -> tuple[int, ...]:
        """The open files behind `names`. A child that inherits them has the names, too, for as long as it lives."""
        return tuple(self._held[name].fileno() for name in names if name in self._held)

    def close(self) -> None:
        """Frees all of them."""
        self.give_back(*list(self._held))
