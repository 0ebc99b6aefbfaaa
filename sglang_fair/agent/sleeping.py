"""Models of unlike shape on one GPU: a server for each, of which one is awake. In which order they take turns. Pure.

SGLang's servers with `--enable-memory-saver --enable-weights-cpu-backup` give their GPU memory back
(`/release_memory_occupation`) and take it again (`/resume_memory_occupation`) while they live. A server is

    open      awake, and lets requests in         awake     awake, with nobody inside
    shut      awake, and lets nobody in           checked   awake, flushed, and has generated
    unknown   perhaps awake                       asleep    without GPU memory

and goes from open over shut and awake to asleep, if another one is to be awake; else from asleep over awake and
checked to open. A server is resumed only when all others are asleep: two would not fit. Where a step fails, the server
may be awake, whatever was tried; it has to be put to sleep before another is resumed. A server that cannot be woken
leaves the GPU to the one before, and so on in turn, each time after a longer wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["unknown", "open", "shut", "awake", "checked", "asleep"]
Act = Literal["shut", "empty", "release", "resume", "flush", "probe", "open"]

PATHS = {
    "release": "/release_memory_occupation",
    "resume": "/resume_memory_occupation",
    "flush": "/flush_cache",
    "probe": "/generate",
}
"""SGLang's, of the acts that it carries out. `empty` is waiting, and the gate is shut and opened by the agent."""

TO_SLEEP: Mapping[State, Act] = {"shut": "empty", "awake": "release", "checked": "release"}
"""What follows on the way to sleep; from any other state the gate is shut first."""

RETRY_S, LONGEST_RETRY_S = 0.5, 30.0


@dataclass(frozen=True)
class Do:
    """One thing to do at one server, after a wait."""

    act: Act
    server: str
    after_s: float = 0.0


class Turns:
    """The servers of one GPU."""

    def __init__(self, servers: Sequence[str], open_: str | None = None) -> None:
        """`open_` is known to be open, and then all others are asleep; None: nothing is known."""
        if len(set(servers)) < len(servers) or (open_ is not None and open_ not in servers):
            raise ValueError(f"servers have names of their own: {', '.join(servers)}")
        self._states: dict[str, State] = dict.fromkeys(servers, "unknown" if open_ is None else "asleep")
        self._goal = self._before = servers[0] if open_ is None else open_
        if open_ is not None:
            self._states[open_] = "open"
        self._flushed = False
        self._failures = 0
        self.error = ""
        """Why the last turn failed; "": it did not."""

    @property
    def open(self) -> str | None:
        """Whoever serves; None: nobody."""
        return next((name for name, state in self._states.items() if state == "open"), None)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is to be done."""
        return self.open == self._goal

    def state(self, server: str) -> State:
        """What is known of a server."""
        return self._states[server]

    def wake(self, server: str) -> None:
        """It is to be the one that is open. KeyError for an unknown one; nothing while another turn is under way."""
        self._states[server]
        if self.is_settled and server != self._goal:
            self._before, self._goal, self._failures, self.error = self._goal, server, 0, ""

    def next(self) -> Do | None:
        """What to do now; None: nothing."""
        if self.is_settled:
            return None
        for server, state in self._states.items():
            if server != self._goal and state != "asleep":
                return Do(TO_SLEEP.get(state, "shut"), server, self._wait_s())
        match self._states[self._goal]:
            case "asleep" | "unknown":
                return Do("resume", self._goal, self._wait_s())
            case "awake":
                return Do("probe" if self._flushed else "flush", self._goal)
            case _:
                return Do("open", self._goal, self._wait_s())

    def did(self, do: Do, error: str = "") -> None:
        """It was done, or failed because of `error`. What was not to be done changes nothing."""
        expected = self.next()
        if expected is None or (expected.act, expected.server) != (do.act, do.server):
            return
        if error:
            self._failed(do, error)
            return
        match do.act:
            case "shut":
                self._states[do.server] = "shut"
            case "empty":
                self._states[do.server] = "awake"
            case "release":
                self._states[do.server] = "asleep"
            case "resume":
                self._states[do.server], self._flushed = "awake", False
            case "flush":
                self._flushed = True
            case "probe":
                self._states[do.server] = "checked"
            case "open":
                self._states[do.server], self._failures = "open", 0

    def _failed(self, do: Do, error: str) -> None:
        self._failures += 1
        if do.act in ("shut", "empty", "open"):
            return  # nothing has changed; it is tried again
        self.error = self.error or f"{do.server}: {do.act}: {error}"
        if do.act == "release":
            # Part of its memory may be gone. It is woken again, which puts that right, if nobody else is to have it.
            self._states[do.server] = "unknown"
            if self._states[self._goal] == "asleep":
                self._goal, self._before = do.server, self._goal
            return
        self._states[do.server] = "unknown"
        self._goal, self._before = self._before, self._goal

    def _wait_s(self) -> float:
        if not self._failures:
            return 0.0
        return min(LONGEST_RETRY_S, RETRY_S * 2.0 ** min(self._failures - 1, 30))
