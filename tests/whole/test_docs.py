"""docs/policies.md says of each policy, placement and cost what the code has: names, knobs, defaults, bounds, prices,
memory.

    .venv/bin/python -m tests.whole.test_docs        # prints the page's table of memory

A page that falls behind the registry fails here.
"""

import gc
import re
import tracemalloc
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import pytest

from router.placement import PLACEMENTS
from sglang_fair.core import POLICIES, make_policy, option_values, options, options_of
from sglang_fair.core.admission import Admission
from sglang_fair.core.cost import COSTS, make_cost
from sglang_fair.core.job import Job
from sglang_fair.core.normal import ALL_CLIENTS
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.wsc import Normalised
from sglang_fair.overlay.config import server_name

PAGE = (Path(__file__).parents[2] / "docs/policies.md").read_text(encoding="utf-8")

every_policy = pytest.mark.parametrize("name", list(POLICIES))
every_cost = pytest.mark.parametrize("name", list(COSTS))


def sections(heading: str) -> Mapping[str, Mapping[str, str]]:
    """Below `## heading`: each `### `name``, and its parts, which begin with a **Word.**"""
    chapter = re.split(r"^## ", PAGE.partition(f"\n## {heading}\n")[2], flags=re.M)[0]
    found = {}
    for section in re.split(r"^### ", chapter, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        pieces = re.split(r"^\*\*([^*]+)\.\*\*", body, flags=re.M)
        found[title.strip("` ")] = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    return found


OUR_POLICIES, OUR_COSTS = sections("The policies"), sections("Cost functions")


def knobs(text: str) -> dict[str, str]:
    """`- `name` (default): …` as name to default."""
    return dict(re.findall(r"^- `(\w+)` \(([^)]*)\):", text, flags=re.M))


def written(value: object) -> str:
    """A default as the page writes it."""
    if value is None:
        return "not set"
    return f"{value:,g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


# ---- the same shape for each


def test_every_policy_has_its_section_and_no_other():
    assert sorted(OUR_POLICIES) == sorted(POLICIES)


def test_every_cost_has_its_section_and_no_other():
    assert sorted(OUR_COSTS) == sorted(COSTS)


def test_the_table_of_placements_names_each_of_them():
    chapter = PAGE.partition("\n## The placements\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([^`]+)` \|", chapter, flags=re.M) == list(PLACEMENTS)


# ---- what it says is so


@every_policy
def test_knobs_are_the_policys_with_their_defaults(name):
    policy = make_policy(name)
    expected = {option: written(value) for option, value in option_values(policy).items()}
    if "quantum" in {field.name for field in fields(policy)}:
        expected["quantum"] = written(policy.quantum)
    if policy.weights is not None:
        expected["weights"] = "1 for everybody"
    assert knobs(OUR_POLICIES[name]["Knobs"]) == expected


@every_policy
def test_a_bound_is_claimed_where_one_is_exported(name):
    claimed = not OUR_POLICIES[name]["Bound"].strip().startswith("None")
    assert claimed == (make_policy(name).bound(1, 1) is not None)


@every_policy
def test_it_is_selected_by_commands_that_are_accepted(name):
    text = " ".join(OUR_POLICIES[name]["Select it"].split())
    assert re.search(rf"sglang serve --schedule-policy {re.escape(server_name(name))}( |$)", text)
    assert re.search(rf"sglang-fair cluster --policy {re.escape(name)}( |$)", text)
    shown = re.findall(r"--(?:fair|policy)-options (\S+)", text)
    assert len(shown) == (2 if options_of(name) else 0)
    for one in shown:
        options.make(name, one, quantum=2000, weights=make_policy("dlpm").weights)


@every_cost
def test_parameters_are_the_costs_with_their_defaults(name):
    text = OUR_COSTS[name]["Parameters"]
    told = {field.name: written(field.default) for field in fields(COSTS[name])}
    told = {key: "needed" if "MISSING" in value else value.lower() for key, value in told.items()}
    assert knobs(text) == told


def test_prices_are_those_of_the_costs():
    """The table of what one request costs under each function."""
    chapter = PAGE.partition("\n## Cost functions\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", chapter, flags=re.M)
    assert {text.partition(":")[0] for text, *_ in rows} == set(COSTS)
    for text, *prices in rows:
        cost = make_cost(text)
        said = [cost(1000, 200), cost(1000, 200, 4000), cost(8000, 200)]
        assert prices == [f"{units:,.0f}" for units in said], text


# ---- memory

REQUESTS = 10_000
LIMITS = (2_048, 2_048, 2_048)
"""Bytes for each request that waits, for each further client that waits, for each absent client."""


def block_of(request: int) -> Any:
    """What the overlay keeps to know requests that would compute the same: a digest of samples of the prompt."""
    return 512, None, None, Random(request).randbytes(16)


def waiting_bytes(name: str, clients: int, requests: int) -> float:
    """For each of `requests` waiting requests of `clients` clients: queue, policy, look-ups, and its own id and
    the digest of samples of its prompt."""
    admission = Admission(FairQueue(make_policy(name)), lambda job: (0, None))
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(requests):
        job = Job(f"{number:032x}", f"tenant-{number % clients:06}", 1000, 500)
        admission.arrive(job)
        admission.looked_up(job, number % 3 * 256, block_of(number))
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / requests


def absent_bytes(name: str, clients: int) -> float:
    """For each of `clients` that had one request each and are gone, while one that was never served waits."""
    queue = FairQueue(make_policy(name))
    queue.arrive(Job("first", "first", 1000, 500))
    if isinstance(queue.policy, Normalised):  # what is normal is learnt of so many clients, and not of more
        for number in range(2 * ALL_CLIENTS):
            queue.policy.normal.learn(f"{number:032x}", "", "", 1000, 5)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(clients):
        job = Job(f"{number:032x}", f"tenant-{number:06}", 1000, 500)
        queue.arrive(job)
        queue.admit(job, extend_tokens=1000, cached_tokens=0)
        queue.account.emit(job, 5 + number % 7)
        queue.finish(job.id)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / clients


def memory(name: str, requests: int) -> tuple[float, float, float]:
    """Bytes for each request that waits, each further client that waits, each absent client."""
    gc.freeze()  # all that was imported need not be looked through again and again
    try:
        one = waiting_bytes(name, 1, requests)
        return one, waiting_bytes(name, requests, requests) - one, absent_bytes(name, requests)
    finally:
        gc.unfreeze()


@pytest.mark.slow
@every_policy
def test_memory_is_bounded_and_what_the_page_says(name):
    """A sixteenth of the page's number: dictionaries are then as full as with all of them."""
    numbers = r" \| ".join([r"([\d,]+)"] * 3)
    row = re.search(rf"^\| `{re.escape(name)}` \| {numbers} \|$", PAGE, flags=re.M)
    assert row is not None
    measured = memory(name, REQUESTS // 16)
    for bytes_each, said, limit in zip(measured, row.groups(), LIMITS, strict=True):
        assert bytes_each < limit
        assert bytes_each == pytest.approx(float(said.replace(",", "")), rel=0.2, abs=64), (
            "measure anew: python -m tests.whole.test_docs"
        )


if __name__ == "__main__":
    print("| policy | waiting request | further waiting client | absent client |\n|---|---|---|---|")
    for each in POLICIES:
        print(f"| `{each}` |", *(f"{round(number, -1):,.0f} |" for number in memory(each, REQUESTS)))
