"""What a process and its children listen on, and whether what is said there is protected."""

import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import psutil

from sglang_fair.common.listening import is_loopback
from tests.support.live import command_line

Speaks = Literal["tls", "curve", "nothing protected"]

TIMEOUT_S = 60.0

GREETING = (b"\xff" + bytes(8) + b"\x7f" + b"\3\0" + b"CURVE".ljust(20, b"\0")).ljust(64, b"\0")
"""That of a client of ZMQ's which speaks CURVE (https://rfc.zeromq.org/spec/23)."""


@dataclass(frozen=True)
class Listener:
    """One socket that others can reach."""

    command: str
    host: str
    port: int

    def speaks(self) -> Speaks:
        """What it is protected by."""
        if self._is_tls():
            return "tls"
        return "curve" if self._mechanism() == b"CURVE" else "nothing protected"

    def _connect(self) -> socket.socket:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return socket.create_connection((host, self.port), TIMEOUT_S)

    def _is_tls(self) -> bool:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            with self._connect() as plain, context.wrap_socket(plain):
                return True
        except OSError:
            return False

    def _mechanism(self) -> bytes:
        seen = b""
        try:
            with self._connect() as peer:
                peer.sendall(GREETING)
                while len(seen) < 32 and (more := peer.recv(64)):
                    seen += more
        except OSError:
            pass
        return seen[12:32].rstrip(b"\0")


def family(pid: int) -> list[psutil.Process]:
    """A process and all its children."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def exposed(pid: int) -> Iterator[Listener]:
    """Those of `family` that other machines could reach."""
    for process in family(pid):
        try:
            found = process.net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        for one in found:
            is_open = one.status == psutil.CONN_LISTEN or (one.type == socket.SOCK_DGRAM and not one.raddr)
            if is_open and one.laddr and not is_loopback(one.laddr.ip):
                yield Listener(command_line(process) or process.name(), one.laddr.ip, one.laddr.port)
