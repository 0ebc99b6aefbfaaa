"""What a rendered container would find: its files on this disk, its variables, and the settings that it would run with.

Secrets that the chart does not make are made as docs/kubernetes.md says: keys by `sglang-fair keys`, certificates by
openssl, a tenants' file by our own code.
"""

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_fair.common import curve
from tests.support.certificates import HERE, Certificates
from tests.support.helm import Container, Rendered

POD_IP, LEADER = "10.1.2.3", "rel-sglang-fair-replica-0.rel-sglang-fair-replica.prod"

FIELDS = {
    "metadata.name": "rel-sglang-fair-replica-0",
    "status.podIP": POD_IP,
    "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']": "1",
}
FILES = "/etc/sglang-fair/files"
"""Where settings find the files that they name."""

FROM_LWS = {"LWS_LEADER_ADDRESS": LEADER}
"""Which LeaderWorkerSet puts into its pods' environment."""

NAMES = tuple(
    f"DNS:{name}.prod.svc"
    for name in (
        "*.rel-sglang-fair-replica",
        *(f"rel-sglang-fair-{one}" for one in ("gateway", "admin", "router")),
    )
)
"""In the certificates, as docs/kubernetes.md says."""

TENANTS = f"tenants:\n  gold:\n    keys:\n    - sha256:{'5' * 64}\n    weight: 2.0\n"


@dataclass(frozen=True)
class Secrets:
    """Secrets that operators make, by name: their keys, and the contents."""

    folder: Path

    @cached_property
    def all(self) -> Mapping[str, Mapping[str, bytes]]:
        keys, certificates = self.folder / "curve", Certificates.make(self.folder / "tls", (*HERE, *NAMES))
        curve.make(keys)
        tls = {
            "tls.crt": certificates.certificate,
            "tls.key": certificates.key,
            "ca.crt": certificates.authority,
        }
        pair = {name: Path(path).read_bytes() for name, path in tls.items()}
        return {
            "curve": {path.name: path.read_bytes() for path in keys.iterdir()},
            "service-keys": dict.fromkeys(("admin-key", "replica-key", "feeder-key"), b"x" * 32),
            "internal-ca": {"ca.crt": pair["ca.crt"]},
            "gateway-tls": pair,
            "replica-tls": pair,
            "router-tls": pair,
            "dashboard-tls": pair,
            "tenants": {"tenants.yaml": TENANTS.encode()},
            "hub-token": {"token": b"hf_0"},
        }


class Node:
    """Has the rendered objects, and gives containers their files."""

    def __init__(
        self, rendered: Rendered, secrets: Secrets, folder: Path, tokenizer: Callable[[Path], Any]
    ) -> None:
        """`tokenizer` makes a tokenizer in a folder."""
        self._rendered, self._secrets, self._folder, self._tokenizer = rendered, secrets, folder, tokenizer

    def contents(self, kind: str, name: str) -> Mapping[str, bytes]:
        """Of a secret or a config map. KeyError if there is none."""
        found = self._rendered.named(kind, name)
        if found is None:
            if kind != "Secret":
                raise KeyError(f"no {kind} {name}")
            return self._secrets.all[name]
        if kind == "Secret":
            return {key: base64.b64decode(value) for key, value in found["data"].items()}
        return {key: value.encode() for key, value in (found.get("data") or {}).items()}

    def environment(self, container: Container) -> dict[str, str]:
        """The container's variables. KeyError for a secret that there is not."""
        found = dict(FROM_LWS) if container.pod.kind.startswith("LeaderWorkerSet") else {}
        for name, one in container.env.items():
            source = one.get("valueFrom", {})
            if "secretKeyRef" in source:
                asked = source["secretKeyRef"]
                found[name] = self.contents("Secret", asked["name"])[asked["key"]].decode()
            elif "fieldRef" in source:
                found[name] = FIELDS[source["fieldRef"]["fieldPath"]]
            else:
                found[name] = one["value"]
        return found

    def mount(self, container: Container) -> Path:
        """A folder with all that is mounted, at the paths below it. KeyError for what there is not."""
        root = self._folder / re.sub(r"\W+", "-", str(container.pod))  # containers of a pod share its volumes
        volumes = {one["name"]: one for one in container.pod.spec.get("volumes", ())}
        for mount in container.manifest["volumeMounts"]:
            at = root / mount["mountPath"].lstrip("/")
            if (only := mount.get("subPath")) is not None:  # one file of a volume, where it is mounted
                at.parent.mkdir(parents=True, exist_ok=True)
                at.write_bytes(self._volume(volumes[mount["name"]])[only])
                continue
            at.mkdir(parents=True, exist_ok=True)
            if mount["name"] not in volumes:
                assert mount["name"] in container.pod.claims, f"{container} has no volume {mount['name']}"
                continue
            for name, content in self._volume(volumes[mount["name"]]).items():
                below = f"{root}{FILES}".encode()
                (at / name).write_bytes(content.replace(FILES.encode(), below))
        for number in range(len(container.pod.spec.get("initContainers", ()))):
            (root / f"tokenizers/{number}").mkdir(parents=True, exist_ok=True)
            self._tokenizer(root / f"tokenizers/{number}")
        return root

    def _volume(self, volume: Mapping[str, Any]) -> dict[str, bytes]:
        if "secret" in volume:
            asked = volume["secret"]
            known = self.contents("Secret", asked["secretName"])
            return {one["path"]: known[one["key"]] for one in asked["items"]}
        if "configMap" in volume:
            return dict(self.contents("ConfigMap", volume["configMap"]["name"]))
        assert {"emptyDir", "persistentVolumeClaim"} & volume.keys(), volume
        return {}

    def arguments(
        self, container: Container, root: Path | None, env: Mapping[str, str] | None = None
    ) -> list[str]:
        """As the process gets them, with paths below `root`, if there is one. KeyError for a variable that there is
        not."""
        env = self.environment(container) if env is None else env
        words = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], word) for word in container.arguments]
        if root is None:
            return words
        return [re.sub(r"(?<==)/(etc/sglang-fair|tokenizers|batches)", rf"{root}/\1", word) for word in words]


def ports_of(program: str, settings: Any, *, leads: bool = True) -> set[int]:
    """The ports that a process opens for others. A replica that does not lead is a further node of another one."""
    match program:
        case "replica":
            found = {settings.port}
            if leads and settings.kv_port is not None:  # SGLang publishes from its first node
                found |= {settings.kv_port, settings.kv_port + 1, *filter(None, (settings.load_port,))}
            meets = [word for word in settings.extra if word.startswith("--dist-init-addr=")]
            return found | {int(word.rpartition(":")[2]) for word in meets}
        case "router":
            return {int(settings.bind.rpartition(":")[2]), settings.http_port}
        case "gateway" | "picker":
            return {settings.port, settings.admin_port}
        case "dashboard":
            return {settings.port}
    return set()
