"""`sglang-fair doctor`: whether what is here fits together, before anything is started.

SGLang is looked through by its sources (`overlay.sources`): that takes a second, needs no GPU, and goes with the wheel
of a release that is not installed.
"""

import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, NamedTuple

from rich.console import Console

from router.gateway.request.intake import read_tokens
from sglang_fair.cluster import gpus
from sglang_fair.cluster.options import Options, check
from sglang_fair.cluster.ports import PortTaken, is_free
from sglang_fair.common.curve import ROLES, Keys
from sglang_fair.install.check import unmet_requirements
from sglang_fair.models.__main__ import for_gateway
from sglang_fair.overlay import releases, sources
from sglang_fair.settings.commands import Mistake, Option, PassedOn, run
from sglang_fair.settings.program import parse
from sglang_fair.settings.setting import SettingError

PYTHON = (3, 11)
INSTALL = "run sglang-fair install cpu, with GPUs sglang-fair install cuda"


class Line(NamedTuple):
    """One line of the report."""

    what: str
    says: str
    do: str | None = None
    """What the user is to do; None: nothing."""


def of_wheel(wheel: Path) -> tuple[str, Traversable]:
    """The version of SGLang in a wheel, and its files. Raises Mistake for another file."""
    try:
        root = zipfile.Path(wheel)
        about = next(one.name for one in root.iterdir() if re.fullmatch(r"sglang-.+\.dist-info", one.name))
    except (OSError, StopIteration, zipfile.BadZipFile):
        raise Mistake(
            f"{wheel} is no wheel of SGLang: pip download --no-deps sglang==VERSION gets one"
        ) from None
    return about.removeprefix("sglang-").removesuffix(".dist-info"), root


def of_release(version: str, root: Traversable, *, tries: bool) -> Iterator[Line]:
    """`tries`: a release that is not tested is wanted."""
    other = f"install sglang=={releases.NEWEST}"
    wrong = sources.faults(root, version)
    if releases.is_tested(version):
        yield Line("SGLang", f"{version}, which is tested")
        for lack in releases.lacking(version):
            if lack.instead is None:
                yield Line("", f"without {lack.what} (since {lack.since})")
    else:
        said = f"{version} is not tested; {', '.join(releases.TESTED)} are"
        yield Line(
            "SGLang", said, None if tries else f"{other}, or start with --unsupported-sglang if the hooks fit"
        )
    count = sum(1 for _ in sources.needs(version))
    if wrong:
        yield Line("hooks", f"{len(wrong)} of {count} do not fit: {'; '.join(wrong)}", other)
    else:
        yield Line("hooks", f"{count} functions and attributes are as they are known")


def of_environment(device: str, *, has_sglang: bool) -> Iterator[Line]:
    if not has_sglang:
        yield Line("SGLang", "not installed", INSTALL)
    too_old = sys.version_info < PYTHON
    yield Line(
        "Python", platform.python_version(), f"use {'.'.join(map(str, PYTHON))} or later" if too_old else None
    )
    try:
        yield Line("torch", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        yield Line("torch", "not installed", INSTALL)
    if unmet := unmet_requirements():
        yield Line(
            "packages", f"missing, or of another version: {', '.join(unmet)}", "pip install sglang-fair again"
        )
    found, wanted = gpus.look(), device == "cuda"
    if not found.gpus:
        remedy = "install NVIDIA's driver, or look at CUDA_VISIBLE_DEVICES; without GPUs: --device cpu"
        yield Line("GPUs", "none", remedy if wanted else None)
        return
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()[:1] or [
        "unknown"
    ]
    lacks = "" if found.cuda_build else "; SGLang is without its kernels"
    says = f"{len(found.gpus)}, driver {driver[0]}{lacks}"
    yield Line("GPUs", says, "run sglang-fair install cuda" if lacks and wanted else None)


def of_cluster(settings: Options) -> Iterator[Line]:
    """What a cluster with these settings needs of this machine."""
    try:
        check(settings)
    except SettingError as error:
        yield Line("settings", str(error), "give another value: sglang-fair cluster --help")
        return
    ports = {
        "--port": settings.port, "--admin-port": settings.admin_port, "--router-http-port": settings.router_http_port
    }  # fmt: skip
    for option, port in ports.items():
        if port:
            yield _of_port(settings.host, port, option)
    for name, model in settings.model_names().items():
        yield _of_model(name or model, f"emulated:{model}" if settings.engine == "emulated" else model)
    keys = settings.keys
    if keys is not None and any(Path(keys).glob("*.key*")):
        try:
            for role in ROLES:
                Keys.read(keys, role)
            yield Line("keys", f"{keys} has those of {', '.join(ROLES)}")
        except ValueError as error:
            yield Line("keys", str(error), "make them anew in an empty folder: sglang-fair keys DIR")
    elif keys is not None:
        yield Line("keys", f"{keys} has none: a cluster makes them")


def _of_port(host: str, port: int, option: str) -> Line:
    try:
        free = is_free(host, port)
    except PortTaken as error:
        return Line("port", str(error), f"choose another with {option}, or another --host")
    return Line(
        "port", f"{port} is {'free' if free else 'in use'}", None if free else f"choose another with {option}"
    )


def _of_model(called: str, model: str) -> Line:
    try:
        folder, _ = for_gateway(model, lambda _: None)
        read_tokens({called: str(folder)})
    except (ValueError, OSError, RuntimeError) as error:
        return Line(
            "model", " ".join(str(error).split()), "name another with --model: sglang-fair models lists them"
        )
    return Line("model", f"{called} and its tokenizer are in {folder}")


def main(
    wheel: Annotated[
        Path | None,
        Option(metavar="FILE", help="Look at this release of SGLang in place of the one that is installed."),
    ] = None,
    cluster: PassedOn = None,
) -> int:
    """Say whether SGLang and all else here are fit for a cluster; behind -- stand the options that it is to be started
    with. Exit code 1 if a line says what is to be done."""
    settings = Options(**vars(parse("cluster", cluster or ())))
    root = sources.installed()
    found = of_wheel(wheel) if wheel is not None else (releases.found(), root) if root is not None else None
    lines = [] if found is None else [*of_release(*found, tries=settings.unsupported_sglang)]
    if wheel is None:
        lines += [*of_environment(settings.device, has_sglang=root is not None), *of_cluster(settings)]
    console = Console(soft_wrap=True, highlight=False)
    for line in lines:
        mark = "[green]ok[/]   " if line.do is None else "[red]WRONG[/]"
        console.print(mark, f"{line.what:9}", end=" ")
        console.print(line.says, markup=False, style=None if line.do is None else "red")
        if line.do is not None:
            console.print(f"                → {line.do}", markup=False)
    return 1 if any(line.do is not None for line in lines) else 0


if __name__ == "__main__":
    sys.exit(run(main, "sglang-fair doctor"))
