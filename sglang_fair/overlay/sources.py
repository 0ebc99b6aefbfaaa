"""Whether a release of SGLang has what the overlay needs of it, by its sources: of a package that is installed, or of a
wheel. Nothing of it is imported."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from sglang_fair.overlay.releases import SIGNATURES, number


class Need(NamedTuple):
    """A function or an attribute of SGLang."""

    owner: str
    """The module, and the class if it is in one, below sglang.srt."""
    name: str
    parameters: str | None
    """As they are written; None: it is an attribute."""


def needs(version: str) -> Iterator[Need]:
    """What the overlay needs of SGLang's `version`."""
    owner = ""
    for line in SIGNATURES.strip().splitlines():
        if not line.startswith(" "):
            owner = line
            continue
        what, bound, release = re.fullmatch(r" +(.+?)(?: +(since|until) (\S+))?", line).groups()  # type: ignore[union-attr]
        if bound and (
            number(version) < number(release) if bound == "since" else number(version) > number(release)
        ):
            continue
        if what.startswith("."):
            yield from (Need(owner, name, None) for name in what.replace(".", "").split())
        else:
            name, _, parameters = what.removesuffix(")").partition("(")
            yield Need(owner, name, parameters)


def installed() -> Path | None:
    """The folder with the package that Python would import; None without one."""
    found = find_spec("sglang")
    return None if found is None or found.origin is None else Path(found.origin).parents[1]


def faults(root: Traversable, version: str) -> list[str]:
    """What `root`, the folder or the wheel of SGLang's `version`, has not or has otherwise; each in a line."""
    read = cache(lambda owner: _find(root, owner))
    return [fault for need in needs(version) if (fault := _fault(read(need.owner), need)) is not None]


def _fault(owner: ast.Module | ast.ClassDef | None, need: Need) -> str | None:
    if owner is None:
        return f"there is no {need.owner}"
    if need.parameters is None:
        return None if need.name in _attributes(owner) else f"{need.owner} has no attribute {need.name}"
    found = _named(owner, need.name)
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"{need.owner} has no {need.name}({need.parameters})"
    if not _takes(found.args, need.parameters):
        return f"{need.owner}.{need.name} takes ({_written(found.args)}), and not ({need.parameters})"
    return None


def _find(root: Traversable, owner: str) -> ast.Module | ast.ClassDef | None:
    path, words = root / "sglang" / "srt", owner.split(".")
    while words and (path / words[0]).is_dir():
        path /= words.pop(0)
    file = path / "__init__.py"
    if words and (path / f"{words[0]}.py").is_file():
        file = path / f"{words.pop(0)}.py"
    if not file.is_file():
        return None
    module = ast.parse(file.read_text(encoding="utf-8"))
    if not words:
        return module
    found = _named(module, words[0])
    return found if isinstance(found, ast.ClassDef) else None


def _named(owner: ast.Module | ast.ClassDef, name: str) -> ast.stmt | None:
    return next((node for node in reversed(owner.body) if getattr(node, "name", None) == name), None)


@cache
def _attributes(owner: ast.Module | ast.ClassDef) -> frozenset[str]:
    """Fields, properties, and what methods assign to the object."""
    found = {getattr(node, "name", "") for node in owner.body}
    for node in ast.walk(owner):
        match node:
            case ast.Attribute(value=ast.Name("self"), attr=name, ctx=ast.Store()) | ast.AnnAssign(
                ast.Name(name)
            ):
                found.add(name)
    return frozenset(found)


def _takes(arguments: ast.arguments, known: str) -> bool:
    """Whether the parameters `known` come first, those behind `*` by name, and others need not be given (`...`: must,
    maybe)."""
    before, _, named = known.removesuffix(", ...").partition("*")
    first, keywords = ([word for word in part.split(", ") if word] for part in (before, named.lstrip(", ")))
    places = [one.arg for one in arguments.posonlyargs + arguments.args]
    only = [one.arg for one in arguments.kwonlyargs]
    optional = places[len(places) - len(arguments.defaults) :]
    optional += [
        name for name, default in zip(only, arguments.kw_defaults, strict=True) if default is not None
    ]
    left = {*places, *only} - {*first, *keywords}
    return (
        places[: len(first)] == first
        and {*keywords} <= {*places, *only}
        and (known.endswith(", ...") or left <= {*optional})
    )


def _written(arguments: ast.arguments) -> str:
    return re.sub(r": [^,=]+|=[^,]+", "", ast.unparse(arguments))
