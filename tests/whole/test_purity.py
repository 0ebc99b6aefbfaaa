"""Pure code has no clock, no world and no global randomness, neither in its text nor by what it imports.

Which packages are pure stands in `pyproject.toml`, in the import-linter contract that forbids their imports of clocks,
files and sockets. Here the same packages are held to what no import shows: built-in functions, and the methods of the
module `random`.
"""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
PURE_PACKAGES = next(one for one in CONTRACTS if one["name"].startswith("pure code"))["source_modules"]


def files_of(module: str) -> list[Path]:
    """The source of a module, or of all modules of a package."""
    path = ROOT.joinpath(*module.split("."))
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


PURE = [path for module in PURE_PACKAGES for path in files_of(module)]

SERVERS_AND_ENGINES = {
    "aiohttp", "asyncio", "fastapi", "httpx", "msgspec", "numpy", "sglang", "socket", "starlette", "torch",
    "transformers", "uvicorn", "zmq",
}  # fmt: skip

SEEDED = {"Random"}
"""All that a pure module may take from `random`."""

WORLDLY = {"open", "input", "hash", "id", "__import__"}
"""Built-in functions that read the world, or answer differently in the next process."""


def violations(source: str) -> list[str]:
    """What a module uses of `WORLDLY` and of `random` that a pure one may not."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            found += [f"random.{alias.name}" for alias in node.names if alias.name not in SEEDED]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "random" and node.attr not in SEEDED:
                found.append(f"random.{node.attr}")
        elif isinstance(node, ast.Name) and node.id in WORLDLY and isinstance(node.ctx, ast.Load):
            found.append(f"{node.id}()")
    return found


def test_the_pure_packages_are_found():
    names = {path.name for path in PURE}
    assert {"admission.py", "replica.py", "core.py", "d2lpm.py", "weights.py"} <= names
    assert all(path.is_file() for path in PURE)


@pytest.mark.parametrize("path", PURE, ids=lambda path: str(path.relative_to(ROOT)))
def test_pure_modules_read_no_world_and_no_global_randomness(path):
    assert violations(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import random\nrandom.Random(1)", []),
        ("import random\nrandom.shuffle([])", ["random.shuffle"]),
        ("from random import Random, choice", ["random.choice"]),
        ("sorted([], key=hash)", ["hash()"]),
        ("open('x')", ["open()"]),
        ("from collections import deque\nself.time = 1\nrun.id = 2", []),
    ],
)
def test_the_scan_finds_what_it_looks_for(source, found):
    assert violations(source) == found


def loaded_after(statement: str) -> set[str]:
    """Top-level modules of a fresh interpreter after `statement`."""
    code = f"import sys\n{statement}\nimport json\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in json.loads(result.stdout)}


def test_importing_the_core_loads_the_standard_library_and_msgspec_only():
    modules = [path.stem for path in files_of("sglang_fair.core") if path.stem != "__init__"]
    assert "dlpm" in modules
    loaded = loaded_after("; ".join(f"import sglang_fair.core.{module}" for module in modules))
    assert loaded & SERVERS_AND_ENGINES <= {"msgspec"}
    assert "sglang_fair" in loaded


@pytest.mark.slow
def test_importing_the_simulated_cluster_loads_no_engine_and_no_server():
    loaded = loaded_after("import workloads.simulation, workloads.simulation.command")
    assert loaded & {"fastapi", "sglang", "starlette", "torch", "transformers", "uvicorn", "zmq"} == set()
