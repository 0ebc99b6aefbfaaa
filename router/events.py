"""What the router is told and what it answers, and how each becomes bytes: msgpack, one tagged map a message.

Token ids travel as bytes, little-endian uint32, so that neither side makes a Python object per token.
"""

from typing import Annotated, Literal

import msgspec

TOKEN_BYTES = 4
"""Bytes of one token id: `numpy.dtype('<u4')`."""

Outcome = Literal["ok", "aborted", "failed"]
"""How a request ended: served; given up by its client or the server; never accepted by the worker."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ProtocolError(ValueError):
    """The peer sent something that is no message of this protocol; the text says what is wrong with it."""


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One message: a map whose `type` is the name of its class."""


class Arrive(Message, frozen=True):
    """A gateway has a request and asks for a worker; workers in `exclude` are not to be named.

    Answered at once, or when its turn comes if the placement holds requests: `Done` takes it back until then.
    """

    id: str
    client: str
    tokens: bytes
    max_output_tokens: Count = 0
    namespace: str = ""
    """What else makes a cached prefix another one than its tokens: model, adapter, cache salt."""
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """A cut token id is the sender's mistake."""
        _check_tokens(self.tokens)


class Progress(Message, frozen=True):
    """Request `id` has produced `output_tokens` so far, all told. Optional."""

    id: str
    output_tokens: Count


class Done(Message, frozen=True):
    """Request `id` has ended. Times are the gateway's; None where it could not measure."""

    id: str
    output_tokens: Count = 0
    cached_tokens: Count | None = None
    outcome: Outcome = "ok"
    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None


class WorkerUp(Message, frozen=True):
    """Worker `worker` serves at `url`; `kv` and `replay` are its sockets for KV events, None if it has none.

    `capacity` is its speed beside that of a worker of capacity 1: loads are divided by it.
    """

    worker: str
    url: str
    kv: str | None = None
    replay: str | None = None
    capacity: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class WorkerDown(Message, frozen=True):
    """Worker `worker` is gone, with its cache and all it was serving."""

    worker: str


class WorkerDrain(Message, frozen=True):
    """Worker `worker` is to get no new requests; it is gone when those that it has are over."""

    worker: str


class WorkerHealth(Message, frozen=True):
    """Whether worker `worker` answers. While it does not, it gets no requests and is believed to cache nothing."""

    worker: str
    ok: bool


class Running(Message, frozen=True):
    """A gateway has request `id` at `worker`, which a router that does not know it must count from here on."""

    id: str
    client: str
    worker: str
    tokens: bytes
    max_output_tokens: Count = 0
    namespace: str = ""
    output_tokens: Count = 0

    def __post_init__(self) -> None:
        """A cut token id is the sender's mistake."""
        _check_tokens(self.tokens)


class Table(Message, frozen=True):
    """All requests that a gateway has asked about or has in flight. Asks for a `Difference`."""

    id: str
    requests: tuple[str, ...]


class Follow(Message, frozen=True):
    """Asks for `Workers`. A peer that sends heartbeats hears of every change besides."""

    id: str


class Stored(Message, frozen=True):
    """Worker `worker` caches `len(hashes)` consecutive blocks of `block_tokens` tokens after block `parent`.

    `parent` None: they start a prompt. `namespace` as in `Arrive`.
    """

    worker: str
    hashes: tuple[int, ...]
    parent: int | None
    tokens: bytes
    block_tokens: Annotated[int, msgspec.Meta(ge=1)]
    namespace: str = ""

    def __post_init__(self) -> None:
        """A cut token id is the sender's mistake."""
        _check_tokens(self.tokens)


class Removed(Message, frozen=True):
    """Worker `worker` has dropped these blocks from its cache."""

    worker: str
    hashes: tuple[int, ...]


class Cleared(Message, frozen=True):
    """Worker `worker` caches nothing any more."""

    worker: str


class Query(Message, frozen=True):
    """Asks for a `Snapshot`."""

    id: str


class Place(Message, frozen=True):
    """Send request `id` to `worker` at `url`; `matched_tokens` of its prompt should be cached there."""

    id: str
    worker: str
    url: str
    matched_tokens: int


class Refuse(Message, frozen=True):
    """Request `id` gets no worker, because of `reason`; `retry`: asking again later may succeed.

    `is_full`: as many requests of its client wait as may.
    """

    id: str
    reason: str
    retry: bool
    is_full: bool = False


class Difference(Message, frozen=True):
    """What the router's table of a gateway and the gateway's own do not share.

    `missing` are not known here: to be told by `Running`. `unsettled` are in flight here: to be told by `Done`.
    """

    id: str
    missing: tuple[str, ...]
    unsettled: tuple[str, ...]


class Workers(Message, frozen=True):
    """The workers that are up; `draining` and `sick` among them get no new requests.

    `router` names this run of the router: another one has lost what it was told before.
    """

    id: str
    workers: tuple[WorkerUp, ...]
    draining: tuple[str, ...] = ()
    sick: tuple[str, ...] = ()
    router: str = ""


class Snapshot(Message, frozen=True):
    """The router's state, of plain maps, lists, numbers and texts, for people and dashboards."""

    id: str
    state: dict[str, object]


Event = (
    Arrive
    | Progress
    | Done
    | Running
    | Table
    | WorkerUp
    | WorkerDown
    | WorkerDrain
    | WorkerHealth
    | Follow
    | Stored
    | Removed
    | Cleared
    | Query
)
"""All that the router can be told."""

Answer = Place | Refuse | Difference | Workers | Snapshot
"""All that the router can say."""

Action = tuple[bytes, Answer]
"""(peer, answer): who is to be told what. The peer is the one `Router.handle` was given with the question."""

_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Event | Answer) -> bytes:
    """The bytes of a message."""
    return _ENCODER.encode(message)


def decode_event(data: bytes) -> Event:
    """The event in `data`. Raises `ProtocolError` when there is none."""
    try:
        return _EVENTS.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not an event: {error}") from error


def decode_answer(data: bytes) -> Answer:
    """The answer in `data`. Raises `ProtocolError` when there is none."""
    try:
        return _ANSWERS.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not an answer: {error}") from error


def _check_tokens(tokens: bytes) -> None:
    if len(tokens) % TOKEN_BYTES:
        raise ValueError(f"tokens: {len(tokens)} bytes are no whole number of {TOKEN_BYTES}-byte ids")
