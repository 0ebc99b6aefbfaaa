"""The gRPC services of a picker: ext_proc, one stream a request, and the health of both."""

import asyncio
import datetime
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from router.gateway.errors import ApiError
from router.gateway.gateway import Gateway
from router.gateway.listener import KINDS, ClientGone
from router.gateway.relay import Relay
from router.gateway.request.kinds import style_of
from router.picker import wire
from router.picker.endpoints import Endpoints
from router.picker.request import Message, PickedRequest, Send, Terms
from sglang_fair.common import tls
from sglang_fair.settings import table

log = logging.getLogger("picker")

HEALTH_S = 0.5
SPARE_BYTES = 1 << 20
"""Of a message, besides the piece of a body in it."""
READ_BY_ALL = "/v1/"
"""What begins paths that clients may read at a replica."""


class Picker:
    """Serves the requests of a gateway process's clients. Belongs to one event loop."""

    def __init__(self, gateway: Gateway, settings: table.Picker) -> None:
        self._gateway = gateway
        self.endpoints = Endpoints(gateway.fleet)
        self._terms = Terms(
            self.endpoints, settings.tries, gateway.classes.seconds, is_conformance=settings.conformance
        )
        self._answering: set[asyncio.Task[None]] = set()

    async def process(self, messages: AsyncIterator[Message], context: Any) -> None:
        """One HTTP request, until it is answered or its client has left."""
        first = await anext(messages, None)
        if first is None or not first.HasField("request_headers"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be request_headers")
            return
        request = PickedRequest(first, peer_of(context.peer()), _sender(context), self._terms)
        answering = asyncio.create_task(self._answer(request))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        reading = asyncio.current_task()
        assert reading is not None
        answering.add_done_callback(lambda _: reading.cancel())
        try:
            async for message in messages:
                request.take(message)
            request.left()
            await answering
        except asyncio.CancelledError:
            request.left()
            if not answering.done():
                raise
            reading.uncancel()

    async def _answer(self, request: PickedRequest) -> None:
        try:
            kind = KINDS.get(request.path.encode()) if request.method == "POST" else None
            if kind is not None:
                await Relay(kind, self._gateway, request).run()
                await request.finish()
            else:
                await self._pass(request)
        except ClientGone:
            pass
        except Exception:
            log.exception("request %s %s", request.method, request.path)
            with suppress(ClientGone):
                if not request.started:
                    await _refuse(request, ApiError(500, "the picker failed", code="internal"))

    async def _pass(self, request: PickedRequest) -> None:
        """What no tokens are computed for: any replica answers it. Nothing is counted."""
        gateway = self._gateway
        try:
            gateway.identity.of(request.headers, request.client)
            if request.has_body or request.method not in ("GET", "HEAD"):
                raise ApiError(404, "no such path, or not with this method", code="not_found")
            if not request.path.startswith(READ_BY_ALL):
                raise ApiError(404, f"only paths below {READ_BY_ALL} are read here", code="not_found")
            if not await request.send_on(None, {}):
                raise ApiError(503, "no replica is ready", code="refused", retry_after_s=1)
        except ApiError as error:
            gateway.metrics.count("refusals_total", str(error.status))
            await _refuse(request, error)
            return
        await request.answer_begins()
        request.start(200, {})
        while piece := await request.answer_piece():
            await request.piece(piece)
        await request.end()
        await request.finish()


class Server:
    """The services at an address: `start` it, `close` it."""

    def __init__(self, gateway: Gateway, settings: table.Picker) -> None:
        """Raises ValueError, in one line, for certificates that cannot be used."""
        self._gateway, self._settings = gateway, settings
        self._credentials = credentials(settings)
        self._picker = Picker(gateway, settings)
        self._health = health.aio.HealthServicer()
        self._following: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Listens; the port. Raises OSError if the address cannot be had."""
        settings = self._settings
        largest = ("grpc.max_receive_message_length", settings.max_body_bytes + SPARE_BYTES)
        self._server = grpc.aio.server(options=[largest, ("grpc.so_reuseport", 0)])
        method = grpc.stream_stream_rpc_method_handler(
            self._picker.process,
            request_deserializer=wire.messages.ProcessingRequest.FromString,
            response_serializer=wire.messages.ProcessingResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(wire.SERVICE, {wire.METHOD: method})
        self._server.add_generic_rpc_handlers((handler,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        where = f"{f'[{settings.host}]' if ':' in settings.host else settings.host}:{settings.port}"
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(where)
            else:
                port = self._server.add_secure_port(where, self._credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {where}: {error}") from None
        await self._tell_health()
        await self._server.start()
        self._following = [asyncio.create_task(one) for one in (self._picker.endpoints.run(), self._watch())]
        return int(port)

    async def close(self, notice_s: float, drain_s: float) -> None:
        """After `notice_s`, in which gateways see that it is about to end, accepts nothing more; what is under way may
        take `drain_s`."""
        self._gateway.is_ending = True
        await self._tell_health()
        await asyncio.sleep(notice_s)
        await self._server.stop(drain_s)
        for task in self._following:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            await self._tell_health()
            await asyncio.sleep(HEALTH_S)

    async def _tell_health(self) -> None:
        status = health_pb2.HealthCheckResponse
        is_ready = not self._gateway.is_ending and bool(self._picker.endpoints.able(None, 1))
        await self._health.set("liveness", status.SERVING)
        for name in ("", "readiness", wire.SERVICE):
            await self._health.set(name, status.SERVING if is_ready else status.NOT_SERVING)


def credentials(settings: table.Picker) -> grpc.ServerCredentials | None:
    """What it shows; None: there is no TLS. Raises ValueError for what cannot be used."""
    if settings.plaintext:
        return None
    certificate, key = settings.tls_cert, settings.tls_key
    if certificate is None:
        return grpc.ssl_server_credentials([_self_signed()])

    def read() -> grpc.ServerCertificateConfiguration:
        tls.server(certificate, key)  # raises ValueError if they are no pair
        pair = Path(key or certificate).read_bytes(), Path(certificate).read_bytes()
        return grpc.ssl_server_certificate_configuration([pair])

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        try:
            return read()
        except (OSError, ValueError):  # the one before stays
            return None

    return grpc.dynamic_ssl_server_credentials(read(), renewed)


def peer_of(text: str) -> tuple[str, int] | None:
    """Host and port of a peer, as gRPC writes it; None for a Unix socket."""
    scheme, _, rest = text.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    return (host.strip("[]"), int(port)) if scheme in ("ipv4", "ipv6") else None


def _self_signed() -> tuple[bytes, bytes]:
    """A key and its certificate, in PEM, for a picker whose name no gateway checks."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sglang-fair picker")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(days=1))
    signed = made.not_valid_after(now + datetime.timedelta(days=3650)).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(pem, *plain), signed.public_bytes(pem)


def _sender(context: Any) -> Send:
    """Writes a message. Raises `ClientGone` if nobody takes it."""

    async def send(response: Message) -> None:
        try:
            await context.write(response)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ClientGone from None  # gRPC's way to say so
        except Exception as error:  # it has several others
            raise ClientGone from error

    return send


async def _refuse(request: PickedRequest, error: ApiError) -> None:
    style = style_of("messages") if request.path.startswith("/v1/messages") else "openai"
    headers = {"content-type": "application/json", **error.headers}
    await request.answer(error.status, headers, error.body(style))
