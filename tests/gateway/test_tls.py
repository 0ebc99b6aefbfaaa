"""TLS: a gateway is served over https, and believes only replicas that the right authority has signed."""

import asyncio
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from router.gateway.replicas.connections import Connections, NotConnected
from sglang_fair.common import tls
from tests.support.certificates import Certificates
from tests.support.ports import free_port
from tests.support.stand_in import MODEL, make_tokenizer
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


def test_a_replica_is_believed_by_its_authority(certificates: Certificates, tmp_path: Path) -> None:
    other = Certificates.make(tmp_path / "other")

    async def ask(context: ssl.SSLContext | None, url: str) -> bytes:
        connections = Connections(5.0, 30.0, context)
        try:
            async with connections.post(url, "/generate", {}, b"what") as answer:
                return await answer.read()
        finally:
            connections.close()

    async def main() -> None:
        async def echo(request: web.Request) -> web.Response:
            return web.Response(body=await request.read())

        app = web.Application()
        app.add_routes([web.post("/generate", echo)])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.certificate, certificates.key)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", 0, ssl_context=context).start()
        port = runner.addresses[0][1]
        url = f"https://127.0.0.1:{port}"
        assert await ask(tls.authorities(certificates.authority), url) == b"what"
        shown = tls.pinned(certificates.certificate)
        assert await ask(shown, url) == b"what"
        assert await ask(shown, f"https://127.0.0.2:{port}") == b"what", "by whatever name it is asked"
        with pytest.raises(NotConnected):
            await ask(tls.pinned(other.certificate), url)
        for wrong, address in (
            (other.authority, url),
            (None, url),
            (certificates.authority, f"https://127.0.0.2:{port}"),
        ):
            with pytest.raises(NotConnected):
                await ask(tls.authorities(wrong), address)
        await runner.cleanup()

    asyncio.run(main())


@pytest.fixture
def served(certificates: Certificates, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Ports of a gateway: that of clients, and that of operators."""
    port, admin = free_port(), free_port()
    command = [
        sys.executable, "-m", "router.gateway", "--port", str(port), "--router", "tcp://127.0.0.1:1",
        "--model-name", MODEL, "--tokenizer", str(make_tokenizer(tmp_path)), "--admin-port", str(admin),
        "--tls-cert", certificates.certificate, "--tls-key", certificates.key,
    ]  # fmt: skip
    with subprocess.Popen(command) as process:
        try:
            yield port, admin
        finally:
            process.terminate()


def test_clients_and_operators_are_served_over_https(
    served: tuple[int, int], certificates: Certificates
) -> None:
    context = tls.authorities(certificates.authority)
    assert context is not None
    port, admin = served

    def answers() -> bool:
        try:
            return httpx.get(f"https://127.0.0.1:{port}/health", verify=context).status_code == 503
        except httpx.TransportError:
            return False

    wait_until(answers, "the gateway answers, and says that it has no router")
    assert httpx.get(f"https://127.0.0.1:{admin}/status", verify=context).status_code == 200
    for one in served:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{one}/health")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"https://127.0.0.1:{one}/health")
