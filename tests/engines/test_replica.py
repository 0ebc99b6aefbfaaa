"""`sglang-fair replica` as a shell starts it: SGLang spawns its processes, as on a GPU."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from sglang_fair.common.processes import PARENT
from tests.support.fork_server import PREFIX
from tests.support.live import SPAWNED_S, check_conservation, check_nothing_is_shared_after, lives
from tests.support.ports import free_port
from tests.support.waiting import wait_until


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_serves_on_when_the_shell_has_ended(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    url = f"http://127.0.0.1:{port}"
    command = (
        f"{sys.executable} -m sglang_fair.engines.replica --model tiny --port {port} -- --log-level warning"
    )
    environment = {name: value for name, value in os.environ.items() if name not in (PARENT, PREFIX)}

    def ready() -> bool:
        assert lives(pid), log.read_text()[-3000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/ready", timeout=5).status_code == 200
        return False

    with subprocess.Popen(
        ["sh", "-c", f"{command} >{log} 2>&1 & echo $!; read word"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True,
    ) as shell:  # fmt: skip
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        try:
            wait_until(ready, command, SPAWNED_S)
            shell.communicate(b"end\n")
            assert shell.returncode is not None
            body = {"text": "Hello", "sampling_params": {"max_new_tokens": 4}}
            assert httpx.post(f"{url}/generate", json=body, timeout=60).status_code == 200
            books = httpx.get(f"{url}/fair", timeout=30).json()
            assert books["policy"] == "dlpm", "SGLang's spawned scheduler has loaded the overlay"
            assert books["clients"], "and charged for the request"
            check_conservation(books)
            assert "SIGTERM" not in log.read_text()
            assert lives(pid)
            check_nothing_is_shared_after(pid, url)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            wait_until(lambda: not lives(pid), "its end")
