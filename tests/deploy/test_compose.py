"""What docker-compose.yml promises of every container, read from the file; no Docker is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.recipes import recipe
from gateway import config
from tests.support.prometheus import FOLDER as RULES
from tests.support.prometheus import needs_prometheus

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
STACK: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
ENGINES = {name: service for name, service in SERVICES.items() if name.startswith(("fast-", "exact-"))}
PROFILES = ("cpu", "gpu", "gpu2", "observability")
# Images without a shell or an interpreter, in which nothing could ask.
UNASKED = {"otel-collector", "jaeger"}
ENV = {
    "DUALGAUGE_ADMIN_TOKEN": "a-token",
    "DUALGAUGE_MODEL": "smollm2",
    "DUALGAUGE_OTLP": "",
}
VARIABLE = re.compile(r"\$\{(\w+)(?::[-?][^}]*)?\}")
DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")


class Loader(yaml.SafeLoader):
    """Which knows the tag that takes a value of an earlier file away."""


Loader.add_constructor("!reset", lambda loader, node: None)


def each(names: Any = SERVICES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names)


def mounts(name: str) -> list[dict[str, Any]]:
    """Volumes in their long form."""
    return [
        volume if isinstance(volume, dict) else long_form(*volume.split(":"))
        for volume in SERVICES[name].get("volumes", [])
    ]


def long_form(source: str, target: str, mode: str = "rw") -> dict[str, Any]:
    kind = "bind" if source.startswith(".") else "volume"
    return {"type": kind, "source": source, "target": target, "read_only": mode == "ro"}


def asked(name: str) -> bool:
    """Whether its health is asked for: here, or by its image's own HEALTHCHECK."""
    service = SERVICES[name]
    if "healthcheck" in service:
        return True
    target = service.get("build", {}).get("target")
    stage = re.search(
        rf"^FROM .* AS {target}$(.*?)(?=^FROM |\Z)",
        (FOLDER / "Dockerfile").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return stage is not None and "\nHEALTHCHECK " in stage[1]


@each()
def test_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & service.keys()


@each()
def test_not_root(name: str) -> None:
    user, group = DEFAULT.sub(r"\1", str(SERVICES[name]["user"])).split(":")
    assert int(user) > 0
    assert group.isdigit()


@each()
def test_bounded(name: str) -> None:
    service = SERVICES[name]
    assert service["mem_limit"]
    assert 0 < service["pids_limit"] <= 4096
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}


@pytest.mark.parametrize("name", ["docker-compose.yml", "deploy/docker/rolling.yml"])
def test_asks_for_no_more_open_files_than_the_daemon_may_give(name: str) -> None:
    """A daemon without CAP_SYS_RESOURCE starts no container that asks for more than it has itself."""
    services = yaml.load((ROOT / name).read_text("utf-8"), Loader)["services"]
    assert [one for one, service in services.items() if "ulimits" in service] == []


@each()
def test_writes_to_memory_of_a_bounded_size(name: str) -> None:
    assert any(entry.startswith("/tmp:") for entry in SERVICES[name]["tmpfs"])
    assert all("size=" in entry for entry in SERVICES[name]["tmpfs"])


@each()
def test_host_folders_are_read_only(name: str) -> None:
    assert all(mount["read_only"] for mount in mounts(name) if mount["type"] == "bind")
    assert not any("docker.sock" in mount["source"] for mount in mounts(name))


