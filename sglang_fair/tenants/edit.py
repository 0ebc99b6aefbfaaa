"""Changing a tenants' file: only the lines that a change is about, so that comments and layout stay.

The new text is read before it is written, and must say exactly what was wanted; a file in a style that cannot be edited
line by line is refused, never damaged. It replaces the old one at once: a gateway reads the one or the other.
"""

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from sglang_fair.settings.file import opened
from sglang_fair.settings.setting import SettingError
from sglang_fair.tenants import file
from sglang_fair.tenants.model import Tenant, Tenants

HEAD = "# Who may ask: see `sglang-fair tenants --help` and docs/tenants.md.\ntenants: {}\n"
"""A new file."""

STEP = 2
"""Indentation of what we write."""


class CannotEdit(ValueError):
    """The file cannot be changed as asked; the text is one line."""


class NoSuchTenant(CannotEdit):
    """There is no tenant of that name."""


Change = Callable[[Tenant], Tenant | None]


def add(path: Path, name: str, tenant: Tenant) -> None:
    """Adds a tenant, in a new file if there is none. Raises `CannotEdit`, SettingError for a bad file, OSError."""
    _change(path, name, lambda _: tenant, is_new=True)


def set_keys(path: Path, name: str, keys: Callable[[list[str]], list[str]]) -> None:
    """Replaces a tenant's digests by what `keys` makes of them. Raises as `add`."""
    _change(path, name, lambda old: old.model_copy(update={"keys": keys(old.keys)}), "keys")


def set_weight(path: Path, name: str, weight: float) -> None:
    """Changes a tenant's weight. Raises as `add`, and ValueError for a weight that there cannot be."""
    _change(path, name, lambda old: Tenant.model_validate({**old.model_dump(), "weight": weight}), "weight")


def remove(path: Path, name: str) -> None:
    _change(path, name, lambda _: None)


def _change(path: Path, name: str, change: Change, field: str = "", *, is_new: bool = False) -> None:
    """Makes of a tenant, or of a new one, what `change` returns, which differs in `field`."""
    path = Path(os.path.realpath(path))  # a link stays one
    with _locked(path.parent):
        if is_new and not path.exists():
            _replace(path, HEAD, lambda made: None)
        tenants = file.read(path).tenants
        if is_new and name in tenants:
            raise CannotEdit(f"there is a tenant {name} already")
        if not is_new and name not in tenants:
            raise NoSuchTenant(f"there is no tenant {name!r:.80}")
        changed = change(tenants.get(name, Tenant()))
        others = {other: one for other, one in tenants.items() if other != name}
        wanted = Tenants(tenants=others if changed is None else {**others, name: changed})

        def check(made: Path) -> None:
            try:
                is_right = file.read(made) == wanted
            except SettingError:
                is_right = False
            if not is_right:
                raise CannotEdit(f"{path} is not written one field a line: change it by hand")

        _replace(path, _edited(path, name, changed, field), check)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two changes at a time would lose one. The lock is on the folder, because the file is replaced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str, check: Callable[[Path], None]) -> None:
    """Writes the file at once, on disk when this returns; `check` sees it before and may raise."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    made = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            with contextlib.suppress(FileNotFoundError):
                old = path.stat()
                os.fchmod(out.fileno(), old.st_mode & 0o7777)
                with contextlib.suppress(PermissionError):
                    os.fchown(out.fileno(), old.st_uid, old.st_gid)
            os.fsync(out.fileno())
        check(made)
        made.replace(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _edited(path: Path, name: str, tenant: Tenant | None, field: str) -> str:
    """The file's text with `tenant` of this name, new or changed in `field`; None: without it."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    with opened(path) as (_, root):
        assert isinstance(root, yaml.MappingNode)
        head, tenants = next(pair for pair in root.value if pair[0].value == "tenants")
    entries: dict[str, tuple[yaml.Node, yaml.Node]] = {key.value: (key, node) for key, node in tenants.value}
    at = head.start_mark.line
    if not entries or (tenant is None and len(entries) == 1):  # braces stand for no tenants
        braces = " {}" if entries else ""
        lines[at] = re.sub(r"(tenants['\"]?\s*:)[ ]*(\{\s*\})?", rf"\1{braces}", lines[at], count=1)
    if name in entries:
        first, last, made = _lines_of(*entries[name], name, tenant, field)
    else:
        first_key, last_node = (
            (next(iter(entries.values()))[0], tenants.value[-1][1]) if entries else (None, None)
        )
        first = last = (at if last_node is None else _last_line(last_node)) + 1
        made = _dumped({name: _plain(tenant)}, STEP if first_key is None else first_key.start_mark.column)
    lines[first:last] = made
    return "".join(lines)


def _lines_of(
    key: yaml.Node, node: yaml.Node, name: str, tenant: Tenant | None, field: str
) -> tuple[int, int, list[str]]:
    """What to put in place of which lines of the tenant at `key`."""
    first, last, column = key.start_mark.line, _last_line(node) + 1, key.start_mark.column
    if tenant is None:
        return first, last, []
    if not isinstance(node, yaml.MappingNode) or node.flow_style or not node.value:
        return first, last, _dumped({name: _plain(tenant)}, column)
    begin = node.value[0][0].start_mark
    made = _dumped({field: getattr(tenant, field)}, begin.column)
    for inner, value in node.value:
        if inner.value == field:
            return inner.start_mark.line, _last_line(value) + 1, made
    return begin.line, begin.line, made


def _plain(tenant: Tenant | None) -> dict[str, Any]:
    return {} if tenant is None else tenant.model_dump(exclude_defaults=True)


def _dumped(value: object, column: int) -> list[str]:
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000, indent=STEP)
    return [" " * column + line for line in text.splitlines(keepends=True)]


def _last_line(node: yaml.Node) -> int:
    """The last line with something of this node: a block ends, for YAML, only where the next begins."""
    if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    end = node.end_mark
    return int(end.line - 1 if end.column == 0 and end.line > node.start_mark.line else end.line)
