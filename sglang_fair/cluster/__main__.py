"""`sglang-fair cluster`: the command line of a cluster."""

import sys
from collections.abc import Sequence

from sglang_fair.cluster.options import Options, check
from sglang_fair.cluster.run import run_cluster
from sglang_fair.settings.program import run_program
from sglang_fair.settings.table import Cluster

HELP = """Start replicas, router and gateway, and keep them running until Ctrl-C.

Exit code 0 after a stop, 1 when the cluster could not start or go on, 2 for bad input.
"""

EPILOG = (
    "Arguments behind -- go to each replica's SGLang server, for example: "
    "sglang-fair cluster --device cuda --replicas 4 --model meta-llama/Llama-3.1-8B-Instruct -- --tp 2"
)


def options_of(settings: Cluster) -> Options:
    """The settings with what can be asked of them."""
    return Options(**vars(settings))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a cluster until it is stopped; the exit code."""
    return run_program(
        "cluster",
        lambda settings: run_cluster(options_of(settings)),
        arguments,
        check=lambda settings: check(options_of(settings)),
        help=HELP,
        epilog=EPILOG,
    )


if __name__ == "__main__":
    sys.exit(main())
