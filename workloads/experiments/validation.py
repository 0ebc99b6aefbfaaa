"""`python -m workloads.experiments.validation [--quick] [--out FOLDER] [--publish]`: the validation, by itself."""

import sys

from workloads.experiments import EXPERIMENTS, command
from workloads.experiments.model_validation import Validation

if __name__ == "__main__":
    sys.exit(command.main([Validation.id, *sys.argv[1:]], experiments=command.on_page(EXPERIMENTS)))
