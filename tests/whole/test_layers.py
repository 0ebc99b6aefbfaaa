"""The layers in pyproject.toml, which `lint-imports` checks, speak of every package; and no import is in a circle."""

import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("sglang_fair", "router", "workloads")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)


def contract(kind: str) -> dict:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return next(one for one in settings["contracts"] if one["type"] == kind)


def test_every_package_has_a_layer(graph):
    placed = {name.strip() for layer in contract("layers")["layers"] for name in layer.split("|")}
    assert placed == {"router", "workloads", *graph.find_children("sglang_fair")}


def test_no_module_imports_itself_through_others(graph):
    """The contract compares packages and modules side by side; this one finds a package and its own module too."""
    ignored = [entry.split(" -> ") for entry in contract("acyclic_siblings").get("ignore_imports", [])]
    circles = {
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
        if graph.chain_exists(importer=imported, imported=importer)
    }
    assert circles <= {tuple(order) for one in ignored for order in (one, reversed(one))}
