"""The set-up: two locks without a package in both, one version of SGLang, an environment to work in."""

import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from setuptools import find_packages

from sglang_fair.common.version import VERSION
from sglang_fair.overlay.releases import NEWEST

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RUNS, MORE = (
    dict(line.split("==") for line in (ROOT / file).read_text().splitlines() if not line.startswith("#"))
    for file in ("sglang_fair/install/cpu.txt", "requirements/dev.txt")
)
LOCK = RUNS | MORE
EXTRAS = PROJECT["project"]["optional-dependencies"]


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement)[0]).lower()


def requirements(file: str) -> list[str]:
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def of_extras(*names: str) -> list[str]:
    """What they ask for, those that they refer to included."""
    found = []
    for one in map(Requirement, [one for name in names for one in EXTRAS[name]]):
        found += of_extras(*one.extras) if one.name == "sglang-fair" else [str(one)]
    return found


class TestLock:
    def test_a_cluster_has_all_that_it_needs_and_nothing_that_only_tests_need(self) -> None:
        asked = PROJECT["project"]["dependencies"] + of_extras("workloads", "batches")
        assert {canonical(one) for one in asked + requirements("cpu.in")} <= set(RUNS)
        assert {"hypothesis", "mkdocs-material", "mypy", "playwright", "pytest", "ray", "ruff"} <= set(MORE)

    def test_tests_have_every_extra_and_no_package_is_in_both(self) -> None:
        assert {canonical(one) for one in of_extras("dev")} <= set(LOCK)
        assert set(EXTRAS) - {"dev", "all", "cuda", "qlm"} == {
            name for one in EXTRAS["all"] for name in Requirement(one).extras
        }
        assert not set(RUNS) & set(MORE)

    def test_what_is_dropped_is_not_in_it(self) -> None:
        dropped = [one for one in requirements("overrides.txt") if "'never'" in one]
        assert dropped
        assert not {canonical(one) for one in dropped} & set(LOCK)
        assert not [name for name in LOCK if name.startswith(("nvidia-", "cuda-"))]

    def test_one_version_of_sglang(self) -> None:
        assert LOCK["sglang"] == NEWEST
        assert f"sglang=={NEWEST}" in EXTRAS["cuda"]
        assert f"FROM lmsysorg/sglang:v{NEWEST} AS cuda" in (ROOT / "Dockerfile").read_text()


def test_every_folder_of_sources_is_a_package_and_installed() -> None:
    roots = [ROOT / name for name in ("sglang_fair", "router", "workloads")]
    folders = {path.parent for root in roots for path in root.rglob("*.py")}
    modules = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert modules == set(find_packages(str(ROOT), **PROJECT["tool"]["setuptools"]["packages"]["find"]))


def test_every_other_file_of_a_package_is_installed_too() -> None:
    globs = PROJECT["tool"]["setuptools"]["package-data"]
    missing = []
    for root in ("sglang_fair", "router", "workloads"):
        for file in (ROOT / root).rglob("*"):
            if file.is_dir() or file.suffix in (".py", ".pyc"):
                continue
            package = ".".join(file.parent.relative_to(ROOT).parts)
            if not any(fnmatch(file.name, glob) for glob in globs.get(package, []) + globs.get("*", [])):
                missing.append(str(file.relative_to(ROOT)))
    assert not missing


