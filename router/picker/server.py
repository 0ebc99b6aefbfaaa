"""The gRPC services of a picker: ext_proc, one stream a request, and the health of both.

Why grpclib and not grpcio: that one passes each message through several threads. Behind Envoy on two cores with other
load a request took 50 ms more there than here, where it takes 4, and 2.5 ms of CPU where it takes 1.8 here.
"""

import asyncio
import datetime
import logging
import ssl
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.health.check import ServiceStatus
from grpclib.health.service import OVERALL, Health
from grpclib.server import Server as GrpcServer
from grpclib.server import Stream

from router.gateway.address import bound
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
HTTP2 = ("h2",)
"""What gRPC's clients ask for."""
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
        self.answering: set[asyncio.Task[None]] = set()
        """The requests under way."""

    def __mapping__(self) -> dict[str, Handler]:
        kinds = wire.messages.ProcessingRequest, wire.messages.ProcessingResponse
        return {f"/{wire.SERVICE}/{wire.METHOD}": Handler(self.process, Cardinality.STREAM_STREAM, *kinds)}

    async def process(self, stream: Stream[Message, Message]) -> None:
        """One HTTP request, until it is answered or its client has left."""
        first = await stream.recv_message()
        if first is None or not first.HasField("request_headers"):
            raise GRPCError(Status.INVALID_ARGUMENT, "the first message must have request_headers")
        if first.HasField("protocol_config") and not _is_duplex(first.protocol_config):
            raise GRPCError(Status.INVALID_ARGUMENT, "both body modes must be FULL_DUPLEX_STREAMED")
        request = PickedRequest(first, stream.peer.addr(), _sender(stream), self._terms)
        answering = asyncio.create_task(self._ended(request, stream))
        self.answering.add(answering)
        answering.add_done_callback(self.answering.discard)
        try:
            while (message := await stream.recv_message()) is not None:
                request.take(message)
        finally:  # cancelled, if the gateway has broken it off
            request.left()
        await answering

    async def _ended(self, request: PickedRequest, stream: Stream[Message, Message]) -> None:
        """Answers it, and ends the stream, of which the gateway may not have ended its half."""
        await self._answer(request)
        with suppress(Exception):  # of several kinds: it is broken off
            await stream.send_trailing_metadata()

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
                    await _refuse(request, ApiError(500, "the picker failed"))

    async def _pass(self, request: PickedRequest) -> None:
        """What no tokens are computed for: any replica answers it. Nothing is counted."""
        gateway = self._gateway
        try:
            gateway.identity.of(request.headers, request.client)
            if request.has_body or request.method not in ("GET", "HEAD"):
                raise ApiError(404, "no such path, or not with this method")
            if not request.path.startswith(READ_BY_ALL):
                raise ApiError(404, f"only paths below {READ_BY_ALL} are read here")
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
        self._tls = None if settings.plaintext else context(settings)
        self._picker = Picker(gateway, settings)
        self._ready, self._alive = ServiceStatus(), ServiceStatus()
        self._alive.set(True)
        self._following: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Listens; the port. Raises OSError if the address cannot be had."""
        settings = self._settings
        ready = [self._ready]
        checks = {
            OVERALL: ready,
            self._picker: ready,
            Named("readiness"): ready,
            Named("liveness"): [self._alive],
        }
        self._server = GrpcServer([self._picker, Health(checks)])
        self._tell_health()
        try:
            listening = bound(settings.host, settings.port)
        except OSError as error:
            raise OSError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from None
        await self._server.start(sock=listening, ssl=self._tls)
        self._following = [asyncio.create_task(one) for one in (self._picker.endpoints.run(), self._watch())]
        return int(listening.getsockname()[1])

    async def close(self, notice_s: float, drain_s: float) -> None:
        """Ends after `notice_s`, in which gateways see that it is about to, and once nothing is under way, or after
        `drain_s` more."""
        self._gateway.is_ending = True
        self._tell_health()
        await asyncio.sleep(notice_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self._picker.answering:
                    await asyncio.wait(self._picker.answering)
        self._server.close()
        await self._server.wait_closed()
        for task in self._following:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            self._tell_health()
            await asyncio.sleep(HEALTH_S)

    def _tell_health(self) -> None:
        is_ready = not self._gateway.is_ending and bool(self._picker.endpoints.able(None, 1))
        self._ready.set(is_ready)


def _is_duplex(config: Message) -> bool:
    return bool(config.request_body_mode == config.response_body_mode == wire.FULL_DUPLEX_STREAMED)


class Named:
    """Stands for a service in the health of services."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __mapping__(self) -> Mapping[str, Any]:
        return {f"/{self._name}/": None}


def context(settings: table.Picker) -> ssl.SSLContext | None:
    """What gateways are shown. Raises ValueError for what cannot be used."""
    if settings.tls_cert is not None:
        return tls.server(settings.tls_cert, settings.tls_key, HTTP2)
    with tempfile.TemporaryDirectory(prefix="sglang-fair-picker-") as folder:
        file = Path(folder, "own.pem")
        file.touch(0o600)
        file.write_bytes(_self_signed())
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.load_cert_chain(file)
    made.set_alpn_protocols(HTTP2)
    return made


def _self_signed() -> bytes:
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
    found: bytes = key.private_bytes(pem, *plain) + signed.public_bytes(pem)
    return found


def _sender(stream: Stream[Message, Message]) -> Send:
    """Writes a message. Raises `ClientGone` if nobody takes it."""

    async def send(response: Message) -> None:
        try:
            await stream.send_message(response)
        except Exception as error:  # of several kinds
            raise ClientGone from error

    return send


async def _refuse(request: PickedRequest, error: ApiError) -> None:
    style = style_of("messages") if request.path.startswith("/v1/messages") else "openai"
    headers = {"content-type": "application/json", **error.headers}
    await request.answer(error.status, headers, error.body(style))
