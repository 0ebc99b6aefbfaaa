"""A configuration file: YAML with a section for each program, and in it the settings by name.

    cluster:
      replicas: 4
      policy: dlpm
      policy_options: {patience: 64}
      client_weights: {gold: 2}
      sglang_arguments: [--tp, "2"]

A mistake is an error that begins with `FILE:LINE:COLUMN:`. All sections are checked, whichever is asked for, so that
one file can describe a deployment and is right or wrong as a whole.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from sglang_fair.settings.setting import SettingError, settings_of
from sglang_fair.settings.table import SECTIONS


@dataclass
class Section:
    """The settings of one program as a file has them, and the place of each of them, `FILE:LINE:COLUMN`, by field."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)


def read_file(path: Path) -> dict[str, Section]:
    """The sections of the file, by name. Raises SettingError for anything in it that is wrong."""
    with opened(path) as (loader, root):
        if root is None:
            return {}
        found: dict[str, Section] = {}
        for key, node in entries(path, root, "the file", loader):
            if key.value not in SECTIONS:
                raise SettingError(f"{place_of(path, key)}: {_unknown('section', key.value, SECTIONS)}")
            found[key.value] = _read_section(path, key.value, node, loader)
        return found


def dump(section: str, values: Any) -> str:
    """A file that gives a program these settings, an object of the section's class."""
    shown = {}
    for name, setting in settings_of(type(values)).items():
        value = getattr(values, name)
        if value is not None and not (value == setting.default and value in ("", (), {})):
            shown[setting.key] = _plain(value)
    return str(yaml.safe_dump({section: shown}, sort_keys=False, allow_unicode=True, width=110))


def _read_section(path: Path, name: str, node: yaml.Node, loader: yaml.SafeLoader) -> Section:
    known = {setting.key: setting for setting in settings_of(SECTIONS[name]).values()}
    section = Section()
    if is_null(node):
        return section
    for key, value in entries(path, node, f"section {name}", loader):
        setting = known.get(key.value.replace("-", "_"))
        if setting is None:
            raise SettingError(f"{place_of(path, key)}: {_unknown(f'setting in {name}', key.value, known)}")
        place = place_of(path, value)
        raw = loader.construct_object(value, deep=True)
        if raw is None and setting.default is MISSING:
            raise SettingError(f"{place}: {name}.{setting.key} must {setting.words[1]}")
        try:
            section.values[setting.field] = setting.read(raw, f"{name}.{setting.key}")
        except SettingError as error:
            raise SettingError(f"{place}: {error}", setting.field) from None
        section.places[setting.field] = place
    return section


def _unknown(what: str, name: str, known: Mapping[str, Any]) -> str:
    near = get_close_matches(name.replace("-", "_"), known, 1)
    hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
    return f"there is no {what} called {name!r:.80}{hint}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


# ---- YAML whose nodes know where they stand, so that a mistake is an error with file, line and column


@contextmanager
def opened(path: Path) -> Iterator[tuple[yaml.SafeLoader, yaml.Node | None]]:
    """For `with`: the file's loader and its root, which is None in an empty file.

    Raises SettingError if the file cannot be read, and for YAML's errors in the body too.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(f"cannot read {path}: {reason}") from None
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        yield loader, loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        problem = " ".join(str(error.problem or error.context).split())
        raise SettingError(f"{place}: not YAML: {problem}") from None
    except yaml.YAMLError as error:
        raise SettingError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    finally:
        if loader is not None:
            loader.dispose()


def entries(
    path: Path, node: yaml.Node, what: str, loader: yaml.SafeLoader
) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """The keys and values of a mapping, each key a text that stands there once."""
    if not isinstance(node, yaml.MappingNode):
        raise SettingError(f"{place_of(path, node)}: {what} must be a mapping of names to values")
    loader.flatten_mapping(node)
    seen = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise SettingError(f"{place_of(path, key)}: a name must be a text")
        if key.value in seen:
            raise SettingError(f"{place_of(path, key)}: {key.value} is given twice")
        seen.add(key.value)
    return list(node.value)


def is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def place_of(path: Path, node: yaml.Node) -> str:
    """`FILE:LINE:COLUMN` of a node."""
    return f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
