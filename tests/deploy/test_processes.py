"""Every container of the rendered chart starts one of our programs with a command line that this program accepts, with
the keys, certificates and files that it names where it looks for them; it listens at the ports that the chart says, and
network policies let through what its arguments imply, and nothing else.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from router.replica_lists import specs
from sglang_fair.common.curve import Keys
from sglang_fair.models import __main__ as models
from sglang_fair.settings import program
from sglang_fair.settings.commands import run as run_command
from sglang_fair.settings.table import SECTIONS
from tests.support.helm import NAMESPACE, VALUES, Container, Manifest, Pod, Rendered, rendered
from tests.support.mounted import Node, Secrets, ports_of
from tests.support.programs import main_of
from tests.support.stand_in import make_tokenizer

with_each = pytest.mark.parametrize("name", VALUES)


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return Secrets(tmp_path_factory.mktemp("secrets"))


@dataclass(frozen=True)
class Started:
    """A container as it would be started: its environment, its files, its command line, and what that says."""

    container: Container
    env: Mapping[str, str]
    root: Path
    arguments: list[str]
    settings: Any

    @property
    def pod(self) -> Pod:
        return self.container.pod


class Site:
    """All containers of the chart with one of the value files."""

    def __init__(self, name: str, secrets: Secrets, folder: Path) -> None:
        self.rendered: Rendered = rendered(name)
        node = Node(self.rendered, secrets, folder, make_tokenizer)
        self.started = [self._start(node, one) for one in self.rendered.containers]

    @staticmethod
    def _start(node: Node, container: Container) -> Started:
        assert container.manifest["command"] == ["sglang-fair"]
        root = node.mount(container)
        arguments = node.arguments(container, root)
        assert container.program in SECTIONS
        return Started(
            container,
            node.environment(container),
            root,
            arguments,
            program.parse(container.program, arguments),
        )

    def of(self, program: str) -> list[Started]:
        return [one for one in self.started if one.container.program == program]


@pytest.fixture(scope="session")
def sites(secrets: Secrets, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Site]:
    class Sites(dict[str, Site]):
        def __missing__(self, name: str) -> Site:
            self[name] = Site(name, secrets, tmp_path_factory.mktemp(name))
            return self[name]

    return Sites()


# ---- command lines


@pytest.mark.slow
@with_each
def test_each_program_accepts_its_command_line(
    name: str, sites: Mapping[str, Site], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As far as it looks before it serves: options, configuration file, keys, certificates, tenants, placement."""
    for one in sites[name].started:
        for variable, value in one.env.items():
            monkeypatch.setenv(variable, value)
        words = ["--print-config", *one.arguments]
        assert main_of(one.container.program)(words) == 0, f"{one.container}: {capsys.readouterr().err}"


@with_each
def test_tokenizers_are_put_where_the_gateway_looks(
    name: str, sites: Mapping[str, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, Path]] = []
    monkeypatch.setattr(models, "copy_tokenizer", lambda name, to, say: made.append((name, to)))
    for one in (*sites[name].of("gateway"), *sites[name].of("picker")):
        made.clear()
        for init in (Container(one.pod, init) for init in one.pod.spec["initContainers"]):
            assert init.program == "models"
            assert run_command(models.main, "sglang-fair", init.arguments) == 0
        folders = {f"/{Path(one.settings.tokenizer).relative_to(one.root)}"}
        folders |= {f"/{Path(pair.partition('=')[2]).relative_to(one.root)}"
                    for pair in one.settings.more_models.split(",") if pair}  # fmt: skip
        assert {str(to) for _, to in made} == folders


@with_each
def test_a_model_is_called_the_same_everywhere(name: str, sites: Mapping[str, Site]) -> None:
    site = sites[name]
    served = {one.settings.served_name for one in site.of("replica")}
    assert served == {one.settings.model_name for one in site.of("gateway")}
    for gateway in site.of("gateway"):
        more = [pair.partition("=")[0] for pair in gateway.settings.more_models.split(",") if pair]
        for agent in site.of("agent"):
            named = [pair.partition("=")[0] for pair in agent.settings.models.split(",")]
            assert named == [*served, *more]


