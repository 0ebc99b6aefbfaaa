"""Whether SGLang is beside this package. A wheel brings no engine: which one fits depends on the machine."""

from importlib.util import find_spec

ENGINE = ("sglang", "torch")


def missing_engine() -> str | None:
    """What is missing and what installs it, in a line; None where both are there. Nothing is imported."""
    missing = [name for name in ENGINE if find_spec(name) is None]
    if not missing:
        return None
    return (
        f"{' and '.join(missing)} not installed beside this package; run: sglang-fair install cpu "
        "(with GPUs: sglang-fair install cuda)"
    )
