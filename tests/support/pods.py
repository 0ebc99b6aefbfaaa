"""The chart's pods as processes, or as containers of an image.

    unshare -rmn python -m tests.support.pods      prints `ok`
    python -m tests.support.pods IMAGE             the same, as root; needs a Docker engine on this machine

Each is in a network of its own, with a name server that knows the chart's services. What a container would find is
where it looks for it, its variables are those of the manifest, and it is probed as the manifest says; a service has the
addresses of the pods that are ready. Replicas emulate a GPU. A router is replaced, and comes back at another address.
Everything is protected: keys, and certificates with the pods' names. No API server has a part in it. Containers have
the user, the privileges, the volumes and the read-only file system of the manifest; processes have none of these.
"""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.support.helm import NAMESPACE, ROOT, Container, Pod, Rendered, render, values_file
from tests.support.mounted import Node, Secrets
from tests.support.waiting import eventually, wait_until

NODE = "10.8.0.1"
PROTECTED = ",".join((
    "insecure=false", "curve.existingSecret=curve", "ca.existingSecret=internal-ca", "keys.existingSecret=service-keys",
    "gateway.tls.existingSecret=gateway-tls", "replicas.tls.existingSecret=replica-tls",
    "router.tls.existingSecret=router-tls", "dashboard.tls.existingSecret=dashboard-tls",
    "replicas.discovery=names", "replicas.count=1", "replicas.drainSeconds=30", "router.count=2", "gateway.count=2",
))  # fmt: skip
CLIENTS = [f"client-{number}" for number in range(8)]
START_S = 240.0


def run(*words: str) -> None:
    subprocess.run(words, check=True)


class Names(asyncio.DatagramProtocol):
    """A name server that knows the IPv4 addresses of the names in `zone`."""

    def __init__(self, zone: Mapping[str, set[str]]) -> None:
        self._zone = zone

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = transport

    def datagram_received(self, data: bytes, peer: object) -> None:
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode())
            at += 1 + data[at]
        addresses = self._zone.get(".".join(labels), set())
        is_asked_for = data[at + 1 : at + 3] == b"\0\1"
        found = [socket.inet_aton(one) for one in addresses if is_asked_for]
        records = b"".join(b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + raw for raw in found)
        code = 0x80 if addresses else 0x83
        head = data[:2] + bytes([0x84, code]) + b"\0\1" + len(found).to_bytes(2, "big") + b"\0\0\0\0"
        self._wire.sendto(head + data[12 : at + 5] + records, peer)  # type: ignore[attr-defined]


@dataclass
class Running:
    """One pod."""

    pod: Pod
    name: str
    address: str
    holder: "subprocess.Popen[bytes]"
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    is_ready: bool = False


