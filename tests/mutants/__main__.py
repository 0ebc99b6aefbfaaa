"""Breaks one rule of the source at a time, and sees that the tests named for it fail.

    python -m tests.mutants [NAME ...] [--list] [--jobs 2]

The mutants are `*.yaml` beside this file: lists of `Mutant`. Each is tried in a copy of the tracked files as they are
in the working tree, after its tests have passed there unchanged. It is killed if its tests run and one of them fails;
tests that cannot be collected are an error of the list. The last line is JSON. The exit code is 1 unless all are
killed.
"""

import argparse
import importlib.util
import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("sglang_fair", "router", "workloads", "tests")

ALL_TESTS_S, LIMIT_S = 3600.0, 600.0
"""How long the tests may take of all mutants together, unchanged, and of one."""

KILLED, SURVIVED = "killed", "survived"


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """In `file`, `find`, which stands there once, becomes `replace`: then one of `tests` fails."""

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    hangs: bool = False
    """The tests of it run into the time limit, and that is how it is found."""


def mutants() -> list[Mutant]:
    found = [
        mutant
        for path in sorted(Path(__file__).parent.glob("*.yaml"))
        for mutant in msgspec.yaml.decode(path.read_bytes(), type=list[Mutant])
    ]
    twice = [name for name, times in Counter(mutant.name for mutant in found).items() if times > 1]
    if twice:
        raise SystemExit(f"names of two mutants: {', '.join(twice)}")
    return found


def write(path: Path, text: str) -> None:
    """Without bytecode of what stood there: Python goes by the size and by the second."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def copy(into: Path) -> Path:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name, follow_symlinks=False)
    return into


def run(tree: Path, *arguments: str, limit_s: float, cwd: Path) -> tuple[int | None, str]:
    """The exit code of `python ARGUMENTS`, for which the packages are those of the tree, None after `limit_s`; what
    it printed. All processes that it has started end with it."""
    paths = (str(tree), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": ""}
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=cwd, env=environment, start_new_session=True, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=limit_s)
            return process.returncode, printed
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]


def pytest_in(tree: Path, tests: Iterable[str], *options: str, limit_s: float) -> tuple[int | None, str]:
    return run(
        tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests, limit_s=limit_s, cwd=tree
    )


def check_unchanged(tree: Path, chosen: list[Mutant]) -> float:
    """All tests that are named for them pass on the unchanged tree. The seconds that this took."""
    started_s = time.monotonic()
    tests = dict.fromkeys(test for mutant in chosen for test in mutant.tests)
    code, printed = pytest_in(tree, tests, limit_s=ALL_TESTS_S)
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"on the unchanged tree the tests end with {code}:\n{printed[-8000:]}")
    return time.monotonic() - started_s


def outcome(mutant: Mutant, tree: Path) -> str:
    """`KILLED`, `SURVIVED`, or what is wrong with the entry."""
    path = tree / mutant.file
    before = path.read_text() if path.is_file() else ""
    if (times := before.count(mutant.find)) != 1:
        return f"what it changes stands {times} times in {mutant.file}: it has to be adapted"
    write(path, before.replace(mutant.find, mutant.replace))
    try:
        code, printed = pytest_in(tree, mutant.tests, "-x", limit_s=LIMIT_S)
    finally:
        write(path, before)
    match code:
        case pytest.ExitCode.OK:
            return SURVIVED
        case pytest.ExitCode.TESTS_FAILED:
            return KILLED
        case None:
            return KILLED if mutant.hangs else f"its tests have not ended after {LIMIT_S:.0f} s"
    return f"pytest ended with {code}:\n{printed[-4000:]}"


def check_imports(tree: Path) -> None:
    program = f"import {', '.join(PACKAGES)}; print(*({', '.join(f'{name}.__file__' for name in PACKAGES)},))"
    _, printed = run(tree, "-c", program, limit_s=60.0, cwd=Path("/"))
    if not all(path.startswith(f"{tree}/") for path in printed.split()):
        raise SystemExit(f"tests would not import the copy in {tree}, but {printed}")


def tried(chosen: list[Mutant], jobs: int, tell: Callable[[str], None]) -> dict[str, str]:
    """The outcome of each mutant by its name."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            trees.put(copy(Path(folder) / str(number)))
        check_imports(Path(folder) / "0")
        tell(f"{check_unchanged(Path(folder) / '0', chosen):6.1f} s  their tests, unchanged: all pass")

        def attempt(mutant: Mutant) -> str:
            tree, started_s = trees.get(), time.monotonic()
            try:
                found = outcome(mutant, tree)
            finally:
                trees.put(tree)
            tell(f"{time.monotonic() - started_s:6.1f} s  {mutant.name}: {found}")
            return found

        return dict(zip((mutant.name for mutant in chosen), pool.map(attempt, chosen), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--list", action="store_true", help="what there is, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="copies that are worked on at a time")
    options = parser.parse_args()
    found = {mutant.name: mutant for mutant in mutants()}
    if unknown := set(options.names) - set(found):
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}")
    chosen = [found[name] for name in dict.fromkeys(options.names)] or list(found.values())
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name}  {mutant.file}  {' '.join(mutant.tests)}")
        return 0
    started_s = time.monotonic()
    outcomes = tried(chosen, options.jobs, tell=lambda line: print(line, flush=True))
    print(f"\n{'mutant':40} {'file':40} outcome")
    for mutant in chosen:
        print(f"{mutant.name:40} {mutant.file:40} {outcomes[mutant.name].splitlines()[0]}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    killed = [name for name, how in outcomes.items() if how == KILLED]
    survived = [name for name, how in outcomes.items() if how == SURVIVED]
    summary = {
        "count": len(chosen),
        "killed": len(killed),
        "survived": survived,
        "errors": sorted(set(outcomes) - {*killed, *survived}),
        "seconds": round(time.monotonic() - started_s),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
    }
    print(json.dumps(summary))
    return 0 if len(killed) == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
