"""The router's messages: the events it is given, the answers it gives, and their encoding as tagged msgpack maps.

Token ids travel as bytes, little-endian uint32, so that neither side makes a Python object per token.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from sglang_fair.common.deadlines import MOST_SLO_S, Promise
from sglang_fair.common.weights import MOST_WEIGHT

TOKEN_BYTES = 4
"""Bytes of one token id: `numpy.dtype('<u4')`."""

MOST_SPAN_S = 2 * MOST_SLO_S
"""Until a deadline, or since."""

Outcome = Literal["ok", "aborted", "failed"]
"""How a request ended: served; given up by its client or the server; never accepted by the worker."""

MOST_COUNT = 1 << 32
"""Counts are added up, and no sum of so many messages may be more than msgpack can hold."""
MOST_SECONDS = 1e10
"""Of Unix time too."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""Of an order or a question, counted from 1."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
Model = Annotated[str, msgspec.Meta(min_length=1)]
Weight = Annotated[float, msgspec.Meta(ge=1 / MOST_WEIGHT, le=MOST_WEIGHT)]
Limit = Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)] | None
Span = Annotated[float, msgspec.Meta(ge=-MOST_SPAN_S, le=MOST_SPAN_S)]


Kind = TypeVar("Kind")


class ProtocolError(ValueError):
    """The peer sent something that is not a message of this protocol; the text says what is wrong."""


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One message: a map whose `type` is the name of its class."""


class Due(msgspec.Struct, frozen=True, array_like=True):
    """By when the first token of a request's answer is promised: `left_s` after the message was sent, because peers'
    clocks differ."""

    slo_class: str
    slo_s: Annotated[float, msgspec.Meta(gt=0, le=MOST_SLO_S)]
    left_s: Span

    @staticmethod
    def of(promise: Promise, now_s: float) -> "Due":
        """At `now_s` of the promise's clock."""
        left_s = min(MOST_SPAN_S, max(-MOST_SPAN_S, promise.due_s - now_s))
        return Due(promise.slo_class, promise.slo_s, left_s)

    def promise(self, now_s: float) -> Promise:
        """By a clock that shows `now_s`."""
        return Promise(self.slo_class, self.slo_s, now_s + self.left_s)


class Suspicion(msgspec.Struct, frozen=True, array_like=True):
    """Of a request that a worker had when it ended: its digest (`suspects.fingerprint`), and how many workers have
    ended with it so far."""

    client: str
    fingerprint: Annotated[str, msgspec.Meta(max_length=64)]
    ended: Annotated[int, msgspec.Meta(ge=1, le=1_000)]


class Call(Message, frozen=True):
    """What a request is, whether it needs a worker or has one."""

    id: str
    client: str
    tokens: bytes
    max_output_tokens: Count = 0
    namespace: str = ""
    """Cached prefixes are shared within a namespace only: see `wire.namespace`."""
    weight: Weight | None = None
    """The client's, by the tenants' file; None: it says none."""
    weight_version: int = 0
    """Of that file: the latest says what holds."""
    app: str = ""
    interaction: str = ""
    last: bool = False
    """These three as `common.interaction.Part` has them."""
    begun: Count = 0
    """How many calls of its interaction the gateway has seen accepted: before it, or with it once it has a worker."""

    def __post_init__(self) -> None:
        """Raises ValueError for an incomplete token id."""
        _check_tokens(self.tokens)


class Arrive(Call, frozen=True):
    """A gateway asks for a worker for request `id`, other than those in `exclude`.

    The answer is `Place` or `Refuse`. It comes at once, or later if the placement holds requests; then `Held` comes
    first. Until the answer, a `Done` withdraws the question.
    """

    exclude: tuple[str, ...] = ()
    request: str = ""
    """What its gateway calls the request, of which this is one attempt."""
    stage: str = ""
    session: str = ""
    """These two as `common.interaction.Part` has them."""
    attempt: Count = 0
    """0 for the first one at a call. Further ones, and later parts of a stream, are the same call."""
    most_calls: Limit = None
    app_calls: Limit = None
    """The client's own limits while the cluster is overloaded, by the tenants' file: calls a minute in all, and of this
    app. None: those for everybody."""
    model: str = ""
    """The one that must answer. "": the only one that the cluster has."""
    due: Due | None = None
    """None: the gateway promises nothing."""
    stands_for: Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)] = 1
    """Requests of its client, model and deadline, itself among them: of a batch's lines few wait here at a time."""
    fingerprint: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """As `Suspicion` has it."""
    lost: Count = 0
    """How many workers have ended while they had it."""
    goes_on: bool = False
    """Its answer has begun elsewhere."""