@each()
def test_ports_are_published_on_loopback(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert port.startswith(("127.0.0.1:", "${DUALGAUGE_LISTEN:-127.0.0.1:"))


@each()
def test_images_are_of_one_version(name: str) -> None:
    image = DEFAULT.sub(r"\1", SERVICES[name]["image"])
    assert "build" in SERVICES[name] or re.search(r":v?\d+\.\d+\.\d+$", image)


@each([name for name in SERVICES if name not in UNASKED])
def test_health_is_asked_for(name: str) -> None:
    assert asked(name)


@each()
def test_waits_only_for_what_can_be_healthy(name: str) -> None:
    for other, wait in SERVICES[name].get("depends_on", {}).items():
        assert wait["condition"] == "service_started" or asked(other)
        assert set(SERVICES[name]["profiles"]) <= set(SERVICES[other]["profiles"])


@each([name for name in STACK["networks"] if name != "front"])
def test_networks_have_no_way_out_nor_to_the_host(name: str) -> None:
    found = STACK["networks"][name]
    assert found == {"internal": True, "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"}}


@each(ENGINES)
def test_engines_reach_nothing_and_are_reached_by_the_gateway_alone(name: str) -> None:
    assert list(ENGINES[name]["networks"]) == ["engines"]
    assert not ENGINES[name].keys() & {"ports", "expose"}
    others = {other for other, service in SERVICES.items() if "engines" in service["networks"]}
    assert others == {"gateway", *ENGINES}


@each(ENGINES)
def test_engines_ask_no_hub(name: str) -> None:
    environment = ENGINES[name]["environment"]
    assert environment["HF_HUB_OFFLINE"] == environment["TRANSFORMERS_OFFLINE"] == "1"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert mounts(name)[0]["target"] == "/models"
    assert ENGINES[name]["command"][0].startswith("/models/")


@each(ENGINES)
def test_engines_may_take_minutes_to_load(name: str) -> None:
    assert ENGINES[name]["healthcheck"]["start_period"] == "15m"


@pytest.mark.parametrize("profile", PROFILES[:3])
def test_a_profile_has_one_engine_a_tier_under_the_name_that_the_gateway_asks(profile: str) -> None:
    found = {
        name: service["networks"]["engines"]["aliases"]
        for name, service in ENGINES.items()
        if profile in service["profiles"]
    }
    assert found == {f"fast-{profile}": ["fast"], f"exact-{profile}": ["exact"]}


def test_engines_of_one_gpu_start_one_after_the_other() -> None:
    assert ENGINES["exact-gpu"]["depends_on"] == {"fast-gpu": {"condition": "service_healthy"}}


@pytest.mark.parametrize(("profile", "gpus"), [("gpu", ["0", "0"]), ("gpu2", ["0", "1"])])
def test_gpus(profile: str, gpus: list[str]) -> None:
    devices = [
        ENGINES[f"{tier}-{profile}"]["deploy"]["resources"]["reservations"]["devices"]
        for tier in ("fast", "exact")
    ]
    assert [found["device_ids"] for (found,) in devices] == [[gpu] for gpu in gpus]


def test_shares_of_one_gpu_leave_something_for_the_driver() -> None:
    texts = [" ".join(ENGINES[f"{tier}-gpu"]["command"]) for tier in ("fast", "exact")]
    shares = [float(re.search(r"_SHARE:-([0-9.]+)\}", text)[1]) for text in texts]  # type: ignore[index]
    assert sum(shares) <= 0.92


def test_the_engine_is_the_one_that_is_locked() -> None:
    version = recipe("vllm").version
    assert {ENGINES[name]["image"] for name in ENGINES if "gpu" in name} == {f"vllm/vllm-openai:v{version}"}


def test_redis_evicts_nothing() -> None:
    command = SERVICES["redis"]["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert {name for name, service in SERVICES.items() if "store" in service["networks"]} == {
        "gateway",
        "redis",
    }


def test_the_gateway_outlives_its_grace() -> None:
    loaded = deployment()
    grace = SERVICES["gateway"]["stop_grace_period"].removesuffix("s")
    assert int(grace) > loaded.shutdown_grace


def deployment() -> config.Config:
    return config.read(FOLDER / "etc" / "dualgauge.yaml", ENV)


