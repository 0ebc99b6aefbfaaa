"""`python -m workloads.compare`."""

from workloads.compare.command import main

if __name__ == "__main__":
    raise SystemExit(main())
