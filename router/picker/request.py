"""One HTTP request that another gateway holds: what it says of the request, and what it is told.

The gateway sends the head, the body in pieces, and later the head and body of the replica's answer, each with trailers
behind it perhaps; it waits for as many answers, in the same order. What it is told of the request is where it goes, and
its head and body as the replica is to have them; of the answer, what the client gets of it. All bodies go through here
(ext_proc's FULL_DUPLEX_STREAMED), so an answer's usage is read as it passes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

from router.events import Place
from router.gateway.listener import Callback, ClientGone
from router.gateway.replicas.connections import Broken
from router.picker.endpoints import Endpoints, Subset
from router.picker.wire import OVERWRITE
from router.picker.wire import messages as pb
from sglang_fair.common.deadlines import HEADER_CLASS
from sglang_fair.common.identity import HEADER_KEY
from sglang_fair.common.service_keys import replica_key

DESTINATION = "x-gateway-destination-endpoint"
"""Where the request goes, in a header and in metadata: addresses, the first one first."""
SERVED = "x-gateway-destination-endpoint-served"
"""Who answered, in metadata of the answer."""
LOAD_BALANCING = "envoy.lb"
SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
EXT_PROC, UPSTREAM = "envoy.filters.http.ext_proc", "upstream.address"
"""Where Envoy says who answered, if it is asked for that attribute."""
OBJECTIVES = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
CHOSEN_BY_TEST, SHOWN_TO_TEST = "test-epp-endpoint-selection", "x-conformance-test-served-endpoint"
"""Headers of the extension's conformance suite: addresses that a client wants, and who answered it."""

NOT_FORWARDED = ("authorization", HEADER_KEY, "accept-encoding", CHOSEN_BY_TEST)
"""A client's key stays here, and an answer comes as it is, to be read."""
OURS = "x-fair-"
"""Begins headers that a replica believes."""

MOST_PIECE_BYTES = 62_000
"""Of a body in one message; more is not let through."""

Message: TypeAlias = Any
"""A `ProcessingRequest` or a part of one."""
Send = Callable[[Any], Awaitable[None]]
"""Takes a `ProcessingResponse`."""


@dataclass(frozen=True)
class Terms:
    """What holds for all requests."""

    endpoints: Endpoints
    most_addresses: int
    classes: Container[str]
    """Of deadlines: an objective of such a name asks for that one."""
    is_conformance: bool = False


