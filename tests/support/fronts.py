"""What others put in front of replicas, each configured by the blocks of docs/behind.md: nginx, sglang-router and
LiteLLM."""

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.ports import free_port
from tests.support.waiting import wait_until

PAGE = (Path(__file__).parents[2] / "docs/behind.md").read_text(encoding="utf-8")
PINNED = {"sglang-router": ("sglang-router==0.3.2",), "litellm": ("litellm[proxy]==1.108.7",)}
RESOLVED_ON = "2026-11-26"
"""What these need is chosen among the releases until then."""
START_S = 600.0
"""On a machine where much else runs, too; LiteLLM computes for twenty seconds before it listens."""
REPLICA, FRONT = "127.0.0.1:30000", "127.0.0.1:8080"
"""Addresses on the page."""


def block(language: str) -> str:
    """The page's one block of code in this language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.M | re.S)
    return str(found)


def why_no_nginx() -> str | None:
    """None: it is here."""
    return None if shutil.which("nginx") else "nginx is not installed (Debian: apt-get install nginx-light)"


def environment(name: str) -> Path | str:
    """The programs of an environment with one of `PINNED`, which is made once beside the tests' own packages; where
    that fails, why."""
    folder = Path(sys.prefix, "peers", name)
    done = folder / RESOLVED_ON
    if not done.exists():
        uv = [str(Path(sys.executable).with_name("uv"))]
        fetch = ["pip", "install", "--exclude-newer", RESOLVED_ON, "--python", str(folder / "bin/python")]
        for words in (["venv", "--clear", "--python", sys.executable, str(folder)], [*fetch, *PINNED[name]]):
            tried = subprocess.run([*uv, *words], capture_output=True, text=True, check=False, timeout=300)
            if tried.returncode:
                return f"{PINNED[name][0]} cannot be installed: {tried.stderr.strip()[-200:]}"
        done.touch()
    return folder / "bin"


@dataclass(frozen=True)
class Front:
    """One that runs in front of a replica. `headers` are those by which a client of this name is known to it; `forged`
    is the header that it puts the name into, where no client may."""

    url: str
    headers: Callable[[str], Mapping[str, str]]
    client: Callable[[str], str] = lambda name: name
    """Under which name the replica should know it."""
    forged: str = "x-fair-client"


def by_key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"}


@contextmanager
def run(words: list[str], folder: Path, healthy: str, **variables: str) -> Iterator[None]:
    """A process, from when the address `healthy` answers until it is told to end."""
    variables = {**os.environ, **variables}
    variables.pop("PYTHONPATH", None)
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=folder, env=variables, stdout=output, stderr=output, start_new_session=True
        )

    def answers() -> bool:
        assert process.poll() is None, f"{words[0]} ended: {log.read_text()[-3000:]}"
        try:
            return httpx.get(healthy, timeout=5).status_code < 500
        except httpx.TransportError:
            return False

    try:
        wait_until(answers, healthy, START_S)
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def nginx(replica: str, folder: Path) -> Iterator[Front]:
    port = free_port()
    own = block("nginx").replace(REPLICA, replica).replace(FRONT, f"127.0.0.1:{port}")
    paths = "".join(
        f"{kind}_temp_path {kind};" for kind in ("proxy", "client_body", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "conf").write_text(
        "daemon off; pid pid; error_log stderr; worker_processes 1; events {}\n"
        f"{'user root;' if os.getuid() == 0 else ''} http {{ access_log off; {paths}\n{own}}}\n"
    )
    url = f"http://127.0.0.1:{port}"
    with run(["nginx", "-e", "stderr", "-p", str(folder), "-c", "conf"], folder, url):
        yield Front(url, by_key, forged="x-tenant-id")


@contextmanager
def sglang_router(replica: str, folder: Path, *, programs: Path) -> Iterator[Front]:
    port = free_port()
    words = ["-m", "sglang_router.launch_router", "--worker-urls", f"http://{replica}", "--host", "127.0.0.1"]
    ports = ["--port", str(port), "--prometheus-port", str(free_port())]
    url = f"http://127.0.0.1:{port}"
    with run([str(programs / "python"), *words, *ports], folder, f"{url}/readiness"):
        yield Front(url, lambda name: {"x-smg-routing-key": name})


CHECKS_KEYS = """\
from litellm.proxy._types import UserAPIKeyAuth


async def check(request, api_key):
    return UserAPIKeyAuth(api_key=api_key, user_id=api_key.removesuffix("-key").removeprefix("sk-"))
"""
"""In place of LiteLLM's database of keys, each of which has a user."""


@contextmanager
def litellm(replica: str, folder: Path, *, programs: Path) -> Iterator[Front]:
    port = free_port()
    settings: dict[str, Any] = yaml.safe_load(block("yaml").replace(REPLICA, replica))
    settings["general_settings"]["custom_auth"] = "keys.check"
    (folder / "keys.py").write_text(CHECKS_KEYS)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    words = ["--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    url = f"http://127.0.0.1:{port}"
    with run(
        [str(programs / "litellm"), *words], folder, f"{url}/health/liveliness",
        LITELLM_MASTER_KEY=f"sk-{secrets.token_hex(24)}", LITELLM_LOCAL_MODEL_COST_MAP="True",
    ):  # fmt: skip
        yield Front(
            url,
            lambda name: {"authorization": f"Bearer sk-{name}-key"},
            forged="x-litellm-user_api_key_user_id",
        )
