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

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from sglang_fair.settings.places import entries, is_null, opened, place_of
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