class Running(Call, frozen=True):
    """A gateway has request `id` at `worker`. A router that does not know the request counts it from here on."""

    worker: str = ""
    output_tokens: Count = 0


class Progress(Message, frozen=True):
    """What request `id` has produced since it began. Optional."""

    id: str
    output_tokens: Count


class Done(Message, frozen=True):
    """Request `id` has ended. The gateway measures the times; None if it could not."""

    id: str
    output_tokens: Count = 0
    cached_tokens: Count | None = None
    outcome: Outcome = "ok"
    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    lost: Suspicion | None = None
    """The worker broke, or fell silent, while it had the request."""


LEAST_CAPACITY, LARGEST_CAPACITY = 1e-3, 1e3
"""Loads are divided by capacities, and by their sums: beyond these numbers nothing would be left of the others."""
Capacity = Annotated[float, msgspec.Meta(ge=LEAST_CAPACITY, le=LARGEST_CAPACITY)]


URL_PATTERN = "^https?://[!-.0-~]+/?$"
"""Of the address of a replica: scheme, host and port, and no path."""

ZMQ_PATTERN = r"^(tcp://[!-)+-~]+:[0-9]{1,5}|ipc://[!-~]+)$"
"""Of an address to which a router connects for a replica's events or load."""


class WorkerUp(Message, frozen=True):
    """Worker `worker` serves at `url`, and publishes its KV events at `kv` and `replay`, and its load at `load`.

    `capacity` is its speed relative to a worker of capacity 1. `models` are those that it can load, `loaded` is the one
    that it has. Without models it has the only one that there is, or, if it is known at this address, those of before.
    """

    worker: str
    url: str
    kv: str | None = None
    replay: str | None = None
    capacity: Capacity = 1.0
    load: str | None = None
    models: tuple[Model, ...] = ()
    loaded: str = ""
    kv_tokens: Count = 0
    """Of its KV cache; 0: it does not say."""
    chunk_tokens: Count = 0
    """Of one prefill chunk; 0: it does not say."""
    listed: str = ""
    """The list that names it, as the router calls that (`replica_lists`); "": none does."""

    def __post_init__(self) -> None:
        """Raises ValueError if it has a model that it cannot load."""
        if self.loaded and self.loaded not in self.models:
            raise ValueError(f"loaded: {self.loaded!r:.100} is none of its models")


class Agent(Message, frozen=True):
    """What the agent beside worker `worker` finds there: when it changes, and every second. The answer is `Exchange`.
    `number` is of the last order that it has ended, `busy` of the one that it carries out, 0 for none."""

    id: str
    worker: str
    loaded: str = ""
    """The model that the worker serves; "": none, or it is not known."""
    number: Number = 0
    error: str = ""
    """Why that order failed; "": it did not."""
    busy: Number = 0
    target: str = ""
    """What the order under way is to load."""
    swap_s: dict[Model, Seconds] = {}
    """The models that the worker can load, and about how long each takes."""


class Swap(Message, frozen=True):
    """An operator wants worker `worker` to load `model`. The answer is a `Snapshot`, or a `Refuse` with the reason."""

    id: str
    worker: str
    model: str


class WorkerDown(Message, frozen=True):
    """Worker `worker` is gone, with its cache and its requests."""

    worker: str


class WorkerDrain(Message, frozen=True):
    """Worker `worker` gets no new requests, and is gone once those that it has are over."""

    worker: str


class WorkerHealth(Message, frozen=True):
    """Whether worker `worker` answers this peer. As long as there is a peer that it does not answer, it is sick: it
    gets no requests, and its cache is taken to be empty."""

    worker: str
    ok: bool


MOST_BEGUN = 1_000
"""Interactions in one `Begun`, so that a router places requests in between."""


