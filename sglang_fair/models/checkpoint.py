"""Which models one server can serve in turn: what their folders say, compared without loading anything.

SGLang exchanges the weights of a server that runs, and keeps its configuration, tokenizer, chat template and sampling
defaults. So two models share a server if all of these are equal and their tensors have the same names, shapes and
types. A damaged file is noticed by its size: SGLang would notice it in the middle of the exchange.
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = {"_name_or_path", "name_or_path", "transformers_version", "special_tokens_map_file", "tokenizer_file"}
"""Keys that say where a model comes from, and not what it is."""

COMPARED_JSON = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
COMPARED = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
)

MOST_HEADER_BYTES = 100_000_000
"""As the format allows."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a model, as far as it matters to a server that has another one."""

    folder: Path
    files: Mapping[str, str]
    """A digest of each file that must be the same."""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Type and shape of each."""
    weights: tuple[Path, ...]
    bytes: int


def read(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`. ValueError, with one line, for weights that are missing or damaged."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json")
    weights = _weights(folder)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in weights:
        tensors |= _tensors(file)
    files = {name: _digest(folder / name) for name in COMPARED if (folder / name).is_file()}
    files |= {name: _json_digest(folder / name) for name in COMPARED_JSON if (folder / name).is_file()}
    return Checkpoint(folder, files, tensors, weights, sum(file.stat().st_size for file in weights))


def difference(one: Checkpoint, other: Checkpoint) -> str | None:
    """Why no server can serve the one and then the other, in a line; None: it can."""
    for name in sorted({*one.files, *other.files}):
        if one.files.get(name) != other.files.get(name):
            return f"{name} differs, and SGLang keeps the first one's"
    if one.tensors.keys() != other.tensors.keys():
        name = min(one.tensors.keys() ^ other.tensors.keys())
        return f"only one of them has the tensor {name}"
    for name, about in sorted(one.tensors.items()):
        if other.tensors[name] != about:
            return (
                f"tensor {name} is {_shown(about)} in the one and {_shown(other.tensors[name])} in the other"
            )
    return None


def alike(folders: Mapping[str, Path]) -> dict[str, Checkpoint]:
    """The models' checkpoints by name. ValueError, with one line, for those that cannot share a server; OSError."""
    found: dict[str, Checkpoint] = {}
    for name, folder in folders.items():
        try:
            found[name] = read(folder)
        except ValueError as error:
            raise ValueError(f"model {name}: {error}") from None
    first, *others = found
    for name in others:
        reason = difference(found[first], found[name])
        if reason is not None:
            raise ValueError(f"models {first} and {name} cannot share a replica: {reason}")
    return found


def _weights(folder: Path) -> tuple[Path, ...]:
    found = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            listed = {folder / str(name) for name in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError):
            raise ValueError(f"{index} cannot be read") from None
        missing = sorted(listed - set(found))
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        found = sorted(listed)
    if not found:
        raise ValueError(f"{folder} has no weights (*.safetensors)")
    return tuple(found)


def _tensors(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of the header: 8 bytes with its length, JSON, and then the data."""
    damaged = ValueError(f"{file} is damaged")
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, MOST_HEADER_BYTES):
            raise damaged
        text = opened.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        found = {name: (str(one["dtype"]), tuple(map(int, one["shape"]))) for name, one in header.items()}
        end = max((int(one["data_offsets"][1]) for one in header.values()), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise damaged from None
    if 8 + length + end != size:
        raise ValueError(f"{file} is damaged: it has {size} bytes and should have {8 + length + end}")
    return found


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _json_digest(file: Path) -> str:
    """Whatever the order of its keys, and without those of `NAMES`."""
    try:
        said = json.loads(file.read_text())
    except (ValueError, UnicodeDecodeError):
        raise ValueError(f"{file} cannot be read") from None
    if isinstance(said, dict):
        said = {key: value for key, value in said.items() if key not in NAMES}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _shown(about: tuple[str, tuple[int, ...]]) -> str:
    return f"{about[0]} {list(about[1])}"


def read_ahead(checkpoint: Checkpoint) -> None:
    """Asks the kernel to have the weights in its page cache. Returns before they are. OSError for a missing file."""
    for file in checkpoint.weights:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
