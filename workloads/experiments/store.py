"""Records of experiments as files: one for each run while they are made, one for each experiment when published.

A record is found again by experiment, cell and seed. It counts only for the cell it was made of: one whose
specification has changed since is out of date and is made anew.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from workloads.experiments.contract import Cell, Json, Size, filled
from workloads.records import replace_text

SCHEMA = 1

DIGITS = 5
"""Significant digits that are kept of a measured number."""


@dataclass(frozen=True, slots=True)
class Record:
    """One run of one cell: what was measured, and where and with what."""

    experiment: str
    size: Size
    cell: Mapping[str, Json]
    """As `Cell.to_json` has it."""
    seed: str
    measured: Mapping[str, Json]
    simulated_s: int | float
    wall_s: int | float
    started: str
    """UTC, ISO 8601."""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Json] = field(default_factory=dict)
    version: int = 1
    """Of the experiment, when it was run."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        object.__setattr__(self, "cell", filled(self.cell))

    @property
    def name(self) -> str:
        """The cell's."""
        return str(self.cell["name"])

    def of(self, cell: Cell, version: int) -> bool:
        """Whether this is a run of `cell` as it is specified, and measured by that version of its experiment."""
        return self.version == version and dict(self.cell) == cell.to_json()


def path_of(folder: Path, experiment: str, cell: str, seed: str) -> Path:
    """Where the record of a run lies."""
    return folder / experiment / f"{cell}.{seed}.json"


def write(folder: Path, record: Record) -> None:
    """Put a record into `folder`, whole or not at all."""
    path = path_of(folder, record.experiment, record.name, record.seed)
    replace_text(path, json.dumps(asdict(record), sort_keys=True) + "\n")


def read(path: Path) -> Record | None:
    """The record at `path`; None if there is none of this schema. Raises ValueError for a broken file."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: not a record: {error}") from error
    return record if record.schema == SCHEMA else None


def read_folder(folder: Path, experiments: Iterable[str]) -> list[Record]:
    """All records of these experiments in `folder`, by experiment, cell and seed."""
    paths = (path for experiment in experiments for path in (folder / experiment).glob("*.json"))
    found = (record for path in paths if (record := read(path)) is not None)
    return sorted(found, key=lambda record: (record.experiment, record.name, record.seed))


def publish(folder: Path, records: Sequence[Record]) -> None:
    """Write one experiment's file, smaller than its records: what they share is told once."""
    shared: list[dict[str, Json]] = []
    runs = []
    for record in sorted(records, key=lambda record: (record.name, record.seed)):
        told = asdict(record)
        common = {key: told.pop(key) for key in ("versions", "machine")}
        # The machine's load at the start of each run is no property of the machine.
        common["machine"] = {k: v for k, v in common["machine"].items() if k != "load_1min"}
        if common not in shared:
            shared.append(common)
        runs.append({**told, "made": shared.index(common)})
    lines = ",\n".join(json.dumps(run, sort_keys=True, separators=(",", ":")) for run in runs)
    text = f'{{"made":{json.dumps(shared, sort_keys=True)},\n"runs":[\n{lines}\n]}}\n'
    replace_text(folder / f"{records[0].experiment}.json", text)


def read_published(folder: Path) -> list[Record]:
    """The inverse of `publish`. Raises ValueError."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            told = msgspec.json.decode(path.read_bytes())
            runs = [{**run, **told["made"][run.pop("made")]} for run in told["runs"]]
            records += msgspec.convert(runs, list[Record])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not published records: {error!r}") from error
    return records


def rounded(value: Json, digits: int = DIGITS) -> Json:
    """`value` with numbers of so many significant digits; what is not finite is null, as JSON has no such number."""
    if isinstance(value, Mapping):
        return {str(key): rounded(one, digits) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one, digits) for one in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        short = float(f"{value:.{digits}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    return value
