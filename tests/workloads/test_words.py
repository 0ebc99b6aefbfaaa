"""Experiments' words: they quote records and state no measured number, and expressions decide the verdicts."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from workloads.experiments import EXPERIMENTS, store, words
from workloads.experiments.contract import Cell, Experiment, Result, TrafficSpec
from workloads.experiments.model_validation import Validation
from workloads.experiments.words import ClaimGroup, RecordFields, Words, evaluate, quote
from workloads.session import Plan
from workloads.simulation import Site

ALL = {name: one for name, one in {**EXPERIMENTS, Validation.id: Validation()}.items() if not one.title}

NAMES = re.compile(
    r"""(?x)
    \b(?:Figures?|Tables?|[Ee]xperiments?|[Cc]lients?)\ \d+[ab]?(?:(?:,|\ and|,\ and|\ to)\ \d+[ab]?)*
  | \b(?:15[ab]):                        # panels of a figure
  | §\d+(?:\.\d+)?                       # sections
  | \bD2LPM\b | \bP\d\d\b | \b2U\b | \bS[12]\b | \b(?:qa|tot|judge)-s[12]\b
  | \b(?:A100s?|a100|A10[Gs]?|H100)\b | \bBatch-[12]\b | \b(?:Vicuna|Mistral|Llama)-\d+B\b
  | \bLlama-[\d.]+(?:-\d+B|b)\b | \bLlama-2-\d+b\b | \b8B\ model\b | \b80\ GB\b
  | \bapp\d+\b                           # applications
  | `[a-z0-9-]+`                         # other experiments
  | \ :\ 1\b | \b1\ :\                   # ratios to one
    """
)
"""Names with a digit in them. No other digit stands in words outside of braces."""


def literal_digits(text: str) -> str:
    """What is left of a text with digits when names and placeholders are taken out."""
    rest = NAMES.sub("", re.sub(r"\{[^{}]*\}", "", text))
    return rest if re.search(r"\d", rest) else ""


def texts(document: Words) -> Iterator[str]:
    """All words of a document, and the names of `each` that they quote."""
    yield from (document.title, document.source, document.about, *document.figures.values())
    yield from (note if isinstance(note, str) else note.text for note in document.notes)
    for one in document.claims:
        claims, each = (one.claims, one.each) if isinstance(one, ClaimGroup) else ([one], [])
        yield from quoting(
            [text for claim in claims for text in (claim.text, claim.paper, claim.here, claim.why)], each
        )
    for table in document.tables:
        yield from quoting([table.title, *table.columns], table.each)


def quoting(found: list[str], each: list[dict[str, Any]]) -> Iterator[str]:
    yield from found
    yield from (str(names[name]) for names in each for name in names if f"{{{name}}}" in " ".join(found))


@pytest.mark.parametrize("experiment", ALL.values(), ids=list(ALL))
def test_words_state_no_number(experiment: Experiment) -> None:
    document = words.words_of(experiment)
    found = [left for text in texts(document) if (left := literal_digits(text))]
    assert not found


def test_every_caption_has_a_figure_and_every_experiment_words() -> None:
    published = store.read_published(Path(__file__).parents[2] / "docs" / "results")
    for name, experiment in ALL.items():
        records = {(record.name, record.seed): record for record in published if record.experiment == name}
        cells = experiment.cells("full")
        if any((cell.name, seed) not in records for cell in cells for seed in cell.seeds):
            continue  # it is not on the page, or not with all of its cells
        results = {
            cell.name: Result(cell, [records[cell.name, seed].measured for seed in cell.seeds])
            for cell in cells
        }
        assert experiment.drawings(results).keys() == words.words_of(experiment).figures.keys()


# ---- quoting and evaluating


def fields(*runs: dict[str, Any]) -> RecordFields:
    seeds = tuple(str(seed) for seed in range(len(runs)))
    return RecordFields(Result(Cell("vtc", Site(), TrafficSpec("t"), Plan(1.0), seeds), runs))


def test_a_number_that_a_run_lacks_is_an_error() -> None:
    names = {"cells": {"vtc": fields({"a": 1}, {"a": None})}}
    for expression in ("cells.vtc.a", "cells.vtc.b"):
        with pytest.raises(ValueError, match="of 2 runs have"):
            evaluate(expression, names)
    with pytest.raises(ValueError, match="1 of 2 runs have a"):
        quote("{cells[vtc].a:.1f}", names)


@pytest.mark.parametrize(
    "expression", ["unknown", "unknown > 1", "found.unknown", "1 +", "cells.__class__", "open('x')"]
)
def test_an_expression_knows_its_names_alone(expression: str) -> None:
    with pytest.raises(ValueError):
        evaluate(expression, {"found": {"a": 1}, "cells": {}})


def test_words_quote_names_alone() -> None:
    assert quote("{a:,.0f} of {b}", {"a": 1234.5, "b": None}) == "1,234 of –"
    for text in ("{unknown}", "{}", "{0}"):
        with pytest.raises(ValueError, match="which has no value"):
            quote(text, {"a": 1})


class Sum(Experiment):
    """One cell for each number; the words are given by a test."""

    id = "sum"

    def cells(self, size):
        return [Cell(name, Site(), TrafficSpec("t"), Plan(1.0)) for name in ("a", "b")]

    def run(self, cell, seed):
        raise NotImplementedError


@pytest.fixture
def report_of(tmp_path, monkeypatch):
    """Makes the report of two cells whose `x` is 1 and 3, from words as YAML."""

    def make(text: str) -> words.Report:
        path = tmp_path / f"{abs(hash(text))}.yaml"
        path.write_text("id: sum\ntitle: t\nsource: s\nabout: a\n" + text, encoding="utf-8")
        monkeypatch.setattr(words, "words_file", lambda _: path)
        cells = Sum().cells("full")
        return words.report(
            Sum(), {cell.name: Result(cell, [{"x": x}]) for cell, x in zip(cells, (1, 3), strict=True)}
        )

    return make


@pytest.mark.parametrize(
    ("holds", "partly", "verdict"),
    [("value > 2", "true", "yes"), ("value > 3", "value > 2", "partly"), ("value > 3", "value > 4", "no")],
)
def test_bands_decide_the_verdict(report_of, holds, partly, verdict):
    report = report_of(
        f"""
claims:
  - {{text: t, paper: p, value: cells.b.x, here: "{{value:.1f}}", holds: "{holds}", partly: "{partly}", why: w}}
"""
    )
    [claim] = report.claims
    assert (claim.text, claim.paper, claim.ours, claim.holds, claim.why) == ("t", "p", "3.0", verdict, "w")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("claims: [{text: t}]", "claims.0.claim.here"),
        ("clams: []", "clams"),
        ("claims: [", "while parsing"),
        ("figures: []", "figures"),
    ],
)
def test_a_document_of_another_form_is_refused_with_its_place(report_of, text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        report_of(text)


def test_an_experiment_without_a_document_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "none.yaml"
    path.write_text(yaml.safe_dump({"id": "other", "title": "t", "source": "s", "about": "a"}))
    monkeypatch.setattr(words, "words_file", lambda _: path)
    with pytest.raises(ValueError, match="no words for sum"):
        words.heading(Sum())
