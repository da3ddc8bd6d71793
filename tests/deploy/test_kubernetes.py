"""The manifests below deploy/kubernetes: valid, hardened, and of one mind with docker-compose.yml."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import config
from tests.deploy.test_compose import ENV, SERVICES
from tests.support.kustomize import Manifest, build, containers

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
BUILT = {name: build(FOLDER / name) for name in ("base", "overlays/cpu", "overlays/replicas")}
WORKLOADS = [
    pytest.param(manifest, id=f"{name}-{manifest['metadata']['name']}")
    for name, manifests in BUILT.items()
    for manifest in manifests
    if containers(manifest)
]
# The oldest that is still maintained, and the newest that the schemas have.
VERSIONS = ("1.34", "1.37")
SECRET = "dualgauge"


def one(kind: str, name: str, overlay: str = "base") -> Manifest:
    (found,) = (m for m in BUILT[overlay] if (m["kind"], m["metadata"]["name"]) == (kind, name))
    return found


def container(kind: str, name: str, overlay: str = "base") -> dict[str, Any]:
    (found,) = containers(one(kind, name, overlay))
    return found


def pod(manifest: Manifest) -> dict[str, Any]:
    spec = manifest["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def bytes_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([a-zA-Z]+)", text).groups()  # type: ignore[union-attr]
    return int(number) << {"m": 20, "g": 30}[unit[0].lower()]


@pytest.mark.parametrize("manifest", WORKLOADS)
def test_pods_meet_the_restricted_standard(manifest: Manifest) -> None:
    spec = pod(manifest)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in containers(manifest):
        context = each["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
    assert one("Namespace", "dualgauge")["metadata"]["labels"] == {
        "pod-security.kubernetes.io/enforce": "restricted",
        "app.kubernetes.io/part-of": "dualgauge",
    }


@pytest.mark.parametrize("manifest", WORKLOADS)
def test_pods_have_limits_probes_and_no_way_to_the_api(manifest: Manifest) -> None:
    spec = pod(manifest)
    assert spec["automountServiceAccountToken"] is False
    for each in containers(manifest):
        assert each["resources"]["limits"]["memory"]
        assert each["resources"]["requests"].keys() == {"cpu", "memory"}
        assert {"livenessProbe", "readinessProbe"} <= each.keys()
        assert re.search(r":v?\d+\.\d+\.\d+$", each["image"])
        named = {port["name"] for port in each["ports"]}
        probed = {
            each[kind]["httpGet"]["port"]
            for kind in each
            if kind.endswith("Probe") and "httpGet" in each[kind]
        }
        assert probed <= named


@pytest.mark.parametrize("manifest", WORKLOADS)
def test_selectors_find_their_pods(manifest: Manifest) -> None:
    labels = manifest["spec"]["template"]["metadata"]["labels"]
    assert manifest["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("overlay", BUILT)
def test_services_budgets_and_policies_find_pods(overlay: str) -> None:
    pods = [m["spec"]["template"]["metadata"]["labels"] for m in BUILT[overlay] if containers(m)]
    for manifest in BUILT[overlay]:
        spec = manifest.get("spec", {})
        wanted: dict[str, str] = {}
        if manifest["kind"] == "Service":
            wanted = spec["selector"]
        elif manifest["kind"] == "PodDisruptionBudget":
            wanted = spec["selector"]["matchLabels"]
        elif manifest["kind"] == "NetworkPolicy":
            wanted = spec["podSelector"].get("matchLabels", {})
        assert any(wanted.items() <= labels.items() for labels in pods), manifest["metadata"]["name"]


def test_what_no_policy_names_is_denied() -> None:
    assert one("NetworkPolicy", "nothing")["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
    }


@pytest.mark.parametrize("name", ["engines", "redis"])
def test_engines_and_redis_reach_nothing_and_are_reached_by_the_gateway_alone(name: str) -> None:
    spec = one("NetworkPolicy", name)["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in spec
    (rule,) = spec["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/component": "gateway"}}}]


def test_the_admin_port_is_not_among_what_applications_reach() -> None:
    spec = one("Service", "gateway")["spec"]
    assert [port["targetPort"] for port in spec["ports"]] == ["http"]
    open_to_all = [
        rule["ports"] for rule in one("NetworkPolicy", "gateway")["spec"]["ingress"] if "from" not in rule
    ]
    assert open_to_all == [[{"port": 8080}]]


def test_secrets_are_referred_to_and_not_written_down() -> None:
    assert not [m for manifests in BUILT.values() for m in manifests if m["kind"] == "Secret"]
    spec = pod(one("Deployment", "gateway"))
    (etc,) = (volume["projected"]["sources"] for volume in spec["volumes"] if volume["name"] == "etc")
    assert etc[1]["secret"]["name"] == SECRET
    (token,) = (e for e in spec["containers"][0]["env"] if e["name"] == "DUALGAUGE_ADMIN_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": SECRET, "key": "admin-token"}
    assert f"create secret generic {SECRET}" in (FOLDER.parents[1] / "docs" / "deploying.md").read_text(
        "utf-8"
    )


@pytest.mark.parametrize("overlay", BUILT)
def test_the_gateway_asks_every_engine_by_name(overlay: str) -> None:
    text = one("ConfigMap", "dualgauge", overlay)["data"]["dualgauge.yaml"]
    loaded = config.parse(text, Path("/etc/dualgauge/dualgauge.yaml"), ENV)
    pods = {
        (f"{name}-{number}", f"http://{name}-{number}.{name}:8000")
        for name in ("fast", "exact")
        for number in range(one("StatefulSet", name, overlay)["spec"]["replicas"])
    }
    assert {(engine.name, engine.url) for engine in loaded.engines} == pods
    gateway = container("Deployment", "gateway", overlay)
    assert {entry["name"] for entry in gateway["env"]} == ENV.keys()
    ports = {port["name"]: port["containerPort"] for port in gateway["ports"]}
    assert ports == {"http": loaded.listen.port, "admin": loaded.admin.port}
    grace = pod(one("Deployment", "gateway", overlay))["terminationGracePeriodSeconds"]
    sleep = gateway["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert grace >= loaded.shutdown_grace + sleep


def test_overlays_differ_in_their_engines_alone() -> None:
    texts = [
        (FOLDER / name / "dualgauge.yaml").read_text().split("engines:")[0].partition("model:")[2]
        for name in ("base", "overlays/replicas")
    ]
    assert texts[0] == texts[1]


def test_restarts_take_no_pod_away_before_another_is_ready() -> None:
    spec = one("Deployment", "gateway")["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert spec["replicas"] > one("PodDisruptionBudget", "gateway")["spec"]["minAvailable"]


@pytest.mark.parametrize("overlay", BUILT)
def test_a_node_can_be_emptied_and_takes_one_pod_of_a_kind_at_a_time(overlay: str) -> None:
    for kind, name in (("Deployment", "gateway"), ("StatefulSet", "fast"), ("StatefulSet", "exact")):
        budget = one("PodDisruptionBudget", name, overlay)["spec"]
        labels = one(kind, name, overlay)["spec"]["selector"]["matchLabels"]
        assert budget["selector"]["matchLabels"] == labels
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        assert name == "gateway" or budget["maxUnavailable"] == 1
        (spread,) = pod(one(kind, name, overlay))["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == labels
        assert spread["whenUnsatisfiable"] == "ScheduleAnyway"


def test_redis_may_take_its_time_to_read_what_it_kept() -> None:
    probes = container("StatefulSet", "redis")
    assert probes["startupProbe"]["exec"] == probes["livenessProbe"]["exec"]
    assert probes["startupProbe"]["periodSeconds"] * probes["startupProbe"]["failureThreshold"] >= 300


def test_the_autoscaler_follows_requests_in_flight() -> None:
    scaler = one("HorizontalPodAutoscaler", "gateway", "overlays/replicas")["spec"]
    deployment = one("Deployment", "gateway", "overlays/replicas")
    target = scaler["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"], target["name"]) == (
        deployment["apiVersion"],
        deployment["kind"],
        deployment["metadata"]["name"],
    )
    assert "replicas" not in deployment["spec"]
    metric = scaler["metrics"][0]["pods"]["metric"]["name"]
    (rule,) = yaml.safe_load((FOLDER / "components/monitoring/adapter.yaml").read_text())["rules"]["custom"]
    assert rule["name"]["as"] == metric == "dualgauge_in_flight"


def test_the_service_monitor_finds_the_admin_port() -> None:
    monitor = one("ServiceMonitor", "gateway", "overlays/replicas")["spec"]
    service = one("Service", "gateway-admin", "overlays/replicas")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["authorization"]["credentials"]["name"] == SECRET
    rules = (FOLDER.parent / "prometheus" / "prometheus.yml").read_text()
    assert f"job_name: {service['metadata']['labels'][monitor['jobLabel']]} " in rules


# Of one mind with docker-compose.yml.

PAIRS = [
    ("Deployment", "gateway", "base", "gateway"),
    ("StatefulSet", "redis", "base", "redis"),
    ("StatefulSet", "fast", "base", "fast-gpu2"),
    ("StatefulSet", "exact", "base", "exact-gpu2"),
    ("StatefulSet", "fast", "overlays/cpu", "fast-cpu"),
    ("StatefulSet", "exact", "overlays/cpu", "exact-cpu"),
]
SAME = pytest.mark.parametrize(("kind", "name", "overlay", "service"), PAIRS, ids=[pair[3] for pair in PAIRS])


def default(text: str) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@SAME
def test_memory_is_the_same(kind: str, name: str, overlay: str, service: str) -> None:
    limit = container(kind, name, overlay)["resources"]["limits"]["memory"]
    assert bytes_of(limit) == bytes_of(default(SERVICES[service]["mem_limit"]))


@SAME
def test_images_are_the_same(kind: str, name: str, overlay: str, service: str) -> None:
    here, there = container(kind, name, overlay)["image"], default(SERVICES[service]["image"])
    assert here == there or ("build" in SERVICES[service] and here.rpartition(":")[0] == there)


@pytest.mark.parametrize(
    ("kind", "name", "overlay", "service"), PAIRS[2:], ids=[pair[3] for pair in PAIRS[2:]]
)
def test_engines_are_asked_alike(kind: str, name: str, overlay: str, service: str) -> None:
    each = container(kind, name, overlay)
    health = SERVICES[service]["healthcheck"]
    probe = each["startupProbe"]
    assert f":{each['ports'][0]['containerPort']}{probe['httpGet']['path']}'" in health["test"][-1]
    assert f"{probe['periodSeconds'] * probe['failureThreshold'] // 60}m" == health["start_period"]
    assert each["livenessProbe"]["failureThreshold"] == health["retries"]
    environment = {entry["name"]: entry["value"] for entry in each["env"]}
    del environment["DUALGAUGE_MODEL"]
    cores = "VLLM_CPU_OMP_THREADS_BIND"  # a pod has the cores that it is given
    assert environment == {k: v for k, v in SERVICES[service]["environment"].items() if k != cores}


@pytest.mark.parametrize(
    ("kind", "name", "overlay", "service"), PAIRS[2:], ids=[pair[3] for pair in PAIRS[2:]]
)
def test_engines_are_started_alike(kind: str, name: str, overlay: str, service: str) -> None:
    def options(arguments: list[str]) -> set[tuple[str, ...]]:
        text = " ".join(default(word) for word in arguments[1:])
        found = {tuple(part.split()) for part in re.split(r" (?=--)", text.strip())}
        return {option for option in found if option[0] not in ("--served-model-name", "--max-model-len")}

    assert options(container(kind, name, overlay)["args"]) == options(SERVICES[service]["command"])


def test_redis_is_started_alike() -> None:
    each = container("StatefulSet", "redis")
    assert [*each["command"], *each["args"]] == SERVICES["redis"]["command"]


def test_the_gateway_has_the_same_grace() -> None:
    grace = pod(one("Deployment", "gateway"))["terminationGracePeriodSeconds"]
    assert f"{grace}s" == SERVICES["gateway"]["stop_grace_period"]


# Against the programs that will read them.


@pytest.mark.skipif(
    shutil.which("kubernetes-validate") is None,
    reason="no kubernetes-validate on the PATH (.ci/tools.txt has it)",
)
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(version: str, tmp_path: Path) -> None:
    # The ServiceMonitor is the operator's, not Kubernetes's own.
    manifests = [m for built in BUILT.values() for m in built if m["kind"] != "ServiceMonitor"]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(manifests))
    command = ["kubernetes-validate", "-k", version, "--strict", str(tmp_path / "all.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count(" passed for resource ") == len(manifests), said


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here to compare with")
@pytest.mark.parametrize("overlay", BUILT)
def test_kubectl_builds_the_same(overlay: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / overlay)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    text = re.sub(r"\bname: dualgauge-[a-z0-9]{10}\b", "name: dualgauge", done.stdout)

    def by_name(manifests: Any) -> dict[tuple[str, str], Manifest]:
        return {(m["kind"], m["metadata"]["name"]): m for m in manifests}

    assert by_name(yaml.safe_load_all(text)) == by_name(BUILT[overlay])
