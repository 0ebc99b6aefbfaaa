"""`python -m workloads.experiments.validation [--quick] [--out FOLDER] [--publish]`: the validation, by itself."""

import sys
from collections.abc import Sequence

from workloads.experiments import EXPERIMENTS, command
from workloads.experiments.model_validation import Validation


def main(argv: Sequence[str] | None = None) -> int:
    """`reproduce`, for this experiment alone and in this process."""
    known = command.on_page(EXPERIMENTS)
    given = [Validation.id, *(sys.argv[1:] if argv is None else argv)]
    return command.main(given, experiments=known)


if __name__ == "__main__":
    sys.exit(main())
