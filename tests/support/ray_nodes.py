"""A Ray cluster of nodes on this machine, each at an address of its own on loopback. Nothing of it calls out."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.support.live import living
from tests.support.ports import free_port
from tests.support.waiting import wait_until

OBJECT_STORE_BYTES = 80_000_000
"""About the least that Ray takes; nothing is stored there."""

SOON = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}
"""A node that is gone is missed in 2 s in place of 15."""

STARTED = "Ray runtime started."


class RayNodes:
    """The nodes at 127.0.0.2, 127.0.0.3 and so on, the first one the head; each has `cpus` CPUs, whatever is there."""

    def __init__(self, count: int, cpus: int, python: str, environment: Mapping[str, str]) -> None:
        """`python` is that of the environment whose packages run, and `environment` all that it gets."""
        # The paths of sockets are below it, and must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.address = f"127.0.0.2:{free_port()}"
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._family: list[psutil.Process] = []
        port = self.address.partition(":")[2]
        for index in range(count):
            log = self._folder / f"node{index}.log"
            role = (
                ("--head", f"--port={port}", f"--temp-dir={self._folder}", "--include-dashboard=false",
                 "--disable-usage-stats", "--dashboard-port=0")
                if index == 0
                else (f"--address={self.address}",)
            )  # fmt: skip
            command = [
                python, "-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address=127.0.0.{index + 2}",
                f"--num-cpus={cpus}", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}",
                "--min-worker-port=0", "--max-worker-port=0", "--block",
            ]  # fmt: skip
            with log.open("wb") as output:
                node = subprocess.Popen(
                    command, stdout=output, stderr=output, start_new_session=True, cwd=self._folder,
                    env={**environment, **SOON, "RAY_USAGE_STATS_ENABLED": "0"},
                )  # fmt: skip
            self._nodes.append(node)
            wait_until(
                lambda log=log, node=node: STARTED in log.read_text() or node.poll() is not None,
                "a node of Ray's",
            )
            assert node.poll() is None, log.read_text()

    def kill(self, index: int) -> None:
        """SIGKILL to a node's raylet, as if its machine were gone."""
        self._remember()
        node = psutil.Process(self._nodes[index].pid)
        raylet = next(child for child in node.children() if child.name() == "raylet")
        raylet.kill()

    def close(self) -> None:
        """Ends all of them; what does not end is killed."""
        self._remember()
        for node in reversed(self._nodes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(node.pid, signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not living(self._family), "the end of Ray", 15)
        for process in living(self._family):
            process.kill()
        for node in self._nodes:
            node.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _remember(self) -> None:
        for node in self._nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(node.pid)
                self._family += [process, *process.children(recursive=True)]
