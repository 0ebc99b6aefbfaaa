"""Versions and machine, for records of what was measured."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang_fair.common.version import VERSION

PACKAGES = ("sglang", "torch")


def versions() -> dict[str, str]:
    """The versions of Python, this package and `PACKAGES`, and the git commit where there is one."""
    found = {"python": platform.python_version(), "sglang-fair": VERSION}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed here"
    try:
        # An environment with the wheel may lie in a repository of somebody else's.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        found["commit"] = _git("describe", "--always", "--dirty").strip()
    except (OSError, subprocess.CalledProcessError):
        found["commit"] = "not in a git repository"
    return found


def _git(*words: str) -> str:
    git = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name, empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def machine() -> dict[str, Any]:
    """System, processor, cores, and the load average of the last minute."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"system": platform.platform(), "processor": processor(), "cores": cores(), "load_1min": load}
