"""TLS: a gateway is served over https, and believes only replicas that the right authority has signed."""

import logging
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from router.gateway.replicas.connections import Connections, NotConnected
from sglang_fair.common import tls
from tests.support.certificates import Certificates
from tests.support.ports import free_port
from tests.support.stand_in import MODEL
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def files(certificates: Certificates, tmp_path: Path) -> Certificates:
    """Copies, which a test may change."""
    names = ("ca.pem", "cert.pem", "key.pem")
    return Certificates(
        *(shutil.copy(Path(certificates.certificate).parent / one, tmp_path) for one in names)
    )


async def test_a_replica_is_believed_by_its_authority(certificates: Certificates, tmp_path: Path) -> None:
    other = Certificates.make(tmp_path / "other")

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def ask(context: ssl.SSLContext | None, host: str = "127.0.0.1") -> bytes:
        connections = Connections(5.0, 30.0, context)
        try:
            async with connections.request(
                "POST", f"https://{host}:{port}", "/generate", {}, b"what"
            ) as answer:
                return await answer.read()
        finally:
            connections.close()

    app = web.Application()
    app.add_routes([web.post("/generate", echo)])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0, ssl_context=context).start()
    port = runner.addresses[0][1]
    ours, shown = tls.believed(certificates.authority), tls.believed(None, certificates.certificate)
    for right, host in ((ours, "127.0.0.1"), (shown, "127.0.0.1"), (shown, "127.0.0.2")):
        assert await ask(right, host) == b"what"
    for wrong, host in (
        (tls.believed(None, other.certificate), "127.0.0.1"),
        (tls.believed(other.authority), "127.0.0.1"),
        (tls.believed(None), "127.0.0.1"),
        (ours, "127.0.0.2"),
    ):
        with pytest.raises(NotConnected):
            await ask(wrong, host)
    await runner.cleanup()


