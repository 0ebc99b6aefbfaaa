"""Nothing listens beyond this machine unprotected unless somebody says so."""

from pathlib import Path

import pytest

from router.__main__ import check as check_router
from router.gateway.__main__ import check as check_gateway
from sglang_fair.cluster.options import Options
from sglang_fair.cluster.options import check as check_cluster
from sglang_fair.common.curve import make
from sglang_fair.common.listening import is_local
from sglang_fair.common.service_keys import admin_key, replica_key
from sglang_fair.dashboard.__main__ import check as check_dashboard
from sglang_fair.engines.replica import check_protection as check_replica
from sglang_fair.settings.commands import BAD_INPUT
from sglang_fair.settings.setting import SettingError, command_line, settings_of
from sglang_fair.settings.table import SECTIONS, Dashboard, Gateway, Replica, Router
from tests.support.certificates import Certificates
from tests.support.programs import main_of

GATEWAY = {"port": 8000, "router": ("tcp://10.0.0.1:1",), "model_name": "tiny", "tokenizer": "/m"}


@pytest.mark.parametrize(
    ("address", "local"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
     ("", False), ("::", False), ("10.0.0.1", False), ("router", False), ("tcp://127.0.0.1:5555", True),
     ("tcp://[::1]:5555", True), ("tcp://*:5555", False), ("tcp://0.0.0.0:5555", False), ("tcp://eth0:1", False),
     ("tcp://[::]:5555", False), ("ipc:///run/router", True), ("inproc://x", True), ("udp://x", False)],
)  # fmt: skip
def test_who_reaches_an_address(address: str, local: bool) -> None:
    assert is_local(address) is local


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    make(tmp_path / "keys")
    return str(tmp_path / "keys")


