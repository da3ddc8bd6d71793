"""The collector's file has the structure that its components document; the collector itself is in no registry
that the tests could take it from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

FILE = Path(__file__).parents[2] / "deploy" / "otel" / "collector.yaml"
CONFIG: dict[str, Any] = yaml.safe_load(FILE.read_text("utf-8"))


def exactly(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SECONDS = {"type": "string", "pattern": r"^\d+(ms|s|m)$"}
COUNT = {"type": "integer", "minimum": 1}
PERCENT = {"type": "integer", "minimum": 1, "maximum": 100}
ADDRESS = exactly(endpoint={"type": "string", "pattern": r"^\$\{env:LISTEN:-127\.0\.0\.1\}:\d+$"})
NAMES = {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True}
SCHEMA = exactly(
    receivers=exactly(otlp=exactly(protocols=exactly(grpc=ADDRESS, http=ADDRESS))),
    processors=exactly(
        memory_limiter=exactly(
            check_interval=SECONDS, limit_percentage=PERCENT, spike_limit_percentage=PERCENT
        ),
        batch=exactly(timeout=SECONDS, send_batch_size=COUNT, send_batch_max_size=COUNT),
    ),
    exporters=exactly(
        otlp_http=exactly(
            endpoint={"const": "${env:TRACES_URL}"},
            compression={"enum": ["gzip", "zstd", "snappy", "none"]},
            timeout=SECONDS,
            sending_queue=exactly(queue_size=COUNT),
            retry_on_failure=exactly(
                initial_interval=SECONDS, max_interval=SECONDS, max_elapsed_time=SECONDS
            ),
        )
    ),
    extensions=exactly(health_check=ADDRESS),
    service=exactly(
        extensions=NAMES,
        pipelines=exactly(traces=exactly(receivers=NAMES, processors=NAMES, exporters=NAMES)),
    ),
)


def test_its_components_know_every_key() -> None:
    jsonschema.validate(CONFIG, SCHEMA)


@pytest.mark.parametrize("kind", ["receivers", "processors", "exporters", "extensions"])
def test_what_is_configured_is_used(kind: str) -> None:
    service = CONFIG["service"]
    used = service["extensions"] if kind == "extensions" else service["pipelines"]["traces"][kind]
    assert set(used) == CONFIG[kind].keys()


def test_memory_is_limited_before_anything_is_kept() -> None:
    assert CONFIG["service"]["pipelines"]["traces"]["processors"][0] == "memory_limiter"
    batch, limiter = CONFIG["processors"]["batch"], CONFIG["processors"]["memory_limiter"]
    assert batch["send_batch_size"] <= batch["send_batch_max_size"]
    assert limiter["spike_limit_percentage"] < limiter["limit_percentage"]


def test_every_variable_is_explained() -> None:
    head = FILE.read_text("utf-8").partition("receivers:")[0]
    for name in set(re.findall(r"\$\{env:(\w+)", FILE.read_text("utf-8"))):
        assert f"{name}=" in head
