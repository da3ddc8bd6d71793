from __future__ import annotations

from pathlib import Path

import pytest

from engines import checkpoint, llamacpp, plan
from engines.checkpoint import CheckpointError
from engines.hardware import Machine
from engines.llamacpp import ModelError
from engines.plan import Placement
from engines.spec import EngineSpec
from tests.engines import gguf_files

BINARY = Path("/opt/llama-server")
MODEL = Path("/models/m.gguf")


def spec(**fields: object) -> EngineSpec:
    known = {
        "name": "fast-0",
        "tier": "fast",
        "kind": "llama.cpp",
        "url": "http://127.0.0.1:8101",
        "served_model": "smollm2",
        "precision": "q4_1",
        "model": str(MODEL),
    }
    return EngineSpec(**{**known, **fields})  # type: ignore[arg-type]


def placed(device: str = "cpu", **fields: object) -> Placement:
    engine = spec(**fields)
    facts = checkpoint.Facts()
    settings = plan.settings(engine, None)
    return Placement(engine, device, 1, facts, settings, budget=None, kv=None, cpus=(2, 3))


def test_the_command_serves_the_file_under_the_models_name() -> None:
    argv = llamacpp.command(placed(), BINARY, MODEL, {}).argv
    assert argv[:7] == (str(BINARY), "--model", str(MODEL), "--host", "127.0.0.1", "--port", "8101")
    assert argv[argv.index("--alias") + 1] == "smollm2"
    assert argv[argv.index("--threads") + 1] == "2"


def test_what_shows_prompts_or_leads_around_the_gateway_is_off() -> None:
    argv = llamacpp.command(placed(), BINARY, MODEL, {}).argv
    assert "--no-slots" in argv
    assert "--no-webui" in argv


def test_on_a_gpu_all_layers_go_there() -> None:
    command = llamacpp.command(placed("gpu:1"), BINARY, MODEL, {})
    assert command.argv[command.argv.index("--n-gpu-layers") + 1] == "999"
    assert command.env["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("args", [("-ngl", "10"), ("--n-gpu-layers=10",)])
def test_what_the_operator_wrote_wins(args: tuple[str, ...]) -> None:
    argv = llamacpp.command(placed("gpu:0", args=args), BINARY, MODEL, {}).argv
    assert "999" not in argv
    assert argv[-len(args) :] == args


def test_the_key_is_in_the_environment_and_not_on_the_command_line() -> None:
    command = llamacpp.command(placed(api_key="sk-engine"), BINARY, MODEL, {"PATH": "/bin"})
    assert command.env["LLAMA_API_KEY"] == "sk-engine"
    assert command.env["PATH"] == "/bin"
    assert "sk-engine" not in " ".join(command.argv)


def test_the_file_in_a_folder_is_found(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "m.gguf")
    assert llamacpp.file_of(file) == file
    assert llamacpp.file_of(tmp_path) == file


def test_of_a_model_in_parts_the_first_is_opened(tmp_path: Path) -> None:
    for part in (1, 2):
        gguf_files.write(tmp_path / f"m-0000{part}-of-00002.gguf")
    assert llamacpp.file_of(tmp_path).name == "m-00001-of-00002.gguf"


def test_no_file_and_several_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no GGUF file"):
        llamacpp.file_of(tmp_path)
    gguf_files.write(tmp_path / "a.gguf")
    gguf_files.write(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match="2 GGUF files, name one"):
        llamacpp.file_of(tmp_path)


def test_a_plan_knows_the_size_of_a_gguf_file(tmp_path: Path) -> None:
    facts = plan.facts_of("m", gguf_files.write(tmp_path / "m.gguf"))
    assert facts.weights == 48
    assert facts.unknown == "llama.cpp sizes its KV cache by itself"


def test_a_plan_knows_the_size_of_all_parts(tmp_path: Path) -> None:
    first = gguf_files.write(tmp_path / "m-00001-of-00002.gguf")
    more = (gguf_files.tensor("c", (4,), 0, 0),)
    gguf_files.write(tmp_path / "m-00002-of-00002.gguf", part=1, tensors=more)
    assert plan.facts_of("m", first).weights == 36 + 12 + 16


def test_a_broken_gguf_file_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="version 9"):
        checkpoint.read(gguf_files.write(tmp_path / "m.gguf", version=9))


def test_a_llama_server_is_planned_smaller_than_a_vllm(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "m.gguf")
    machine = Machine(gpus=(), cpus=(0, 1), memory=2 << 30, available=2 << 30)
    found = plan.plan([spec(model=str(file))], machine, lambda _: checkpoint.read(file))
    assert found.placements[0].memory < 2 << 30


AMX = frozenset({"avx2", "amx_int8"})


def test_on_a_processor_with_amx_its_kernels_are_left_out() -> None:
    assert "--no-repack" in llamacpp.command(placed(), BINARY, MODEL, {}, AMX).argv


def test_elsewhere_weights_are_repacked() -> None:
    assert "--no-repack" not in llamacpp.command(placed(), BINARY, MODEL, {}, frozenset({"avx2"})).argv
    assert "--no-repack" not in llamacpp.command(placed("gpu:0"), BINARY, MODEL, {}, AMX).argv


def test_an_operator_may_want_the_kernels_for_amx() -> None:
    argv = llamacpp.command(placed(args=("--repack",)), BINARY, MODEL, {}, AMX).argv
    assert "--no-repack" not in argv
