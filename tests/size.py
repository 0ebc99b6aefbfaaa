"""`make size`: how large the house is, by capability, beside what each was budgeted; and what has grown too large.

Code lines are those that are left without blank lines, comments, docstrings and imports.
"""

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES, TESTS = ("sglang_fair", "router", "workloads"), "tests"
MOST_LINES, MOST_CODE, MOST_TEST_LINES, MOST_FILES = 52_000, 36_000, 40_000, 400
MOST_OF_FUNCTION, MOST_OF_CLASS, MOST_PARAMETERS = 80, 350, 10


@dataclass
class Row:
    """One capability: its files, its tests, and the lines budgeted for both."""

    name: str
    budget: int
    tests_budget: int
    sources: list[str]
    tests: list[str]
    found: Counter[str] = field(default_factory=Counter)


ROWS = [Row(**row) for row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["row"]]


@dataclass
class File:
    """What was counted of one file, and what of it is too large."""

    lines: int
    code: int
    functions: list[tuple[int, str]]
    classes: list[tuple[int, str]]
    parameters: list[tuple[int, str]]


def is_text(node: ast.stmt) -> bool:
    """A docstring, of an attribute too."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def counted(path: Path) -> File:
    """Raises SyntaxError."""
    text = path.read_text()
    lines = text.splitlines()
    tree = ast.parse(text)
    left_out = {number for number, line in enumerate(lines, 1) if not line.strip() or line.lstrip()[0] == "#"}
    file = File(len(lines), 0, [], [], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.stmt) and is_text(node)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        size, where = (
            (node.end_lineno or node.lineno) - node.lineno + 1,
            f"{path.relative_to(ROOT)}:{node.lineno}",
        )
        if isinstance(node, ast.ClassDef):
            file.classes.append((size, f"{where} {node.name}"))
            continue
        file.functions.append((size, f"{where} {node.name}"))
        if node.name == "__init__":
            count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
            file.parameters.append((count, where))
    file.code = len(lines) - len(left_out)
    return file


def row_of(name: str, *, is_test: bool) -> Row:
    for row in ROWS:
        patterns = row.tests if is_test else row.sources
        if any(fnmatch(name, pattern) for pattern in patterns):
            return row
    return ROWS[-1]


def files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def table() -> Iterator[str]:
    shape = "{:<40} {:>7} {:>7} {:>7}   {:>6} {:>7}"
    yield shape.format("capability", "lines", "code", "budget", "tests", "budget")
    sums: Counter[str] = Counter()
    for row in ROWS:
        found = row.found
        yield shape.format(
            row.name, found["lines"], found["code"], row.budget, found["tests"], row.tests_budget
        )
        sums.update(found)
    yield shape.format("all", sums["lines"], sums["code"], MOST_LINES, sums["tests"], MOST_TEST_LINES)
    yield f"code {sums['code']} of {MOST_CODE}, files {sums['files']} of {MOST_FILES}"


def too_large(found: list[File]) -> Iterator[str]:
    kinds = (
        ("functions", "lines", MOST_OF_FUNCTION, [one for file in found for one in file.functions]),
        ("classes", "lines", MOST_OF_CLASS, [one for file in found for one in file.classes]),
        ("__init__", "parameters", MOST_PARAMETERS, [one for file in found for one in file.parameters]),
    )
    for kind, unit, most, sizes in kinds:
        over = sorted((one for one in sizes if one[0] > most), reverse=True)
        yield f"{kind} of more than {most} {unit}: {len(over)}"
        yield from (f"  {size:>5}  {where}" for size, where in over)


def main() -> int:
    found = []
    for path in files(*SOURCES):
        file = counted(path)
        row_of(str(path.relative_to(ROOT)), is_test=False).found.update(
            lines=file.lines, code=file.code, files=1
        )
        found.append(file)
    for path in files(TESTS):
        row_of(str(path.relative_to(ROOT / TESTS)), is_test=True).found["tests"] += counted(path).lines
    print(*table(), *too_large(found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
