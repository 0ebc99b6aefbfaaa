"""Clusters that the tests of several files share: these are of one group, `pytest.mark.xdist_group`, of its name."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.gateway.guard import KEY_VARIABLE
from sglang_fair.common.service_keys import replica_key
from sglang_fair.tenants import edit, keys
from sglang_fair.tenants.model import Limits, Tenant
from tests.support.live import EMULATED, Cluster
from tests.support.ports import free_port

ADMIN = "the admin's key"
ENVIRONMENT = {KEY_VARIABLE: ADMIN, replica_key.variable: "the replicas' key"}
APIS = ("chat", "several", "completions", "responses", "messages", "tokenizer", "leaver", "programs")
"""Tenants, of whom each asks by one API: what its replicas charge it is what that told it."""


FLOODING = ("flood", "light", "rival", "honest", "adversary", "hose", "drop")


def tenant(name: str, **more: object) -> Tenant:
    """Whose key is its name."""
    return Tenant(keys=[keys.written(keys.digest(name))], **more)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two small models with tools and schemas, for tenants; and a log in JSON."""
    file = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    for name in APIS:
        edit.add(file, name, tenant(name))
    for name, limits in (("light", Limits(requests_per_minute=1000)), ("heavy", Limits())):
        edit.add(file, name, tenant(name, weight=3.0, limits=limits))
    options = ("--tenants", str(file), "--log-format", "json")
    engine = ("--tool-call-parser", "qwen25", "--constrained-json-disable-any-whitespace")
    with Cluster(*options, "--", *engine, environment=ENVIRONMENT) as made:
        yield made


@pytest.fixture(scope="session")
def flooded_tenants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of `flooded`."""
    return tmp_path_factory.mktemp("tenants") / "tenants.yaml"


@pytest.fixture(scope="session")
def flooded(flooded_tenants: Path) -> Iterator[Cluster]:
    """Two emulated GPUs, two processes of a gateway and a page, for tenants who flood them."""
    file = flooded_tenants
    for name in FLOODING:
        edit.add(file, name, tenant(name))
    edit.add(file, "thrifty", tenant("thrifty", limits=Limits(output_tokens=4)))
    options = (
        "--tenants", str(file), "--dashboard-port", str(free_port()), "--quantum", "500", "--gateway-workers", "2",
    )  # fmt: skip
    with Cluster(*EMULATED, *options, "--", "--max-running-requests", "8", environment=ENVIRONMENT) as made:
        yield made
