"""The sdist and the wheel, built of a copy of the sources, and an environment that has the wheel."""

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
PACKAGES = ("sglang_fair", "router", "workloads")
BESIDE = ("tests", "deploy")

WATCHER = '''\
"""Writes down each file below FOLDER that this process opens or lists."""

import os
import sys

FOLDER, FOUND, ALLOWED = {folder!r}, {found!r}, {allowed!r}


def watch(event, arguments):
    if event not in ("open", "os.listdir", "os.scandir") or not arguments:
        return
    path = arguments[0]
    if isinstance(path, (str, bytes, os.PathLike)):
        path = os.path.abspath(os.fsdecode(path))
        if path.startswith(FOLDER + os.sep) and not path.startswith(ALLOWED + os.sep):
            with open(FOUND, "a") as file:
                file.write(path + "\\n")


sys.addaudithook(watch)
'''


@dataclass(frozen=True)
class Built:
    """What `python -m build` makes."""

    sdist: Path
    wheel: Path


def build(folder: Path) -> Built:
    """Of a copy in `folder`, in which an interpreter has left its caches; the wheel is built of the sdist."""
    sources = folder / "sources"
    sources.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, sources)
    for name in (*PACKAGES, *BESIDE):
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, sources / name, ignore=shutil.ignore_patterns("*.pyc", "__pycache__")
            )
    for name in (*PACKAGES, *BESIDE):
        cache = sources / name / "__pycache__"
        cache.mkdir(parents=True)
        (cache / "left.cpython-311.pyc").write_bytes(b"left behind")
    (sources / "deploy" / "monitoring" / "metrics.key").write_text("a secret")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(sources)],
        check=True, capture_output=True, text=True, env=clean_environment(),
    )  # fmt: skip
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return Built(sdist, wheel)


@dataclass(frozen=True)
class Installed:
    """An environment of its own with the wheel, which shares all other packages with the one of the tests."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def command(self) -> str:
        """`sglang-fair`."""
        return str(self.bin / "sglang-fair")

    @property
    def python(self) -> str:
        return str(self.bin / "python")

    def read_from_the_checkout(self) -> list[str]:
        """Files of the checkout that any Python process of this environment has opened or listed."""
        found = self.folder / "read"
        return sorted(set(found.read_text().splitlines())) if found.exists() else []

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command of this environment, called outside of the checkout."""
        return subprocess.run(
            [str(self.bin / words[0]), *words[1:]], capture_output=True, text=True, check=False, timeout=120,
            cwd=self.folder, env={**clean_environment(), **environment},
        )  # fmt: skip


def install(wheel: Path, folder: Path) -> Installed:
    """The wheel alone is installed; what it needs is found where the tests find it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    made = Installed(folder)
    subprocess.run(
        [sys.executable, "-m", "pip", "-q", "--python", made.python, "install", "--no-deps", "--no-index", str(wheel)],
        check=True, capture_output=True, text=True, env=clean_environment(),
    )  # fmt: skip
    (packages,) = folder.glob("lib/python*/site-packages")
    shared = sysconfig.get_path("purelib")
    (packages / "shared.pth").write_text(f"{shared}\n")
    (packages / "sitecustomize.py").write_text(
        WATCHER.format(folder=str(ROOT), found=str(folder / "read"), allowed=sys.prefix)
    )
    return made


def clean_environment() -> dict[str, str]:
    """Without what points to the checkout, to the environment of the tests or to their fork server."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV") and not name.startswith("SGLANG_FAIR_")
    }
