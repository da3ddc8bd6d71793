from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from engines.hardware import GIB
from gateway.cli import cli
from tests.engines.test_checkpoint import CONFIG, TENSORS, safetensors

QWEN3 = ("--exact", "Qwen/Qwen3-8B", "--fast", "Qwen/Qwen3-8B-AWQ")
LARGE = ("--exact", "Qwen/Qwen2.5-7B-Instruct", "--fast", "Qwen/Qwen2.5-7B-Instruct-AWQ", "--context", "8192")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of its own, on a machine without GPUs, caches and models."""
    for name in ("HOME", "HF_HOME", "HF_HUB_CACHE", "DUALGAUGE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def planned(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def model(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "model.safetensors").write_bytes(safetensors(TENSORS))
    return folder


def test_a_pair_on_two_gpus_has_one_each_the_exact_one_on_the_roomier() -> None:
    found = planned("--gpu", "16GiB", "--gpu", "24GiB", *QWEN3)
    assert found["fits"]
    fast, exact = found["engines"]
    assert (fast["device"], exact["device"]) == ("gpu:0", "gpu:1")
    assert exact["weights"] == 16_381_470_720
    for engine, gpu in ((fast, found["gpus"][0]), (exact, found["gpus"][1])):
        parts = ("weights", "activations", "cuda_graphs", "other")
        assert sum(engine[part] for part in parts) + engine["kv_cache"]["bytes"] == engine["memory"]
        assert engine["memory"] <= gpu["available"] <= gpu["visible"] <= gpu["total"]
        assert engine["kv_cache"]["token_bytes"] == 147456
        assert engine["kv_cache"]["blocks"] == engine["kv_cache"]["bytes"] // (16 * 147456)
        assert engine["requests"]["2k"] == engine["kv_cache"]["blocks"] // 128
        assert engine["requests"]["8k"] == engine["kv_cache"]["blocks"] // 512
        assert f"--gpu-memory-utilization {engine['share']:.3f}" in engine["flags"]
        assert f"--kv-cache-memory-bytes {engine['kv_cache']['bytes']}" in engine["flags"]
        assert f"--max-model-len {engine['max_model_len']}" in engine["flags"]
        assert f"--max-num-seqs {engine['max_num_seqs']}" in engine["flags"]
    assert fast["max_model_len"] == exact["max_model_len"] == 32768


def test_the_table_says_what_the_json_says() -> None:
    result = run("--gpu", "16GiB", "--gpu", "24GiB", *QWEN3)
    assert result.exit_code == 0
    for text in (
        "fast-0 on gpu:0",
        "exact-0 on gpu:1",
        "15.3 GiB",
        "147,456",
        "requests of 8k",
        "--max-num-seqs",
    ):
        assert text in result.output


def test_fp8_halves_the_bytes_of_a_token_and_keeps_the_limits_that_are_given() -> None:
    found = planned(
        *("--gpu", "24", "--gpu", "24", *QWEN3),
        *("--kv-cache-dtype", "fp8", "--context", "4096", "--sequences", "4"),
    )
    for engine in found["engines"]:
        assert engine["kv_cache"]["token_bytes"] == 73728
        assert (engine["max_model_len"], engine["max_num_seqs"]) == (4096, 4)
        assert engine["requests"] == {"2k": engine["kv_cache"]["blocks"] // 128, "8k": None}
        assert "--kv-cache-dtype fp8" in engine["flags"]


def test_what_does_not_fit_ends_with_3_and_says_what_would() -> None:
    found = planned("--gpu", "24GiB", *LARGE, code=3)
    assert not found["fits"]
    assert "fast-0 is to take requests of 8,192 tokens" in found["problems"][0]
    assert [change["kind"] for change in found["changes"]] == ["context", "fp8-cache", "swap", "model", "gpu"]
    assert found["changes"][0]["engines"][0]["max_model_len"] == 4096
    result = run("--gpu", "24GiB", *LARGE)
    assert result.exit_code == 3
    assert "does not fit: fast-0" in result.output
    assert "What fits, from the smallest change to the largest:" in result.output
    assert "take a GPU of 32 GiB" in result.output


def test_without_models_it_is_what_up_would_choose() -> None:
    found = planned("--gpu", "24GiB", "--gpu", "24GiB")
    assert [engine["model"] for engine in found["engines"]] == ["Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-8B"]
    assert any("is the largest pair of the table that fits" in note for note in found["notes"])


def test_without_a_gpu_up_would_choose_the_demo_pair_on_the_cpu() -> None:
    found = planned()
    assert [(e["device"], e["kv_cache"]["bytes"]) for e in found["engines"]] == [("cpu", GIB)] * 2
    assert found["gpus"] == []


def test_folders_are_read_and_count_by_tensor(alone: Path) -> None:
    exact = model(alone / "exact")
    model(alone / "fast", quantization_config={"bits": 4})
    found = planned("--gpu", "8", "--exact", str(exact), "--fast", "./fast")
    for engine in found["engines"]:
        assert engine["weights"] == sum(2 * elements for _, elements in TENSORS.values())
        assert engine["weights_by_tensor"]["lm_head.weight"] == 128000
        assert engine["weights_by_kind"]["attention"] == 8192
        assert engine["max_model_len"] == 4096
    assert found["engines"][0]["activations"] > found["engines"][1]["activations"]


def test_one_engine_alone_can_be_planned() -> None:
    (engine,) = planned("--gpu", "24", "--exact", "Qwen/Qwen3-8B")["engines"]
    assert engine["name"] == "exact-0"


def test_a_model_in_the_hub_clients_cache_is_read(alone: Path) -> None:
    place = alone / "home" / "models--who--knows"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    (place / "snapshots").mkdir()
    model(place / "snapshots" / "abc")
    (engine,) = planned("--gpu", "8", "--fast", "who/knows")["engines"]
    assert engine["weights_by_tensor"]["lm_head.weight"] == 128000


CONFIGURATION = """
model: m
engines:
  - {name: fast-0, tier: fast, kind: vllm, model: Qwen/Qwen3-8B-AWQ, precision: awq, gpu: 0, port: 8101}
  - {name: exact-0, tier: exact, kind: vllm, model: Qwen/Qwen3-8B, precision: bf16, gpu: 1, share: 0.8,
     port: 8102, args: [--max-model-len, "8192"]}
  - {name: other, tier: exact, kind: external, url: "http://127.0.0.1:8103", precision: bf16}
