"""What is measured side by side: this gateway with every feature on, and peers from PyPI in cached environments."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from bench.machine import CACHE, KEY, ROOT, HarnessError, free_port

POLICY = ROOT / "policies" / "default.yaml"

Command = Callable[[Path, Path, int, Sequence[int]], list[str]]
"""(programs of its environment, folder for its files, its port, ports of the engines) -> what to start."""


@dataclass(frozen=True)
class Peer:
    name: str
    requirement: str
    command: Command
    env: dict[str, str] = field(default_factory=dict)
    share: float = 1
    """Of the usual connections: so many that a slow one still ends requests within a load."""

    @property
    def folder(self) -> Path:
        return CACHE / self.name

    def install(self) -> None:
        """Into an environment of its own, once. Raises HarnessError."""
        done = self.folder / "installed"
        if done.exists():
            return
        print(f"installing {self.requirement} into {self.folder} ...", flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        for command in (
            [sys.executable, "-m", "venv", self.folder],
            [self.folder / "bin" / "pip", "install", "--quiet", self.requirement],
        ):
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                told = made.stderr.strip()[-1000:]
                raise HarnessError(
                    f"{self.requirement} cannot be installed; leave {self.name} out of --peers: {told}"
                )
        done.touch()

    @property
    def version(self) -> str:
        name = self.name.replace("-", "_")
        found = next(self.folder.glob(f"lib/*/site-packages/{name}-*.dist-info"), None)
        return found.name.removeprefix(f"{name}-").removesuffix(".dist-info") if found else "?"


def _rust_router(*start: str, level: str) -> Command:
    """vllm-router and sglang-router come from one source: they share their options."""

    def command(programs: Path, _: Path, port: int, engines: Sequence[int]) -> list[str]:
        program = [str(programs / start[0]), *start[1:]]
        urls = [f"http://127.0.0.1:{engine}" for engine in engines]
        rest = ["--policy", "round_robin", "--log-level", level, "--prometheus-port", str(free_port())]
        return [*program, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, *rest]

    return command


def _litellm(programs: Path, folder: Path, port: int, engines: Sequence[int]) -> list[str]:
    models = [
        {
            "model_name": "smollm2",
            "litellm_params": {
                "model": "hosted_vllm/smollm2",
                "api_base": f"http://127.0.0.1:{engine}/v1",
                "api_key": "none",
            },
        }
        for engine in engines
    ]
    file = folder / "litellm.yaml"
    file.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
    return [str(programs / "litellm"), "--config", str(file), "--host", "127.0.0.1", "--port", str(port)]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("vllm-router", "vllm-router", _rust_router("vllm-router", level="warning")),
        Peer("sglang-router", "sglang-router", _rust_router("sglang-router", "launch", level="warn")),
        Peer("litellm", "litellm[proxy]", _litellm, {"LITELLM_LOG": "ERROR"}, share=0.1),
    )
}


def our_program() -> Path:
    program = Path(sys.executable).parent / "dualgauge"
    if not program.exists():
        raise HarnessError(
            f"{program} does not exist: run `pip install -e '.[dev,bench]'` in this environment"
        )
    return program


def our_version() -> str:
    return version("dualgauge")


def deploy(
    folder: Path,
    port: int,
    admin: int,
    engines: Sequence[int],
    *,
    store: str = "memory",
    workers: int = 1,
    policy: Path = POLICY,
) -> Path:
    """The file of a deployment with a key, the classifier's policy, limits that never bind, metrics and 1 % of the
    traces, whose collector is not there."""
    (folder / "keys.yaml").write_text(f"keys: [{{name: bench, plan: default, key: {KEY}}}]\n")
    tiers = zip(("fast", "exact"), ("awq", "fp16"), engines, strict=True)
    file = {
        "listen": f"127.0.0.1:{port}",
        "admin": f"127.0.0.1:{admin}",
        "model": "smollm2",
        "policy": str(policy),
        "keys": "keys.yaml",
        "limits": {"store": store},
        "telemetry": {"otlp": "http://127.0.0.1:9", "sample": 0.01},
        "engines": [
            {"name": f"{tier}-0", "tier": tier, "kind": "external", "url": f"http://127.0.0.1:{engine}", "served_model": "smollm2", "precision": precision}
            for tier, precision, engine in tiers
        ],
    }  # fmt: skip
    if workers > 1:
        file["workers"] = workers
    path = folder / "dualgauge.yaml"
    path.write_text(json.dumps(file, indent=1))
    return path
