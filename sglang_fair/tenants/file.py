"""Reading a tenants' file. A mistake is a SettingError that begins with `FILE:LINE:COLUMN:`."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pydantic
import yaml

from sglang_fair.settings.file import entries, is_null, opened, place_of
from sglang_fair.settings.setting import SettingError
from sglang_fair.tenants.model import Tenants

MAX_BYTES = 16 << 20
"""Of the file: a hundred thousand tenants."""
MAX_DEPTH = 16
MAX_NODES = 1_000_000
"""Bound what aliases can blow up, or lead in a circle."""

_Path = tuple[str | int, ...]


def read(path: Path) -> Tenants:
    """The file's content. Raises SettingError, in one line, for the first thing in it that is wrong."""
    try:
        _check_size(path)
        return _read(path)
    except RecursionError:
        raise SettingError(f"{path}: nested too deeply") from None


def _check_size(path: Path) -> None:
    """Reading a pipe or a device might never end."""
    try:
        found = path.stat()
    except OSError as error:
        raise SettingError(f"cannot read {path}: {error.strerror}") from None
    if stat.S_ISDIR(found.st_mode):
        raise SettingError(f"cannot read {path}: {os.strerror(errno.EISDIR)}")
    if not stat.S_ISREG(found.st_mode):
        raise SettingError(f"cannot read {path}: it is not a file, which could be read again when it changes")
    if found.st_size > MAX_BYTES:
        raise SettingError(f"{path} has {found.st_size} bytes; at most {MAX_BYTES} are read")


def _read(path: Path) -> Tenants:
    with opened(path) as (loader, root):
        if root is None:
            raise SettingError(f"{path}:1:1: the file is empty; without tenants it says `tenants: {{}}`")
        reading = _Reading(path, loader)
        content = reading.value(root, ())
        try:
            return Tenants.model_validate(content)
        except pydantic.ValidationError as error:
            raise SettingError(reading.explain(error)) from None


class _Reading:
    """From nodes to plain data. Names are texts, however YAML would read them, and stand once in their mapping."""

    def __init__(self, path: Path, loader: yaml.SafeLoader) -> None:
        self._path = path
        self._loader = loader
        self._nodes: dict[_Path, yaml.Node] = {}

    def value(self, node: yaml.Node, at: _Path) -> Any:
        self._nodes[at] = node
        if len(at) > MAX_DEPTH or len(self._nodes) > MAX_NODES:
            raise SettingError(f"{place_of(self._path, node)}: nested too deeply, or too much of it")
        if isinstance(node, yaml.SequenceNode):
            return [self.value(one, (*at, index)) for index, one in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            pairs = entries(self._path, node, "this", self._loader)
            return {key.value: self._below(key, one, at) for key, one in pairs}
        try:
            return self._loader.construct_object(node, deep=True)
        except (ValueError, OverflowError) as error:  # as !!int of a text, or a date that there is not
            raise SettingError(f"{place_of(self._path, node)}: {error}") from None

    def _below(self, key: yaml.ScalarNode, node: yaml.Node, at: _Path) -> Any:
        found = self.value(node, (*at, key.value))
        self._nodes[(*at, key.value, "[key]")] = key  # as pydantic calls it in an error
        return {} if found is None and is_null(node) and at == ("tenants",) else found

    def explain(self, error: pydantic.ValidationError) -> str:
        """The first error in this file's words."""
        first = min(error.errors(include_url=False), key=self._order)
        where, node = self._node(first)
        problem = first["msg"].removeprefix("Value error, ")
        kind, name = first["type"], str(first["loc"][-1]) if first["loc"] else ""
        if kind == "extra_forbidden":
            problem = f"there is no {name!r:.80} here"
            node = self._nodes.get((*where, "[key]"), node)
        elif kind == "missing":
            problem = f"{name} is missing"
        elif kind == "model_type" or kind == "dict_type":
            problem = "this must be a mapping of names to values"
        else:
            problem = problem[:1].lower() + problem[1:]
        called = ".".join(str(step) for step in where if step != "[key]")
        return f"{place_of(self._path, node)}: {called + ': ' if called else ''}{problem}"

    def _node(self, error: Any) -> tuple[_Path, yaml.Node]:
        """The innermost node that an error is about, and its path."""
        at: _Path = tuple(error.get("ctx", {}).get("place", error["loc"]))
        while at not in self._nodes:
            at = at[:-1]
        return at, self._nodes[at]

    def _order(self, error: Any) -> tuple[bool, int, int]:
        mark = self._node(error)[1].start_mark
        return error["type"] == "missing", mark.line, mark.column
