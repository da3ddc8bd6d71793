"""`dualgauge bench` as a command: real processes, stand-ins for engines and for the load generator."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import runfile
from tests.engines.test_checkpoint import CONFIG, TENSORS, safetensors
from tests.gateway.test_cli_up import Site

ROOT = Path(__file__).parents[2]
QUICK = ("bench", "--quick", "--levels", "1,8")
COMPLETE = ("prose", "code", "maths", "json")


class BenchSite(Site):
    """A deployment whose engines and load generator are stand-ins; `HOME` has no environment of llama.cpp."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        run = (
            f"cd {shlex.quote(str(ROOT))} && exec {shlex.quote(sys.executable)} -m tests.gateway.bench_python"
        )
        # `-P -s -m MODULE` are Python's, what follows is the stand-in's
        (folder / "python").write_text(f'#!/bin/sh\n{run} "$@"\n')
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
        (folder / "model" / "model.safetensors").write_bytes(safetensors(TENSORS))
        self.env |= {"DUALGAUGE_HOME": str(folder / "home"), "BENCH_ORDERS": str(folder / "orders")}

    @property
    def orders(self) -> list[tuple[int, int]]:
        """Concurrency and requests of what the load generator was asked, warm-ups left out."""
        lines = (self.folder / "orders").read_text().split("\n")[:-1]
        found = [(int(line.split()[1]), int(line.split()[2])) for line in lines]
        return [one for one in found if one != (4, 4)]

    @property
    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "dualgauge-bench" / "results.json").read_bytes())
        return found

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["key"]: row for row in self.results["configurations"]}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[BenchSite]:
    site = BenchSite(tmp_path)
    yield site
    site.close()


