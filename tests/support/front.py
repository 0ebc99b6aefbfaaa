"""A router and a gateway in front of replicas that a test has started."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from tests.support.ports import free_port
from tests.support.waiting import wait_until


@contextlib.contextmanager
def front(
    tokenizer: Path, logs: Path, router_options: Sequence[str], gateway_options: Sequence[str] = ()
) -> Iterator[str]:
    """The gateway's address."""
    router, port = f"tcp://127.0.0.1:{free_port()}", free_port()
    commands = (
        ("router", "--bind", router, *router_options),
        ("router.gateway", "--port", str(port), "--router", router, "--model-name", "m", "--tokenizer",
         str(tokenizer), *gateway_options),
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/health", timeout=5).status_code == 200
        return False

    with (logs / f"{port}.log").open("wb") as log, contextlib.ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        wait_until(ready, url)
        yield url
