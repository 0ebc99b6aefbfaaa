"""Changing a tenants' file: only the lines that a change is about, so that comments and layout stay.

The new text is read before it is written, and must say exactly what was wanted; a file in a style that cannot be edited
line by line is refused, never damaged. It replaces the old one at once: a gateway reads the one or the other.
"""

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import yaml

from sglang_fair.settings.places import opened
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


def add(path: Path, name: str, tenant: Tenant) -> None:
    """Adds a tenant, in a new file if there is none. Raises `CannotEdit`, SettingError for a bad file, OSError."""

    def put(known: Tenants, lines: "_Lines") -> Tenants:
        if name in known.tenants:
            raise CannotEdit(f"there is a tenant {name} already")
        lines.append(name, tenant)
        return Tenants(tenants={**known.tenants, name: tenant})

    _change(path, put, HEAD)


def set_keys(path: Path, name: str, keys: Callable[[list[str]], list[str]]) -> None:
    """Replaces a tenant's digests by what `keys` makes of them. Raises as `add`."""

    def put(known: Tenants, lines: "_Lines") -> Tenants:
        tenant = _tenant(known, name)
        changed = tenant.model_copy(update={"keys": keys(tenant.keys)})
        lines.set_field(name, changed, "keys")
        return Tenants(tenants={**known.tenants, name: changed})

    _change(path, put)


def set_weight(path: Path, name: str, weight: float) -> None:
    """Changes a tenant's weight. Raises as `add`, and ValueError for a weight that there cannot be."""

    def put(known: Tenants, lines: "_Lines") -> Tenants:
        tenant = _tenant(known, name)
        changed = Tenant.model_validate({**tenant.model_dump(), "weight": weight})
        lines.set_field(name, changed, "weight")
        return Tenants(tenants={**known.tenants, name: changed})

    _change(path, put)


def remove(path: Path, name: str) -> None:
    """Removes a tenant. Raises as `add`."""

    def take(known: Tenants, lines: "_Lines") -> Tenants:
        _tenant(known, name)
        lines.remove(name)
        return Tenants(tenants={other: one for other, one in known.tenants.items() if other != name})

    _change(path, take)


def _tenant(known: Tenants, name: str) -> Tenant:
    if name not in known.tenants:
        raise NoSuchTenant(f"there is no tenant {name!r:.80}")
    return known.tenants[name]


def _change(path: Path, change: Callable[[Tenants, "_Lines"], Tenants], empty: str | None = None) -> None:
    path = Path(os.path.realpath(path))  # a link stays one
    with _locked(path.parent):
        if empty is not None and not path.exists():
            _replace(path, empty, lambda made: None)
        known = file.read(path)
        lines = _Lines(path)
        wanted = change(known, lines)

        def check(made: Path) -> None:
            try:
                is_right = file.read(made) == wanted
            except SettingError:
                is_right = False
            if not is_right:
                raise CannotEdit(f"{path} is not written one field a line: change it by hand")

        _replace(path, lines.text(), check)


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


class _Lines:
    """The lines of a file, and where its tenants stand in them."""

    def __init__(self, path: Path) -> None:
        self._lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if self._lines and not self._lines[-1].endswith("\n"):
            self._lines[-1] += "\n"
        with opened(path) as (_, root):
            assert isinstance(root, yaml.MappingNode)
            self._key, self._tenants = next(pair for pair in root.value if pair[0].value == "tenants")
        self._entries: dict[str, tuple[yaml.Node, yaml.Node]] = {
            key.value: (key, node) for key, node in self._tenants.value
        }

    def text(self) -> str:
        return "".join(self._lines)

    def append(self, name: str, tenant: Tenant) -> None:
        if not self._entries:
            self._put_value("")
            self._splice(self._key.start_mark.line + 1, 0, self._entry(name, tenant, STEP))
            return
        first = next(iter(self._entries.values()))[0]
        _, last = list(self._entries.values())[-1]
        self._splice(_last_line(last) + 1, 0, self._entry(name, tenant, first.start_mark.column))

    def remove(self, name: str) -> None:
        key, node = self._entries[name]
        self._splice(key.start_mark.line, _last_line(node) + 1 - key.start_mark.line, [])
        if len(self._entries) == 1:
            self._put_value(" {}")

    def set_field(self, name: str, tenant: Tenant, field: str) -> None:
        key, node = self._entries[name]
        first, column = key.start_mark.line, key.start_mark.column
        if not isinstance(node, yaml.MappingNode) or node.flow_style or not node.value:
            self._splice(first, _last_line(node) + 1 - first, self._entry(name, tenant, column))
            return
        column = node.value[0][0].start_mark.column
        made = _dumped({field: getattr(tenant, field)}, column)
        for inner, value in node.value:
            if inner.value == field:
                first = inner.start_mark.line
                self._splice(first, _last_line(value) + 1 - first, made)
                return
        self._splice(node.value[0][0].start_mark.line, 0, made)

    def _entry(self, name: str, tenant: Tenant, column: int) -> list[str]:
        return _dumped({name: tenant.model_dump(exclude_defaults=True) or {}}, column)

    def _splice(self, at: int, count: int, made: Sequence[str]) -> None:
        self._lines[at : at + count] = made

    def _put_value(self, text: str) -> None:
        """Writes `text` behind `tenants:` in place of braces, if there are any."""
        line = self._key.start_mark.line
        self._lines[line] = re.sub(
            r"(tenants['\"]?\s*:)[ ]*(\{\s*\})?", rf"\1{text}", self._lines[line], count=1
        )


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
