"""The supervisor's connection to the router: asks whether it answers, and reports replicas that die and return."""

import asyncio
import contextlib
from typing import Any, Protocol

import zmq
from zmq.asyncio import Context

from router.events import (
    Answer,
    ProtocolError,
    Query,
    Snapshot,
    Swap,
    WorkerDown,
    WorkerDrain,
    WorkerUp,
    decode_answer,
    encode,
)
from sglang_fair.cluster.plan import Worker
from sglang_fair.common.curve import Keys


class Link(Protocol):
    """Tells a router about its workers."""

    def up(self, worker: Worker) -> None:
        """`worker` serves again, with an empty cache."""
        ...

    def down(self, worker: Worker) -> None:
        """`worker` is gone."""
        ...

    def drain(self, worker: Worker) -> None:
        """`worker` must get no new requests; it is gone when it has none left."""
        ...

    def close(self) -> None:
        """Ends the connection."""
        ...


class RouterLink:
    """A DEALER socket to the router. Messages sent while the router is down reach its successor, in order."""

    def __init__(self, endpoint: str, keys: Keys | None = None) -> None:
        """Connects in the background; with `keys`, to a router that has its own."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        if keys is not None:
            keys.connect(self._socket, "router")
        self._socket.connect(endpoint)

    def up(self, worker: Worker) -> None:
        """`worker` serves again, with an empty cache."""
        models = worker.models or ((worker.model,) if worker.model else ())
        self._send(
            encode(
                WorkerUp(
                    worker.name,
                    worker.url,
                    worker.kv,
                    worker.replay,
                    load=worker.load,
                    models=models,
                    loaded="" if worker.models else worker.model,
                )
            )
        )

    def down(self, worker: Worker) -> None:
        """`worker` is gone."""
        self._send(encode(WorkerDown(worker.name)))

    def drain(self, worker: Worker) -> None:
        """`worker` must get no new requests; it is gone when it has none left."""
        self._send(encode(WorkerDrain(worker.name)))

    def close(self) -> None:
        """Drops what has not been sent."""
        self._socket.close()
        self._context.term()

    def _send(self, message: bytes) -> None:
        # The queue is full only if the router is gone for good; it also finds dead replicas by itself.
        with contextlib.suppress(zmq.Again):
            self._socket.send(message, zmq.NOBLOCK)


async def router_answers(endpoint: str, timeout_s: float = 1.0, keys: Keys | None = None) -> bool:
    """Whether a router at `endpoint` answers a query within `timeout_s`. With `keys`, here and below, it must have its
    own."""
    return await router_workers(endpoint, timeout_s, keys) is not None


async def router_workers(
    endpoint: str, timeout_s: float = 1.0, keys: Keys | None = None
) -> dict[str, Any] | None:
    """The workers in the answer of the router at `endpoint`, by name. None if it does not answer in time."""
    return _part(await router_asked(endpoint, Query("ready?"), timeout_s, keys), "workers")


async def router_swaps(
    endpoint: str, timeout_s: float = 1.0, keys: Keys | None = None
) -> dict[str, Any] | None:
    """How far each worker is with loading another model, by name. None if the router does not answer in time."""
    return _part(await router_asked(endpoint, Query("swaps?"), timeout_s, keys), "swaps")


async def router_shortage(
    endpoint: str, timeout_s: float = 1.0, keys: Keys | None = None
) -> dict[str, Any] | None:
    """What the queues of the router at `endpoint` say is missing; None if nothing is, or it does not answer."""
    queues = _part(await router_asked(endpoint, Query("short?"), timeout_s, keys), "queues") or {}
    shortage = queues.get("shortage")
    return shortage if isinstance(shortage, dict) else None


async def router_asked(
    endpoint: str, question: Query | Swap, timeout_s: float = 1.0, keys: Keys | None = None
) -> Answer | None:
    """What the router at `endpoint` answers. None if it does not in time."""
    with Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.connect(socket, "router")
        socket.connect(endpoint)
        await socket.send(encode(question))
        try:
            return decode_answer(await asyncio.wait_for(socket.recv(), timeout_s))
        except (TimeoutError, ProtocolError):
            return None


def _part(answer: Answer | None, name: str) -> dict[str, Any] | None:
    if not isinstance(answer, Snapshot):
        return None
    found = answer.state.get(name)
    return found if isinstance(found, dict) else {}