@with_each
def test_no_process_dies_with_its_container_s_parent(name: str, sites: Mapping[str, Site]) -> None:
    """A container's main process has a parent that is no process of ours."""
    for one in sites[name].started:
        assert getattr(one.settings, "outlive_parent", True), one.container


@with_each
def test_keys_go_to_whom_they_belong(name: str, sites: Mapping[str, Site]) -> None:
    for one in sites[name].started:
        folder = getattr(one.settings, "keys", None)
        if folder is None:
            continue
        role: Any = {"router": "router", "replica": "replica"}.get(one.container.program, "gateway")
        assert Keys.read(folder, role).role == role
        assert {path.name for path in Path(folder).glob("*.key_secret")} == {f"{role}.key_secret"}


@with_each
def test_processes_are_given_the_time_that_they_take_to_end(name: str, sites: Mapping[str, Site]) -> None:
    for one in sites[name].started:
        hook = (
            one.container.manifest.get("lifecycle", {})
            .get("preStop", {})
            .get("exec", {})
            .get("command", ["", "0"])
        )
        drain_s = getattr(one.settings, "drain_s", 0) or (300 if one.container.program == "replica" else 3)
        drain_s += getattr(one.settings, "notice_s", 0)
        assert one.pod.spec["terminationGracePeriodSeconds"] >= int(hook[1]) + drain_s + 2, one.container


# ---- ports and probes


def listens(one: Started) -> set[int]:
    leads = one.pod.labels.get("sglang-fair/leads") == "true"
    return ports_of(one.container.program, one.settings, leads=leads)


@with_each
def test_ports_are_those_that_processes_listen_at(name: str, sites: Mapping[str, Site]) -> None:
    for one in sites[name].started:
        assert set(one.container.ports.values()) == listens(one), one.container


PATHS: Mapping[str, tuple[str, str]] = {
    "router": ("router/http.py", r"GET (/\w+)"),
    "gateway": ("router/gateway/pages.py", r'Operation\(\s*"GET",\s*"(/\w+)"'),
    "picker": ("router/gateway/pages.py", r'Operation\(\s*"GET",\s*"(/\w+)"'),
    "dashboard": ("sglang_fair/dashboard/server.py", r'web\.get\("(/\w+)"'),
}
"""Where a program's paths stand. What they answer is tested where the program is."""

OF_SGLANG = {"/ready", "/health"}


@with_each
def test_probes_ask_for_what_there_is(name: str, sites: Mapping[str, Site]) -> None:
    for one in sites[name].started:
        probes = {
            kind: one.container.manifest[kind] for kind in one.container.manifest if kind.endswith("Probe")
        }
        if not one.container.ports:
            assert not probes
            continue
        if one.container.program == "replica":
            paths = OF_SGLANG
        else:
            file, pattern = PATHS[one.container.program]
            paths = set(
                re.findall(pattern, Path(__file__).parents[2].joinpath(file).read_text(encoding="utf-8"))
            )
        has_tls = getattr(one.settings, "tls_cert", None) or "--ssl-certfile" in str(
            getattr(one.settings, "extra", "")
        )
        assert "startupProbe" in probes
        for probe in probes.values():
            asked = probe.get("httpGet") or probe["tcpSocket"]
            assert asked["port"] in one.container.ports
            if "httpGet" in probe:
                assert asked["path"] in paths
                assert asked.get("scheme", "HTTP") == ("HTTPS" if has_tls else "HTTP")


# ---- who talks to whom


@dataclass(frozen=True, order=True)
class Connection:
    """From pods of one component to those of another."""

    source: str
    target: str
    port: int


