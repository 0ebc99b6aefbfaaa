"""What a replica publishes for routers over ZMQ, protected by CURVE: KV events, their replay, and its load.

`PUBLISHER` is one of SGLang's event publishers: SGLang's own, with keys on its sockets. The folder of the keys is in
`KEYS_VARIABLE`. With keys, load goes over CURVE too; with or without them it is published where KV events are, because
SGLang takes no other address for load than all of the machine's.
"""

import os
from functools import cache
from typing import Any

import zmq
from sglang.srt.disaggregation import kv_events
from sglang.srt.managers.scheduler_components import load_publisher
from sglang.srt.utils.network import is_zmq_endpoint_ipv6

from sglang_fair.common.curve import KEYS_VARIABLE, PUBLISHER, Gate, Keys


class Guarded:
    """Stands where SGLang has a ZMQ context: what it makes are sockets that let in routers alone."""

    def __init__(self, context: "zmq.Context[Any]", folder: str) -> None:
        """Raises ValueError if there are no keys in `folder`."""
        self._context = context
        self._keys = Keys.read(folder, "replica")
        self.gate = Gate(context, self._keys)
        self.gate.run()

    def socket(self, kind: int) -> Any:
        """A server's socket, which is not bound yet."""
        made = self._context.socket(kind)
        self._keys.serve(made)
        self.gate.watch(made)
        return made


@cache
def guarded(folder: str) -> Guarded:
    """The one of this process: a context has one gate."""
    return Guarded(zmq.Context.instance(), folder)


class CurvePublisher(kv_events.ZmqEventPublisher):
    """SGLang's publisher behind keys."""

    def _socket_setup(self) -> None:
        folder = os.environ.get(KEYS_VARIABLE)
        if not folder:
            raise SystemExit(f"sglang-fair: publisher {PUBLISHER} needs a folder of keys in {KEYS_VARIABLE}")
        self._ctx = guarded(folder)
        super()._socket_setup()


def register() -> None:
    """Makes the publisher known to SGLang in this process."""
    if PUBLISHER not in kv_events.EventPublisherFactory._registry:
        kv_events.EventPublisherFactory.register_publisher(PUBLISHER, CurvePublisher)


def open_load_socket(original: Any, endpoint: str) -> Any:
    """Around SGLang's opening of the socket for load."""
    folder = os.environ.get(KEYS_VARIABLE)
    if not folder:
        return original(endpoint)
    made = guarded(folder).socket(zmq.PUB)
    made.set_hwm(load_publisher.LOAD_PUB_HWM)
    made.linger = 0
    made.ipv6 = is_zmq_endpoint_ipv6(endpoint)
    made.bind(endpoint)
    return made


def beside_kv_events(result: Any, *args: Any, kv_endpoint: str | None = None, **kwargs: Any) -> Any:
    """After SGLang's choice of host and port for load: the host is that of the KV events."""
    found, reason = result
    host = (kv_endpoint or "").removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return ((host, found[1]) if found is not None and host else found), reason


def refused() -> int | None:
    """How many connections of peers without the right key this process has refused; None: anybody may connect."""
    folder = os.environ.get(KEYS_VARIABLE)
    return guarded(folder).gate.refused if folder and guarded.cache_info().currsize else None
