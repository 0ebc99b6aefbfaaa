"""Which TCP ports the processes listen on, chosen so that two clusters on one machine never meet.

A port that is free now may be taken before SGLang binds it, many seconds later. So supervisors also reserve the ports
that they choose (`Marks`).
"""

import contextlib
import errno
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass

FIRST_PORT = 30_000
"""Below the range that Linux gives to outgoing connections (32768 on)."""

LAST_PORT = 32_767


class PortTaken(RuntimeError):
    """A port that was asked for is in use, or none is left."""


@dataclass(frozen=True)
class ReplicaPorts:
    """A replica's ports: `http`, `kv` for KV events, `kv + 1` for their replay, `load` for how much it has to do (None:
    nobody wants to know), and `rendezvous`, where the model's ranks meet. SGLang would draw the last one, and two
    replicas that start together may draw the same."""

    http: int
    kv: int
    rendezvous: int
    load: int | None = None


@dataclass(frozen=True)
class Ports:
    """All ports of one cluster."""

    gateway: int
    router: int
    replicas: tuple[ReplicaPorts, ...]


class Marks:
    """Names of one kind (ports, GPUs) that this process alone of the machine has, until `close` or its death.

    A name is that of an abstract Unix socket, which the kernel frees when the last process that has the socket is gone.
    Linux only: elsewhere the names of other processes are free.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._held: dict[str, socket.socket] = {}

    def take(self, name: str) -> bool:
        """Takes `name`. False if this process or another one has it."""
        if name in self._held:
            return False
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            if sys.platform.startswith("linux"):
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
        self.give_back(*list(self._held))


class Reservations:
    """The ports that this process has reserved, until `close` or its death."""

    def __init__(self, host: str) -> None:
        """`host` is the gateway's; a port counts as free when it is free there and on every address."""
        self._host = host
        self._marks = Marks("port")

    def take(self, port: int) -> bool:
        if not self._marks.take(str(port)):
            return False
        is_ours = False
        try:
            is_ours = is_free(self._host, port) and is_free("", port)
        finally:
            if not is_ours:
                self._marks.give_back(str(port))
        return is_ours

    def choose(self, gateway: int, replicas: int, *, loads: bool = False) -> Ports:
        """Those of a cluster. `gateway` has been reserved; 0 takes a port like the others. `loads`: replicas have a
        port for how much they have to do. Raises `PortTaken` when there are too few."""
        return Ports(gateway or self._run(), self._run(), tuple(self.replica(loads) for _ in range(replicas)))

    def replica(self, loads: bool) -> ReplicaPorts:
        return ReplicaPorts(self._run(), self._run(2), self._run(), self._run() if loads else None)

    def one(self, asked: int | None, option: str) -> int:
        """The port that was asked for with `option`, or a free one. Raises `PortTaken`."""
        if asked is None:
            return self._run()
        if not self.take(asked):
            raise PortTaken(f"port {asked} is in use; choose another with {option}")
        return asked

    def _run(self, count: int = 1) -> int:
        """The first of `count` neighbours that are free."""
        taken: list[int] = []
        for port in range(FIRST_PORT, LAST_PORT):
            if not self.take(port):
                self._marks.give_back(*map(str, taken))
                taken.clear()
            else:
                taken.append(port)
            if len(taken) == count:
                return taken[0]
        raise PortTaken(f"too few free ports from {FIRST_PORT} to {LAST_PORT}")

    def give_back(self, ports: ReplicaPorts) -> None:
        """Frees the ports of a replica that is gone for good."""
        taken = (ports.http, ports.kv, ports.kv + 1, ports.rendezvous, ports.load)
        self._marks.give_back(*(str(port) for port in taken if port is not None))

    def close(self) -> None:
        self._marks.close()


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on `port` of `host` ("": of every address) right now.

    Raises `PortTaken` when it could listen on no port there: no such address, or a privileged port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise PortTaken(f"--host {host}: {error.strerror}") from None
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise PortTaken(f"cannot listen on {host or '*'}:{port}: {error.strerror}") from None
    return True
