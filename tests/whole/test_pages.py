"""README and pages: what they name exists, what they show is accepted, their links lead somewhere, lines are short.

    .venv/bin/python -m tests.whole.test_pages        # prints the README's table of results from the records

Pages that are generated (`GENERATED`) answer for themselves; only links into them are checked here.
"""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import sys
import tomllib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from sglang_fair import cli
from sglang_fair.core.job import Job

ROOT = Path(__file__).parents[2]
GENERATED = ("docs/results.md", "docs/settings.md")
WRITTEN = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    if str(path.relative_to(ROOT)) not in GENERATED
)
EXAMPLES = ("sglang_fair/core/spf.py",)
"""Files that a page tells its reader to write."""
FOLDERS = ("sglang_fair", "router", "workloads", "tests", "docs", "requirements")

every_page = pytest.mark.parametrize("page", WRITTEN)


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def prose_of(page: str) -> str:
    """Without what the changelog says of earlier releases, where names were other ones, and of what is gone."""
    return text_of(page).partition("\n### Removed")[0] if page == "CHANGELOG.md" else text_of(page)


@cache
def sources() -> Mapping[str, str]:
    """Every text file of the repository that holds code, by path."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix == ".py"]
    files += (ROOT / "deploy").rglob("*.sbatch")
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


@cache
def named_in_sources(word: str) -> bool:
    settings = ROOT / "docs/settings.md"
    generated = settings.read_text(encoding="utf-8") if settings.exists() else ""
    return word in generated or any(
        word in text for path, text in sources().items() if not path.startswith("tests/")
    )


def blocks(page: str) -> Iterator[str]:
    """Blocks of code, whether fenced or indented by four spaces."""

    def indented(fenced: re.Match[str]) -> str:
        return re.sub("^", "    ", fenced[1], flags=re.M)

    text = re.sub(r"^```\w*\n(.*?)^```$", indented, prose_of(page), flags=re.M | re.S)
    for block in re.findall(r"(?:^    .*\n)+", text, flags=re.M):
        yield re.sub(r"^    ", "", block, flags=re.M)


# ---- links


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", text_of(page), flags=re.M)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


@every_page
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in anchors(str(file.resolve().relative_to(ROOT))), target


# ---- files and folders


def paths(page: str) -> Iterator[str]:
    """What looks like a file or folder of the repository: `folder/…` of ours, or `name.py`, `name.md`."""
    for word in re.findall(r"`([^`\s]+)`", prose_of(page)):
        if word in EXAMPLES or any(sign in word for sign in ("NAME", "<", "*", "{")):
            continue
        if (word.split("/")[0] in FOLDERS and "/" in word) or re.fullmatch(r"[\w./]+\.(py|md)", word):
            yield word


@every_page
def test_files_exist(page: str) -> None:
    known = [f"/{path}" for path in sources()] + [f"/{name}" for name in WRITTEN]
    for path in paths(page):
        assert (ROOT / path).exists() or any(one.endswith(f"/{path}") for one in known), path


def test_the_picture_of_layers_is_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    picture = next(block for block in blocks("docs/architecture.md") if "sglang_fair.cli" in block)
    drawn = [re.split(r"  +", line.strip())[0] for line in picture.splitlines() if line.strip()]
    assert [{name.split(".")[-1] for name in row.split(" | ")} for row in drawn] == [
        {name.split(".")[-1] for name in row.split(" | ")} for row in layers
    ]


# ---- commands, options, variables, headers


@cache
def help_of(*command: str) -> str:
    """What `sglang-fair COMMAND --help` prints, asked for in this process, which imports only once."""

    def become(module: str, arguments: list[str]) -> None:
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    shown = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(action="ignore"),  # runpy's, of modules that are imported already
    ):
        patch.setattr(cli, "_become", become)
        patch.setattr(os, "_exit", sys.exit)
        patch.setattr(sys, "argv", ["sglang-fair", *command, "--help"])
        patch.setenv("COLUMNS", "250")
        patch.setenv("TERM", "dumb")
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return "" if ended.value.code else shown.getvalue()


def commands(page: str) -> Iterator[Sequence[str]]:
    """Our commands, in blocks and in the text, as words."""
    shown = [line for block in blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    shown += re.findall(r"`(sglang-fair [^`]+)`", prose_of(page))
    for line in shown:
        line = line.strip().removeprefix(".venv/bin/")
        if line.startswith("sglang-fair "):
            yield shlex.split(line, comments=True)[1:]


def test_commands_are_accepted() -> None:
    """Each is a command that there is, and has the options that are shown. One test: each --help is asked for once."""
    shown_on = [(page, words) for page in WRITTEN for words in commands(page)]
    for page, words in shown_on:
        name = tuple(words[:2] if words[0] in ("bench", "workers", "tenants") else words[:1])
        if name[0].startswith("-"):
            continue
        shown = help_of(*name)
        assert shown, f"{page}: there is no command {' '.join(name)}"
        for word in words[: words.index("--") if "--" in words else None]:
            if word.startswith("--"):
                option = word.partition("=")[0]
                assert re.search(rf"{option}(?![\w-])", shown), f"{page}: {' '.join(name)} has no {option}"


OTHERS_OPTIONS = {
    "--tp",
    "--model-path",
    "--schedule-policy",
    "--max-running-requests",
    "--target", "--build-arg",
    "--init",
    "--is-embedding",
    "--dataset-name", "--num-prompts", "--header",
    "--enable-custom-logit-processor",
    "--radix-eviction-policy-config",
    "--install-completion", "--show-completion",
    "--array", "--batch", "--cpus-per-task", "--gpus-per-task", "--mem-per-gpu", "--ntasks", "--requeue", "--signal",
}  # fmt: skip
"""SGLang's, docker's, Typer's, Slurm's."""


@every_page
def test_options_exist(page: str) -> None:
    for option in set(re.findall(r"(?<![\w-])--[a-z][\w-]*", prose_of(page))) - OTHERS_OPTIONS:
        assert (
            named_in_sources(option)
            or named_in_sources(f'"{option.removeprefix("--")}"')
            or (named_in_sources(option.removeprefix("--").replace("-", "_")))
        ), option


@every_page
def test_variables_and_headers_exist(page: str) -> None:
    for name in set(re.findall(r"SGLANG_FAIR_[A-Z_]+[A-Z]|x-fair-[a-z-]+[a-z]", prose_of(page))):
        assert named_in_sources(name), name


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for page in WRITTEN:
        shown = [line for block in blocks(page) for line in block.splitlines()]
        shown += re.findall(r"`(make [^`]+)`", prose_of(page))
        for line in shown:
            if found := re.match(r"make ([a-z]+)", line.strip()):
                assert found[1] in targets, f"{page}: {line}"


# ---- the README's policy, and its table of results


@pytest.mark.parametrize("page", ["README.md", "docs/adding.md"])
def test_the_policy_that_is_shown_works(page: str) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```", text_of(page), flags=re.M | re.S)
    names: dict[str, Any] = {"__name__": "example"}
    exec(code, names)
    policy = names["Spf"]()
    for job in (
        Job("long", "a", 900),
        Job("short", "b", 100, arrival=1),
        Job("as short", "a", 100, arrival=2),
    ):
        policy.arrive(job)
    assert policy.pick().id == "short"


WORKLOADS = {"tot": "trees", "judge": "judges", "qa": "documents"}
SCHEDULERS = {"d2lpm": "", "shipped": ", the default", "vtc": "", "rr": "", "preble": ""}
"""By cell, and what their names have behind placement and policy."""


def results() -> list[str]:
    """Rows of the README's table: Figure 7 on four GPUs, S1, medians of the seeds."""
    runs = json.loads((ROOT / "docs/results/dlpm-fig7.json").read_text(encoding="utf-8"))["runs"]
    by_cell: dict[str, list[Any]] = defaultdict(list)
    for run in runs:
        by_cell[run["cell"]["name"]].append(run)
    rows = []
    for workload, title in WORKLOADS.items():
        for scheduler, more in SCHEDULERS.items():
            cell = by_cell[f"{workload}-s1-d4-{scheduler}"]
            measured, site = [run["measured"] for run in cell], cell[0]["cell"]["site"]

            def middle(key: str, measured: Sequence[Any] = measured) -> float:
                return median(one[key] for one in measured)

            cut = "≥ " if any(one["p50_cut"] for one in measured) else ""
            bound = "none" if measured[0]["bound"] is None else f"{middle('bound') / 1000:,.0f}"
            cells = (
                title if scheduler == "d2lpm" else "",
                f"{site['placement']} + {site['policy']}{more}",
                f"{middle('service_rate') / 1000:,.0f}",
                f"{cut}{middle('p50_s'):.0f} s",
                f"{middle('hit_rate'):.2f}",
                f"{middle('difference') / 1000:,.0f}",
                bound,
            )
            rows.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return rows


def test_the_readme_quotes_the_records() -> None:
    shown = text_of("README.md").partition("<!-- results")[2].partition("<!-- end")[0]
    assert [line for line in shown.splitlines() if line.startswith("|")][2:] == results()


if __name__ == "__main__":
    print("\n".join(results()))