class Names:
    """Resolves the names in a site's arguments as the cluster's name server would."""

    def __init__(self, found: Rendered) -> None:
        self._found = found

    def pods(self, host: str) -> list[Pod]:
        """The pods behind `SERVICE.NAMESPACE.svc` or `POD.SERVICE.NAMESPACE.svc`. AssertionError for no such name."""
        *pod, service, namespace, svc = host.split(".")
        assert (namespace, svc) == (NAMESPACE, "svc"), host
        manifest = self._found.named("Service", service)
        if manifest is None:  # LeaderWorkerSet makes one of its own name
            assert self._found.named("LeaderWorkerSet", service) is not None, host
            return [one for one in self._found.pods if one.workload == service and "leaders" in one.kind]
        pods = self._found.selected(manifest["spec"]["selector"])
        if pod:
            (workload, _, ordinal) = pod[0].rpartition("-")
            pods = [one for one in pods if one.workload == workload]
            assert int(ordinal) < (pods[0].count or 0), host
            assert self._found.named("StatefulSet", workload)["spec"]["serviceName"] == service  # type: ignore[index]
            assert manifest["spec"]["clusterIP"] == "None"
        assert pods, host
        return pods

    def reach(self, source: Pod, address: str) -> Iterator[Connection]:
        """From a pod to a URL, or an address of ZMQ. Services have the ports of their pods, by name."""
        parts = urlsplit(address)
        assert parts.hostname is not None
        assert parts.port is not None
        if parts.hostname in ("127.0.0.1", "10.1.2.3"):
            return
        manifest = self._found.named("Service", parts.hostname.split(".")[-3])
        for pod in self.pods(parts.hostname):
            port = parts.port
            if manifest is not None:
                (named,) = [one for one in manifest["spec"]["ports"] if one["port"] == parts.port]
                port = next(
                    one.ports[named["targetPort"]]
                    for one in pod.containers
                    if named["targetPort"] in one.ports
                )
            yield Connection(source.component, pod.component, port)


def replicas_of(one: Started) -> list[Any]:
    """The replicas that a router follows, each address as a name."""
    if one.settings.replicas_file is not None:
        return specs.lines(Path(one.settings.replicas_file).read_text(encoding="utf-8"))
    return [named.worker(named.host) for named in map(specs.name, one.settings.replicas_dns)]


def implied(site: Site) -> set[Connection]:
    """What the arguments of all processes imply."""
    names, found = Names(site.rendered), set()
    followed = [up for one in site.of("router") for up in replicas_of(one)]
    assert followed
    for one in site.started:
        settings, addresses = one.settings, set()
        match one.container.program:
            case "router":
                for up in followed:
                    addresses |= {up.url, up.kv, up.replay, *filter(None, (up.load,))}
            case "gateway" | "picker":  # asks those that its routers name
                addresses |= {*settings.router, *(up.url for up in followed)}
            case "feeder":
                addresses |= {settings.gateway}
            case "agent":
                addresses |= {settings.router, settings.replica}
            case "dashboard":
                addresses |= {settings.gateway, *(up.url for up in followed)}
        for address in addresses:
            found |= set(names.reach(one.pod, address))
    return found


