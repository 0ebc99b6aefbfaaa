"""The chart with six value files: helm accepts it, Kubernetes' schemas do, and its objects fit together.

Nothing is applied to an API server.
"""

import json
import re
from functools import cache

import kubernetes_validate
import pytest

from tests.support.helm import CHART, NAMESPACE, ROOT, VALUES, Manifest, rendered, run, values_file
from tests.support.monitoring import RULES

KUBERNETES = ("1.35", "1.31")
CUSTOM = ("InferencePool", "LeaderWorkerSet", "PrometheusRule", "ServiceMonitor")
"""Of whom Kubernetes has no schema."""

with_each = pytest.mark.parametrize("name", VALUES)


@with_each
def test_helm_finds_nothing_to_complain_about(name: str) -> None:
    done = run("lint", "--strict", str(CHART), "-f", str(values_file(name)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout


def as_pod(template: Manifest) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod", **template["metadata"]},
        "spec": template["spec"],
    }


read_schema = cache(kubernetes_validate.utils.schema_contents)


@with_each
@pytest.mark.parametrize("version", KUBERNETES)
def test_each_manifest_is_what_kubernetes_knows(
    name: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kubernetes_validate.utils, "schema_contents", read_schema
    )  # of 1.5 MB, once for all objects
    found = rendered(name)
    for one in found.manifests:
        if one["kind"] not in CUSTOM:
            kubernetes_validate.validate(one, version, strict=True)
    for pod in found.pods:
        if pod.kind.startswith("LeaderWorkerSet"):  # the others' are part of what was checked
            kubernetes_validate.validate(as_pod(pod.template), version, strict=True)


@with_each
def test_names_are_unique_and_fit(name: str) -> None:
    found = [(one["kind"], one["metadata"]["name"]) for one in rendered(name).manifests]
    assert len(set(found)) == len(found)
    assert all(one["metadata"]["namespace"] == NAMESPACE for one in rendered(name).manifests)
    long = rendered(name, "--set", "fullnameOverride=" + "-".join(["a-very-long-name"] * 5))
    assert all(
        len(one["metadata"]["name"]) <= 52 for one in long.manifests
    )  # and 11 characters of a revision


@with_each
def test_whoever_selects_pods_finds_some(name: str) -> None:
    found = rendered(name)
    for one in found.of("Service"):
        pods = found.selected(one["spec"]["selector"])
        assert pods, one
        for pod in pods:
            ports = {name for container in pod.containers for name in container.ports}
            assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports, one
    for one in found.of("PodDisruptionBudget"):
        assert found.selected(one["spec"]["selector"]["matchLabels"]), one
    for one in found.of("NetworkPolicy"):
        assert found.selected(one["spec"]["podSelector"]["matchLabels"]), one
    for one in found.of("Deployment", "StatefulSet"):
        selected = found.selected(one["spec"]["selector"]["matchLabels"])
        assert [pod.workload for pod in selected] == [one["metadata"]["name"]]
    for one in found.of("StatefulSet"):
        service = found.named("Service", one["spec"]["serviceName"])
        assert service is not None
        assert found.selected(service["spec"]["selector"])
    for one in found.of("HorizontalPodAutoscaler"):
        target = found.named(one["spec"]["scaleTargetRef"]["kind"], one["spec"]["scaleTargetRef"]["name"])
        assert target is not None
        assert "replicas" not in target["spec"]
        container = target["spec"]["template"]["spec"]["containers"][0]
        assert container["resources"]["requests"]["cpu"]
    for one in found.of("Ingress"):
        for path in one["spec"]["rules"][0]["http"]["paths"]:
            service = found.named("Service", path["backend"]["service"]["name"])
            assert service is not None
            assert path["backend"]["service"]["port"]["name"] in {
                port["name"] for port in service["spec"]["ports"]
            }


@with_each
def test_pods_run_without_rights(name: str) -> None:
    for pod in rendered(name).pods:
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["shareProcessNamespace"] is True
        assert {one["topologyKey"] for one in pod.spec["topologySpreadConstraints"]} == {
            "kubernetes.io/hostname", "topology.kubernetes.io/zone",
        }  # fmt: skip
        for container in pod.all_containers:
            allowed = container.manifest["securityContext"]
            assert allowed["readOnlyRootFilesystem"] is True
            assert allowed["allowPrivilegeEscalation"] is False
            assert allowed["capabilities"] == {"drop": ["ALL"]}
            assert container.manifest["resources"]["requests"]["memory"]
            assert {"/tmp", "/cache"} <= {one["mountPath"] for one in container.manifest["volumeMounts"]}


@with_each
def test_pods_restart_for_settings_of_their_own_alone(name: str) -> None:
    before = {
        (pod.kind, pod.workload): pod.template["metadata"]["annotations"] for pod in rendered(name).pods
    }
    after = rendered(name, "--set", "settings.gateway.log_level=debug")
    changed = {
        pod.component
        for pod in after.pods
        if before[pod.kind, pod.workload] != pod.template["metadata"]["annotations"]
    }
    assert changed == {"gateway", "batches"} & {pod.component for pod in after.pods}


# ---- monitoring


@pytest.mark.parametrize("name", ["one-gpu-node", "many-replicas", "two-nodes", "batches"])
def test_prometheus_finds_every_process_that_has_metrics(name: str) -> None:
    found = rendered(name)
    reached: set[tuple[str, int]] = set()
    for one in found.of("ServiceMonitor"):
        spec, (endpoint,) = one["spec"], one["spec"]["endpoints"]
        services = [
            service
            for service in found.of("Service")
            if spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
            and endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        ]
        assert len(services) == 1, one
        target = next(
            port["targetPort"] for port in services[0]["spec"]["ports"] if port["name"] == endpoint["port"]
        )
        for pod in found.selected(services[0]["spec"]["selector"]):
            reached |= {(pod.component, one.ports[target]) for one in pod.containers if target in one.ports}
        (renamed,) = endpoint["relabelings"]
        assert renamed["targetLabel"] == "job"
        job = next(rule["expr"] for rule in RULES if rule["alert"] == "SglangFairTargetDown")
        assert re.fullmatch(re.search(r'job=~"([^"]+)"', job)[1], renamed["replacement"])  # type: ignore[index]
    expected = {("gateway", 8001), ("router", 9001), ("replica", 30000)}
    more = {pod.component for pod in found.pods} & {"batches", "picker"}
    assert reached == expected | {(component, 8001) for component in more}


def test_a_pool_has_the_replicas_and_names_the_picker() -> None:
    """As `inferencepools.inference.networking.k8s.io` v1 has it."""
    found = rendered("many-replicas")
    (pool,) = found.of("InferencePool")
    spec = pool["spec"]
    assert {one.component for one in found.selected(spec["selector"]["matchLabels"])} == {"replica"}
    replica = next(one for one in found.containers if one.program == "replica")
    assert [one["number"] for one in spec["targetPorts"]] == [replica.ports["http"]]
    picker = spec["endpointPickerRef"]
    service = found.named("Service", picker["name"])
    assert service is not None
    assert picker["port"]["number"] in {one["port"] for one in service["spec"]["ports"]}
    assert picker["failureMode"] == "FailClose"
    assert not rendered("minimal").of("InferencePool")


def test_rules_and_dashboard_are_those_of_the_tables() -> None:
    found = rendered("one-gpu-node")
    (rule,) = found.of("PrometheusRule")
    assert rule["spec"]["groups"][0]["rules"] == RULES
    dashboard = found.named("ConfigMap", "rel-sglang-fair-grafana")
    assert dashboard is not None
    assert json.loads(dashboard["data"]["sglang-fair.json"]) == json.loads(
        (ROOT / "deploy/monitoring/grafana-dashboard.json").read_text(encoding="utf-8")
    )


# ---- values


TRIAL = str(values_file("cpu-trial"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--set", "router.count=two"], "at '/router/count': got string, want integer"),
        (["--set", "replica.count=2"], "additional properties 'replica' not allowed"),
        (["--set", "settings.planner.port=1"], "additional properties 'planner' not allowed"),
        (["--set", "model.name="], "minLength: got 0, want 1"),
        (["--set", "batches.size=many"], "does not match pattern"),
        (["--set", "settings.router.placement=qlm", "--set", "router.count=2"],
         "router.count is 2, and placements deadline and qlm hold requests in one router alone"),
        (["--set", "insecure=false"], "set curve.existingSecret to a secret of the keys that `sglang-fair keys` makes"),
        (["--set", "insecure=false", "--set", "curve.existingSecret=c"], "set gateway.tls.existingSecret"),
        (["--set", "insecure=false", "--set", "curve.existingSecret=c", "--set", "gateway.tls.existingSecret=t"],
         "set router.tls.existingSecret"),
        (["--set", "replicas.tls.existingSecret=t"], "set replicas.discovery to names"),
        (["--set", "replicas.tls.existingSecret=t", "--set", "replicas.discovery=names"], "set ca.existingSecret"),
        (["--set", "replicas.nodes=2"], "set replicas.gpus"),
        (["--set", "replicas.gpus=1"], "an emulated replica has no GPU"),
        (["--set", "cache.size=1Gi", "--set", "cache.existingClaim=c"], "set one of them"),
        (["--set", "gateway.autoscaling.enabled=true", "--set", "gateway.autoscaling.min=9"], "min is larger than max"),
        (["--set", "picker.enabled=true"], "picker.gateways: say which pods are the gateway's"),
        (["--set", "gateway.ingress.enabled=true"], "gateway.ingress: set host"),
        (["--set-json", 'swap.models=[{"name": "b", "source": "/models/b"}]'], "set modelVolume.existingClaim"),
        (["--set-json", 'swap.models=[{"name": "b", "source": "hub/b"}]'], "does not match pattern"),
        (["--set", "model.source=/models/a #b"], "at '/model/source': '/models/a #b' does not match pattern"),
        (["--set", "fullnameOverride=9x"], "at '/fullnameOverride': '9x' does not match pattern"),
        (["--set-json", 'replicas.podLabels={"sglang-fair/leads": "false"}'], "'not' failed"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_clear_line(given: list[str], said: str) -> None:
    done = run("template", "rel", str(CHART), "-f", TRIAL, *given)
    assert done.returncode != 0
    assert said in done.stderr, done.stderr
    assert "nil pointer" not in done.stderr


def test_nothing_is_started_unprotected_unless_somebody_says_so() -> None:
    done = run("template", "rel", str(CHART), "--set", "model.name=m,model.source=default,replicas.gpus=0")
    assert done.returncode != 0
    assert "or set insecure to true" in done.stderr
    protected = rendered("many-replicas")
    assert "--insecure" not in json.dumps([one.manifest for one in protected.containers])
