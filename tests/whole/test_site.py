"""The site: it is built strictly, has every page, needs nothing from elsewhere, and its pictures are current."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import deficit_pictures
from docs.site_hooks import on_page_markdown

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does, elsewhere."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(folder)],
        capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_on_it(site: Path) -> None:
    pages = {file.stem for file in (ROOT / "docs").glob("*.md")}
    assert pages | {"404"} == {file.stem for file in site.glob("*.html")}
    home = (site / "index.html").read_text()
    assert [name for name in pages if f'href="{name}.html"' not in home and name != "index"] == []


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    """Fonts, scripts, styles and pictures are the site's own."""
    loaded = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(?:https?:)?//|<link[^>]*\shref=\"?(?:https?:)?//"
    )
    for file in site.glob("*.html"):
        assert loaded.findall(file.read_text()) == [], file.name
    for file in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )['\"]?(?:https?:)?//", file.read_text()), file.name


def test_a_link_to_a_file_of_the_repository_names_it() -> None:
    text = "See [values.yaml](../deploy/helm/values.yaml), [the head](../Dockerfile), [metrics](metrics.md#alerts)."
    said = on_page_markdown(text)
    assert said == "See `deploy/helm/values.yaml`, the head (`Dockerfile`), [metrics](metrics.md#alerts)."


def test_pictures_are_those_of_the_policies() -> None:
    for name, text in deficit_pictures.pictures().items():
        written = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert written == text, "run: python -m docs.deficit_pictures"


def test_what_the_pictures_show() -> None:
    """As the page says it: three to one under LPM, even under DLPM, and never further apart than the bound."""
    lpm, dlpm = (deficit_pictures.run(policy)[-1].service for policy in ("lpm", "dlpm"))
    assert 2.7 < lpm["greedy"] / lpm["calm"] < 3.3
    assert 0.85 < dlpm["greedy"] / dlpm["calm"] < 1.15
    samples = deficit_pictures.run("dlpm")
    for one in samples:
        assert one.bound is None or abs(one.service["greedy"] - one.service["calm"]) <= one.bound
