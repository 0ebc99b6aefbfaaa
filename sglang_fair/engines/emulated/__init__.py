"""An emulated GPU: SGLang's own scheduler, radix cache, KV bookkeeping and HTTP server, and no model.

In place of the forward pass we wait for as long as a cost model says that it takes, and in place of sampling we draw
each token from what stands before it. The rest is real: schedulers can be compared at true timing on a machine without
a GPU.

    hooks      where SGLang meets it
    networks   the model class that SGLang loads; it computes nothing

`sim.emulation` says what is emulated, `sim.gpu_clock` when the GPU's steps end and how late the scheduler was, and
`models.emulated` writes the model folder.

`install` is the entry point `sglang.srt.plugins: sglang_fair_emulated`. If it did not attach, the replica does not
start: no other code knows the architecture that its model folder names.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict

from sglang_fair.engines import cpu
from sglang_fair.overlay import attach
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


def install() -> None:
    """Registers the hooks where an emulated GPU was asked for. SystemExit when SGLang is not what they were written
    for."""
    if VARIABLE in os.environ:
        attach("sglang_fair.engines.emulated.hooks", "cannot emulate a GPU in this sglang")
