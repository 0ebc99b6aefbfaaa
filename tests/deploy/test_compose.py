"""The Compose files: what docker-compose makes of them, and what our programs make of their command lines.

test_image.py starts them, where there is an image and a Docker engine.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from router.replica_lists import specs
from sglang_fair.models import __main__ as models
from sglang_fair.settings import program
from sglang_fair.settings.commands import run as run_command
from sglang_fair.settings.table import SECTIONS
from tests.support.helm import ROOT
from tests.support.monitoring import FOLDER, RULES
from tests.support.mounted import ports_of
from tests.support.programs import main_of
from tests.support.stand_in import make_tokenizer

DEPLOY = ROOT / "deploy"
FILES = {"cpu": ("compose.yaml",), "gpu": ("compose.yaml", "compose.gpu.yaml")}
SAID = {
    "SGLANG_FAIR_ADMIN_KEY": "operators",
    "SGLANG_FAIR_REPLICA_KEY": "replicas",
    "MODEL": "org/model",
    "MODEL_NAME": "llama",
}

Service = dict[str, Any]


def interpolated(text: str) -> str:
    """As docker-compose does it: ${NAME}, ${NAME:-default}, ${NAME:?error}; $$ is a dollar."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        name, kind, other = found[1], found[2] or "", found[3] or ""
        if name in SAID:
            return SAID[name]
        assert kind == ":-", f"{name}: {other}"
        return other

    return re.sub(r"\$\$|\$\{(\w+)(:[-?])?([^}]*)\}", value, text)


def services(which: str) -> dict[str, Service]:
    """The files, one over the other: lists of a later one win, and mappings are merged."""

    def merged(one: Any, other: Any) -> Any:
        if isinstance(one, dict) and isinstance(other, dict):
            return {key: merged(one.get(key), other.get(key, one.get(key))) for key in {**one, **other}}
        return other

    found: dict[str, Any] = {}
    for name in FILES[which]:
        found = merged(found, yaml.safe_load(interpolated((DEPLOY / name).read_text(encoding="utf-8"))))
    return dict(found["services"])


