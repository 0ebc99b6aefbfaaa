"""What a run leaves behind: JSON lines, written as things happen, so that a broken run can still be read.

A file holds one run: a `manifest` first, then a row for every `request`, `program` and `sample` in the order
in which they ended, and `end` last; a file without `end` is a run that was cut off. All `_s` times are
seconds since the run's start on the driver's monotonic clock. What was not measured is null.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from sglang_fair.common.provenance import machine, versions

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a measurement: a scheduler, as tables call it, on a workload with one seed."""

    workload: str
    scheduler: str
    repeat: int = 0
    seed: str = "0"

    def __str__(self) -> str:
        return f"{self.scheduler} on {self.workload}"

    def path(self, folder: Path) -> Path:
        scheduler = self.scheduler.replace(" ", ".").replace(":", "-")
        return folder / f"{self.workload}.{scheduler}.{self.repeat}.jsonl"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was run, where, and what the servers said they were."""

    workload: str
    scheduler: str
    clients: Mapping[str, Mapping[str, Any]]
    """By name: `well_behaved`, `app`, `rate_per_s`, `cv`, `requests` (in one of its programs)."""
    duration_s: float
    """Arrivals stop then."""
    programs_per_client: int | None = None
    """Arrivals of a client also stop then; None: not before the end of `duration_s`."""
    workers: int | None = None
    seed: str = "0"
    repeat: int = 0
    extend_weight: float = 1.0
    output_weight: float = 2.0
    bound: float | None = None
    """Not read: records of earlier releases have it."""
    reported: Mapping[str, Any] = field(default_factory=dict)
    """Policy and placement as read back from the servers."""
    case: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    started_unix_s: float | None = None
    schema: int = SCHEMA


def stamp() -> dict[str, Any]:
    """The fields of a manifest that say where and when a run begins."""
    return {"versions": versions(), "machine": machine(), "started_unix_s": time.time()}


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Latency counts from `t_intended_s`, when it could have been sent, not from when it was."""

    client: str
    program: int
    call: int
    stage: str
    t_intended_s: float
    t_start_s: float | None
    """None: it never got a connection of its client's share."""
    t_first_token_s: float | None
    t_done_s: float
    outcome: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    max_output_tokens: int = 0
    token_times: Sequence[tuple[float, int]] = ()
    """(when, how many output tokens had come by then), a pair for every event that brought some."""
    worker: str | None = None
    status: int | None = None
    error: str | None = None
    waited_s: float | None = None
    """In the replica, before it was admitted or given up; None: nobody says."""

    @property
    def extend_tokens(self) -> int | None:
        """Prompt tokens that the engine computed; None where it did not say what was cached."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """One program. `t_done_s` is None when the run ended first: it took longer than `end` minus intended."""

    client: str
    program: int
    t_intended_s: float
    t_done_s: float | None
    requests: int
    failed: int
    outcome: str


METERS = ("service", "extend_tokens", "output_tokens", "waiting", "running", "backlog")
"""The numbers of a client's account that a sample keeps."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one replica said about its clients (its `/fair`)."""

    round: int
    """All replicas are asked at once, in numbered rounds."""
    t_s: float
    worker: str
    clients: Mapping[str, Mapping[str, float]]
    """By name: `service`, `extend_tokens`, `output_tokens`, `waiting`, `running`, `backlog`, if it says so.

    `backlog` is another number each time that the client begins to wait.
    """
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The run ended as planned."""

    t_s: float
    lost_samples: int = 0


RecordLine: TypeAlias = Manifest | RequestRecord | ProgramRecord | Sample | End
_KINDS: Mapping[str, type[RecordLine]] = {
    "manifest": Manifest,
    "request": RequestRecord,
    "program": ProgramRecord,
    "sample": Sample,
    "end": End,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass
class Run:
    """The rows of one file, by kind."""

    manifest: Manifest
    requests: list[RequestRecord] = field(default_factory=list)
    programs: list[ProgramRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    end: End | None = None

    @property
    def errors(self) -> str:
        """The first few, in one line."""
        return "; ".join(sorted({record.error for record in self.requests if record.error})[:3])

    def add(self, row: RecordLine) -> None:
        match row:
            case RequestRecord():
                self.requests.append(row)
            case ProgramRecord():
                self.programs.append(row)
            case Sample():
                self.samples.append(row)
            case End():
                self.end = row
            case Manifest():
                raise ValueError("a run has one manifest")


class Records:
    """Writes rows to a file, each at once, and keeps them as a `Run`."""

    def __init__(self, path: Path | None, manifest: Manifest) -> None:
        """A `path` of None keeps the rows in memory only."""
        self.run = Run(manifest)
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8", buffering=1)
        self._write(manifest)

    def add(self, row: RecordLine) -> None:
        self.run.add(row)
        self._write(row)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, row: RecordLine) -> None:
        if self._file is not None:
            self._file.write(to_json(row) + "\n")


def to_json(row: RecordLine) -> str:
    """One line, its kind first."""
    return json.dumps({"kind": _NAMES[type(row)], **asdict(row)}, default=str)


def read(path: Path) -> Run:
    """The run in `path`. Raises ValueError with file and line where it is not one."""
    run: Run | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            fields = json.loads(line)
            row = _KINDS[fields.pop("kind")](**fields)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: not a record: {error!r}") from error
        if run is None:
            if not isinstance(row, Manifest):
                raise ValueError(f"{path}:1: a run begins with its manifest")
            if row.schema != SCHEMA:
                raise ValueError(f"{path}: schema {row.schema}, this program reads {SCHEMA}")
            run = Run(row)
        else:
            run.add(row)
    if run is None:
        raise ValueError(f"{path}: empty")
    return run


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader, and the next run after an interruption, sees all of it or the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
