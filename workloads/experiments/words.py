"""The words of an experiment: claims, tables, captions and notes as data, in a YAML file beside its Python.

The file is named like the module and holds one document for each experiment in it:

    id: x-fig1
    title: Two clients, one of them greedy
    source: X, Figure 1
    about: "{RPM[0]} and {RPM[1]} requests/min for {LENGTH_S:.0f} s."
    paper: {gap: 40, tokens_per_s: 779}                  # the paper's numbers
    values:                                              # named expressions, each may use those above it
      ratio: cells.vtc.tokens_per_s / cells.fcfs.tokens_per_s
    claims:
      - text: VTC costs no throughput
        paper: "{paper[tokens_per_s]} tokens/s"
        value: ratio
        here: "{value:.2f}× FCFS's"
        holds: value >= 0.98                             # else
        partly: value >= 0.9                             # else no
        why: Shown where the claim does not hold.
    tables:
      - title: Medians over seeds
        columns: {scheduler: = label, tokens/s: tokens_per_s, "× FCFS": = own.tokens_per_s / cells.fcfs.tokens_per_s}
    figures: {rate: "Service rate in {WINDOW_S:.0f} s windows."}
    ratios: {tokens_vtc_over_fcfs: ratio}                # numbers for whoever reads them by program

Words can only quote. They are format strings of Python: `{name:spec}` is replaced by a named value, and there is no
other way to a number, since `tests/workloads/test_words.py` allows no digit outside of braces but in names such as
"Figure 7" or "A100". So a new run changes every number in the words.

Expressions are Jinja's, evaluated in its sandbox, where an unknown name is an error; the functions are abs, max, min
and sum. Words and expressions know

    cells            the records: `cells.vtc.clients["client 1"].service` is the median over the seeds
    paper, setting   numbers that the file itself states
    UPPER_CASE       constants of the modules that define the experiment and its base classes
    anything else    what `Experiment.values` returns, then `values` of the file

`about` is shown without records too: it knows neither of the last line nor `cells`.

A claim may have `when`: it is made only where that holds. `each` repeats a group of claims, or a table, for several
sets of names. A table has a row for every cell unless `rows` says which: cells' names, or mappings of names; a mapping
may name its `cell`. A column is a path in the cell's record, shown with its range over seeds, or `= expression`.
"""

import inspect
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Discriminator, Tag, ValidationError

from workloads.experiments.claims import Claim, Figure, Report, Table, Verdict, plain, shown
from workloads.experiments.contract import Experiment, Json, Result


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClaimWords(_Strict):
    """One claim: words, and expressions that decide it."""

    text: str
    paper: str
    here: str
    holds: str
    partly: str = "false"
    why: str = ""
    value: str | None = None
    when: str = "true"
    values: dict[str, str] = {}


class ClaimGroup(_Strict):
    """Claims that are made once for each set of names."""

    each: list[dict[str, Any]]
    claims: list[ClaimWords]


class TableWords(_Strict):
    """One table: `columns` are the heads, and where each finds its entries."""

    title: str
    columns: dict[str, str]
    rows: str | None = None
    when: str = "true"
    digits: int = 3
    each: list[dict[str, Any]] = [{}]


class Note(_Strict):
    """A paragraph below the tables and figures."""

    text: str
    when: str = "true"


class Words(_Strict):
    """One experiment's document."""

    id: str
    title: str
    source: str
    about: str
    paper: dict[str, Any] = {}
    setting: dict[str, Any] = {}
    shapes: Any = None
    """Not read: a place for YAML anchors that claims share."""
    values: dict[str, str] = {}
    claims: list[
        Annotated[
            Annotated[ClaimWords, Tag("claim")] | Annotated[ClaimGroup, Tag("group")],
            Discriminator(lambda one: "group" if "each" in one else "claim"),
        ]
    ] = []
    tables: list[TableWords] = []
    figures: dict[str, str] = {}
    notes: list[str | Note] = []
    ratios: dict[str, str] = {}


def words_file(experiment: Experiment) -> Path:
    """The file beside the experiment's module."""
    return Path(inspect.getfile(type(experiment))).with_suffix(".yaml")


def words_of(experiment: Experiment) -> Words:
    """The document of this experiment. Raises ValueError where the file lacks it or it is not as described above."""
    path = words_file(experiment)
    try:
        return _documents(path)[experiment.id]
    except KeyError:
        raise ValueError(f"{path}: no words for {experiment.id}") from None


@cache
def _documents(path: Path) -> dict[str, Words]:
    try:
        with path.open(encoding="utf-8") as file:
            documents = [Words.model_validate(one) for one in yaml.safe_load_all(file)]
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise ValueError(f"{path}: {error}") from error
    return {one.id: one for one in documents}


@dataclass(frozen=True, slots=True)
class Heading:
    """What is said of an experiment before there are records."""

    title: str
    source: str
    """Paper and figures."""
    about: str
    """What is run, and how it differs from the paper's setting."""


def heading(experiment: Experiment) -> Heading:
    """The experiment's title, source and description."""
    if experiment.title:
        return Heading(plain(experiment.title), plain(experiment.source), plain(experiment.about))
    words = words_of(experiment)
    names = _stated(experiment, words)
    return Heading(*(quote(one, names) for one in (words.title, words.source, words.about)))


