"""An image that SGLANG_FAIR_IMAGE names, in containers of a Docker engine on this machine (`make image-check`).

Where no registry has its base, Debian has one much like it:

    debootstrap --variant=minbase --include=ca-certificates,libpython3.11-dev,python3-pip,python3.11-venv bookworm root
    ln -s python3.11 root/usr/bin/python && tar -C root -c . | docker import - python:3.11-slim
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.helm import ROOT, helm
from tests.support.ports import free_port
from tests.support.waiting import wait_until

LIMIT_S = 900
"""On a busy machine. The first start converts the model and compiles."""
IMAGE = os.environ.get("SGLANG_FAIR_IMAGE", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(not IMAGE, reason="SGLANG_FAIR_IMAGE names no image"),
]


def run(*words: str, **env: str) -> str:
    done = subprocess.run(words, env={**os.environ, **env}, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def asked(url: str, body: object = None, key: str = "none") -> str | None:
    """What is answered; None, after a second, when nobody is there."""
    headers = {"content-type": "application/json", "x-fair-client": "alice", "authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
            return str(answer.read().decode())
    except OSError:
        time.sleep(1)
        return None


def knows_the_capital(port: int, model: str) -> None:
    question = {"role": "user", "content": "What is the capital of Italy?"}
    url, body = f"http://127.0.0.1:{port}/v1/chat/completions", {"model": model, "messages": [question]}
    assert "Rome" in wait_until(lambda: asked(url, body), "an answer", LIMIT_S)


@contextmanager
def composed(port: int) -> Iterator[None]:
    """Compose's services but Prometheus, which is another image."""
    env = {
        "IMAGE": IMAGE,
        "PORT": str(port),
        "SGLANG_FAIR_ADMIN_KEY": "operators",
        "SGLANG_FAIR_REPLICA_KEY": "r",
    }
    tool = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    tool += ["-p", "sglang-fair-check", "-f", str(ROOT / "deploy/compose.yaml")]
    try:
        run(*tool, "up", "-d", "--scale", "replica=2", "gateway", "dashboard", "router", "replica", **env)
        yield
    finally:
        run(*tool, "down", "--volumes", **env)


def test_its_default_command_answers() -> None:
    port = free_port()
    name = run("docker", "run", "--detach", "--init", "--publish", f"127.0.0.1:{port}:8000", IMAGE).strip()
    try:
        knows_the_capital(port, "default")
        run("docker", "stop", "--time", "60", name)
        assert run("docker", "inspect", "--format", "{{.State.ExitCode}}", name) == "0\n"
    finally:
        print(run("docker", "logs", name)[-6000:])
        run("docker", "rm", "--force", name)


def test_compose_starts_what_answers_and_shows_it() -> None:
    with composed(port := free_port()):
        knows_the_capital(port, "smollm2")

        def is_shown() -> bool:
            knows_the_capital(port, "smollm2")  # it shows what is served while it looks
            seen = asked("http://127.0.0.1:8002/view", key="operators") or ""
            return "alice" in seen and seen.count(":30000") >= 2

        wait_until(is_shown, "the dashboard shows the client and both replicas")


def test_the_chart_s_pods_serve_and_a_router_is_replaced_at_another_address() -> None:
    helm()  # skips the test where there is none
    assert run(sys.executable, "-m", "tests.support.pods", IMAGE).endswith("ok\n")