def test_the_gateway_listens_where_its_ports_lead() -> None:
    loaded = deployment()
    inside = [int(port.rpartition(":")[2]) for port in SERVICES["gateway"]["ports"]]
    assert inside == [loaded.listen.port, loaded.admin.port]
    assert loaded.admin_token == ENV["DUALGAUGE_ADMIN_TOKEN"]
    assert loaded.keys is not None


def test_the_gateway_asks_engines_where_they_listen() -> None:
    urls = {engine.url for engine in deployment().engines}
    assert urls == {"http://fast:8000", "http://exact:8000"}
    for service in ENGINES.values():
        command = service["command"]
        assert command[command.index("--port") + 1] == "8000"
        assert ":8000/health" in service["healthcheck"]["test"][-1]


def test_the_gateway_is_given_every_variable_of_its_file() -> None:
    text = (FOLDER / "etc" / "dualgauge.yaml").read_text()
    assert set(VARIABLE.findall(text)) == ENV.keys() == SERVICES["gateway"]["environment"].keys()


def test_traces_go_to_the_collector_where_one_is_named() -> None:
    loaded = config.read(
        FOLDER / "etc" / "dualgauge.yaml", {**ENV, "DUALGAUGE_OTLP": "http://otel-collector:4318"}
    )
    assert loaded.telemetry.otlp == "http://otel-collector:4318"
    assert deployment().telemetry.otlp is None
    assert "telemetry" in SERVICES["gateway"]["networks"]
    assert "telemetry" in SERVICES["otel-collector"]["networks"]


def test_example_names_variables_that_are_read() -> None:
    lines = (FOLDER / "example.env").read_text().splitlines()
    named = {match[1] for line in lines if (match := re.match(r"#? ?([A-Z_]+)=", line))}
    known = set(VARIABLE.findall((ROOT / "docker-compose.yml").read_text())) | {"COMPOSE_PROFILES"}
    assert named <= known


def test_prometheus_reads_as_the_one_of_a_single_machine_does() -> None:
    own, other = (
        yaml.safe_load(path.read_text())
        for path in (FOLDER / "prometheus.yml", ROOT / "deploy" / "prometheus" / "prometheus.yml")
    )
    (here,), (there,) = own.pop("scrape_configs"), other.pop("scrape_configs")
    assert own == other
    assert here["job_name"] == there["job_name"]
    assert here["dns_sd_configs"] == [{"names": ["gateway"], "type": "A", "port": deployment().admin.port}]
    assert here["authorization"]["credentials_file"] in " ".join(SERVICES["prometheus"]["entrypoint"])


def at(url: str) -> tuple[str, str]:
    """Host and port."""
    host, _, port = url.removeprefix("http://").partition(":")
    return host, port


def test_grafana_asks_services_where_they_listen() -> None:
    found = {}
    environment = SERVICES["grafana"]["environment"]
    for mount in mounts("grafana"):
        if mount["target"].endswith(".yaml"):
            provisioned = yaml.safe_load((ROOT / mount["source"]).read_text())
            for source in provisioned["datasources"]:
                name = source["url"].removeprefix("$")
                found[source["type"]] = at(environment.get(name, source["url"]))
    assert found == {"prometheus": ("prometheus", "9090"), "jaeger": ("jaeger", "16686")}
    for kind, (service, port) in found.items():
        assert kind in SERVICES[service]["image"]
        assert SERVICES[service]["ports"][0].endswith(f":{port}")
        assert set(SERVICES["grafana"]["networks"]) & set(SERVICES[service]["networks"])


def test_grafana_finds_the_dashboards_where_they_are_mounted() -> None:
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/dualgauge.yaml").read_text())[
        "providers"
    ][0]
    (source,) = [m["source"] for m in mounts("grafana") if m["target"] == provider["options"]["path"]]
    assert list((ROOT / source).glob("*.json"))


