"""What this machine has for a cluster: cores, available memory, GPUs."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from sglang_fair.cluster.plan import Machine
from sglang_fair.common.provenance import cores

CGROUP = Path("/sys/fs/cgroup")


def look(environ: Mapping[str, str] = os.environ) -> Machine:
    """The machine's resources at this moment."""
    return Machine(
        cores=cores(),
        available_bytes=min(psutil.virtual_memory().available, *_left_in_cgroup(CGROUP)),
        gpus=visible_gpus(_count_gpus(), environ.get("CUDA_VISIBLE_DEVICES")),
        cuda_build=importlib.util.find_spec("sgl_kernel") is not None,
        python=sys.executable,
    )


def visible_gpus(count: int, cuda_visible_devices: str | None) -> tuple[str, ...]:
    """Names, as CUDA_VISIBLE_DEVICES takes them, of those of `count` GPUs that may be used."""
    if not count:
        return ()
    if cuda_visible_devices is None:
        return tuple(str(index) for index in range(count))
    return tuple(name.strip() for name in cuda_visible_devices.split(",") if name.strip() not in ("", "-1"))


def _count_gpus() -> int:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return (
        sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0
    )


def _left_in_cgroup(folder: Path) -> list[int]:
    """Bytes left below a container's limit (cgroup v2). Caches that can be dropped count as free."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return [sys.maxsize]
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return [sys.maxsize]
    return [int(limit) - used + int(stat.get("inactive_file", 0))]
