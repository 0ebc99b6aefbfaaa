"""YAML whose nodes know where they stand, so that a mistake in a file is an error with file, line and column."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from sglang_fair.settings.setting import SettingError


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