def matches(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    return selector is not None and selector.get("matchLabels", {}).items() <= labels.items()


def lets(
    rules: list[Manifest], peers: str, labels: Mapping[str, str], port: int, protocol: str = "TCP"
) -> bool:
    """Whether one of the rules of a policy allows this pod of its namespace, at this port."""
    for rule in rules:
        who = rule.get(peers)
        if who is not None and not any(
            "namespaceSelector" not in one and matches(one.get("podSelector"), labels) for one in who
        ):
            continue
        ports = rule.get("ports")
        if ports is None or {"protocol": protocol, "port": port} in ports:
            return True
    return False


def allowed(found: Rendered, direction: str, source: Pod, target: Pod, port: int) -> bool:
    """Whether the policies of one side allow it: the source's, for egress, or the target's, for ingress."""
    pod, other, peers = (source, target, "to") if direction == "egress" else (target, source, "from")
    policies = [
        one["spec"]
        for one in found.of("NetworkPolicy")
        if matches(one["spec"]["podSelector"], pod.labels) and direction.title() in one["spec"]["policyTypes"]
    ]
    return not policies or any(lets(one.get(direction) or [], peers, other.labels, port) for one in policies)


def is_open(found: Rendered, target: Pod, port: int) -> bool:
    """Whether everybody may come to this port: it is for clients, or operators."""
    return any(
        "from" not in rule and {"protocol": "TCP", "port": port} in rule.get("ports", ())
        for one in found.of("NetworkPolicy")
        if matches(one["spec"]["podSelector"], target.labels)
        for rule in one["spec"]["ingress"]
    )


FOR_EVERYBODY = {("gateway", 8000), ("batches", 8000), ("dashboard", 8002)}


@with_each
@pytest.mark.parametrize("direction", ["ingress", "egress"])
def test_policies_allow_what_arguments_imply_and_nothing_else(
    name: str, direction: str, sites: Mapping[str, Site]
) -> None:
    """Each side by itself: a connection needs both."""
    site = sites[name]
    found, expected = site.rendered, implied(site)
    if not found.of("NetworkPolicy"):
        return
    for one in found.of("NetworkPolicy"):  # everybody may resolve names
        assert lets(one["spec"]["egress"], "to", {}, 53, "UDP")
        assert lets(one["spec"]["egress"], "to", {}, 53)
    for pod in found.pods:  # everybody is under a policy
        assert any(matches(one["spec"]["podSelector"], pod.labels) for one in found.of("NetworkPolicy")), pod
    within = {"replica"} if found.of("LeaderWorkerSet") else set()
    reachable = set()
    for source in found.pods:
        for target in found.pods:
            for port in (port for container in target.containers for port in container.ports.values()):
                if source.component == target.component and source.component in within:
                    continue  # nodes of one replica
                if direction == "ingress" and is_open(found, target, port):
                    assert (target.component, port) in FOR_EVERYBODY
                    continue
                if allowed(found, direction, source, target, port):
                    reachable.add(Connection(source.component, target.component, port))
    assert reachable == expected


@with_each
def test_all_routers_are_named_alike_and_exist(name: str, sites: Mapping[str, Site]) -> None:
    site = sites[name]
    (router,) = [
        one for one in site.rendered.of("StatefulSet") if one["metadata"]["name"].endswith("-router")
    ]
    lists = {tuple(one.settings.router) for one in (*site.of("gateway"), *site.of("picker"))}
    (addresses,) = lists
    assert len(addresses) == router["spec"]["replicas"]
    for one in site.of("agent"):
        assert (one.settings.router,) == addresses


@with_each
def test_routers_follow_the_replicas_that_there_are(name: str, sites: Mapping[str, Site]) -> None:
    site = sites[name]
    (one, *_) = site.of("router")
    replica = site.of("replica")[0].settings
    for up in replicas_of(one):
        assert (urlsplit(up.url).port, urlsplit(up.kv).port, urlsplit(up.replay).port) == (
            replica.port, replica.kv_port, replica.kv_port + 1,
        )  # fmt: skip
        assert (None if up.load is None else urlsplit(up.load).port) == replica.load_port
        assert up.url.startswith("https:") == ("--ssl-certfile" in " ".join(replica.extra))
    if one.settings.replicas_file is not None:
        workload = next(pod for pod in site.rendered.pods if pod.component == "replica")
        assert len(replicas_of(one)) == workload.count
    assert one.settings.page_size == replica.page_size


@pytest.mark.parametrize("discovery", ["dns", "names"])
def test_an_agent_calls_its_replica_as_the_router_does(
    discovery: str, secrets: Secrets, tmp_path: Path
) -> None:
    found = rendered("batches", "--set", f"replicas.discovery={discovery}")
    node = Node(found, secrets, tmp_path, make_tokenizer)
    containers = {one.program: one for one in found.containers if one.pod.component in ("replica", "router")}
    said = {
        name: program.parse(name, node.arguments(one, node.mount(one))) for name, one in containers.items()
    }
    agent, router = said["agent"], said["router"]
    if discovery == "dns":
        (named,) = map(specs.name, router.replicas_dns)
        called = [named.worker("10.1.2.3")]
    else:
        called = specs.lines(Path(router.replicas_file).read_text(encoding="utf-8"))
    up = next(one for one in called if one.worker == agent.worker)
    assert up.models == tuple(pair.partition("=")[0] for pair in agent.models.split(","))
    if discovery == "names":
        assert agent.replica == up.url


@pytest.mark.engine
@with_each
@pytest.mark.usefixtures("sglang")
def test_sglang_accepts_the_arguments_that_are_its_own(name: str, sites: Mapping[str, Site]) -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    for one in sites[name].of("replica"):
        parsed, unknown = parser.parse_known_args(["--model-path", "m", *one.settings.extra])
        assert unknown == []
        if one.pod.kind.startswith("LeaderWorkerSet"):
            assert (parsed.nnodes, parsed.node_rank, parsed.tp_size) == (2, 1, 16)