class Kubelet:
    """Starts pods, probes them, and tells the name server who is ready."""

    def __init__(self, rendered: Rendered, folder: Path) -> None:
        self.rendered, self._folder = rendered, folder
        self.node = Node(rendered, Secrets(folder / "secrets"), folder / "mounts", lambda path: None)
        self.zone: dict[str, set[str]] = {}
        self.pods: dict[str, Running] = {}
        self._hosts = 1
        self._make_network()

    def _make_network(self) -> None:
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "pods", "type", "bridge")
        run("ip", "address", "add", f"{NODE}/16", "dev", "pods")
        run("ip", "link", "set", "pods", "up")
        resolver = self._folder / "resolv.conf"
        resolver.write_text(f"nameserver {NODE}\noptions timeout:1 attempts:2\n")
        run("mount", "--bind", str(resolver), "/etc/resolv.conf")

    def start_all(self) -> None:
        for pod in self.rendered.pods:
            for number in range(pod.count or 0):
                self.start(pod, f"{pod.workload}-{number}")

    def start(self, pod: Pod, name: str) -> Running:
        """At an address that no pod has had."""
        self._hosts += 1
        address = f"10.8.{self._hosts // 200}.{self._hosts % 200 + 2}"
        holder, inside = self._hold(name, address)
        running = self.pods[name] = Running(pod, name, address, holder)
        for init in pod.spec.get("initContainers", ()):
            done = self._process(running, Container(pod, init), inside)
            assert done.wait() == 0, (name, init["name"])
        for container in pod.containers:
            running.processes[container.name] = self._process(running, container, inside)
        return running

    def _hold(self, name: str, address: str) -> tuple["subprocess.Popen[bytes]", tuple[str, ...]]:
        """A process that holds the pod's network, and the words before a command that is to be in it."""
        link = f"pod{self._hosts}"
        holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        own, pid = os.readlink("/proc/self/ns/net"), str(holder.pid)
        wait_until(lambda: os.readlink(f"/proc/{pid}/ns/net") != own, "the pod's network")
        inside = ("nsenter", "--target", pid, "--net")
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", pid)
        run("ip", "link", "set", link, "master", "pods", "up")
        run(*inside, "ip", "address", "add", f"{address}/16", "dev", "eth0")
        run(*inside, "ip", "link", "set", "eth0", "up")
        run(*inside, "ip", "link", "set", "lo", "up")
        return holder, inside

    def _process(
        self, running: Running, container: Container, inside: tuple[str, ...]
    ) -> "subprocess.Popen[bytes]":
        root = self.node.mount(container)
        env = self.node.environment(container) | {"POD_NAME": running.name, "POD_IP": running.address}
        command, env = self._command(running, container, root, env)
        with (self._folder / f"{running.name}-{container.name}.log").open("ab") as log:
            return subprocess.Popen(
                [*inside, *command], env=env, stdout=log, stderr=log, start_new_session=True
            )

    def _command(
        self, running: Running, container: Container, root: Path, env: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """The words of a container's process, and its variables."""
        words = [sys.executable, "-m", "sglang_fair.cli", container.program]
        own = {name: value.replace("/cache", f"{self._folder}/cache") for name, value in env.items()}
        own |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
        return [*words, *self.node.arguments(container, root, env)], own

    def stop(self, name: str) -> None:
        """Tells its processes to end, and waits no longer than the manifest says."""
        running = self.pods.pop(name)
        self._tell()
        for process in running.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in running.processes.values():
            process.wait(running.pod.spec["terminationGracePeriodSeconds"])
        self._end(running)

    def replace(self, name: str) -> Running:
        """As a stateful set does: another pod of the same name."""
        pod = self.pods[name].pod
        self.stop(name)
        return self.start(pod, name)

    def _end(self, running: Running) -> None:
        for process in running.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        running.holder.kill()
        running.holder.wait()

    def close(self) -> None:
        for running in self.pods.values():
            self._end(running)

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Probes, again and again."""
        while True:
            for running in list(self.pods.values()):
                running.is_ready = all(
                    [await self._passes(session, running, one) for one in running.pod.containers]
                )
            self._tell()
            await asyncio.sleep(0.5)

    async def _passes(self, session: aiohttp.ClientSession, running: Running, container: Container) -> bool:
        process = running.processes.get(container.name)
        assert process is None or process.poll() is None, (
            f"{running.name} has ended: {self.log(running.name)}"
        )
        probe = container.manifest.get("readinessProbe")
        if probe is None:
            return True
        asked = probe["httpGet"]
        url = f"{asked.get('scheme', 'HTTP').lower()}://{running.address}:{container.ports[asked['port']]}{asked['path']}"
        try:
            async with session.get(
                url, timeout=aiohttp.ClientTimeout(total=probe["timeoutSeconds"])
            ) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    def _tell(self) -> None:
        zone: dict[str, set[str]] = {}
        for service in self.rendered.of("Service"):
            name = f"{service['metadata']['name']}.{NAMESPACE}.svc"
            for one in self.pods.values():
                is_listed = one.is_ready or service["spec"].get("publishNotReadyAddresses")
                if is_listed and service["spec"]["selector"].items() <= one.pod.labels.items():
                    zone.setdefault(name, set()).add(one.address)
                    if one.pod.kind == "StatefulSet":
                        zone[f"{one.name}.{name}"] = {one.address}
        self.zone.clear()
        self.zone.update(zone)

    def of(self, component: str) -> list[Running]:
        return [one for one in self.pods.values() if one.pod.component == component]

    def log(self, name: str) -> str:
        return "".join(path.read_text()[-3000:] for path in self._folder.glob(f"{name}-*.log"))


class Containers(Kubelet):
    """As containers of an image, whichever one the manifest names."""

    def __init__(self, rendered: Rendered, folder: Path, image: str) -> None:
        self._image = image
        super().__init__(rendered, folder)

    def _make_network(self) -> None:
        run("docker", "network", "create", "--subnet", f"{NODE}/16", "--gateway", NODE, "pods")

    def _hold(self, name: str, address: str) -> tuple["subprocess.Popen[bytes]", tuple[str, ...]]:
        command = ["docker", "run", "--rm", "--init", "--name", name, "--network", "pods", "--ip", address]
        holder = subprocess.Popen([*command, "--dns", NODE, "--entrypoint", "sleep", self._image, "infinity"])
        running = ["docker", "exec", name, "true"]
        wait_until(lambda: subprocess.run(running, capture_output=True).returncode == 0, "the pod's network")
        return holder, ("docker", "run", "--rm", f"--network=container:{name}", f"--pid=container:{name}")

    def _command(
        self, running: Running, container: Container, root: Path, env: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        user, may = running.pod.spec["securityContext"], container.manifest["securityContext"]
        assert may["readOnlyRootFilesystem"]
        assert not may["allowPrivilegeEscalation"]
        words = [
            f"--name={running.name}-{container.name}",
            f"--user={user['runAsUser']}:{user['runAsGroup']}",
        ]
        words += ["--read-only", "--security-opt=no-new-privileges"]
        words += [f"--cap-drop={one}" for one in may["capabilities"]["drop"]]
        emptied = {one["name"] for one in running.pod.spec["volumes"] if "emptyDir" in one}
        for mount in container.manifest["volumeMounts"]:
            source = root / mount["mountPath"].lstrip("/")
            if mount["name"] in emptied:  # each pod has its own
                source = self._folder / "volumes" / running.name / mount["name"]
                source.mkdir(parents=True, exist_ok=True)
                source.chmod(0o777)
            words.append(f"-v={source}:{mount['mountPath']}{':ro' if mount.get('readOnly') else ''}")
        words += [f"-e={name}={value}" for name, value in env.items()]
        (entrypoint,) = container.manifest["command"]
        said = [container.program, *self.node.arguments(container, None, env)]
        return [*words, f"--entrypoint={entrypoint}", self._image, *said], dict(os.environ)

    def _end(self, running: Running) -> None:
        names = [f"{running.name}-{name}" for name in running.processes]
        subprocess.run(["docker", "rm", "--force", *names, running.name], capture_output=True)
        super()._end(running)

    def close(self) -> None:
        super().close()
        run("docker", "network", "rm", "pods")


def metric(page: str, name: str) -> float:
    """The sum over all labels."""
    rows = [
        line
        for line in page.splitlines()
        if line.startswith((f"sglang_fair_{name}{{", f"sglang_fair_{name} "))
    ]
    return sum(float(row.rpartition(" ")[2]) for row in rows)


class Checks:
    """What is asked of the pods, from the node."""

    def __init__(self, kubelet: Kubelet, session: aiohttp.ClientSession) -> None:
        self._kubelet, self._session = kubelet, session
        self._admin = {"authorization": "Bearer " + "x" * 32}

    async def all_ready(self) -> bool:
        return all(one.is_ready for one in self._kubelet.pods.values())

    async def serves(self, prompt: str) -> None:
        """Every client at every gateway."""
        for gateway in self._kubelet.of("gateway"):
            for client in CLIENTS:
                body = {
                    "model": "llama",
                    "messages": [{"role": "user", "content": prompt * 40}],
                    "max_tokens": 4,
                }
                url = f"https://{gateway.address}:8000/v1/chat/completions"
                async with self._session.post(url, json=body, headers={"x-fair-client": client}) as answer:
                    assert answer.status == 200, await answer.text()

    async def pages(self, component: str, port: int) -> list[str]:
        found = []
        for one in self._kubelet.of(component):
            url = f"https://{one.address}:{port}/metrics"
            async with self._session.get(url, headers=self._admin) as answer:
                assert answer.status == 200, (url, answer.status)
                found.append(await answer.text())
        return found

    async def routers_follow_caches(self) -> bool:
        """Both placed requests, and heard of what the replica has cached."""
        return all(
            metric(page, "router_placements_total") > 0
            and metric(page, "router_tree_tokens") > 0
            and metric(page, "router_measured_hit_tokens_total") > 0
            for page in await self.pages("router", 9001)
        )

    async def gateways_see(self, routers: int) -> bool:
        return all(
            metric(page, "gateway_routers_up") == routers for page in await self.pages("gateway", 8001)
        )

    async def refuses_whoever_has_no_key(self) -> None:
        (gateway, *_) = self._kubelet.of("gateway")
        (replica, *_) = self._kubelet.of("replica")
        (dashboard,) = self._kubelet.of("dashboard")
        for url, status in (
            (f"https://{gateway.address}:8001/metrics", 401),
            (f"https://{replica.address}:30000/fair", 401),
            (f"https://{dashboard.address}:8002/view", 401),
        ):
            async with self._session.get(url, allow_redirects=False) as answer:
                assert answer.status == status, (url, answer.status)

    async def page_shows_clients_and_replicas(self) -> bool:
        """It shows what is served while it looks, so something is."""
        await self.serves("one ")
        (dashboard,) = self._kubelet.of("dashboard")
        async with self._session.get(f"https://{dashboard.address}:8002/view", headers=self._admin) as answer:
            assert answer.status == 200
            text = await answer.text()
        return all(name in text for name in ("client-", *(one.name for one in self._kubelet.of("replica"))))


async def body(kubelet: Kubelet) -> None:
    await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Names(kubelet.zone), local_addr=(NODE, 53)
    )
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE  # as a kubelet's probes
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as session:
        watching = asyncio.create_task(kubelet.watch(session))
        checks = Checks(kubelet, session)

        async def ready(what: str) -> None:
            async def is_so() -> bool:
                if watching.done():
                    watching.result()
                return await checks.all_ready()

            await eventually(is_so, what, START_S)

        try:
            await asyncio.to_thread(kubelet.start_all)
            await ready("all pods are ready")
            await checks.serves("one ")
            await eventually(checks.routers_follow_caches, "routers hear of caches")
            await checks.refuses_whoever_has_no_key()
            await eventually(
                checks.page_shows_clients_and_replicas, "the dashboard asks gateways and replicas"
            )

            await asyncio.to_thread(kubelet.replace, "rel-sglang-fair-router-0")
            await ready("the router is back at another address")
            await eventually(lambda: checks.gateways_see(2), "gateways find the router by its name")
            await checks.serves("one ")
            await eventually(checks.routers_follow_caches, "the new router hears of caches")
        finally:
            watching.cancel()


def main(*image: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rendered = render("-f", str(values_file("cpu-trial")), "--set", PROTECTED)
        kubelet = Containers(rendered, Path(folder), *image) if image else Kubelet(rendered, Path(folder))
        try:
            asyncio.run(body(kubelet))
        except BaseException:
            for name in kubelet.pods:
                print(f"==== {name}\n{kubelet.log(name)}")
            raise
        finally:
            kubelet.close()
    print("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
