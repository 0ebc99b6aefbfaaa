"""One run of clients' programs on a simulated cluster. The body follows; the signatures stand."""

from collections.abc import Callable, Sequence
from pathlib import Path

from workloads.clients import Client
from workloads.driver import Plan, Progress
from workloads.records import Manifest, Run
from workloads.simulation.site import Site


def describe(
    site: Site, clients: Sequence[Client], plan: Plan, *, seed: str, workload: str = "", repeat: int = 0
) -> Manifest:
    """What is about to be run, for its records; the caller may add versions and machine by `replace`."""
    raise NotImplementedError


def simulate(
    site: Site,
    clients: Sequence[Client],
    plan: Plan,
    *,
    seed: str = "0",
    workload: str = "",
    manifest: Manifest | None = None,
    path: Path | None = None,
    curve_s: float = 0.5,
    watch: Callable[[Progress], None] | None = None,
) -> Run:
    """Run the programs of `clients` (built with a `PackedCodec`) to the plan's end, in virtual seconds.

    The run is like the live driver's: `measures.summarize`, reports and plots take it unchanged. Equal arguments
    give equal runs. `manifest` in place of `describe`'s own; `path` is where the records are written besides; a
    request's `token_times` are at least `curve_s` apart; `watch` hears after each round of samples.
    """
    raise NotImplementedError