class Composition:
    """The services, with a folder for each volume."""

    def __init__(self, which: str, folder: Path) -> None:
        self.services, self._folder = services(which), folder
        self._make_keys()
        make_tokenizer(self._volume("tokenizers", "0"))
        self.programs = {
            name: self._words(one["command"])
            for name, one in self.services.items()
            if one.get("entrypoint") == ["sglang-fair"] and one["command"][0] in SECTIONS
        }
        self.settings = {name: program.parse(words[0], words[1:]) for name, words in self.programs.items()}

    def _volume(self, *words: str) -> Path:
        path = self._folder.joinpath(*words)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _words(self, words: list[str]) -> list[str]:
        return [re.sub(r"(?<==)/(keys|tokenizers)", rf"{self._folder}/\1", word) for word in words]

    def _make_keys(self) -> None:
        """Runs the script of the service `keys`, twice: as the second `up` does."""
        one = self.services["keys"]
        assert one["entrypoint"] == ["sh", "-ec"]
        (script,) = one["command"]
        bin_folder = self._volume("bin")
        (bin_folder / "sglang-fair").write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m sglang_fair.cli "$@"\n'
        )
        (bin_folder / "sglang-fair").chmod(0o755)
        self._volume("keys")
        env = {
            **os.environ,
            **one["environment"],
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        for _ in range(2):
            subprocess.run(
                ["sh", "-ec", script.replace("/keys", f"{self._folder}/keys")], env=env, check=True
            )

    @property
    def keys(self) -> Path:
        return self._folder / "keys"


@pytest.fixture(scope="module", params=list(FILES))
def composition(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Composition:
    return Composition(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
def test_each_program_accepts_its_command_line(
    composition: Composition, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"replica", "router", "gateway", "dashboard"} <= {
        words[0] for words in composition.programs.values()
    }
    for name, words in composition.programs.items():
        with monkeypatch.context() as patch:
            for variable, value in composition.services[name].get("environment", {}).items():
                patch.setenv(variable, value or "")
            assert main_of(words[0])(["--print-config", *words[1:]]) == 0, (
                f"{name}: {capsys.readouterr().err}"
            )


def test_the_tokenizer_is_where_the_gateway_looks(
    composition: Composition, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, Path]] = []
    monkeypatch.setattr(models, "copy_tokenizer", lambda name, to, say: made.append((name, to)))
    (command, *words) = composition.services["tokenizer"]["command"]
    assert command == "models"
    assert run_command(models.main, "sglang-fair models", words) == 0
    ((source, folder),) = made
    assert f"--tokenizer={folder}" in composition.services["gateway"]["command"]
    replicas = [one for name, one in composition.settings.items() if name.startswith("replica")]
    assert {one.model for one in replicas} == {source}
    assert {one.served_name for one in replicas} == {composition.settings["gateway"].model_name}


def reached(composition: Composition) -> Iterator[tuple[str, int]]:
    """The services and ports that command lines name."""
    settings = composition.settings
    for name in map(specs.name, settings["router"].replicas_dns):
        up = name.worker(name.host)
        for address in (up.url, up.kv, up.replay):
            yield str(urlsplit(address).hostname), int(urlsplit(address).port or 0)
    for address in (*settings["gateway"].router, settings["dashboard"].gateway):
        yield str(urlsplit(address).hostname), int(urlsplit(address).port or 0)


def test_who_is_asked_is_there_and_listens(composition: Composition) -> None:
    for host, port in reached(composition):
        aliased = [
            name
            for name, one in composition.services.items()
            if name == host or host in (one.get("networks") or {}).get("default", {}).get("aliases", ())
        ]
        assert aliased
        for name in aliased:
            assert port in ports_of(composition.programs[name][0], composition.settings[name]), (name, port)


def test_only_this_machine_reaches_what_has_no_tls(composition: Composition) -> None:
    for name, one in composition.services.items():
        for published in one.get("ports", ()):
            host, _, inner = str(published).rsplit(":", 2)
            assert host == "127.0.0.1"
            if name in composition.settings:
                assert int(inner) in ports_of(composition.programs[name][0], composition.settings[name])


def test_health_is_asked_where_it_is_told(composition: Composition) -> None:
    paths = {"replica": "/ready", "router": "/healthz", "gateway": "/healthz", "dashboard": "/health"}
    for name, words in composition.programs.items():
        if "healthcheck" not in composition.services[name]:
            assert name == "replica-1"
            continue
        code = composition.services[name]["healthcheck"]["test"][-1]
        compile(code, name, "exec")
        asked = urlsplit(re.search(r"'(http[^']+)'", code)[1])  # type: ignore[index]
        assert asked.path == paths[words[0]]
        assert asked.port in ports_of(words[0], composition.settings[name])


def test_prometheus_scrapes_what_listens(composition: Composition, tmp_path: Path) -> None:
    text = (DEPLOY / "compose/prometheus.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    known = {
        one["job_name"] for one in yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    }
    assert {one["job_name"] for one in config["scrape_configs"]} == known
    for job in config["scrape_configs"]:
        for static in job.get("static_configs", ()):
            (host, _, port) = static["targets"][0].partition(":")
            assert int(port) in ports_of(composition.programs[host][0], composition.settings[host])
        for names in job.get("dns_sd_configs", ()):
            assert names["names"] == ["replica"]
            assert names["port"] == composition.settings["replica"].port
        credentials = job.get("authorization", {}).get("credentials_file")
        assert credentials is None or (composition.keys / credentials.removeprefix("/keys/")).is_file()
    if (tool := shutil.which("promtool")) is None:
        pytest.skip("no promtool")
    shutil.copy(ROOT / "deploy/monitoring/alerts.yaml", tmp_path)
    (tmp_path / "prometheus.yaml").write_text(text.replace("/keys/", f"{composition.keys}/"))
    done = subprocess.run(
        [tool, "check", "config", "prometheus.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


@pytest.mark.machine
@pytest.mark.parametrize("which", list(FILES))
def test_docker_compose_understands_it(which: str) -> None:
    tool = shutil.which("docker-compose")
    if tool is None:
        pytest.skip("no docker-compose")
    files = [word for name in FILES[which] for word in ("-f", str(DEPLOY / name))]
    env = {name: value for name, value in os.environ.items() if name not in SAID}
    done = subprocess.run(
        [tool, *files, "config"], env={**env, **SAID}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(services(which))
    bare = subprocess.run([tool, *files, "config"], env=env, capture_output=True, text=True, check=False)
    assert bare.returncode != 0
    assert "is the operators' key" in bare.stderr


def test_the_images_start_what_they_say() -> None:
    """Their commands are accepted. They listen beyond the container, which somebody publishes or does not."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    commands = [json.loads(found) for found in re.findall(r"^CMD (\[.*\])$", text, flags=re.M)]
    assert len(commands) == 2
    for command, *words in commands:
        settings = program.parse(command, words)
        assert settings.host == "0.0.0.0"
        assert settings.insecure
