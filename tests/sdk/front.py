"""A gateway of its own in front of engines that run: `dualgauge serve`, with a key for each plan."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import yaml

from policies.shipped import policy_text
from tests.engines_real.pair import MODEL, free_port, samples, until

KEY = "sk-main"
SINGLE_KEY = "sk-single"
SMALL_KEY = "sk-small"
PLANS: Mapping[str, Mapping[str, str | int]] = {
    "default": {"requests": "1k/min", "tokens": "1M/min"},
    "single": {"concurrent": 1},
    "small": {"tokens": "10/min"},
}
KEYS = {KEY: "default", SINGLE_KEY: "single", SMALL_KEY: "small"}
PROSE = "Tell me about the rivers of the north."
CODE = "Write a Python function that merges two sorted lists, with a unit test for the empty case."
CRITICAL = {"x-criticality": "high"}
LONG = 1000
"""So long a reply that an engine would take some ten seconds over it: it ends when its reader leaves."""
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TIERS = {"fast": "awq", "exact": "bf16"}


@dataclass(frozen=True)
class Front:
    """`base` without /v1, as Anthropic's clients want it; `url` with it, as OpenAI's do."""

    base: str
    admin: str

    @property
    def url(self) -> str:
        return f"{self.base}/v1"

    def refusals(self) -> float:
        """Requests that were over a limit, or found no engine, by the gateway's own count."""
        ended = ("limited", "unavailable")
        return sum(s.value for s in samples(self.admin) if s.labels.get("outcome") in ended)


@contextmanager
def serve(folder: Path, engines: Mapping[str, str]) -> Iterator[Front]:
    """A gateway in front of one engine a tier."""
    ports = free_port(), free_port()
    policy = yaml.safe_load(policy_text("default")[0])
    config = {
        "listen": f"127.0.0.1:{ports[0]}",
        "admin": f"127.0.0.1:{ports[1]}",
        "model": MODEL,
        "policy": "./policy.yaml",
        "keys": "./keys.yaml",
        "health": {"every": "100ms", "down_after": 1},
        "engines": [
            {"name": f"{tier}-0", "tier": tier, "kind": "external", "url": url, "precision": TIERS[tier]}
            for tier, url in engines.items()
        ],
    }
    files = {
        "dualgauge.yaml": config,
        "policy.yaml": {**policy, "plans": PLANS},
        "keys.yaml": {"keys": [{"name": plan, "key": key, "plan": plan} for key, plan in KEYS.items()]},
    }
    for name, content in files.items():
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    log = folder / "gateway.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "serve", "--config", str(folder / "dualgauge.yaml")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    front = Front(*(f"http://127.0.0.1:{port}" for port in ports))
    try:
        until("the gateway serves", lambda: _serves(front, process, log), 30)
        yield front
    finally:
        process.terminate()
        process.wait(30)


def _serves(front: Front, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text("utf-8", "replace")
    try:
        return httpx2.get(f"{front.base}/healthz", trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False
