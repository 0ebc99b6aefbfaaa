"""Tenants, proxies, operators and limits of a cluster: what its processes are told of them."""

import contextlib
import json
import logging
from pathlib import Path

import pytest

from router.gateway.__main__ import is_loopback, warn
from sglang_fair.cluster.options import Options, check
from sglang_fair.cluster.plan import build
from sglang_fair.cluster.ports import Reservations
from sglang_fair.common.service_keys import replica_key
from sglang_fair.engines.replica import server_arguments
from sglang_fair.models.catalog import ServedModel
from sglang_fair.settings.program import parse
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


def test_replicas_of_a_throttled_cluster_publish_their_load(tmp_path: Path) -> None:
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps({"user": 3}))
    options = Options(throttle="oit", limits=str(limits), replicas=2)
    with contextlib.closing(Reservations("127.0.0.1")) as reservations:
        ports = reservations.choose(0, 2, loads=True)
    plan = build(options, "cpu", MACHINE, MODEL, ports)
    for index, replica in enumerate(plan.of("replica")):
        argv, port = list(replica.argv), ports.replicas[index].load
        assert argv[argv.index("--load-port") + 1] == str(port)
        assert replica.worker is not None
        assert replica.worker.load == f"tcp://127.0.0.1:{port}"
    [router] = plan.of("router")
    assert f"load=tcp://127.0.0.1:{ports.replicas[0].load}" in " ".join(router.argv)
    assert list(router.argv)[list(router.argv).index("--limits") + 1] == str(limits)


def test_the_replica_s_key_is_in_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(replica_key.variable, "the key")
    plan = build(Options(), "cpu", MACHINE, MODEL, PORTS)
    assert not any("the key" in word for process in plan.processes for word in process.argv)
    model = ServedModel("tiny", "/m", "tiny", "dummy", 1)
    argv = server_arguments(Replica(), model)
    assert argv[argv.index("--api-key") + 1] == "the key"
    monkeypatch.delenv(replica_key.variable)
    assert "--api-key" not in server_arguments(Replica(), model)


def test_keys_that_a_cluster_is_to_make_are_not_missed(tmp_path: Path) -> None:
    check(Options(keys=str(tmp_path / "none yet")))