class PickedRequest:
    """A `router.gateway.listener.Incoming`, made of its first message. `take` the others; `left` once no more come."""

    def __init__(self, first: Message, client: tuple[str, int] | None, send: Send, terms: Terms) -> None:
        """`client` is the gateway, as a peer."""
        self.headers = _headers(first.request_headers)
        self.client, self.loop = client, asyncio.get_running_loop()
        self.own_headers: Mapping[str, str] = {}
        self.started = self.ended = False
        self.status, self.started_s = 0, 0.0
        self.served_by = ""
        self.method = self.headers.get(":method", "")
        self.path = self.headers.get(":path", "").partition("?")[0]
        self.has_body = not first.request_headers.end_of_stream
        self.is_handed = False
        """The gateway has been told where it goes."""
        self.subset = _subset(first)
        self._send, self._terms = send, terms
        self._inbox: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self._has_left = False
        self._leaving: set[Callback] = set()
        self._has_request_trailers = False
        self._answered_at = ""
        """The address of whoever answers."""
        self._head: Message | None = None
        """Of the answer to the client, until it is sent."""
        self._over = ""
        """With which message the replica's answer has ended: headers, body or trailers."""
        self._is_cut = self._is_closed = False
        objective = next((self.headers[name] for name in OBJECTIVES if name in self.headers), "")
        if objective in terms.classes:
            self.headers.setdefault(HEADER_CLASS, objective)
        if terms.is_conformance and (chosen := self.headers.get(CHOSEN_BY_TEST)):
            self.subset = [one.strip() for one in chosen.split(",")]

    # -- messages of the gateway

    def take(self, message: Message) -> None:
        if message.HasField("response_headers") and not self.is_handed:
            self.left()  # the gateway has answered by itself
        else:
            self._inbox.put_nowait(message)

    def left(self) -> None:
        """Its client has left, or the gateway needs nothing more."""
        if not self._has_left:
            self._has_left = True
            self._inbox.put_nowait(ClientGone())
            for leave in tuple(self._leaving):
                leave()

    def fail(self, error: Exception) -> None:
        """Whoever waits for the next message gets this error, once those before it are read."""
        self._inbox.put_nowait(error)

    async def next(self) -> Message:
        """Raises `ClientGone`, and what it fails by."""
        if self._has_left and self._inbox.empty():
            raise ClientGone
        found = await self._inbox.get()
        if isinstance(found, Exception):
            raise found
        return found

    # -- the request

    @property
    def excluded(self) -> tuple[str, ...]:
        return self._terms.endpoints.excluded(self.subset)

    def whole_body(self) -> bytes | None:
        return None if self.has_body else b""

    async def body_piece(self) -> tuple[bytes, bool]:
        message = await self.next()
        if message.HasField("request_trailers"):
            self._has_request_trailers = True
            return b"", False
        return message.request_body.body, not message.request_body.end_of_stream

    def when_client_leaves(self, leave: Callback) -> Callback:
        if self._has_left:
            self.loop.call_soon(leave)
        self._leaving.add(leave)
        return partial(self._leaving.discard, leave)

    def hand_over(self, place: Place, headers: Mapping[str, str], body: bytes) -> "Handed":
        return Handed(self, place.worker, headers, body)

    async def send_on(self, worker: str | None, headers: Mapping[str, str], body: bytes = b"") -> bool:
        """Has the gateway bring it to `worker`, or to any. False if there is no address of one."""
        addresses = self._terms.endpoints.able(self.subset, self._terms.most_addresses, worker)
        if not addresses:
            return False
        to = ",".join(addresses)
        sent = {**headers, **replica_key.headers(), DESTINATION: to}
        if self.has_body and "content-length" in self.headers:
            sent["content-length"] = str(len(body))
        removed = [
            name
            for name in self.headers
            if (name in NOT_FORWARDED or name.startswith(OURS)) and name not in sent
        ]
        common = pb.CommonResponse(header_mutation=_mutation(sent, removed), clear_route_cache=True)
        response = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
        response.dynamic_metadata.update({LOAD_BALANCING: {DESTINATION: to}})
        self.is_handed = True
        await self._send(response)
        if self.has_body:
            for piece in _pieces(body, ends=not self._has_request_trailers):
                await self._send(pb.ProcessingResponse(request_body=piece))
        if self._has_request_trailers:
            await self._send(pb.ProcessingResponse(request_trailers=pb.HttpTrailers()))
        return True

    # -- the replica's answer

    async def answer_begins(self, asked: str = "") -> Message:
        """Its head. `served_by` is who has answered then, if that is not who was `asked`."""
        message = await self.next()
        if not message.HasField("response_headers"):
            raise Broken("the gateway tells of an answer without its head")
        self._answered_at = _served(message)
        if self._answered_at and (worker := self._terms.endpoints.worker_at(self._answered_at)) != asked:
            self.served_by = worker
        if message.response_headers.end_of_stream:
            self._over = "headers"
        return message.response_headers

    async def answer_piece(self) -> bytes:
        """b"" at its end."""
        while not self._over:
            message = await self.next()
            if message.HasField("response_trailers"):
                self._over = "trailers"
                break
            if message.response_body.end_of_stream:
                self._over = "body"
            piece: bytes = message.response_body.body
            if piece:
                return piece
        return b""

    def cut(self) -> None:
        """Nobody reads the rest of the replica's answer."""
        self._is_cut = not self._over

    # -- the client's answer

    def start(self, status: int, headers: Mapping[str, str]) -> None:
        self._begin(status)
        named = {**headers, **self.own_headers}
        if self._terms.is_conformance:
            named[SHOWN_TO_TEST] = self._answered_at
        removed = [] if "content-length" in named else ["content-length"]
        common = pb.CommonResponse(header_mutation=_mutation(named, removed))
        self._head = pb.HeadersResponse(response=common)

    async def piece(self, body: bytes) -> None:
        await self._send_head()
        for piece in _pieces(body, ends=False):
            await self._send(pb.ProcessingResponse(response_body=piece))

    async def end(self, body: bytes = b"") -> None:
        self.ended = True
        await self._send_head()
        self._is_closed = self._over in ("headers", "body")
        if self._over != "headers" and (body or self._is_closed):
            for piece in _pieces(body, ends=self._is_closed):
                await self._send(pb.ProcessingResponse(response_body=piece))

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """An error takes the place of whatever the gateway has."""
        if status < 400:
            self.start(status, {**headers, "content-length": str(len(body))})
            await self.end(body)
            return
        self._begin(status)
        self.ended = self._is_closed = True
        named = _mutation({**headers, **self.own_headers})
        refused = pb.ImmediateResponse(status=pb.HttpStatus(code=status), headers=named, body=body)
        await self._send(pb.ProcessingResponse(immediate_response=refused))

    async def finish(self) -> None:
        """Once it is served: tells the gateway that the answer is over, when the replica's is. Raises `ClientGone`."""
        if self._is_closed or not self.started:
            return
        while not (self._over or self._is_cut):
            await self.answer_piece()
        if self._over == "trailers":
            await self._send(pb.ProcessingResponse(response_trailers=pb.HttpTrailers()))
        else:
            await self._send(pb.ProcessingResponse(response_body=next(_pieces(b"", ends=True))))

    def _begin(self, status: int) -> None:
        self.started, self.status, self.started_s = True, status, self.loop.time()

    async def _send_head(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            await self._send(pb.ProcessingResponse(response_headers=head))


class Handed:
    """A request on its way to a replica by the gateway, and the answer (`router.gateway.listener`)."""

    def __init__(self, request: PickedRequest, worker: str, headers: Mapping[str, str], body: bytes) -> None:
        self.was_sent = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self._request, self._worker = request, worker
        self._sent = headers, body

    def give_up(self, error: Exception) -> None:
        self._request.fail(error)

    async def __aenter__(self) -> "Handed":
        request = self._request
        if request.is_handed:
            raise Broken("the gateway has it already, and no second replica can be named")
        if not await request.send_on(self._worker, *self._sent):
            raise Broken("its address is not known, or not one of those that the gateway allows")
        self.was_sent = True
        self.headers = _headers(await request.answer_begins(self._worker))
        self.status = int(self.headers.get(":status", "502"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._request.cut()

    async def piece(self) -> bytes:
        return await self._request.answer_piece()

    async def read(self) -> bytes:
        pieces = []
        while piece := await self.piece():
            pieces.append(piece)
        return b"".join(pieces)


def _headers(found: Message) -> dict[str, str]:
    return {
        one.key: one.raw_value.decode("latin-1") if one.raw_value else one.value
        for one in found.headers.headers
    }


def _mutation(named: Mapping[str, str], removed: list[str] | None = None) -> Message:
    each = [
        pb.HeaderValueOption(
            header=pb.HeaderValue(key=name, raw_value=value.encode("latin-1")),
            append_action=OVERWRITE,
        )
        for name, value in named.items()
    ]
    return pb.HeaderMutation(set_headers=each, remove_headers=removed or [])


def _pieces(body: bytes, *, ends: bool) -> Iterator[Message]:
    """At least one; `ends`: nothing follows."""
    for at in range(0, max(1, len(body)), MOST_PIECE_BYTES):
        is_last = ends and at + MOST_PIECE_BYTES >= len(body)
        piece = pb.HttpBody(body=body[at : at + MOST_PIECE_BYTES], end_of_stream=is_last)
        yield pb.BodyResponse(
            response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=piece))
        )


def _subset(message: Message) -> Subset:
    """None where the gateway says nothing of one."""
    namespace, key = SUBSET
    metadata = message.metadata_context.filter_metadata
    if namespace not in metadata or key not in metadata[namespace].fields:
        return None
    value = metadata[namespace].fields[key]
    texts = [one.string_value for one in value.list_value.values] or value.string_value.split(",")
    return [one.strip() for one in texts if one.strip()]


def _served(message: Message) -> str:
    """The address of whoever answered; "" where the gateway does not say, or has answered by itself."""
    metadata = message.metadata_context.filter_metadata
    if LOAD_BALANCING in metadata and (found := metadata[LOAD_BALANCING].fields[SERVED].string_value):
        return str(found)
    if EXT_PROC in message.attributes:
        return str(message.attributes[EXT_PROC].fields[UPSTREAM].string_value)
    return ""
