"""How SGLang's processes learn what a replica emulates, and what that makes of SGLang's arguments: PURE."""

import json
from collections.abc import Mapping
from dataclasses import asdict

from sglang_fair.engines import cpu
from sglang_fair.sim.emulation import Emulation

VARIABLE = "SGLANG_FAIR_EMULATED"
"""Environment variable with an `Emulation` as JSON, for SGLang's processes; unset: nothing is emulated."""

STREAM_INTERVAL_TOKENS = 8
"""Tokens between two chunks of a stream, behind the first. SGLang sends every token on its own; for eight
replicas on two cores that is more work than all of their scheduling, and the schedulers come too late."""


def read(environ: Mapping[str, str]) -> Emulation:
    """What these environment variables say is emulated. KeyError when they say nothing."""
    return Emulation(**json.loads(environ[VARIABLE]))


def environment(emulation: Emulation) -> dict[str, str]:
    """The variables that a replica's processes need before they import SGLang."""
    return {
        **cpu.environment(),
        VARIABLE: json.dumps(asdict(emulation)),
        # SGLang then imports its 200 models only when one of them is asked for.
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_fair.engines.emulated.networks",
    }


def server_arguments(emulation: Emulation) -> tuple[str, ...]:
    """What SGLang must be told; a later argument of the user's wins.

    As on a GPU, the scheduler prepares a step while the one before runs.
    """
    on_cpu = [argument for argument in cpu.SERVER_ARGUMENTS if argument != "--disable-overlap-schedule"]
    return (
        *on_cpu,
        "--grammar-backend", "none",
        "--chunked-prefill-size", str(emulation.chunked_prefill_tokens),
        "--stream-interval", str(STREAM_INTERVAL_TOKENS),
    )  # fmt: skip
