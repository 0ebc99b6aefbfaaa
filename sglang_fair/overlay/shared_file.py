"""Memory that all processes of one server share, as a file that vanishes with them.

The file has no name. It belongs to the process that reads the server's arguments; its children open it by way of
/proc and find the path in their environment. Nothing is left behind, whichever of them is killed.
"""

import os
from collections.abc import MutableMapping


def share(variable: str, size_bytes: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes the file for this process and its children and puts its path into `variable`; once is enough."""
    if environ.get(variable, "").startswith(f"/proc/{os.getpid()}/"):
        return
    descriptor = os.memfd_create(variable.lower())
    os.ftruncate(descriptor, size_bytes)
    environ[variable] = f"/proc/{os.getpid()}/fd/{descriptor}"
