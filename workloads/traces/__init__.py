"""Real traffic: traces that tell who sent how much and when, and stand-ins where no file is given."""

from workloads.traces.arena import arena
from workloads.traces.mooncake import mooncake
from workloads.traces.named import STAND_INS, find_trace
from workloads.traces.production import production
from workloads.traces.profiles import Profile, mix
from workloads.traces.servegen import servegen
from workloads.traces.trace import BLOCK_TOKENS, Trace, TraceRequest

__all__ = [
    "BLOCK_TOKENS",
    "STAND_INS",
    "Profile",
    "Trace",
    "TraceRequest",
    "arena",
    "find_trace",
    "mix",
    "mooncake",
    "production",
    "servegen",
]
