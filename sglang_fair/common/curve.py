"""ZMQ's CURVE between router, gateways and replicas: who may connect, and that nobody else can read what is said.

Each role has one key pair. A server shows that it has its role's secret key, a client that it has that of a role which
the server admits; everything that follows is encrypted (https://rfc.zeromq.org/spec/26). A folder holds, of each role,
NAME.key (public) and NAME.key_secret, in ZMQ's format. A process needs its own secret key and the others' public ones.

    router     serves gateways, and follows replicas
    gateway    asks the router; so do other processes that send it events
    replica    publishes KV events and load to routers
"""

import contextlib
import logging
import os
import struct
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import zmq
import zmq.auth
from zmq.utils.monitor import recv_monitor_message
from zmq.utils.z85 import decode

Role = Literal["router", "gateway", "replica"]
ROLES: tuple[Role, ...] = get_args(Role)

ADMITTED: Mapping[Role, tuple[Role, ...]] = {"router": ("gateway",), "replica": ("router",), "gateway": ()}
"""By a server's role: the roles of its clients."""

HANDLER = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a client may connect (https://rfc.zeromq.org/spec/27), once in each context."""

KEYS_VARIABLE = "SGLANG_FAIR_KEYS"
"""Where a replica's processes find the folder."""

PUBLISHER = "fair-curve"
"""A replica's publisher of KV events behind keys, in SGLang's `--kv-events-config`."""

FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

TURN_MS = 200
"""A server that is watched later is seen after so long."""

log = logging.getLogger("curve")

Socket = Any
"""A `zmq.Socket`, of whatever kind."""


def make(folder: Path) -> list[Path]:
    """Makes the keys of all roles in `folder`, which is made if it is not there, and lists the files. Those of secret
    keys are for their owner alone. Raises FileExistsError if there is a key already, and OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = [path for role in ROLES for path in _files(folder, role)]
    for path in found:
        if path.exists():
            raise FileExistsError(f"{path} is there already")
    before = os.umask(0o077)
    try:
        for role in ROLES:
            zmq.auth.create_certificates(folder, role)
    finally:
        os.umask(before)
    for path in found[::2]:
        path.chmod(0o644)
    return found


def make_if_none(folder: Path) -> None:
    """`make`, unless there is a key of any role already. Raises OSError."""
    if not any(path.exists() for role in ROLES for path in _files(folder, role)):
        make(folder)


def _check(key: bytes) -> None:
    try:
        is_key = len(key) == 40 and len(decode(key)) == 32
    except (KeyError, struct.error):  # no character of Z85, or a number that is too large
        is_key = False
    if not is_key:
        raise ValueError("a key has 40 characters of Z85")


def _files(folder: Path, role: Role) -> tuple[Path, Path]:
    return folder / f"{role}.key", folder / f"{role}.key_secret"


@dataclass(frozen=True)
class Keys:
    """What a process of one role needs."""

    role: Role
    public: bytes
    secret: bytes
    others: Mapping[Role, bytes]
    """Public keys."""

    @staticmethod
    def read(folder: str | Path, role: Role) -> "Keys":
        """From a folder as `make` makes it. Raises ValueError for keys that are missing, cannot be read, or are not of
        one pair: those of others would be refused, or it would be."""
        needed = {*ADMITTED[role], *(server for server, clients in ADMITTED.items() if role in clients)}
        try:
            public, secret = zmq.auth.load_certificate(_files(Path(folder), role)[1])
            others = {one: zmq.auth.load_certificate(_files(Path(folder), one)[0])[0] for one in needed}
            keys = Keys(role, public, secret or b"", others)
            shown = _files(Path(folder), role)[0]  # others may have it, and it need not be here
            told = zmq.auth.load_certificate(shown)[0] if shown.exists() else public
            for key in (keys.public, keys.secret, told, *others.values()):
                _check(key)
            if zmq.curve_public(keys.secret) != public or told != public:
                raise ValueError(f"{role}.key and {role}.key_secret are not of one pair")
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} has no keys for a {role}: {error}") from None
        return keys

    @staticmethod
    def read_if(folder: str | None, role: Role) -> "Keys | None":
        """The same, where somebody has named a folder."""
        return None if folder is None else Keys.read(folder, role)

    def serve(self, socket: Socket) -> None:
        """`socket`, before it is bound, lets in who has a key. Needs a `Gate` in its context, or nobody else does."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.zap_domain = self.role.encode()

    def connect(self, socket: Socket, to: Role) -> None:
        """`socket`, before it is connected, talks to a process of role `to` alone."""
        socket.curve_serverkey = self.others[to]
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


class Refusals:
    """Notices that a socket's peers and its owner do not have each other's keys."""

    def __init__(self, socket: Socket) -> None:
        """`socket` is not bound or connected yet."""
        self._socket = socket
        self.monitor: Socket = socket.get_monitor_socket(FAILURES)
        self.monitor.linger = 0

    def has_come(self) -> bool:
        """Whether one has, since this was asked last. Reads one."""
        try:
            recv_monitor_message(self.monitor, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Before or after the socket is closed."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        if not self.monitor.closed:
            self.monitor.close(0)


class Gate:
    """Decides who connects to the servers of one context, and counts those who may not.

    The owner polls `sockets` and calls `serve` for those that are readable; or `run` does so in a thread.
    """

    def __init__(self, context: "zmq.Context[Any]", keys: Keys) -> None:
        """Raises `zmq.ZMQError` if the context has a gate already."""
        self.refused = 0
        """Connections of peers that have no key, or a wrong one, or take us for somebody else; each attempt counts."""
        self._admitted: Collection[bytes] = {decode(keys.others[role]) for role in ADMITTED[keys.role]}
        self._context = context
        self._asked: Socket = context.socket(zmq.REP)
        self._asked.linger = 0
        self._asked.bind(HANDLER)
        self._watched: tuple[Refusals, ...] = ()

    @property
    def sockets(self) -> list[Socket]:
        return [self._asked, *(one.monitor for one in self._watched)]

    def watch(self, server: Socket) -> None:
        """Counts who fails to connect to `server`, which is not bound yet."""
        self._watched = (*self._watched, Refusals(server))

    def serve(self, source: Socket) -> None:
        if source is self._asked:
            with contextlib.suppress(zmq.Again):
                self._answer(source.recv_multipart(zmq.NOBLOCK))
        elif any(one.has_come() for one in self._watched if one.monitor is source):
            self._count()

    def close(self) -> None:
        """Stops; the servers must be closed too."""
        for one in self._watched:
            one.close()
        self._asked.close(0)

    def run(self) -> None:
        """Serves in a daemon thread, as long as the process lives."""
        threading.Thread(target=self._serve_all, name="curve", daemon=True).start()

    def _serve_all(self) -> None:
        while True:
            poller = zmq.Poller()
            for source in self.sockets:
                poller.register(source, zmq.POLLIN)
            for source, _ in poller.poll(TURN_MS):
                self.serve(source)

    def _answer(self, frames: list[bytes]) -> None:
        version, request, mechanism, key = (
            frames[0],
            frames[1],
            frames[5],
            frames[6] if len(frames) > 6 else b"",
        )
        may = mechanism == b"CURVE" and key in self._admitted
        status = (b"200", b"OK") if may else (b"400", b"this key is not admitted")
        self._asked.send_multipart([version, request, *status, b"", b""])

    def _count(self) -> None:
        self.refused += 1
        if not self.refused & (self.refused - 1):  # 1, 2, 4, 8, …
            log.warning("%d connections without the right key were refused", self.refused)
