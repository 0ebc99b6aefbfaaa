"""The endpoint picker on a whole cluster: through Envoy clients get the shares, and the cached prefixes, that they get
through the gateway."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest

pytest.importorskip("grpclib", reason="no sglang-fair[picker]")

from router.picker.__main__ import READY
from sglang_fair.common.service_keys import bearer
from sglang_fair.tenants import edit
from tests.support.asking import LIMIT_S, Asking, shares
from tests.support.envoy import envoy_program, envoy_started
from tests.support.live import EMULATED, Cluster, command_line
from tests.support.ports import free_port
from tests.support.waiting import DEADLINE_S, wait_until
from tests.whole.conftest import ENVIRONMENT, tenant

pytestmark = pytest.mark.e2e

WEIGHTS = {"four": 4.0, "one": 1.0}
GROUPS, ROUNDS, PREFIX_TOKENS = 6, 3, 512
CONNECTIONS = 40
"""More than run at a time, so that some of each always wait."""
TIMES_THE_BOUND = 4


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    envoy_program()
    found = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    for name, weight in WEIGHTS.items():
        edit.add(found, name, tenant(name, weight=weight))
    edit.add(found, "reader", tenant("reader"))
    return found


@pytest.fixture(scope="module")
def cluster(file: Path) -> Iterator[Cluster]:
    options = "--tenants", str(file), "--quantum", "500", "--", "--max-running-requests", "8"
    with Cluster(*EMULATED, *options, environment=ENVIRONMENT) as made:
        yield made


@pytest.fixture(scope="module")
def envoy(cluster: Cluster, file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, before the same replicas as the gateway and by the same router."""
    gateway = next(
        line for one in cluster.processes() if "router.gateway" in (line := command_line(one))
    ).split()
    same = [
        word for name in ("--model-name", "--tokenizer") for word in (name, gateway[gateway.index(name) + 1])
    ]
    port = free_port()
    command = [
        sys.executable, "-m", "router.picker", "--port", str(port), "--router", cluster.addresses["router"],
        "--tenants", str(file), *same, "--notice", "0",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((tmp_path_factory.mktemp("picker") / "log").open("w+"))
        picker = subprocess.Popen(command, stderr=log, env={**os.environ, **ENVIRONMENT})
        stack.callback(picker.wait, DEADLINE_S)
        stack.callback(picker.terminate)
        wait_until(lambda: READY in Path(log.name).read_text(), "the picker is ready")
        ports = [int(url.rpartition(":")[2]) for url in cluster.addresses["replicas"]]
        folder = tmp_path_factory.mktemp("envoy")
        url = stack.enter_context(envoy_started(ports, port, folder, tls=True))
        wait_until(lambda: _answers(url), "Envoy serves")
        yield url


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", headers=bearer("reader")).status_code == 200
    except httpx.TransportError:
        return False


def cached(url: str, seed: int) -> list[int]:
    """Of each of several prompts, the tokens that were cached: groups have a prefix each, and take turns."""
    random, found = Random(seed), list[int]()
    prefixes = [[random.randrange(3, 30_000) for _ in range(PREFIX_TOKENS)] for _ in range(GROUPS)]
    for _ in range(ROUNDS):
        for prefix in prefixes:
            own = [random.randrange(3, 30_000) for _ in range(32)]
            body = {"input_ids": prefix + own, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
            answer = httpx.post(f"{url}/generate", json=body, headers=bearer("reader"), timeout=60)
            found.append(answer.json()["meta_info"]["cached_tokens"])
    return found


def test_prefixes_are_found_as_through_the_gateway(cluster: Cluster, envoy: str) -> None:
    by_gateway, by_picker = cached(cluster.url, 1), cached(envoy, 2)
    assert by_picker == by_gateway
    assert all(tokens >= PREFIX_TOKENS for tokens in by_picker[GROUPS:])


@pytest.mark.timeout(2 * LIMIT_S)
def test_shares_of_four_to_one(cluster: Cluster, envoy: str) -> None:
    """Within the bound at each replica."""
    with Asking(envoy, prompt_tokens=48, output_tokens=16) as asking:
        for name in WEIGHTS:
            asking.ask(name, CONNECTIONS)
        got = shares(cluster, tuple(WEIGHTS), TIMES_THE_BOUND)
    assert {status for _, status in asking.answered} == {200}
    assert got["four"] / got["one"] == pytest.approx(4, rel=0.25), got