def test_keys_and_tls_protect(
    certificates: Certificates, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are, and go together. That without them nothing listens elsewhere is below."""
    monkeypatch.setenv(admin_key.variable, "k")
    key, authority, here = certificates.key, certificates.authority, "tcp://127.0.0.1:5555"
    tls, everywhere = {"tls_cert": certificates.certificate, "tls_key": key}, {"host": "0.0.0.0"}
    admin = {"admin_host": "::", "admin_port": 9001}

    def gateway(**more: object) -> Gateway:
        return Gateway(**GATEWAY, **more)  # type: ignore[arg-type]

    check_router(Router(bind="tcp://0.0.0.0:5555", keys=folder))
    check_gateway(gateway(**everywhere, **tls, keys=folder))
    check_gateway(gateway(admin_host="0.0.0.0"))
    check_cluster(Options(**everywhere, **admin, **tls))
    check_dashboard(Dashboard(**everywhere, **tls))
    for check, settings, what in (
        (check_router, Router(bind=here, keys="/none"), "--keys: /none has no keys for a router"),
        (check_router, Router(bind=here, replica_ca="/none"), "--replica-ca: /none"),
        (check_gateway, gateway(**everywhere, keys=folder), "--host 0.0.0.0 is reached from elsewhere: give it TLS"),
        (check_gateway, gateway(tls_key=key), "--tls-key is of no use without --tls-cert"),
        (check_gateway, gateway(**tls | {"tls_key": authority}), "--tls-cert: .*(not its key|TLS says)"),
        (check_gateway, gateway(tls_cert="/none"), "--tls-cert: /none: No such file"),
        (check_gateway, gateway(replica_ca=key), "--replica-ca: "),
        (check_gateway, gateway(keys="/none"), "--keys: /none has no keys for a gateway"),
        (check_cluster, Options(tls_cert=authority), "--tls-cert: "),
        (check_dashboard, Dashboard(gateway_ca=authority, gateway_cert=tls["tls_cert"]), "give one of them"),
        (check_dashboard, Dashboard(gateway_cert=key), "--gateway-cert: .*no certificate in it"),
        (check_dashboard, Dashboard(replica_ca="/none"), "--replica-ca: /none"),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=what) as raised:
            check(settings)  # type: ignore[operator]
        assert "\n" not in str(raised.value)
    monkeypatch.delenv(admin_key.variable)
    with pytest.raises(SettingError, match="the page is for this machine alone"):
        check_dashboard(Dashboard(**everywhere, **tls))


def test_a_replica(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(replica_key.variable, raising=False)
    tls = ("--ssl-certfile", "c", "--ssl-keyfile=k")
    events = '{"publisher": "zmq", "endpoint": "tcp://*:5"}'
    curve = events.replace("zmq", "fair-curve")
    check_replica(Replica(kv_port=1))
    check_replica(Replica(kv_port=1, extra=("--kv-events-config", events.replace("*", "127.0.0.1"))))
    check_replica(Replica(keys=folder, extra=("--kv-events-config", curve)))
    check_replica(Replica(host="10.0.0.1", kv_port=1, insecure=True))
    check_replica(Replica(host="10.0.0.1", kv_port=1, keys=folder, extra=(*tls, "--api-key=secret")))
    for bad, what in (
        (Replica(host="10.0.0.1"), "give it a key in SGLANG_FAIR_REPLICA_KEY and TLS"),
        (Replica(host="10.0.0.1", extra=tls), "give it a key"),
        (Replica(host="10.0.0.1", extra=("--api-key", "k")), "give it a key"),
        (Replica(host="10.0.0.1", kv_port=1, extra=(*tls, "--api-key", "k")), "give its KV events --keys"),
        (Replica(extra=("--host", "0.0.0.0")), "--host 0.0.0.0 is reached from elsewhere"),
        (Replica(extra=("--hos", "0.0.0.0")), "--host 0.0.0.0 is reached from elsewhere"),
        (Replica(extra=("--ho=0.0.0.0",)), "--host 0.0.0.0 is reached from elsewhere"),
        (Replica(extra=("--kv-ev", events)), "is reached from elsewhere"),
        (Replica(host="10.0.0.1", extra=(*tls, "--api-ke", "k")), "give it a key"),
        (Replica(host="127.0.0.1", extra=("--host=127.0.0.1", "--host=::")), "--host :: is reached"),
        (
            Replica(kv_port=1, extra=("--kv-events-config", events)),
            r"--kv-events-config tcp://\*:5 is reached",
        ),
        (Replica(kv_port=1, extra=(f"--kv-events-config={curve}",)), "give it --keys"),
        (Replica(extra=("--kv-events-config", "{")), "a JSON object"),
    ):
        with pytest.raises(SettingError, match=what):
            check_replica(bad)
    monkeypatch.setenv(replica_key.variable, "k")
    check_replica(Replica(host="10.0.0.1", extra=tls))


LISTENING = {
    "cluster": ("host", "admin_host"),
    "replica": ("host",),
    "router": ("bind", "http_host"),
    "gateway": ("host", "admin_host"),
    "picker": ("host", "admin_host"),
    "dashboard": ("host",),
}
"""Where each program listens, by its settings."""


@pytest.mark.parametrize("section", SECTIONS)
def test_no_program_listens_elsewhere_unprotected(
    section: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own command line; with --insecure it would. A program or an address that is not known here fails."""
    monkeypatch.setenv(admin_key.variable, "k")
    found = sorted(name for name in settings_of(SECTIONS[section]) if name.endswith("host") or name == "bind")
    assert found == sorted(LISTENING.get(section, ()))
    needed = {"router": {"bind": "tcp://127.0.0.1:5555"}, "gateway": GATEWAY, "picker": GATEWAY}.get(
        section, {}
    )
    for field in found:
        elsewhere = {field: "tcp://10.0.0.1:5555" if field == "bind" else "10.0.0.1"}
        ports = {"admin_host": {"admin_port": 9001}, "http_host": {"http_port": 9002}}.get(field, {})
        words = command_line(SECTIONS[section], {**needed, **ports, **elsewhere})
        for more, code in (((), BAD_INPUT), (("--insecure",), 0)):
            assert main_of(section)([*words, *more, "--print-config"]) == code, (field, more)
            assert ("is reached from elsewhere" in capsys.readouterr().err) is (code != 0)
