"""The file through which SGLang's schedulers tell its other processes how much they have to do.

SGLang 0.5.23 makes it in /dev/shm, 16 KiB for each data-parallel rank, and never removes it: a machine on which
replicas come and go fills up. Ours has no name and vanishes with the replica.
"""

import os
from collections.abc import MutableMapping
from typing import Any

from sglang_fair.overlay.shared_file import share

VARIABLE = "SGLANG_FAIR_LOAD_FILE"


def replace(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes the file for this process and its children. The scheduler that opens it first gives it its size."""
    share(VARIABLE, 0, environ)


def shm_path_for(result: str, *args: Any, **kwargs: Any) -> str:
    """After SGLang's choice of a path, which stays where no file was made."""
    return os.environ.get(VARIABLE, result)
