"""What an emulated replica's processes find in their environment, and SGLang's arguments for it."""

import json
from collections.abc import Mapping
from dataclasses import asdict

from sglang_fair.engines import cpu
from sglang_fair.sim.emulation import Emulation

VARIABLE = "SGLANG_FAIR_EMULATED"
"""The environment variable with an `Emulation` as JSON. Where it is not set, nothing is emulated."""

STREAM_INTERVAL_TOKENS = 8
"""Tokens in each chunk of a stream but the first. SGLang sends every token separately by default. For eight replicas
on two cores that is more work than all of their scheduling, and it delays the schedulers."""


def read(environ: Mapping[str, str]) -> Emulation:
    """The emulation that these environment variables describe. KeyError when there is none."""
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
    """SGLang's arguments for this emulation. A later argument of the user's wins.

    Overlap scheduling is on, as on a GPU: the scheduler prepares a step while the one before runs.
    """
    on_cpu = [argument for argument in cpu.SERVER_ARGUMENTS if argument != "--disable-overlap-schedule"]
    return (
        *on_cpu,
        "--dtype", "bfloat16",
        "--grammar-backend", "none",
        "--chunked-prefill-size", str(emulation.chunked_prefill_tokens),
        "--stream-interval", str(STREAM_INTERVAL_TOKENS),
    )  # fmt: skip
