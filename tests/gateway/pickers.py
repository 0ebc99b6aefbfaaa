"""A picker beside a cluster's gateway, and those who ask it: a test by gRPC, or a real Envoy."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from grpclib.client import Channel
from grpclib.const import Cardinality
from grpclib.exceptions import ProtocolError, StreamTerminatedError
from h2.exceptions import StreamClosedError

from router.gateway.gateway import Gateway
from router.picker.__main__ import as_gateway
from router.picker.request import DESTINATION, EXT_PROC, LOAD_BALANCING, SUBSET, UPSTREAM
from router.picker.server import Server
from router.picker.wire import METHOD, SERVICE
from router.picker.wire import messages as pb
from sglang_fair.settings import table
from tests.gateway.clusters import Cluster
from tests.support.envoy import envoy_started
from tests.support.stand_in import MODEL
from tests.support.waiting import DEADLINE_S, eventually

CHAT_PATH = "/v1/chat/completions"


def named(headers: dict[str, str]) -> Any:
    each = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()]
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=each))


def address(replica: Any) -> str:
    return str(replica.url.removeprefix("http://"))


class Exchange:
    """One HTTP request about which a test asks the picker, as a gateway would."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def send(self, *messages: Any) -> None:
        for message in messages:
            await self._stream.send_message(message)

    async def ask(
        self,
        body: bytes | None,
        *,
        path: str = CHAT_PATH,
        headers: dict[str, str] | None = None,
        subset: Sequence[str] | str | None = None,
        pieces: int = 1,
    ) -> None:
        """The request; None: it is a GET."""
        head = {":method": "GET" if body is None else "POST", ":path": path, **(headers or {})}
        first = pb.ProcessingRequest(request_headers=named(head))
        first.request_headers.end_of_stream = body is None
        if subset is not None:
            hint = {SUBSET[1]: subset if isinstance(subset, str) else list(subset)}
            first.metadata_context.filter_metadata[SUBSET[0]].update(hint)
        await self.send(first)
        if body is not None:
            size = max(1, -(-len(body) // pieces))
            parts = [body[at : at + size] for at in range(0, len(body), size)]
            for number, part in enumerate(parts, 1):
                piece = pb.HttpBody(body=part, end_of_stream=number == len(parts))
                await self.send(pb.ProcessingRequest(request_body=piece))

    async def told(self) -> Any:
        """The next message; None at the end."""
        return await asyncio.wait_for(self._stream.recv_message(), DEADLINE_S)

    async def ends(self) -> None:
        """Raises GRPCError if the stream ends by one."""
        assert await self.told() is None
        await self._stream.recv_trailing_metadata()

    async def picked(self) -> tuple[list[str], dict[str, str], bytes]:
        """The addresses, the headers and the body that the replica gets."""
        head = await self.told()
        assert head is not None
        assert head.HasField("request_headers"), head
        common = head.request_headers.response
        headers = {
            one.header.key: one.header.raw_value.decode() for one in common.header_mutation.set_headers
        }
        headers |= {f"-{name}": "" for name in common.header_mutation.remove_headers}
        assert common.clear_route_cache
        assert head.dynamic_metadata[LOAD_BALANCING][DESTINATION] == headers[DESTINATION]
        body, ends = b"", False
        while not ends:
            told = await self.told()
            assert told is not None
            piece = told.request_body.response.body_mutation.streamed_response
            assert len(piece.body) <= 62_000
            body, ends = body + piece.body, piece.end_of_stream
        return headers[DESTINATION].split(","), headers, body

    async def refused(self) -> tuple[int, dict[str, Any], dict[str, str]]:
        """The status, the error and the headers; the stream ends with it."""
        told = await self.told()
        assert told is not None
        assert told.HasField("immediate_response"), told
        assert await self.told() is None
        found = told.immediate_response
        headers = {one.header.key: one.header.raw_value.decode() for one in found.headers.set_headers}
        return found.status.code, json.loads(found.body)["error"], headers

    async def answer(self, served: str, status: int = 200, kind: str = "application/json") -> None:
        """The head of the answer of whoever has this address; "": the gateway's own."""
        head = named({":status": str(status), "content-type": kind})
        message = pb.ProcessingRequest(response_headers=head)
        if served:
            message.attributes[EXT_PROC].update({UPSTREAM: served})
        await self.send(message)

    async def body(self, *pieces: bytes, ends: bool = True) -> None:
        """Of the answer."""
        for number, piece in enumerate(pieces, 1):
            body = pb.HttpBody(body=piece, end_of_stream=ends and number == len(pieces))
            await self.send(pb.ProcessingRequest(response_body=body))

    async def answered(self) -> tuple[dict[str, str], bytes]:
        """What its client gets, to the end."""
        head = await self.told()
        assert head is not None
        assert head.HasField("response_headers"), head
        mutation = head.response_headers.response.header_mutation
        headers = {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}
        body, ends = b"", False
        while not ends:
            told = await self.told()
            assert told is not None
            if told.HasField("response_trailers"):
                break
            piece = told.response_body.response.body_mutation.streamed_response
            body, ends = body + piece.body, piece.end_of_stream
        return headers, body

    async def leave(self) -> None:
        await self._stream.cancel()


@dataclass
class Picking:
    """A picker, and the cluster that it is of."""

    c: Cluster
    gateway: Gateway
    port: int
    channel: Channel = field(repr=False)
    open: contextlib.AsyncExitStack = field(repr=False)
    """The streams."""

    async def exchange(self) -> Exchange:
        kinds = pb.ProcessingRequest, pb.ProcessingResponse
        stream = self.channel.request(f"/{SERVICE}/{METHOD}", Cardinality.STREAM_STREAM, *kinds)
        self.open.push_async_callback(_left, await stream.__aenter__())
        return Exchange(stream)

    async def post(self, url: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, str], bytes]:
        """By HTTP through Envoy at `url`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.c.http.post(url + CHAT_PATH, json=body, headers=named) as response:
            return response.status, dict(response.headers), await response.read()


async def _left(stream: Any) -> None:
    with contextlib.suppress(ProtocolError, StreamTerminatedError, StreamClosedError):  # it has ended
        await stream.cancel()


@contextlib.asynccontextmanager
async def picking(c: Cluster, tokenizer: Path, **settings: Any) -> AsyncIterator[Picking]:
    """One beside the gateway of `c`, which knows its replicas."""
    given = {"plaintext": True, "model_name": MODEL, "tokenizer": str(tokenizer), "notice_s": 0.0}
    given |= {"port": 0, "router": (c.router.endpoint,), **settings}
    made = table.Picker(**given)
    gateway = Gateway(as_gateway(made), hands_over=True)
    server = Server(gateway, made)
    await gateway.start()
    try:
        port = await server.start()
        workers = len(c.gateway.fleet.workers)
        await eventually(lambda: len(gateway.fleet.workers) == workers, "the picker knows the workers")
        async with Channel("127.0.0.1", port) as channel, contextlib.AsyncExitStack() as streams:
            yield Picking(c, gateway, port, channel, streams)
    finally:
        await server.close(0.0, 0.1)
        await gateway.close()


@contextlib.asynccontextmanager
async def behind_envoy(p: Picking, folder: Path, **more: Any) -> AsyncIterator[str]:
    """The address of an Envoy that asks `p` and serves."""
    ports = [int(one.url.rpartition(":")[2]) for one in p.c.replicas]
    with envoy_started(ports, p.port, folder, **more) as url:

        async def serves() -> bool:
            async with p.c.http.get(f"{url}/v1/models") as response:
                return response.status < 500

        with contextlib.suppress(aiohttp.ClientError):
            await eventually(serves, "Envoy serves")
        yield url