class Begun(Message, frozen=True):
    """Interactions under way of which calls were served through this gateway: (client, app, id, calls accepted, by when
    its calls are due if anything is promised). A router that was restarted takes up those that it does not know."""

    interactions: Annotated[
        tuple[tuple[str, str, str, Count, Due | None], ...], msgspec.Meta(max_length=MOST_BEGUN)
    ]


class Table(Message, frozen=True):
    """All requests that a gateway has asked about or has in flight. The answer is a `Difference`."""

    id: str
    requests: tuple[str, ...]


class Follow(Message, frozen=True):
    """Asks for `Workers`. Peers that send heartbeats are also told of every change."""

    id: str


class Query(Message, frozen=True):
    """Asks for a `Snapshot`."""

    id: str


class Explain(Message, frozen=True):
    """Asks what is remembered of a request, by the id of an `Arrive` or by its `request`. The answer is `Explained`.

    `client`: only of its requests.
    """

    id: str
    request: str
    client: str | None = None


class Lift(Message, frozen=True):
    """An operator ends the quarantine of `client`. The answer is a `Snapshot`, or a `Refuse` if it is in none."""

    id: str
    client: str


class SetLimits(Message, frozen=True):
    """An operator replaces the rules of throttling: `rules` is JSON, as `core.throttle.make_rules` reads it. The answer
    is a `Snapshot`, or a `Refuse` that says what is wrong."""

    id: str
    rules: bytes
    at_s: Seconds = 0.0
    """Unix time."""


class Posted(Message, frozen=True):
    """Rules that an operator has set at `at_s`, in a router that was started with rules of digest `start`. Gateways
    keep them for a router that was restarted. One that was started with other rules keeps its own."""

    rules: bytes
    at_s: Annotated[float, msgspec.Meta(ge=0, le=2 * MOST_SECONDS)]
    """More than can be said: of rules that follow others at once it is a little later."""
    start: str


class Load(Message, frozen=True):
    """Of the `size_tokens` of its KV cache `worker` uses `used_tokens`, and `waiting_tokens` that are not cached wait.
    The core counts and ignores numbers that cannot be."""

    worker: str
    used_tokens: int
    waiting_tokens: int
    size_tokens: int


class Stored(Message, frozen=True):
    """Worker `worker` caches consecutive blocks of `block_tokens` tokens after block `parent`; None: they are the
    beginning of a prompt."""

    worker: str
    hashes: tuple[int, ...]
    parent: int | None
    tokens: bytes
    block_tokens: Annotated[int, msgspec.Meta(ge=1)]
    namespace: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for an incomplete token id."""
        _check_tokens(self.tokens)


class Removed(Message, frozen=True):
    """Worker `worker` has evicted these blocks."""

    worker: str
    hashes: tuple[int, ...]


class Cleared(Message, frozen=True):
    """The cache of worker `worker` is empty."""

    worker: str


class PeerGone(Message, frozen=True):
    """The peer has fallen silent. What it had in flight is over."""


class Tick(Message, frozen=True):
    """Time has passed, and all that peers have sent so far was read. What is due is looked at."""


class Planned(Message, frozen=True):
    """The work of question `number` is done (`Placement.question`). `found`: None if it has failed, or took too
    long."""

    number: int
    found: Any = None


class Place(Message, frozen=True):
    """Send request `id` to `worker` at `url`; `matched_tokens` of its prompt should be cached there."""

    id: str
    worker: str
    url: str
    matched_tokens: int
    call: Number = 0
    """The number of the call in its interaction, from 1; 0: it names none."""
    due: Due | None = None
    """What holds for the call: a later one of an interaction is due when the first was. None: what its gateway has
    promised."""
    tier: Count = 0
    """1: the client is ahead of its share, so others within theirs go before it at the worker too."""
    model: str = ""
    """Which the worker must have: it can load others. "": it cannot."""
    on_trial: bool = False
    """It is suspected of ending workers (`suspects`): the router waits to hear that its answer has begun."""


class Refuse(Message, frozen=True):
    """Request `id` gets no worker because of `reason`. With `retry`, asking again later may succeed. `is_full`: too
    many requests of its client are waiting. `code`: as in `core.throttle.Refusal`, or `suspects`."""

    id: str
    reason: str
    retry: bool
    is_full: bool = False
    code: str = ""
    retry_after_s: Seconds | None = None


class Held(Message, frozen=True):
    """Request `id` waits: its `Place` or `Refuse` follows, however long that takes. The gateway need not ask again as
    long as each `Difference` names it in `held`."""

    id: str


class Exchange(Message, frozen=True):
    """What the agent beside `worker` has to do: order `number` is to load `model`; 0: nothing. `ahead` are the models
    that the worker is going to need, soonest first."""

    id: str
    worker: str
    number: Annotated[int, msgspec.Meta(ge=0)] = 0
    model: str = ""
    ahead: tuple[str, ...] = ()
    complaint: str = ""
    """What is wrong with what it said; "": nothing."""


class Cut(Message, frozen=True):
    """The worker of request `id` is to load another model. A gateway that can have the answer continued cuts it off and
    asks again; any other one lets it finish."""

    id: str


class Difference(Message, frozen=True):
    """How the router's list of a gateway's requests differs from the gateway's own: `missing` the router does not know
    (the gateway sends a `Running` for each), `unsettled` the router alone has (a `Done`), `held` wait at the router; of
    others that waited the gateway asks again."""

    id: str
    missing: tuple[str, ...]
    unsettled: tuple[str, ...]
    held: tuple[str, ...] = ()


class Workers(Message, frozen=True):
    """The workers that are up; those in `draining` or `sick` get no new requests. `router` identifies this run of the
    router: after a restart it knows nothing of what was before."""

    id: str
    workers: tuple[WorkerUp, ...]
    draining: tuple[str, ...] = ()
    sick: tuple[str, ...] = ()
    router: str = ""
    limits: Posted | None = None
    """None: those that it was started with hold, if it throttles."""
    plans: bool = False
    """It orders the workers' queues, so no other router may do so."""


