"""The wheel and the sdist: what is in them, and a cluster that is started from the wheel alone."""

import json
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import httpx
import pytest

from sglang_fair.common.version import VERSION
from tests.support.live import EMULATED, Cluster
from tests.support.wheel import PACKAGES, ROOT, Built, Installed, clean_environment, install

pytestmark = [pytest.mark.machine, pytest.mark.slow]


def sources() -> set[str]:
    """Every file of the packages."""
    files = (file for name in PACKAGES for file in (ROOT / name).rglob("*"))
    return {
        str(file.relative_to(ROOT)) for file in files if file.is_file() and "__pycache__" not in file.parts
    }


class TestContents:
    def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(self, built: Built) -> None:
        with zipfile.ZipFile(built.wheel) as archive:
            names = set(archive.namelist())
        about = {name for name in names if ".dist-info/" in name}
        assert names - about == sources()
        assert {name.partition(".dist-info/")[2] for name in about} == {
            "METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"
        }  # fmt: skip
        assert {f"{name}/py.typed" for name in PACKAGES} <= names

    def test_the_sdist_has_the_same_and_no_tests_caches_or_keys(self, built: Built) -> None:
        with tarfile.open(built.sdist) as archive:
            names = {one.name.partition("/")[2] for one in archive.getmembers() if one.isfile()}
        assert sources() | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= names
        assert {"deploy/monitoring/alerts.yaml", "deploy/monitoring/prometheus.yaml"} <= names
        assert not [
            name for name in names if name.startswith("tests/") or name.endswith((".pyc", ".key", ".so"))
        ]

    def test_what_the_metadata_say(self, built: Built) -> None:
        with zipfile.ZipFile(built.wheel) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith("METADATA"))
            found = Parser().parsestr(archive.read(name).decode())
        assert (found["Name"], found["Version"]) == ("sglang-fair", VERSION)
        assert found["License-Expression"] == "Apache-2.0"
        assert not [one for one in found.get_all("Requires-Dist") if "torch" in one], "the machine says which"
        assert built.wheel.name == f"sglang_fair-{VERSION}-py3-none-any.whl"


def test_records_name_no_commit_of_a_repository_around_the_environment(built: Built, tmp_path: Path) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    inside = install(built.wheel, tmp_path / "v")
    said = inside.run(
        "python", "-c", "from sglang_fair.common import provenance as p; print(p.versions()['commit'])"
    )
    assert said.stdout == "not in a git repository\n", said


@pytest.fixture(scope="module")
def cluster(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(
        *EMULATED, command=(installed.command,), folder=tmp_path_factory.mktemp("elsewhere"),
        environment=clean_environment(),
    )  # fmt: skip
    with started as made:
        yield made


@pytest.mark.e2e
class TestFromTheWheel:
    def test_it_answers(self, cluster: Cluster) -> None:
        asked = [{"role": "user", "content": "What is the capital of Italy?"}]
        body = {"model": "default", "messages": asked, "max_tokens": 16}
        url, who = f"{cluster.url}/v1/chat/completions", {"x-fair-client": "alice"}
        answer = httpx.post(url, json=body, headers=who, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
        assert sum(book["clients"].get("alice", {}).get("service", 0) for book in cluster.books()) > 0

    def test_its_commands_see_the_cluster(self, cluster: Cluster, installed: Installed) -> None:
        shown = installed.run("sglang-fair", "status", cluster.url, "--json")
        assert shown.returncode == 0, shown.stderr
        assert json.loads(shown.stdout)["gateway"]["gateway"]["version"] == VERSION
        assert installed.run("sglang-fair", "--version").stdout == f"sglang-fair {VERSION}\n"

    def test_nothing_is_read_from_the_checkout(self, cluster: Cluster, installed: Installed) -> None:
        places = installed.run(
            "python", "-c", "import router, sglang_fair, workloads as w; print(router, sglang_fair, w)"
        )
        assert places.stdout.count(str(installed.folder)) == 3, places
        assert installed.read_from_the_checkout() == []

    def test_the_watcher_sees_what_is_read(self, installed: Installed, tmp_path: Path) -> None:
        assert installed.run("python", "-c", f"open({str(ROOT / 'LICENSE')!r}).close()").returncode == 0
        assert installed.read_from_the_checkout() == [str(ROOT / "LICENSE")]
