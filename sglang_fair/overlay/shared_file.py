"""Memory that all processes of one server share, as a file that vanishes with them: heartbeats, and SGLang's load.

The file has no name. It belongs to the process that reads the server's arguments; its children open it by way of
/proc and find the path in their environment. Nothing is left behind, whichever of them is killed.

SGLang 0.5.23 makes its own for the load in /dev/shm, 16 KiB for each data-parallel rank, and never removes it: a
machine on which replicas come and go fills up.
"""

import os
from collections.abc import MutableMapping
from typing import Any

LOAD_VARIABLE = "SGLANG_FAIR_LOAD_FILE"


def share(variable: str, size_bytes: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes the file for this process and its children and puts its path into `variable`; once is enough."""
    if environ.get(variable, "").startswith(f"/proc/{os.getpid()}/"):
        return
    descriptor = os.memfd_create(variable.lower())
    os.ftruncate(descriptor, size_bytes)
    environ[variable] = f"/proc/{os.getpid()}/fd/{descriptor}"


def shm_path_for(result: str, *args: Any, **kwargs: Any) -> str:
    """After SGLang's choice of a path for its load, which stays where no file was made."""
    return os.environ.get(LOAD_VARIABLE, result)
