import json
from pathlib import Path
from typing import Any

import pytest

from bench import gateways
from bench.gateways import arguments, kept, name_of
from bench.machine import HarnessError


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["load", "--peers", "nginx"], "nginx is none of vllm-router, sglang-router, litellm"),
        (["load", "--rounds", "0"], "--rounds and --seconds must be above 0"),
        (["load", "--seconds", "-1"], "--rounds and --seconds must be above 0"),
        (["workers", "--workers", "1"], "one is measured beside them"),
        (["streams", "--streams", "20000"], "--streams must be 1 to 10000"),
        (["lod"], "invalid choice"),
    ],
)
def test_a_wrong_option_is_told(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(given)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (["load", "--peers", "vllm-router, litellm"], "load vllm-router litellm"),
        (["load", "--peers", "", "--store", "redis"], "load redis"),
        (["streams", "--step"], "streams vllm-router 1000 step"),
        (["workers", "--workers", "4"], "workers 4 redis"),
        (["size"], "size"),
    ],
)
def test_what_measures_something_else_is_kept_apart(given: list[str], name: str) -> None:
    assert name_of(arguments(given)) == name


def test_nothing_was_kept_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "RESULTS", tmp_path / "results.json")
    assert kept() == {}


def test_results_that_are_not_json_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results.json").write_text("{")
    monkeypatch.setattr(gateways, "RESULTS", tmp_path / "results.json")
    with pytest.raises(HarnessError, match="check it out anew"):
        kept()


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_asks_for_what_it_is_to_ask(stream: bool) -> None:
    body: dict[str, Any] = json.loads(gateways.body(stream=stream))
    assert (body.get("stream", False), len(body["messages"][1]["content"])) == (stream, 140)
