"""`python -m workloads.experiments`."""

from workloads.experiments.command import main

if __name__ == "__main__":
    raise SystemExit(main())
