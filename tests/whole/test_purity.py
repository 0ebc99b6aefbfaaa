"""The core has no engine, no clock and no global randomness: neither when imported nor in its text."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = sorted(
    [
        *(ROOT / "sglang_fair" / "core").glob("*.py"),
        *(ROOT / "router" / "placement").glob("*.py"),
        *(ROOT / "router" / name for name in ("core.py", "events.py", "radix.py")),
        ROOT / "sglang_fair" / "engines" / "emulated" / "settings.py",
        *(ROOT / "sglang_fair" / "sim").glob("*.py"),
    ]
)

ENGINES_AND_SHELLS = {
    "aiohttp", "asyncio", "fastapi", "httpx", "msgspec", "numpy", "sglang", "socket", "starlette", "torch",
    "transformers", "uvicorn", "zmq",
}  # fmt: skip

CLOCKS_AND_WORLD = {
    "asyncio", "datetime", "multiprocessing", "os", "secrets", "socket", "subprocess", "threading", "time",
    "uuid", *ENGINES_AND_SHELLS,
} - {"msgspec", "numpy"}  # fmt: skip
"""What no pure module names. The router's pure part may use msgspec (its events) and numpy (token arrays)."""

SEEDED = {"Random"}
"""All that a pure module may take from `random`."""


WORLDLY = {"open", "input", "hash", "id", "__import__"}
"""Built-in functions that read the world, or answer differently in the next process."""


def violations(source: str) -> list[str]:
    """What a module imports or reads that a pure one may not."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
            found += [f"import {name}" for name in names if name in CLOCKS_AND_WORLD]
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            if module in CLOCKS_AND_WORLD:
                found.append(f"from {module}")
            elif module == "random":
                found += [f"random.{alias.name}" for alias in node.names if alias.name not in SEEDED]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "random" and node.attr not in SEEDED:
                found.append(f"random.{node.attr}")
        elif isinstance(node, ast.Name) and node.id in WORLDLY and isinstance(node.ctx, ast.Load):
            found.append(f"{node.id}()")
    return found


@pytest.mark.parametrize("path", PURE, ids=lambda path: str(path.relative_to(ROOT)))
def test_pure_modules_name_no_clock_and_no_world(path):
    assert violations(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time", ["import time"]),
        ("from datetime import datetime", ["from datetime"]),
        ("import os.path", ["import os"]),
        ("import random\nrandom.Random(1)", []),
        ("import random\nrandom.shuffle([])", ["random.shuffle"]),
        ("from random import Random, choice", ["random.choice"]),
        ("import torch.nn", ["import torch"]),
        ("sorted([], key=hash)", ["hash()"]),
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


def test_importing_the_core_loads_the_standard_library_only():
    modules = [path.stem for path in PURE if path.parent.name == "core" and path.stem != "__init__"]
    assert "dlpm" in modules
    loaded = loaded_after("; ".join(f"import sglang_fair.core.{module}" for module in modules))
    assert loaded & ENGINES_AND_SHELLS == set()
    assert "sglang_fair" in loaded


def test_importing_the_pure_router_loads_no_shell():
    loaded = loaded_after("import router.core, router.placement")
    assert loaded & (ENGINES_AND_SHELLS - {"numpy", "msgspec"}) == set()


def test_importing_a_simulated_replica_loads_the_core_and_numpy_only():
    loaded = loaded_after("import sglang_fair.sim.replica, sglang_fair.sim.fitting")
    assert loaded & (ENGINES_AND_SHELLS - {"numpy"}) == set()
    assert loaded & {"router", "workloads"} == set()


def test_importing_the_simulated_cluster_loads_no_engine_and_no_server():
    loaded = loaded_after("import workloads.simulation, workloads.simulation.command")
    assert loaded & {"fastapi", "sglang", "starlette", "torch", "transformers", "uvicorn", "zmq"} == set()
