"""What this machine has for a cluster: cores, available memory, GPUs."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from sglang_fair.cluster import gpus
from sglang_fair.cluster.plan import Machine
from sglang_fair.common.provenance import cores

CGROUP = Path("/sys/fs/cgroup")


def look(environ: Mapping[str, str] = os.environ) -> Machine:
    """The machine's resources at this moment."""
    return Machine(
        cores=cores(),
        available_bytes=min(psutil.virtual_memory().available, *_left_in_cgroup(CGROUP)),
        gpus=gpus.visible(gpus.listed(_nvidia_smi()), environ.get("CUDA_VISIBLE_DEVICES")),
        cuda_build=importlib.util.find_spec("sgl_kernel") is not None,
        python=sys.executable,
    )


def _nvidia_smi() -> str:
    """The list of GPUs; empty if there is none."""
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
        return ""
    return listed.stdout if listed.returncode == 0 else ""


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
