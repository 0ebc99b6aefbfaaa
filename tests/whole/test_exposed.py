"""Every process of a whole cluster that is told to listen beyond its machine: what it listens on is protected."""

import contextlib
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_fair.common.curve import make
from sglang_fair.common.service_keys import admin_key, replica_key
from sglang_fair.tenants import edit
from sglang_fair.tenants.model import Tenant
from tests.support import checkpoints
from tests.support.certificates import Certificates
from tests.support.listeners import Listener, exposed, family
from tests.support.live import Cluster, Replica, command_line
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PROGRAMS = [
    "cluster", "fork_server", "replica", "router", "gateway", "agent", "feeder", "dashboard",
]  # fmt: skip


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


def get(url: str, **more: Any) -> httpx.Response:
    return httpx.get(url, timeout=120, **more)


def trusted(certificates: Certificates) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificates.authority)


def spoken(found: list[Listener]) -> dict[int, str]:
    """What is spoken at each port; AssertionError where nothing protects it."""
    spoken = {one.port: one.speaks() for one in found}
    assert "nothing protected" not in spoken.values(), [
        (one.command[:90], one.host, one.port) for one in found if spoken[one.port] == "nothing protected"
    ]
    return dict(spoken)


def test_a_cluster_with_all_that_it_can_have(certificates: Certificates, tmp_path: Path) -> None:
    """It makes its keys itself, and all of its processes talk to each other as before."""
    models = ",".join(
        f"{name}={checkpoints.write(tmp_path / name, seed)}" for seed, name in enumerate("ab", 1)
    )
    edit.add(tmp_path / "tenants.yaml", "gold", Tenant())
    admin, page = free_port(), free_port()
    with Cluster(
        "--models", models, "--swap", "all", "--replicas", "1", "--placement", "qlm",
        "--host", "0.0.0.0", "--admin-host", "0.0.0.0", "--admin-port", str(admin),
        "--dashboard-port", str(page), "--batches", str(tmp_path / "batches"),
        "--tenants", str(tmp_path / "tenants.yaml"), "--keys", str(tmp_path / "keys"),
        "--tls-cert", certificates.certificate, "--tls-key", certificates.key,
        "--", "--max-running-requests", "8", "--max-total-tokens", "4096",
        environment={admin_key.variable: "operator", replica_key.variable: "replica"},
    ) as cluster:  # fmt: skip
        pid = cluster.addresses["pids"]["cluster"]
        lines = [command_line(process) for process in family(pid)]
        assert [name for name in PROGRAMS if not any(name in line for line in lines)] == []
        assert spoken(list(exposed(pid))) == {int(cluster.url.rpartition(":")[2]): "tls", admin: "tls"}
        headers = {"authorization": "Bearer operator"}
        verify = trusted(certificates)

        def whole() -> bool:
            """The agent says what its replica has, the page reads the gateway."""
            with contextlib.suppress(httpx.TransportError):
                status = get(f"{cluster.addresses['admin']}/status", headers=headers, verify=verify).json()
                view = get(f"{cluster.addresses['dashboard']}/view", headers=headers).json()
                phase = status["swaps"].get("r0", {}).get("phase")
                return bool(phase == "serves" and view["placement"] == "qlm")
            return False

        wait_until(whole, "agent and page reach the others")
        status = get(f"{cluster.addresses['admin']}/status", headers=headers, verify=verify).json()
        assert not status["wire"]["refused"]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    make(tmp_path / "keys")
    monkeypatch.setenv(admin_key.variable, "operator")
    monkeypatch.setenv(replica_key.variable, "replica")
    return str(tmp_path / "keys")


class Far(Replica):
    """Behind TLS, a key and CURVE, at all addresses of this machine."""

    def __init__(self, certificates: Certificates, keys: str) -> None:
        self.load_port = free_port()
        super().__init__(
            "--host", "0.0.0.0", "--keys", keys, "--load-port", str(self.load_port), "--",
            "--ssl-certfile", certificates.certificate, "--ssl-keyfile", certificates.key, kv_events=True,
        )  # fmt: skip
        self.url = self.url.replace("http://", "https://")


def test_a_replica_alone(certificates: Certificates, keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang and PyTorch open nothing else."""
    monkeypatch.setenv("SSL_CERT_FILE", certificates.authority)
    monkeypatch.setattr(Replica, "__exit__", _end)
    with Far(certificates, keys) as replica:
        assert replica.process is not None
        assert replica.kv_port is not None
        assert spoken(list(exposed(replica.process.pid))) == {
            replica.port: "tls",
            replica.kv_port: "curve",
            replica.kv_port + 1: "curve",
            replica.load_port: "curve",
        }
        assert get(f"{replica.url}/fair").status_code == 401

        def are_refused() -> bool:
            answer = get(f"{replica.url}/fair", headers=replica_key.headers())
            return bool(answer.json()["refused_peers"] >= 3)

        wait_until(are_refused, "those who asked what it speaks had no key")


def _end(replica: Replica, *_: object) -> None:
    replica.kill()