def report(experiment: Experiment, results: Mapping[str, Result]) -> Report:
    """Claims, tables, figures and notes from the results of all cells. The same records give the same report."""
    if experiment.title:
        return Report(experiment.report(results))
    words = words_of(experiment)
    names = _stated(experiment, words)
    names["cells"] = {name: RecordFields(result) for name, result in results.items()}
    names |= experiment.values(results)
    names |= _evaluated(words.values, names)
    drawings = experiment.drawings(results)
    if uncaptioned := drawings.keys() - words.figures.keys():
        raise ValueError(f"figures without a caption: {', '.join(sorted(uncaptioned))}")
    return Report(
        [
            *_claims(words.claims, names),
            *_tables(words.tables, names, results),
            *(
                Figure(name, quote(text, names), drawings[name])
                for name, text in words.figures.items()
                if name in drawings
            ),
            *(
                quote(note.text, names)
                for note in (Note(text=one) if isinstance(one, str) else one for one in words.notes)
                if evaluate(note.when, names)
            ),
            _evaluated(words.ratios, names),
        ]
    )


class RecordFields:
    """A cell's record in expressions and words: a field is read as an attribute or a key, a number is the median
    over seeds. Raises ValueError for a number that not every run has."""

    def __init__(self, result: Result, path: str = "") -> None:
        self._result, self._path = result, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, key: str | int) -> Any:
        path = f"{self._path}/{key}".removeprefix("/")
        if any(isinstance(self._result.at(run, path), Mapping) for run in self._result.runs):
            return RecordFields(self._result, path)
        return self._result.number(path)


# ---- quoting and evaluating


class _Formatter(string.Formatter):
    """`str.format`, which takes names alone and shows a missing value as a dash."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(key, int) or key not in kwargs:
            raise ValueError(f"words quote {key!r}, which has no value")
        return kwargs[key]

    def format_field(self, value: Any, format_spec: str) -> str:
        return shown(None) if value is None else str(super().format_field(value, format_spec))


def quote(text: str, names: Mapping[str, Any]) -> str:
    """`text` with values for its placeholders. Raises ValueError for one that has none."""
    return _Formatter().vformat(text, (), names)


_SANDBOX = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
_SANDBOX.globals = {"abs": abs, "max": max, "min": min, "sum": sum}


@cache
def _compiled(expression: str) -> Any:
    return _SANDBOX.compile_expression(expression, undefined_to_none=False)


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression. Raises ValueError for an unknown name or a broken expression."""
    try:
        value = _compiled(expression)(names)
        if isinstance(value, StrictUndefined):
            value._fail_with_undefined_error()
    except TemplateError as error:
        raise ValueError(f"{expression}: {error}") from error
    return value


def _evaluated(expressions: Mapping[str, str], names: Mapping[str, Any]) -> dict[str, Any]:
    """The values of named expressions, each of which may use those before it."""
    found: dict[str, Any] = {}
    for name, expression in expressions.items():
        found[name] = evaluate(expression, {**names, **found})
    return found


def _stated(experiment: Experiment, words: Words) -> dict[str, Any]:
    """What is known without records: constants of the experiment's modules, and the numbers that its file states."""
    modules = dict.fromkeys(kind.__module__ for kind in reversed(type(experiment).__mro__))
    constants = {
        name: value
        for module in modules
        for name, value in vars(sys.modules[module]).items()
        if name.isupper() and not name.startswith("_")
    }
    return {**constants, "paper": words.paper, "setting": words.setting}


# ---- from words to a report


def _claims(words: Sequence[ClaimWords | ClaimGroup], names: Mapping[str, Any]) -> Iterator[Claim]:
    for one in words:
        if isinstance(one, ClaimGroup):
            for more in one.each:
                yield from _claims(one.claims, {**names, **more})
        elif evaluate(one.when, names):
            yield _claim(one, names)


def _claim(words: ClaimWords, outer: Mapping[str, Any]) -> Claim:
    names = {**outer, **_evaluated(words.values, outer)}
    if words.value is not None:
        names["value"] = evaluate(words.value, names)
    verdict: Verdict = "no"
    if evaluate(words.holds, names):
        verdict = "yes"
    elif evaluate(words.partly, names):
        verdict = "partly"
    text, paper, here, why = (quote(one, names) for one in (words.text, words.paper, words.here, words.why))
    return Claim(text, paper, here, verdict, why)


def _tables(
    words: Sequence[TableWords], outer: Mapping[str, Any], results: Mapping[str, Result]
) -> Iterator[Table]:
    for one in words:
        for more in one.each:
            names = {**outer, **more}
            if evaluate(one.when, names):
                rows = list(results) if one.rows is None else evaluate(one.rows, names)
                yield Table(
                    quote(one.title, names),
                    " | ".join(quote(head, names) for head in one.columns),
                    [_row(one, row, names, results) for row in rows],
                    one.digits,
                )


def _row(
    table: TableWords, row: str | Mapping[str, Json], outer: Mapping[str, Any], results: Mapping[str, Result]
) -> list[str | float | None]:
    names = {**outer, **({"cell": row} if isinstance(row, str) else row)}
    result = results.get(names["cell"]) if "cell" in names else None
    if result is not None:
        names = {"label": result.cell.title, **names, "own": names["cells"][names["cell"]]}
    found: list[str | float | None] = []
    for source in table.columns.values():
        if source.startswith("="):
            found.append(evaluate(source.removeprefix("="), names))
        else:
            found.append(shown(None) if result is None else result.shown(quote(source, names), table.digits))
    return found