def test_there_is_one_version() -> None:
    """Metadata and chart have the one that is written in the code, and the changelog knows it."""
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "sglang_fair.common.version.VERSION"
    }
    chart = yaml.safe_load((ROOT / "deploy/helm/sglang-fair/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{VERSION}] - " in changes


class TestMake:
    def test_torch_comes_at_last_with_its_dependencies(self, tmp_path: Path) -> None:
        steps = make(
            "-n", "setup", f"VENV={tmp_path}/v", "DEVICE=cpu", "TORCH_INDEX=https://torch.example"
        ).splitlines()
        index = f"torch=={LOCK['torch']} torchvision=={LOCK['torchvision']} --index-url https://torch.example"
        alone, whole = (i for i, step in enumerate(steps) if index in step)
        lock = next(i for i, step in enumerate(steps) if "--no-deps -r" in step)
        check = next(i for i, step in enumerate(steps) if "install.check cpu" in step)
        more = next(i for i, step in enumerate(steps) if "-r requirements/dev.txt" in step)
        assert "--no-deps" in steps[alone]
        assert "--no-deps" not in steps[whole]
        assert alone < lock < whole < check < more

    @pytest.mark.parametrize("target", ["cluster", "compare", "reproduce"])
    def test_who_only_looks_installs_what_that_needs(self, target: str, tmp_path: Path) -> None:
        assert "dev.txt" not in make("-n", target, f"VENV={tmp_path}/v")
        assert "dev.txt" in make("-n", "check", f"VENV={tmp_path}/v")

    def test_what_is_set_up_is_not_set_up_again(self, tmp_path: Path) -> None:
        stamps = tmp_path / "v/.make"
        stamps.mkdir(parents=True)
        for name in ("venv", "cpu", "cpu-dev"):
            (stamps / name).touch()
        assert "Nothing to be done" in make("setup", f"VENV={tmp_path}/v")
        assert "pip" not in make("-n", "cluster", f"VENV={tmp_path}/v")
        os.utime(stamps / "cpu", (1, 1))
        assert "install.check cpu" in make("-n", "setup", f"VENV={tmp_path}/v")

    def test_a_gpu_environment_stays_one(self, tmp_path: Path) -> None:
        assert "[cuda,dev]" in make("-n", "setup", f"VENV={tmp_path}/v", "DEVICE=cuda")
        (tmp_path / "v/.make").mkdir(parents=True)
        (tmp_path / "v/.make/cuda").touch()
        assert "requirements/dev.txt" not in make("-n", "check", f"VENV={tmp_path}/v")

    def test_a_missing_python_is_one_line(self, tmp_path: Path) -> None:
        done = subprocess.run(
            ["make", "-C", str(ROOT), "setup", f"VENV={tmp_path}/v", "PYTHON=python3.99"],
            capture_output=True, text=True, check=False, env=clean_environment(),
        )  # fmt: skip
        assert done.returncode != 0
        assert done.stderr.startswith("setup: python3.99 is not installed (PYTHON= names another)\n")


def check(what: str, first: str) -> subprocess.CompletedProcess[str]:
    """The check of an installation, in a process in which a line was run first."""
    code = (
        f"import runpy, sys\n{first}\nsys.argv[1:] = [{what!r}]\n"
        "runpy.run_path('sglang_fair/install/check.py', run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("hidden", "said"), [("torch", "cannot be imported"), ("sglang_fair", "not installed")]
)
def test_a_broken_installation_is_named_in_one_line(hidden: str, said: str) -> None:
    done = check("cpu", f"sys.modules[{hidden!r}] = None")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("setup: ")
    assert said in line


@pytest.mark.slow
def test_a_program_of_the_user_s_finds_what_is_installed(tmp_path: Path) -> None:
    """In a process of the environment, without an import of ours."""
    program = (
        "import torchvision.ops, torchvision.transforms.v2, sglang.lang\n"
        "from sglang import function, gen\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class TestImage:
    """The CUDA image cannot be built here: it takes what it has from SGLang's, whose packages' metadata is known."""

    def test_pip_changes_nothing_that_sglang_pins(self) -> None:
        pinned = {
            canonical(one.name): str(one.specifier).removeprefix("==")
            for one in map(Requirement, metadata.requires("sglang") or ())
            if one.marker is None and str(one.specifier).startswith("==")
        }
        asked = PROJECT["project"]["dependencies"] + of_extras("all")
        asked = [one for one in map(Requirement, asked) if canonical(one.name) in pinned]
        assert len(asked) > 1
        assert all(pinned[canonical(one.name)] in one.specifier for one in asked)

    def test_what_is_missing_ends_the_build_in_one_line(self) -> None:
        done = check(
            "image",
            "from importlib import metadata\n"
            "version = metadata.version\n"
            "def hiding(name):\n"
            "    if name == 'httptools': raise metadata.PackageNotFoundError(name)\n"
            "    return '0.1' if name == 'rich' else version(name)\n"
            "metadata.version = hiding",
        )
        assert done.returncode == 1
        assert done.stderr == (
            "setup: not installed, or of another version: httptools>=0.6, rich>=14.2 (found 0.1)\n"
        )

    def test_the_one_for_cpus_has_all_extras_but_ray(self) -> None:
        (of_cpu,) = re.findall(r"\.whl\)\[([a-z,]+,[a-z,]+)\]", (ROOT / "Dockerfile").read_text())
        (everything,) = PROJECT["project"]["optional-dependencies"]["all"]
        assert f"sglang-fair[{of_cpu}]" == everything.replace("ray,", "")

    def test_it_is_checked_where_it_is_built(self) -> None:
        done = check("image", "")
        assert done.returncode == 0, done.stderr
        cuda = (ROOT / "Dockerfile").read_text().partition(" AS cuda")[2]
        assert "install.check image\n" in cuda
        assert re.search(r'pip install --no-cache-dir "[^"]*\.whl\)\[all\]"', cuda), "with its dependencies"


def make(*arguments: str) -> str:
    """What `make` prints; the variables of a `make` that runs these tests are not its business."""
    command = ["make", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=clean_environment()).stdout


def clean_environment() -> dict[str, str]:
    ours = (
        "VENV", "DEVICE", "PYTHON", "TORCH_INDEX", "ARGS", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES",
    )  # fmt: skip
    return {name: value for name, value in os.environ.items() if name not in ours}
