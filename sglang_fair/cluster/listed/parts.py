"""A list of replicas that many machines write on a disk that they share, without locks.

    FILE          what routers follow (`router.replica_lists`): all parts, renamed into place
    FILE.d/NAME   the line of one replica, which its own machine writes, touches every few seconds, and takes away

Whoever looks makes FILE what the parts say, if it is not. So a list that two wrote at once is right after the next
look, and the order of their writes does not matter. A part that nobody has touched for `STALE_S` does not count: its
machine is gone. Nor does one that is no line of a replica, as a machine that crashes may leave it: routers would refuse
the whole list. Times are those of files, which the disk's server gives, so that no two clocks are compared.
"""

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from router.replica_lists.specs import worker

LOOK_S = 3.0
STALE_S = 60.0

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Part:
    """A replica's line, and when it was last touched."""

    line: str
    touched_s: float


def merged(parts: Mapping[str, Part], now_s: float) -> str:
    """The list of all that are touched, in the order of their names."""
    lines = (parts[name].line for name in sorted(parts) if now_s - parts[name].touched_s <= STALE_S)
    return "".join(f"{line}\n" for line in lines)


class OwnPart:
    """The part of the replica called `name` in the list `path`. Methods raise OSError."""

    def __init__(self, path: Path, name: str) -> None:
        """ValueError for a name that is no file's."""
        if not NAME.fullmatch(name):
            raise ValueError(f"a replica is called by letters, digits, dots and dashes, not {name!r:.80}")
        self._path = path
        self._folder = path.with_name(f"{path.name}.d")
        self._own = self._folder / name
        self._beside = self._folder / f".{name}"

    def look(self, line: str | None) -> bool:
        """Has the list say this line of it, or nothing of it; whether the list was another one before."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if line is None:
            self._own.unlink(missing_ok=True)
        else:
            self._beside.write_text(line)
            self._beside.replace(self._own)
        self._beside.write_text("")
        now_s = self._beside.stat().st_mtime
        wanted = merged(self._parts(), now_s)
        if self._list() == wanted:
            self._beside.unlink()
            return False
        self._beside.write_text(wanted)
        self._beside.replace(self._path)
        return True

    def _parts(self) -> dict[str, Part]:
        found = {}
        for entry in os.scandir(self._folder):
            if NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError, ValueError):  # it has just left, or is torn
                    line = Path(entry.path).read_text().strip()
                    worker(line)
                    found[entry.name] = Part(line, entry.stat().st_mtime)
        return found

    def _list(self) -> str | None:
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return None
