"""`python -m workloads.isolation`."""

from workloads.isolation.command import main

if __name__ == "__main__":
    raise SystemExit(main())
