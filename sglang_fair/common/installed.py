"""What is beside this package. A wheel brings no engine, which depends on the machine, and leaves to extras what one
command alone needs.
"""

from importlib.util import find_spec

ENGINE = ("sglang", "torch")

EXTRAS = {
    "grpclib": ("picker", "an endpoint picker"),
    "matplotlib": ("workloads", "plots"),
    "psycopg": ("postgres", "--batches postgresql://…"),
    "python_multipart": ("batches", "--batches"),
    "sqlalchemy": ("batches", "--batches"),
}
"""Packages, each with the extra that has it and what needs it. Ray's, Redis' and OpenTelemetry's are asked for
where they are used."""


def missing_engine() -> str | None:
    """What is missing and what installs it, in a line; None where both are there. Nothing is imported."""
    missing = [name for name in ENGINE if find_spec(name) is None]
    if not missing:
        return None
    return (
        f"{' and '.join(missing)} not installed beside this package; run: sglang-fair install cpu "
        "(with GPUs: sglang-fair install cuda)"
    )


def missing_extra(package: str) -> str | None:
    """What installs a package of `EXTRAS`, in a line; None where it is there. Nothing is imported."""
    if find_spec(package) is not None:
        return None
    extra, user = EXTRAS[package]
    return f"{user} needs {package.replace('_', '-')}: pip install 'sglang-fair[{extra}]'"
