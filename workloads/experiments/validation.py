"""`python -m workloads.experiments.validation [--quick] [--out FOLDER] [--publish]`: the validation, by itself."""

import sys

from workloads.experiments import EXPERIMENTS, command
from workloads.experiments.model_validation import Validation

if __name__ == "__main__":
    # One cell after the other, in this process: engines share the machine with their driver.
    given = [Validation.id, "--jobs", "0", *sys.argv[1:]]
    sys.exit(command.main(given, experiments=command.on_page(EXPERIMENTS)))
