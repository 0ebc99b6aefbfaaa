"""`sglang-fair cluster`: its command line. What it starts is imported only then, so that --help is quick."""

import sys
from collections.abc import Sequence

from sglang_fair.settings.program import run_program
from sglang_fair.settings.table import Cluster

HELP = """Start replicas, router and gateway, and keep them running until Ctrl-C.

Exit code 0 after a stop, 1 when the cluster could not start or go on, 2 for bad input.
"""

EPILOG = (
    "Arguments behind -- go to each replica's SGLang server, for example: "
    "sglang-fair cluster --device cuda --replicas 4 --model meta-llama/Llama-3.1-8B-Instruct -- --tp 2"
)


def check(settings: Cluster) -> None:
    from sglang_fair.cluster import options

    options.check(options.Options(**vars(settings)))


def serve(settings: Cluster) -> int:
    from sglang_fair.cluster import options, run

    return run.run_cluster(options.Options(**vars(settings)))


def main(arguments: Sequence[str] | None = None) -> int:
    return run_program("cluster", serve, arguments, check=check, help=HELP, epilog=EPILOG)


if __name__ == "__main__":
    sys.exit(main())