def told(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode != 0, result.stdout
    assert "Traceback" not in result.stderr
    return result.stderr


def test_each_configuration_at_hand_is_measured_in_every_cell(site: BenchSite) -> None:
    result = site.run(*QUICK)
    assert result.returncode == 0, result.stderr
    rows = site.rows()
    for key in ("transformers", "exact", "fast"):
        assert set(rows[key]["speeds"]) == {"1", "8"}
        assert set(rows[key]["scores"]) == set(COMPLETE)
        assert rows[key]["memory"]["peak"] > rows[key]["memory"]["files"] > 0
    assert rows["exact"]["scores"]["prose"]["perplexity"] == pytest.approx(2.718, abs=0.001)
    assert site.orders == [(1, 6), (8, 16)] * 3


def test_what_is_not_at_hand_says_why_and_how_to_get_it(site: BenchSite) -> None:
    result = site.run(*QUICK)
    assert result.returncode == 0, result.stderr
    assert "no GGUF file of the model is named: name one with --gguf FILE" in result.stderr
    row = site.rows()["gguf"]
    assert not row["speeds"]
    assert row["problem"]


def test_a_gguf_file_without_llama_server_says_how_to_install_it(site: BenchSite) -> None:
    (site.folder / "m.gguf").write_bytes(b"GGUF")
    result = site.run(*QUICK, "--gguf", "m.gguf")
    assert result.returncode == 0, result.stderr
    assert "`dualgauge engines install --kind llama.cpp`" in site.rows()["gguf"]["problem"]


def test_engines_are_asked_for_as_many_at_a_time_as_is_measured(site: BenchSite) -> None:
    site.write(exact="['--max-num-seqs', '2']")
    site.run(*QUICK)
    assert site.rows()["exact"]["arguments"].endswith("--max-num-seqs 2 --max-num-seqs 8")


def test_a_second_run_goes_on_from_what_is_there(site: BenchSite) -> None:
    site.env["BENCH_ENDS"] = "8"
    assert "the load generator ended" in told(site.run(*QUICK))
    assert site.orders == [(1, 6), (8, 16)]
    del site.env["BENCH_ENDS"]
    (site.folder / "orders").unlink()
    result = site.run(*QUICK)
    assert result.returncode == 0, result.stderr
    assert site.orders == [(8, 16), (1, 6), (8, 16), (1, 6), (8, 16)]


def test_where_all_is_measured_nothing_is_started(site: BenchSite) -> None:
    site.run(*QUICK)
    (site.folder / "orders").write_text("")
    (site.folder / "dualgauge-bench" / "report.html").unlink()
    result = site.run(*QUICK)
    assert result.returncode == 0, result.stderr
    assert site.orders == []
    assert (site.folder / "dualgauge-bench" / "report.html").exists()


def test_what_both_runs_took_is_added_up(site: BenchSite) -> None:
    site.env["BENCH_ENDS"] = "8"
    told(site.run(*QUICK))
    first = site.results["spent"]
    assert first["cpu"] > 0
    del site.env["BENCH_ENDS"]
    site.run(*QUICK)
    assert site.results["spent"]["seconds"] > first["seconds"]
    assert site.results["spent"]["cpu"] > first["cpu"]


def test_figures_of_another_workload_are_not_mixed_with(site: BenchSite) -> None:
    site.run(*QUICK)
    error = told(site.run(*QUICK, "--output-tokens", "64"))
    assert "figures of another workload or machine: begin anew with --fresh" in error


def test_figures_of_other_arguments_are_not_mixed_with(site: BenchSite) -> None:
    site.run(*QUICK)
    site.write(exact="['--enforce-eager']")
    assert "with another model, program or arguments" in told(site.run(*QUICK))


def test_fresh_begins_anew(site: BenchSite) -> None:
    site.run(*QUICK)
    result = site.run(*QUICK, "--output-tokens", "64", "--fresh")
    assert result.returncode == 0, result.stderr
    assert site.results["workload"]["output_tokens"] == 64


def test_an_engine_that_does_not_start_leaves_the_others_measured(site: BenchSite) -> None:
    site.write(exact="['--die', 'ValueError: no such dtype']")
    error = told(site.run(*QUICK))
    assert "ended with exit code 1: ValueError: no such dtype" in error
    rows = site.rows()
    assert not rows["exact"]["speeds"]
    assert rows["fast"]["speeds"]
    assert "ValueError: no such dtype" in (site.folder / "dualgauge-bench" / "report.md").read_text()


def test_an_engine_that_failed_is_tried_again(site: BenchSite) -> None:
    site.write(exact="['--warm-up', '500']")
    told(site.run(*QUICK))
    results = site.folder / "dualgauge-bench" / "results.json"
    before = results.read_text()
    assert "the warm-up completion got 500" in told(site.run(*QUICK))
    assert json.loads(before)["configurations"][2] == site.rows()["fast"]


def test_beside_a_deployment_that_runs_nothing_is_measured(site: BenchSite) -> None:
    with runfile.hold(site.paths.lock) as ours:
        assert ours
        assert "is running, which would slow what is measured: `dualgauge down" in told(site.run(*QUICK))


def test_a_deployment_without_engines_of_ours_has_nothing_to_measure(site: BenchSite) -> None:
    engine = "{name: a, tier: fast, kind: external, url: http://127.0.0.1:1, served_model: m, precision: awq}"
    site.config.write_text(f"model: m\ntiers: [fast]\npolicy: policy.yaml\nengines:\n  - {engine}\n")
    assert "there is nothing to measure" in told(site.run(*QUICK))


def test_requests_longer_than_the_engine_takes_are_refused_at_once(site: BenchSite) -> None:
    site.write(fast="['--max-model-len', '64']", more="parity: {allow: [max_length]}\n")
    error = told(site.run(*QUICK))
    assert "engine `fast-0` takes requests of 64 tokens, not of the 129" in error


@pytest.mark.parametrize("levels", ["0,8", "8,1", "1,1", "many", "", "1,4096"])
def test_levels_are_numbers_in_order(site: BenchSite, levels: str) -> None:
    error = told(site.run("bench", "--levels", levels))
    assert "write numbers of requests at a time, ascending, up to 1024: 1,8,32,128" in error


def test_a_decision_log_that_is_not_there_is_told_before_anything_starts(site: BenchSite) -> None:
    assert "there is no decision log none.jsonl" in told(site.run(*QUICK, "--decision-log", "none.jsonl"))
    assert not (site.folder / "dualgauge-bench").exists()


def test_a_missing_configuration_is_told(site: BenchSite) -> None:
    assert "there is no other.yaml" in told(site.run("bench", "--config", "other.yaml"))
