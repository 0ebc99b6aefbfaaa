"""Tenants, proxies and operators of a cluster: what its gateway is told, and what is refused before anything starts."""

import logging
from pathlib import Path

import pytest

from router.gateway.__main__ import check as check_gateway
from router.gateway.__main__ import is_loopback, warn
from sglang_fair.cluster import __main__ as cluster_command
from sglang_fair.cluster.options import Options, check
from sglang_fair.cluster.plan import build
from sglang_fair.common.service_keys import replica_key
from sglang_fair.engines.replica import server_arguments
from sglang_fair.models.catalog import ServedModel
from sglang_fair.settings.program import parse
from sglang_fair.settings.setting import SettingError
from sglang_fair.settings.table import Gateway, Replica
from sglang_fair.tenants import edit
from sglang_fair.tenants.model import Tenant
from tests.cluster.test_cluster import MACHINE, MODEL, PORTS

GATEWAY = {"port": 8000, "router": ("tcp://127.0.0.1:1",), "model_name": "tiny", "tokenizer": "/m"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "t.yaml"
    edit.add(made, "gold", Tenant())
    return made


def test_the_gateway_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    options = Options(
        tenants=path.name, trusted_proxies="10.0.0.0/8", admin_port=9001, limit_store="redis://127.0.0.1:1/0"
    )
    gateway = build(options, "cpu", MACHINE, MODEL, PORTS).of("gateway")[0]
    found = parse("gateway", gateway.argv[3:])
    assert (found.tenants, found.trusted_proxies) == (str(path), "10.0.0.0/8")
    assert (found.admin_host, found.admin_port) == ("127.0.0.1", 9001)
    assert found.limit_store == "redis://127.0.0.1:1/0"


def test_what_no_balancer_looks_at_ends_at_once() -> None:
    plan = build(Options(), "cpu", MACHINE, MODEL, PORTS)
    assert {
        parse(role, one.argv[3:]).notice_s for role in ("gateway", "router") for one in plan.of(role)
    } == {0.0}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--tenants", "BAD"], "BAD:2:10: tenants.gold.wieght: there is no 'wieght' here"),
        (["--tenants", "/none.yaml"], "cannot read /none.yaml"),
        (["--trusted-proxies", "10.0.0.1/8"], "--trusted-proxies: 10.0.0.1/8 has host bits set"),
        (["--limit-store", "file:x"], "--limit-store must be memory or redis://"),
        (["--admin-port", "0"], "--admin-port must lie from 1 to 65535"),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], error: str
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("tenants:\n  gold: {wieght: 3}\n")
    words = [str(bad) if word == "BAD" else word for word in options]
    assert cluster_command.main(words) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert error.replace("BAD", str(bad)) in said
    with pytest.raises((SettingError, SystemExit)):
        check_gateway(parse("gateway", [f"--{k.replace('_', '-')}={v}" for k, v in GATEWAY.items()] + words))


@pytest.mark.parametrize(
    ("host", "loud"),
    [("0.0.0.0", True), ("gateway.example", True), ("127.9.9.9", False), ("localhost", False)],
)  # fmt: skip
def test_a_gateway_for_everybody_is_loud(
    host: str, loud: bool, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_loopback(host) is not loud
    with caplog.at_level(logging.WARNING):
        warn(Gateway(host=host, **GATEWAY))
        assert ("ANYBODY" in caplog.text) is loud
        caplog.clear()
        warn(Gateway(host=host, tenants=str(path), admin_port=9, **GATEWAY))
        assert "ANYBODY" not in caplog.text


def test_the_replica_s_key_is_in_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(replica_key.variable, "the key")
    plan = build(Options(), "cpu", MACHINE, MODEL, PORTS)
    assert not any("the key" in word for process in plan.processes for word in process.argv)
    model = ServedModel("tiny", "/m", "tiny", "dummy", 1, 131_072)
    argv = server_arguments(Replica(), model)
    assert argv[argv.index("--api-key") + 1] == "the key"
    monkeypatch.delenv(replica_key.variable)
    assert "--api-key" not in server_arguments(Replica(), model)


def test_keys_that_a_cluster_is_to_make_are_not_missed(tmp_path: Path) -> None:
    check(Options(keys=str(tmp_path / "none yet")))
