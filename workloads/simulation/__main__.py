"""`python -m workloads.simulation`."""

from workloads.simulation.command import main

if __name__ == "__main__":
    raise SystemExit(main())