def test_the_collector_passes_traces_to_jaeger() -> None:
    assert at(SERVICES["otel-collector"]["environment"]["TRACES_URL"]) == ("jaeger", "4318")
    assert SERVICES["jaeger"]["environment"] == {"JAEGER_LISTEN_HOST": "0.0.0.0"}
    read = (ROOT / "deploy/otel/collector.yaml").read_text().replace("${env:", "${")
    assert set(VARIABLE.findall(read)) == SERVICES["otel-collector"]["environment"].keys()


@needs_prometheus
def test_prometheus_accepts_its_file(tmp_path: Path) -> None:
    for file in (FOLDER / "prometheus.yml", RULES / "rules.yml"):
        shutil.copy(file, tmp_path)
    command = ["promtool", "check", "config", "--syntax-only", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@each([name for name in SERVICES if any(m["type"] == "bind" for m in mounts(name))])
def test_mounted_files_are_there(name: str) -> None:
    for mount in mounts(name):
        source = DEFAULT.sub(r"\1", mount["source"])
        if mount["type"] == "bind" and source != "./models":
            assert (ROOT / source).exists(), source


def test_the_lock_of_the_image_has_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    locked = set(re.findall(r"^([a-z0-9-]+)==", (FOLDER / "requirements.txt").read_text(), re.MULTILINE))
    names = {re.split(r"[\[>=<~! ;]", line)[0].lower() for line in project["project"]["dependencies"]}
    assert names <= locked
    build = set(re.findall(r"^([a-z0-9-]+)==", (FOLDER / "requirements-build.txt").read_text(), re.MULTILINE))
    assert {re.split(r"[>=]", line)[0] for line in project["build-system"]["requires"]} <= build


def compose() -> list[str] | None:
    """The plugin as a program of its own, or as Docker's."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if (
        shutil.which("docker")
        and not subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode
    ):
        return ["docker", "compose"]
    return None


@pytest.mark.skipif(compose() is None, reason="no docker-compose on the PATH (.ci/tools.txt has it)")
@pytest.mark.parametrize(
    "profiles", [*((one,) for one in PROFILES), *((one, PROFILES[3]) for one in PROFILES[:3])]
)
def test_compose_accepts_the_file(profiles: tuple[str, ...], tmp_path: Path) -> None:
    command = [
        *(compose() or ()),
        "--env-file",
        str(tmp_path / ".env"),
        "-f",
        str(ROOT / "docker-compose.yml"),
    ]
    (tmp_path / ".env").write_text("DUALGAUGE_ADMIN_TOKEN=a-token\n")
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, *chosen, "config", "-q"], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(compose() is None, reason="no docker-compose on the PATH (.ci/tools.txt has it)")
@pytest.mark.parametrize("profile", PROFILES[:3])
def test_compose_accepts_several_gateways(profile: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("DUALGAUGE_ADMIN_TOKEN=a-token\n")
    files = [word for name in ("docker-compose.yml", "deploy/docker/rolling.yml") for word in ("-f", name)]
    command = [*(compose() or ()), "--env-file", str(tmp_path / ".env"), *files, "--profile", profile]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, "config"], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    stack = yaml.safe_load(done.stdout)["services"]
    published = {(port["host_ip"], port["target"]) for port in stack["front"]["ports"]}
    assert published == {("127.0.0.1", port) for port in (8080, 8081)}
    assert "ports" not in stack["gateway"]
    assert stack["gateway"]["deploy"]["replicas"] == 2
    hardening = ("read_only", "cap_drop", "security_opt", "logging", "restart")
    assert [stack["front"][key] for key in hardening] == [stack["gateway"][key] for key in hardening]


@pytest.mark.skipif(compose() is None, reason="no docker-compose on the PATH (.ci/tools.txt has it)")
def test_compose_wants_an_admin_token(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("DUALGAUGE_ADMIN_TOKEN=\n")
    command = [
        *(compose() or ()),
        "--env-file",
        str(tmp_path / ".env"),
        "-f",
        str(ROOT / "docker-compose.yml"),
    ]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, "--profile", "cpu", "config", "-q"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode != 0
    assert "put one into .env" in done.stderr
