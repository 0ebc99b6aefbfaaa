"""All packets of a network, as whoever listens in sees them."""

import socket
import threading
from collections import defaultdict
from collections.abc import Collection

from tests.support.waiting import wait_until

ALL_PROTOCOLS = 0x0003
OUTGOING = 4
TCP = 6
BUFFER_BYTES = 64 << 20
"""As much of it as the machine allows."""


class Packets:
    """`with` it: what is sent over TCP in this process's network meanwhile, over its loopback too, is kept."""

    def __init__(self) -> None:
        self._flows: dict[tuple[bytes, bytes], list[bytes]] = defaultdict(list)
        self._stops = False

    def __enter__(self) -> "Packets":
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ALL_PROTOCOLS))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._socket.settimeout(0.05)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stops = True
        self._thread.join()
        self._socket.close()

    def of(self, ports: Collection[int]) -> list[bytes]:
        """What each connection to or from one of these ports carried, one direction each."""
        return [
            b"".join(pieces)
            for (one, other), pieces in list(self._flows.items())
            if {_port(one), _port(other)} & set(ports)
        ]

    def hold(self, ports: Collection[int], mark: bytes) -> bool:
        """Whether such a connection carried `mark`."""
        return any(mark in flow for flow in self.of(ports))

    def seen(self, ports: Collection[int]) -> int:
        """Bytes of such connections."""
        return sum(map(len, self.of(ports)))

    def wait_for(self, ports: Collection[int]) -> None:
        """Until something was said there."""
        wait_until(lambda: self.seen(ports), f"something is said at {sorted(ports)}")

    def _read(self) -> None:
        while True:
            try:
                data, (interface, _, kind, *_) = self._socket.recvfrom(1 << 17)
            except TimeoutError:
                if self._stops:
                    return
                continue
            if interface == "lo" and kind == OUTGOING:
                continue  # it comes in, too
            if len(data) < 40 or data[0] >> 4 != 4 or data[9] != TCP:
                continue
            head = (data[0] & 15) * 4
            body = data[head + (data[head + 12] >> 4) * 4 : int.from_bytes(data[2:4], "big") or None]
            if body:
                source, target = data[12:16] + data[head : head + 2], data[16:20] + data[head + 2 : head + 4]
                self._flows[source, target].append(body)


def _port(end: bytes) -> int:
    return int.from_bytes(end[4:], "big")
