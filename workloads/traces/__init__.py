"""Real traffic: traces that tell who sent how much and when, and stand-ins where no file is given."""

from collections.abc import Callable, Mapping
from pathlib import Path

from workloads.traces.arena import arena
from workloads.traces.mooncake import mooncake, production
from workloads.traces.servegen import Profile, day, mix, servegen
from workloads.traces.trace import BLOCK_TOKENS, Trace, TraceRequest

__all__ = [
    "BLOCK_TOKENS",
    "STAND_INS",
    "Profile",
    "Trace",
    "TraceRequest",
    "arena",
    "day",
    "find_trace",
    "mix",
    "mooncake",
    "production",
    "servegen",
]

STAND_INS: Mapping[str, Callable[..., Trace]] = {"arena": arena, "mooncake": mooncake}
"""Traces that can be named without a file."""


def find_trace(name: str, *, seed: str = "0") -> Trace:
    """The stand-in of this name, or the trace in the file of this name, in Mooncake's form or with a client in each
    line. Raises OSError, and ValueError that names file and line."""
    if name in STAND_INS:
        return STAND_INS[name](seed=seed)
    path = Path(name)
    with path.open(encoding="utf-8") as lines:
        is_mooncake = '"hash_ids"' in lines.readline()
    return mooncake(path, seed=seed) if is_mooncake else arena(path, seed=seed)