class TestRenewed:
    """Files that change while a program runs."""

    @staticmethod
    def put(new: str, old: str) -> None:
        """As a secret of Kubernetes is renewed: a link that points elsewhere."""
        Path(old).unlink()
        Path(old).symlink_to(new)

    @staticmethod
    def connects(client: ssl.SSLContext | None, server: ssl.SSLContext | None) -> bool:
        assert client is not None
        assert server is not None
        there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = (
            client.wrap_bio(here, there, server_hostname="127.0.0.1"),
            server.wrap_bio(there, here, server_side=True),
        )
        done = set()
        for _ in range(8):
            for side in sides:
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLError:
                    return False
                done.add(side)
        return len(done) == 2

    def test_a_server_shows_the_newest_pair(
        self, files: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        new = Certificates.make(tmp_path / "new", days=3)
        server = tls.server(files.certificate, files.key)
        assert server is not None
        before, after = tls.believed(files.authority), tls.believed(new.authority)
        first = server.end_s
        assert first == pytest.approx(time.time() + 2 * 86_400, abs=3600)
        assert self.connects(before, server)
        assert not self.connects(after, server)
        with caplog.at_level(logging.INFO, "tls"):
            self.put(new.certificate, files.certificate)
            for _ in range(3):
                assert self.connects(before, server), "no pair yet"
            assert [one.levelname for one in caplog.records] == ["WARNING"], "said once"
            self.put(new.key, files.key)
            assert self.connects(after, server)
            assert not self.connects(before, server)
            assert caplog.records[1].message == f"read again: {files.certificate}, {files.key}"
            assert "ends in 3.0 days" in caplog.records[2].message
        assert server.end_s == pytest.approx(first + 86_400, abs=3600)
        assert len(caplog.records) == 3

    def test_clients_believe_the_newest_authority_alone(self, files: Certificates, tmp_path: Path) -> None:
        new = Certificates.make(tmp_path / "new")
        client = tls.believed(files.authority)
        old_server, new_server = (tls.server(one.certificate, one.key) for one in (files, new))
        assert self.connects(client, old_server)
        assert not self.connects(client, new_server)
        Path(files.authority).unlink()
        assert self.connects(client, old_server), "what it read before holds"
        shutil.copy(new.authority, files.authority)
        assert self.connects(client, new_server)
        assert not self.connects(client, old_server)

    def test_who_knows_a_server_by_its_certificate_follows_it(
        self, files: Certificates, tmp_path: Path
    ) -> None:
        new = Certificates.make(tmp_path / "new")
        client, server = tls.believed(None, files.certificate), tls.server(files.certificate, files.key)
        assert self.connects(client, server)
        shutil.copy(new.certificate, files.certificate)
        shutil.copy(new.key, files.key)
        assert self.connects(client, server)
        assert self.connects(client, tls.server(new.certificate, new.key)), (
            "and has not stayed with the old one"
        )

    def test_one_that_has_ended_is_shown_and_warned_of(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        ended = Certificates.make(tmp_path / "ended", days=-1)
        server = tls.server(ended.certificate, ended.key)
        assert server is not None
        assert 0 < server.end_s < time.time()
        assert not self.connects(tls.believed(ended.authority), server)
        server.warn()
        assert "has ended" in caplog.text


@pytest.fixture(params=[1, 2], ids=["a process", "two processes"])
def served(request: pytest.FixtureRequest, files: Certificates, tokenizer: Path) -> Iterator[tuple[int, int]]:
    """Ports of a gateway: that of clients, and that of operators."""
    port, admin = free_port(), free_port()
    command = [
        sys.executable, "-m", "router.gateway", "--port", str(port), "--router", "tcp://127.0.0.1:1",
        "--model-name", MODEL, "--tokenizer", str(tokenizer), "--admin-port", str(admin),
        "--tls-cert", files.certificate, "--tls-key", files.key, "--workers", str(request.param), "--notice", "0",
    ]  # fmt: skip
    with subprocess.Popen(command) as process:
        try:
            yield port, admin
        finally:
            process.terminate()


get = partial(httpx.get, timeout=60)


@pytest.mark.slow
def test_clients_and_operators_are_served_over_https(
    served: tuple[int, int], files: Certificates, tmp_path: Path
) -> None:
    context = tls.believed(files.authority)
    assert context is not None
    port, admin = served

    def answers() -> bool:
        try:
            return get(f"https://127.0.0.1:{port}/health", verify=context).status_code == 503
        except httpx.TransportError:
            return False

    wait_until(answers, "the gateway answers, and says that it has no router")
    assert get(f"https://127.0.0.1:{admin}/status", verify=context).status_code == 200

    def end_s() -> float:
        page = get(f"https://127.0.0.1:{admin}/metrics", verify=context).text
        families = {one.name: one for one in text_string_to_metric_families(page)}
        return families["sglang_fair_gateway_certificate_end_timestamp_seconds"].samples[0].value

    def is_right() -> bool:  # 0 while one of the processes has not said it
        return end_s() == pytest.approx(time.time() + 2 * 86_400, abs=3600)

    wait_until(is_right, "all processes have said when it ends")
    for one in served:
        with pytest.raises(httpx.TransportError):
            get(f"http://127.0.0.1:{one}/health")
        with pytest.raises(httpx.ConnectError):
            get(f"https://127.0.0.1:{one}/health")
    new = Certificates.make(tmp_path / "new")
    for old, renewed in zip((files.certificate, files.key), (new.certificate, new.key), strict=True):
        shutil.copy(renewed, old)
    after = tls.believed(new.authority)
    assert after is not None
    for one, path in ((port, "health"), (admin, "status")):
        assert get(f"https://127.0.0.1:{one}/{path}", verify=after).status_code in (200, 503)
        with pytest.raises(httpx.ConnectError):
            get(f"https://127.0.0.1:{one}/{path}", verify=context)
