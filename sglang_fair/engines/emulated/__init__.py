"""An emulated GPU: SGLang's own scheduler, radix cache, KV bookkeeping and HTTP server, and no model.

In place of the forward pass we wait for as long as a cost model says that it takes, and in place of sampling we draw
each token from what stands before it. The rest is real: schedulers can be compared at true timing on a machine without
a GPU.

    settings   how SGLang's processes learn which GPU and model, and SGLang's arguments for it: PURE
    hooks      where SGLang meets it
    networks   the model class that SGLang loads; it computes nothing

`sim.emulation` says what is emulated, `sim.gpu_clock` when the GPU's steps end and how late the scheduler was, and
`models.emulated` writes the model folder.

`install` is the entry point `sglang.srt.plugins: sglang_fair_emulated`. If it did not attach, the replica does not
start: no other code knows the architecture that its model folder names.
"""

import os

from sglang_fair.engines.emulated.settings import VARIABLE
from sglang_fair.overlay import attach


def install() -> None:
    """Registers the hooks where an emulated GPU was asked for. SystemExit when SGLang is not what they were written
    for."""
    if VARIABLE in os.environ:
        attach("sglang_fair.engines.emulated.hooks", "cannot emulate a GPU in this sglang")