"""


def test_the_engines_of_a_configuration(alone: Path) -> None:
    (alone / "mine.yaml").write_text(CONFIGURATION)
    found = planned("--config", "mine.yaml", "--gpu", "24", "--gpu", "24", "--context", "8192")
    fast, exact = found["engines"]
    assert (exact["share"], exact["max_model_len"], exact["max_num_seqs"]) == (0.8, 8192, 256)
    assert fast["share"] == 0.939
    assert found["notes"] == ["not planned, since they are no vLLM engines that are started here: other"]


def test_engines_that_name_no_gpu_share_the_first_and_may_swap_it(alone: Path) -> None:
    text = CONFIGURATION.replace("gpu: 0, ", "").replace("gpu: 1, share: 0.8,", "")
    (alone / "dualgauge.yaml").write_text(text)
    found = planned("--config", "dualgauge.yaml", "--gpu", "24", code=3)
    assert {engine["device"] for engine in found["engines"]} == {"gpu:0"}
    assert "swap" in [change["kind"] for change in found["changes"]]


def test_the_configuration_of_the_folder_is_planned_unasked(alone: Path) -> None:
    (alone / "dualgauge.yaml").write_text(CONFIGURATION)
    assert [e["device"] for e in planned(code=3)["engines"]] == ["cpu", "cpu"]


def test_a_cache_that_only_the_engine_can_size_is_said_to_be(alone: Path) -> None:
    strange = model(alone / "strange", mamba_d_state=16)
    result = run("--gpu", "8", "--exact", str(strange))
    assert result.exit_code == 0
    assert "unknown, will be read from" in " ".join(result.output.split())
    (engine,) = planned("--gpu", "8", "--exact", str(strange))["engines"]
    assert engine["unknown"] == "recurrent layers (`mamba_d_state`)"
    assert engine["kv_cache"]["bytes"] > 0
    assert engine["kv_cache"]["blocks"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("--gpu", "big"), 2, "`big` is no size of a GPU: write 24GiB"),
        (("--config", "a.yaml", "--fast", "x"), 2, "give models or --config, not both"),
        (("--fast", "x", "--context", "0"), 2, "0 is not in the range"),
        (("--exact", "Qwen/Qwen3-8B"), 1, "no NVIDIA GPU is seen here: say what to plan for"),
        (("--gpu", "24", "--exact", "Qwen/Qwen3"), 1, "did you mean `Qwen/Qwen3-4B`?"),
        (("--gpu", "24", "--exact", "zz/zz"), 1, "it is none of Qwen/Qwen2.5-0.5B-Instruct, "),
        (("--gpu", "24", "--exact", "./nowhere"), 1, "nowhere is no model folder: it has no config.json"),
        (("--config", "nowhere.yaml"), 1, "there is no nowhere.yaml"),
    ],
)
def test_what_cannot_be_planned_says_why(arguments: tuple[str, ...], code: int, complaint: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert complaint in result.output


def test_a_broken_config_json_is_named_with_its_key(alone: Path) -> None:
    broken = model(alone / "broken", num_hidden_layers="many")
    result = run("--gpu", "24", "--exact", str(broken))
    assert result.exit_code == 1
    assert f"{broken / 'config.json'}: `num_hidden_layers` must be a whole number above 0" in result.output


def test_shares_that_cannot_be_are_refused(alone: Path) -> None:
    (alone / "dualgauge.yaml").write_text(CONFIGURATION.replace("gpu: 1", "gpu: 0").replace("0.8", "0.99"))
    result = run("--config", "dualgauge.yaml", "--gpu", "24")
    assert result.exit_code == 1
    assert "the shares on gpu 0 add up to 0.99" in result.output


def test_requests_longer_than_the_model_was_made_for_do_not_fit(alone: Path) -> None:
    found = planned("--gpu", "24", "--exact", str(model(alone / "m")), "--context", "8192", code=3)
    (problem,) = found["problems"]
    assert problem.startswith(
        "exact-0 is to take requests of 8,192 tokens, and its model was made for 4,096: "
    )
    (change,) = (change for change in found["changes"] if change["kind"] == "context")
    assert change["text"].endswith("--max-model-len 4096")


@pytest.mark.parametrize("part", ["nan", "-1", "2", "0"])
def test_a_share_that_is_none_is_refused(alone: Path, part: str) -> None:
    model(alone / "m")
    (alone / "dualgauge.yaml").write_text(
        "model: m\nengines: [{name: one, tier: fast, kind: vllm, model: ./m, precision: bf16, gpu: 0, "
        f"args: [--gpu-memory-utilization, '{part}']}}]\n"
    )
    result = run("--gpu", "24", "--config", "dualgauge.yaml")
    assert result.exit_code == 1
    assert (
        f"engine `one`: --gpu-memory-utilization {part} in its `args` is no share of a GPU" in result.output
    )


@pytest.mark.parametrize(
    "args", [["--max-model-len", "abc"], ["--max-num-seqs=0"], ["--block-size", "-5"], ["--max-model-len"]]
)
def test_an_argument_that_is_no_number_is_refused(alone: Path, args: list[str]) -> None:
    model(alone / "m")
    engine = {"name": "one", "tier": "fast", "kind": "vllm", "model": "./m", "precision": "bf16", "gpu": 0}
    (alone / "dualgauge.yaml").write_text(json.dumps({"model": "m", "engines": [{**engine, "args": args}]}))
    result = run("--gpu", "24", "--config", "dualgauge.yaml")
    assert result.exit_code == 1
    name = args[0].partition("=")[0]
    assert f"error: engine `one`: {name} in its `args` is no number above 0, but `" in result.output


@pytest.mark.parametrize("name", ["g/m.gguf", "./g", "demo/smollm2-135m-gguf"])
def test_a_gguf_model_is_not_planned_as_vllms(alone: Path, name: str) -> None:
    (alone / "g").mkdir()
    (alone / "g" / "m.gguf").write_bytes(b"GGUF")
    result = run("--gpu", "24", "--fast", name)
    assert result.exit_code == 1
    assert result.output == (
        f"error: {name} is GGUF, for llama.cpp: `plan` knows what vLLM takes, of safetensors\n"
    )


def test_a_folder_without_weights_is_not_taken_for_a_name(alone: Path) -> None:
    (model(alone / "m") / "model.safetensors").unlink()
    result = run("--gpu", "24", "--exact", "./m")
    assert result.exit_code == 1
    assert result.output == "error: the size of ./m is not known: no safetensors files\n"


def test_limits_hold_for_the_pair_that_up_would_choose_too() -> None:
    found = planned("--gpu", "24", "--context", "4096", "--sequences", "8", "--kv-cache-dtype", "fp8")
    for engine in found["engines"]:
        assert (engine["max_model_len"], engine["max_num_seqs"]) == (4096, 8)
        assert "--kv-cache-dtype fp8" in engine["flags"]


def test_an_empty_name_is_a_wrong_option() -> None:
    assert run("--gpu", "24", "--exact", "").exit_code == 2


def test_kinds_of_weights_stand_together_where_two_models_have_others(alone: Path) -> None:
    tied = model(alone / "tied", tie_word_embeddings=True)
    lines = run("--gpu", "24", "--gpu", "24", "--fast", str(tied), "--exact", str(model(alone / "m"))).output
    rows = [line.split("│")[0].strip() for line in lines.splitlines()]
    kinds = [at for at, row in enumerate(rows) if row.startswith("of them")]
    assert kinds == list(range(kinds[0], kinds[0] + len(kinds)))
