"""The file in which a replica keeps what its policy has learnt: read at the start, written whole every minute and at
the end of the scheduler.

It is also written a few seconds after the replica has become idle: a server is often killed, and seldom while it
serves. Encoding and writing happen in a thread of their own; the scheduler's makes only the lists. The file is replaced
in one step, so whoever is killed while it writes leaves the one before.
"""

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_fair.common.files import read_json
from sglang_fair.core.policy import Policy
from sglang_fair.core.wsc import Normalised

logger = logging.getLogger(__name__)

EVERY_S = 60.0
IDLE_S = 5.0
"""Of a replica that has nothing to do: time since it last wrote."""


def restore(policy: Policy, path: str) -> None:
    """Has `policy` go on from the file, if there is one. ValueError, in one line, for a file that is something else, or
    cannot be written."""
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--fair-normal {path}: no file can be written in {folder}")
    if not Path(path).exists():
        return
    content = read_json(path)
    try:
        if isinstance(policy, Normalised):
            policy.recall(content)
    except ValueError as error:
        raise ValueError(f"--fair-normal {path}: {error}") from None


class NormalFile:
    """Writes what `policy` has learnt to `path`. One that cannot be written is said once."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._written_s: float | None = None
        self._writing: threading.Thread | None = None
        self._has_complained = False

    def tick(self, policy: Policy, now_s: float, *, is_busy: bool) -> None:
        """It is `now_s`: writes if it is time to."""
        if self._written_s is None:
            self._written_s = now_s
        if now_s - self._written_s < (EVERY_S if is_busy else IDLE_S):
            return
        if self._writing is not None and self._writing.is_alive():
            return
        self._written_s = now_s
        if isinstance(policy, Normalised) and policy.has_learnt():
            self._writing = threading.Thread(target=self._write, args=(policy.learnt(),), daemon=True)
            self._writing.start()

    def close(self, policy: Policy) -> None:
        """The scheduler ends: writes what is not written yet."""
        if self._writing is not None:
            self._writing.join()
        if isinstance(policy, Normalised) and policy.has_learnt():
            self._write(policy.learnt())

    def _write(self, learnt: Mapping[str, Any]) -> None:
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        try:
            with beside.open("w", encoding="utf-8") as file:
                file.write(json.dumps(learnt))
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self._path)
        except OSError as error:
            if not self._has_complained:
                self._has_complained = True
                logger.warning("sglang-fair: cannot write %s: %s", self._path, error)
