"""Says in one line whether SGLang can be imported here, and what is wrong if it cannot.

python -m sglang_fair.install.check cpu|cuda|image

`image`: while a container image is built no GPU is there, and SGLang's kernels cannot be imported. Only the versions of
the packages are compared.
"""

import importlib
import os
import sys
import traceback
import warnings
from importlib import metadata


def find_fault(profile: str) -> str | None:
    """What keeps SGLang from being imported in this environment; None when nothing does."""
    try:
        from sglang_fair.engines import cpu
        from sglang_fair.overlay import releases
    except ImportError as error:
        return f"the project itself is not installed: {error}"
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return f"sglang {releases.NEWEST} is not installed"
    if not releases.is_tested(found):
        return f"sglang {found} is installed; {', '.join(releases.TESTED)} are tested"
    if unmet := unmet_requirements():
        return f"not installed, or of another version: {', '.join(unmet)}"
    if profile == "image":
        return None
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        return f"torch {metadata.version('torch')} cannot be imported: {_one_line(error)}"
    if profile == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU; for a machine without one: sglang-fair install cpu"
    try:
        if profile == "cpu":
            os.environ.update(cpu.environment())
        importlib.import_module("sglang.launch_server")
        importlib.import_module("sglang.srt.managers.scheduler")
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"sglang {found} cannot be imported: {_one_line(error)} ({place.filename}:{place.lineno})"
    return None


def unmet_requirements() -> list[str]:
    """What the project asks for, extras left out, and does not find here."""
    from packaging.requirements import Requirement

    unmet = []
    for requirement in map(Requirement, metadata.requires("sglang-fair") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            unmet.append(str(requirement))
            continue
        if found not in requirement.specifier:
            unmet.append(f"{requirement} (found {found})")
    return unmet


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def main(arguments: list[str]) -> int:
    (profile,) = arguments
    warnings.simplefilter("ignore")  # SGLang names each kernel that is missing
    fault = find_fault(profile)
    if fault is not None:
        print(f"setup: {fault}", file=sys.stderr)
        return 1
    versions = [f"{package} {metadata.version(package)}" for package in ("sglang", "torch")]
    print(f"setup: {' and '.join(versions)} work here ({profile})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