class Snapshot(Message, frozen=True):
    """The router's state as plain maps, lists, numbers and strings, for people and dashboards."""

    id: str
    state: dict[str, object]


class Explained(Message, frozen=True):
    """The placements that were asked for, the latest first, as `record.PlacementRecord` shows them."""

    id: str
    placements: tuple[dict[str, object], ...]


PeerEvent = (
    Arrive
    | Progress
    | Done
    | Running
    | Begun
    | Posted
    | Table
    | WorkerUp
    | WorkerDown
    | WorkerDrain
    | WorkerHealth
    | Agent
    | Swap
    | Follow
    | Query
    | Explain
    | Lift
    | SetLimits
)
"""What gateways, the supervisor and agents may send."""

Question = Arrive | Table | Agent | Swap | Follow | Query | Explain | Lift | SetLimits
"""Those that are answered; an answer has the `id` of its question."""

CacheEvent = Stored | Removed | Cleared
"""What the router reads from the KV events of a replica."""

ReplicaEvent = CacheEvent | Load
"""What the router hears from replicas."""

LinkEvent = PeerGone | Tick | Planned
"""What the router's own shell notices: of its peers, of time, and of plans."""

Event = PeerEvent | ReplicaEvent | LinkEvent

Answer = Place | Refuse | Held | Cut | Difference | Workers | Snapshot | Explained | Exchange

Action = tuple[bytes, Answer]
"""(peer, answer): send `answer` to `peer`, whose question it answers."""

_EVENTS: msgspec.msgpack.Decoder[PeerEvent] = msgspec.msgpack.Decoder(PeerEvent)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

encode = msgspec.msgpack.Encoder().encode


def decode_event(data: bytes) -> PeerEvent:
    """Raises `ProtocolError` if `data` is no event that peers may send."""
    return _decode(_EVENTS, data, "event")


def decode_answer(data: bytes) -> Answer:
    """Raises `ProtocolError` if `data` is no answer."""
    return _decode(_ANSWERS, data, "answer")


def _decode(decoder: msgspec.msgpack.Decoder[Kind], data: bytes, what: str) -> Kind:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not an {what}: {error}") from error


def _check_tokens(tokens: bytes) -> None:
    if len(tokens) % TOKEN_BYTES:
        raise ValueError(f"tokens: {len(tokens)} bytes are not a whole number of {TOKEN_BYTES}-byte ids")
