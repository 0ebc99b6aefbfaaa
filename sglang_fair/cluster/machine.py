"""What this machine has for a cluster: cores, GPUs."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping

from sglang_fair.cluster import gpus
from sglang_fair.cluster.plan import Machine
from sglang_fair.common.provenance import cores


def look(environ: Mapping[str, str] = os.environ) -> Machine:
    """The machine's resources at this moment."""
    return Machine(
        cores=cores(),
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
