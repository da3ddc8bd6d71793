"""What is measured: each configuration is one server, started as the deployment starts it, alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engines import llamacpp, manifest, vllm
from engines.bench.load import script_environment
from engines.bench.perplexity import Dialect
from engines.bench.results import Measured, Workload
from engines.launch import Command
from engines.plan import Placement

BASELINE, EXACT, FAST, GGUF = "transformers", "exact", "fast", "gguf"
_ROOM = 16
"""Tokens beside prompt and reply that a slot of llama-server has room for."""
_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Configuration:
    """One server. `tokenizer` is the folder of the model by which all prompts are made, `engine` the
    program's name. `check` raises IntegrityError where the model must not be opened."""

    key: str
    title: str
    tier: str
    engine: str
    dialect: Dialect
    url: str
    served: str
    command: Command
    model: Path
    tokenizer: Path
    gpu: int | None
    device: str
    check: Callable[[], Awaitable[None]]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def files(self) -> int:
        """Bytes of the model's weights on the disk."""
        found = [self.model] if self.model.is_file() else self.model.glob("*.safetensors")
        return sum(file.stat().st_size for file in found)

    def unmeasured(self) -> Measured:
        """Its row before anything is measured."""
        program, *words = self.command.argv
        told = [word for word in words if word != str(self.port)]
        known = manifest.digest(self.model) if self.model.is_dir() else None
        identity = json.dumps([program, told, known or [str(self.model), self.files]])
        shown = [word for word in told if not word.startswith("/")]
        return Measured(
            key=self.key,
            title=self.title,
            tier=self.tier,
            identity=hashlib.sha256(identity.encode()).hexdigest()[:16],
            model=self.model.name,
            device=self.device,
            arguments=" ".join(shown),
        )


def title_of(precision: str) -> str:
    """Of a vLLM engine."""
    return f"{precision.upper()} + PagedAttention (vLLM)"


def served(
    key: str,
    placement: Placement,
    program: Path,
    model: Path,
    tokenizer: Path,
    workload: Workload,
    port: int,
    inherited: Mapping[str, str],
    cpu_flags: frozenset[str],
    check: Callable[[], Awaitable[None]],
    version: str = "",
) -> Configuration:
    """An engine of the deployment, by itself on a port of ours, with room for the highest concurrency."""
    most = max(workload.levels)
    spec = replace(placement.spec, url=f"http://127.0.0.1:{port}", api_key=None)
    if spec.kind == "llama.cpp":
        # One cache for all slots (--kv-unified) would be smaller, and every token would read all of it.
        slot = max(workload.input_tokens + workload.output_tokens, workload.scored) + _ROOM
        more = ("--parallel", str(most), "--ctx-size", str(most * slot))
        placed = replace(placement, spec=replace(spec, args=(*spec.args, *more)))
        # `vllm bench serve` loses the token behind a ping. A server without pings does not read this.
        quiet = {"LLAMA_ARG_SSE_PING_INTERVAL": "-1", **inherited}
        command = llamacpp.command(placed, program, model, quiet, cpu_flags)
        title, engine = "GGUF (llama.cpp)", version or "llama.cpp"
    else:
        placed = replace(placement, spec=replace(spec, args=(*spec.args, "--max-num-seqs", str(most))))
        command = vllm.command(placed, program, str(model), inherited)
        title, engine = title_of(spec.precision), "vLLM"
    return Configuration(
        key=key,
        title=title,
        tier=spec.tier,
        engine=engine,
        dialect="llama.cpp" if spec.kind == "llama.cpp" else "vllm",
        url=spec.url,
        served=spec.served_model,
        command=command,
        model=model,
        tokenizer=tokenizer,
        gpu=placement.gpu,
        device=_device(placement),
        check=check,
    )


def baseline(
    exact: Placement,
    python: Path,
    model: Path,
    workload: Workload,
    port: int,
    check: Callable[[], Awaitable[None]],
) -> Configuration:
    """The 16-bit model under transformers alone, on the device of the 16-bit engine."""
    spec = exact.spec
    argv = [str(python), "-P", "-s", "-m", "benchmark.baseline", str(model), "--port", str(port)]
    argv += ["--name", spec.served_model, "--dtype", _DTYPES.get(spec.precision, "bfloat16")]
    argv += ["--batch", str(max(workload.levels))]
    env = script_environment()
    if exact.gpu is None:
        argv += ["--cpus", ",".join(map(str, exact.cpus))]
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(max(1, len(exact.cpus)))}
    else:
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(exact.gpu)}
    return Configuration(
        key=BASELINE,
        title=f"{spec.precision.upper()}, no paging (transformers)",
        tier="",
        engine="transformers",
        dialect="vllm",
        url=f"http://127.0.0.1:{port}",
        served=spec.served_model,
        command=Command(tuple(argv), env),
        model=model,
        tokenizer=model,
        gpu=exact.gpu,
        device=_device(exact),
        check=check,
    )


def _device(placement: Placement) -> str:
    if placement.gpu is not None:
        return placement.device
    count = len(placement.cpus)
    return f"{count} CPU core{'s' if count != 1 else ''}"
