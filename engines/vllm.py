"""The command line and environment of one vLLM server, on a GPU or on CPU cores.

What the operator wrote in `args` and `env` always wins over what is added here. The flags that are added on a
CPU are those under which vLLM 0.32 starts in half a minute and reuses prefixes of short prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from engines.address import Address
from engines.flags import SLEEP_MODE, has_option
from engines.hardware import GIB
from engines.launch import Command
from engines.plan import Placement

KEEP_ALIVE = "75"
_NOT_INHERITED = frozenset(
    {
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONSTARTUP",
        "PYTHONDONTWRITEBYTECODE",  # without cached bytecode an engine starts in minutes
        "VIRTUAL_ENV",
        "__PYVENV_LAUNCHER__",
    }
)


def command(placement: Placement, python: Path, model: str, inherited: Mapping[str, str]) -> Command:
    """How to start this engine with the interpreter of its environment; `model` is a folder or a hub name."""
    spec = placement.spec
    address = Address.parse(spec.url)
    given = spec.args
    argv = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", model]
    argv += ["--host", "127.0.0.1", "--port", str(address.port), "--served-model-name", spec.served_model]
    on_cpu = placement.gpu is None
    if placement.share is not None and not has_option(given, "--gpu-memory-utilization"):
        argv += ["--gpu-memory-utilization", f"{placement.share:.3f}"]
    if spec.precision in ("fp16", "bf16") and not has_option(given, "--dtype"):
        argv += ["--dtype", "float16" if spec.precision == "fp16" else "bfloat16"]
    if on_cpu and not has_option(given, "--block-size"):
        argv += ["--block-size", "32"]
    if on_cpu and spec.precision == "awq" and not has_option(given, "--dtype"):
        argv += ["--dtype", "bfloat16"]
    return Command((*argv, *given), environment(placement, model, inherited))


def environment(placement: Placement, model: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the engine's process."""
    spec = placement.spec
    env = {key: value for key, value in inherited.items() if key not in _NOT_INHERITED}
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": KEEP_ALIVE}
    env["PYTHONUNBUFFERED"] = "1"
    if Path(model).is_absolute():
        env["HF_HUB_OFFLINE"] = "1"
    if has_option(spec.args, SLEEP_MODE):
        env["VLLM_SERVER_DEV_MODE"] = "1"  # else /sleep and /wake_up are not there
    if spec.api_key is not None:
        env["VLLM_API_KEY"] = spec.api_key  # not on the command line, where everybody reads it
    if placement.gpu is not None:
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(placement.gpu)}
    else:
        env |= {
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, placement.cpus)),
        }
        if not has_option(spec.args, "--kv-cache-memory-bytes"):  # which the variable would overrule
            env["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil((placement.kv or GIB) / GIB))
    return {**env, **spec.env}
